"""No timeouts to set: over links from 0.1 to 100 Mbit/s and with rounds from 0.5 s to 10 minutes, no live device is
excluded, and a dead one is noticed within twice a normal round.

Each seed is a deployment in virtual time, with the real programs of server and devices on a network whose rates the
server does not know. Stages and frames vary, devices are slow for a round, and some lose a connection and return. One
device dies: its connection ends (killed), or nothing more is heard from it (stopped).
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.record import Claim
from benchmarks.timeouts_real import DEATHS, LINKS, Noticed, notice
from pipar.device.interfaces import Equipment
from pipar.errors import LinkError
from pipar.events import Dropped, Event, Lost, RoundOver, TimeoutsChosen, ignore
from pipar.execution.clock import run_virtually, sleep_until
from pipar.execution.lanes import VirtualLanes
from pipar.execution.work import Work
from pipar.job.job import Job
from pipar.job.plans import make_plans
from pipar.launch.assemble import ServerSetup, assemble_server, run_device
from pipar.launch.deployed_process import unlisted_spec
from pipar.launch.sizes_only import SizesOnlyDevicePart, SizesOnlyLearner, SizesOnlySamples
from pipar.methods import Plan
from pipar.planner.costs import Costs
from pipar.profiling.profile import LayerProfile, Profile
from pipar.server.enrolment import OpenEnrolment
from pipar.server.program import Server
from pipar.settings.config_file import config_from
from pipar.settings.links import Link
from pipar.transport.backoff import Backoff
from pipar.transport.delay_line import delayed
from pipar.transport.in_memory import memory_pair
from pipar.transport.interface import Transport
from pipar.transport.reconnect import Reconnector
from pipar.wire.frames import Frame

SEEDS = 200
#: The first seeds have the slowest and the fastest link with the shortest and the longest rounds: bit/s and seconds.
#: Frames have headers, and devices are slow now and then: a round takes longer than what is drawn.
CORNERS = ((1e5, 0.3), (1e5, 700.0), (1e8, 0.3), (1e8, 700.0))
METHODS = ("pipar", "pipar", "sfl", "fl", "sfl2", "sl")
_BATCH = 10
#: What a device's system and gRPC hold of frames that wait for the link.
_BUFFER_BYTES = 256_000


@dataclass(frozen=True)
class Case:
    """One deployment: what is drawn for its seed."""

    seed: int
    method: str
    round_s: float  # about, of a device alone
    rates_bps: dict[str, float]  # both ways, by device
    latency_s: float
    link_share: float  # of the round, that the slowest device's link takes
    model_share: float  # of the bytes of a round, that are the model's
    iterations: int
    speeds: dict[str, float]
    dies: str
    death: str  # "killed" or "stopped"
    dies_in: float  # rounds after the start
    breaks: str | None  # a device that loses its connection once, and returns
    jitter: float = 0.2  # the standard deviation of the logarithm of every stage and frame
    straggles: float = 0.2  # the share of rounds in which a device is slow
    slower: float = 3.0  # up to this factor
    rounds: int = 8


def draw_case(seed: int) -> Case:
    """Return the deployment of a seed: rates and lengths of rounds are uniform in their logarithms."""
    draws = random.Random(f"timeouts {seed}")
    names = [f"pi-{number}" for number in range(1, draws.randint(2, 4) + 1)]
    rate_bps, round_s = 10 ** draws.uniform(5, 8), 10 ** draws.uniform(-0.30103, 2.77815)
    if seed < len(CORNERS):
        rate_bps, round_s = CORNERS[seed]
    return Case(
        seed=seed,
        method=draws.choice(METHODS),
        round_s=round_s,
        rates_bps={
            name: min(1e8, rate_bps * (1.0 if place == 0 else draws.uniform(1, 3))) for place, name in enumerate(names)
        },
        latency_s=10 ** draws.uniform(-3, -1.3),
        link_share=draws.uniform(0.1, 0.8),
        model_share=draws.uniform(0.05, 0.9),
        iterations=draws.randint(2, 8),
        speeds={name: draws.uniform(0.5, 1.0) for name in names},
        dies=draws.choice(names),
        death=draws.choice(("killed", "stopped")),
        dies_in=draws.uniform(2.0, 6.0),
        breaks=draws.choice((None, *names)),
    )


@dataclass
class Outcome:
    """What happened: the lengths of complete rounds, the exclusions, and how long the death went unnoticed."""

    case: Case
    rounds_s: list[float] = field(default_factory=list)
    before_s: list[float] = field(default_factory=list)  # of rounds before the death, with the device that dies
    died_at: float | None = None
    noticed_at: float | None = None
    falsely: list[str] = field(default_factory=list)
    timeouts: list[TimeoutsChosen] = field(default_factory=list)
    counted: list[dict[str, int]] = field(default_factory=list)

    @property
    def normal_s(self) -> float:
        return statistics.median(self.before_s)

    @property
    def noticed_rounds(self) -> float:
        """How many normal rounds passed from the death until the server knew of it."""
        if self.died_at is None or self.noticed_at is None:
            return float("inf")
        return (self.noticed_at - self.died_at) / self.normal_s


def run_case(case: Case) -> Outcome:
    """Return what happened in a deployment without any configured timeout."""
    world = _World(case)
    run_virtually(world.run())
    return world.outcome


class _Pipe:
    """One direction of a link: a transport with a buffer that sends at a varying rate."""

    def __init__(self, transport: Transport, rate_bps: Callable[[], float], latency_s: float) -> None:
        self.is_dead = False  # frames vanish
        self._transport = delayed(transport, latency_s)
        self._rate_bps = rate_bps
        self._queue: asyncio.Queue[Frame] = asyncio.Queue()
        self._held_bytes = 0
        self._room = asyncio.Event()
        self._failure: LinkError | None = None
        self._pump = asyncio.ensure_future(self._send())

    async def write(self, frame: Frame) -> None:
        while self._held_bytes and self._held_bytes + frame.size_bytes > _BUFFER_BYTES and self._failure is None:
            self._room.clear()
            await self._room.wait()
        if self._failure is not None:
            raise self._failure
        self._held_bytes += frame.size_bytes
        self._queue.put_nowait(frame)

    async def read(self) -> Frame:
        return await self._transport.read()

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                frame = await self._queue.get()
                await sleep_until(loop.time() + frame.size_bytes * 8 / self._rate_bps())
                if not self.is_dead:
                    await self._transport.write(frame)
                self._held_bytes -= frame.size_bytes
                self._room.set()
        except LinkError as error:
            self._failure = error
            self._room.set()

    async def close(self) -> None:
        self._pump.cancel()
        if not self.is_dead:
            await self._transport.close()


class _World:
    """A server and its devices in virtual time."""

    def __init__(self, case: Case) -> None:
        self.outcome = Outcome(case)
        self._case = case
        self._draws = random.Random(f"world {case.seed}")
        self._network = _network(case)
        self._pipes: dict[str, list[_Pipe]] = {name: [] for name in case.speeds}
        self._dead: set[str] = set()
        self._slow: dict[str, float] = {}
        self._over_at = 0.0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._enough = asyncio.Event()

    async def run(self) -> None:
        case = self._case
        self._server = self._make_server()
        self._admissions: list[asyncio.Task[None]] = []
        for name in case.speeds:
            self._tasks[name] = asyncio.ensure_future(self._live(name))
        dying = asyncio.ensure_future(self._die())
        breaking = asyncio.ensure_future(self._break())
        self._over_at = asyncio.get_running_loop().time()
        try:
            await self._server.train()
        finally:
            for task in (dying, breaking, *self._tasks.values()):
                task.cancel()
            self._server.close()
            await asyncio.gather(*self._tasks.values(), *self._admissions, return_exceptions=True)

    # --- the server

    def _make_server(self) -> Server:
        case, network = self._case, self._network
        config = config_from(
            {
                "run": {"method": case.method, "epochs": case.rounds, "batch_size": _BATCH, "trace": "off"},
                "plan": {"replan": False},
                "wire": {"encoding": "raw"},
                "server": {"cores": 2, "min_devices": 1},
                "devices": [{"name": name} for name in case.speeds],
            }
        )
        job = Job(config, (), {}, network, {}, False, False, {}, "own", "own")
        enrolment = OpenEnrolment(job, {}, partial(unlisted_spec, config), make_plans)
        plan = Plan(2, 1) if case.method == "fl" else Plan(1, 2 if case.method == "pipar" else 1)
        enrolment.keep_plans(dict.fromkeys(case.speeds, plan))  # planning takes no part in this
        lanes = self._lanes(1.0, "server")
        return assemble_server(
            job,
            ServerSetup(
                learner=SizesOnlyLearner(network, dict.fromkeys(case.speeds, plan.split_point)),
                enrolment=enrolment,
                pool=lanes,
                background=lanes,
                emit=lambda *_: None,
                observe=self._observe,
            ),
        )

    def _observe(self, event: Event) -> None:
        now, outcome = asyncio.get_running_loop().time(), self.outcome
        match event:
            case RoundOver():
                outcome.rounds_s.append(now - self._over_at)
                # A round that began before the device had joined is shorter than those with it.
                if not self._dead and self._case.dies in event.counted:
                    outcome.before_s.append(now - self._over_at)
                self._over_at = now
                outcome.counted.append(dict(event.counted))
                self._slow = {}
            case Dropped() | Lost() if event.device in self._dead:
                outcome.noticed_at = outcome.noticed_at or now
            case Dropped() | Lost():
                outcome.falsely.append(f"{now:.1f} s: {event}")
            case TimeoutsChosen():
                outcome.timeouts.append(event)
            case _:
                pass

    # --- devices

    async def _live(self, name: str) -> None:
        case = self._case
        costs_s = self._lanes(case.speeds[name], name)
        equipment = Equipment(
            SizesOnlySamples(case.iterations * _BATCH),
            lambda orders: SizesOnlyDevicePart(self._network, orders.plan.split_point),
            costs_s,
            self._network,
        )
        loop = asyncio.get_running_loop()
        backoff = Backoff.of_device(case.seed, name, loop.time)
        reconnector = Reconnector(name, "the server", partial(self._dial, name), backoff, ignore)

        async def take_part(transport: Transport) -> None:
            await run_device(name, Link(), equipment, transport, reconnector=reconnector, is_real=True, observe=ignore)

        await reconnector.run(take_part)

    async def _dial(self, name: str) -> Transport:
        case = self._case
        if name in self._dead:
            await asyncio.Event().wait()
        await asyncio.sleep(4 * case.latency_s)  # TCP and TLS
        near, far = memory_pair()
        rate = partial(self._rate_bps, name)
        up, down = _Pipe(near, rate, case.latency_s), _Pipe(far, rate, case.latency_s)
        self._pipes[name] = [up, down]
        self._admissions.append(asyncio.ensure_future(self._server.admit(down, name)))
        return up

    def _slowness(self, name: str) -> float:
        """Return how much slower a device is in this round, the same for its stages and, less so, for its link."""
        if name not in self._slow:
            slow = self._draws.random() < self._case.straggles and name != "server"
            self._slow[name] = self._draws.uniform(1, self._case.slower) if slow else 1.0
        return self._slow[name]

    def _rate_bps(self, name: str) -> float:
        jitter = self._draws.lognormvariate(0, self._case.jitter)
        return self._case.rates_bps[name] / (jitter * self._slowness(name) ** 0.5)

    def _lanes(self, speed: float, name: str) -> Any:
        costs = Costs(self._network, speed)

        def seconds(work: Work) -> float:
            return costs.seconds(work) * self._draws.lognormvariate(0, self._case.jitter) * self._slowness(name)

        return lambda lanes, recorder: VirtualLanes(lanes, recorder, seconds)

    # --- what goes wrong

    async def _after_rounds(self, rounds: float) -> None:
        """Return this many rounds after the start: in the middle of one, by the length of the rounds so far."""
        while len(self.outcome.rounds_s) < int(rounds):
            await asyncio.sleep(self._case.round_s / 50)
        await asyncio.sleep((rounds - int(rounds)) * statistics.median(self.outcome.rounds_s))

    async def _break(self) -> None:
        name = self._case.breaks
        if name is not None:
            await self._after_rounds(1.5)
            for pipe in self._pipes[name]:
                await pipe.close()

    async def _die(self) -> None:
        name = self._case.dies
        await self._after_rounds(self._case.dies_in)
        self._dead.add(name)
        self.outcome.died_at = asyncio.get_running_loop().time()
        if self._case.death == "killed":
            self._tasks[name].cancel()
            for pipe in self._pipes[name]:
                await pipe.close()
        else:
            for pipe in self._pipes[name]:
                pipe.is_dead = True


def _network(case: Case) -> Profile:
    """Return a network whose round takes about as long as the case says, the given share of it on the link."""
    wire_bytes = case.link_share * case.round_s * min(case.rates_bps.values()) / 8
    compute_s = (1 - case.link_share) * case.round_s / case.iterations / (3 if case.method == "sl" else 1)
    # The model travels down and up, and so does every sample: its activations and their gradients.
    model = max(100, int(wire_bytes * (1 if case.method == "fl" else case.model_share) / 2))
    sample = max(4, int(wire_bytes * (1 - case.model_share) / 2 / (case.iterations * _BATCH)))
    one = LayerProfile("one", (compute_s / 4,), (compute_s / 2,), 4 * (sample // 4), model - model % 4)
    two = LayerProfile("two", (compute_s / 40,), (compute_s / 20,), 40, 400)
    return Profile("drawn", "float32", (_BATCH,), (one, two))


# --- the campaign


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:
    outcomes = [run_case(draw_case(seed)) for seed in range(SEEDS)]
    falsely = [f"seed {one.case.seed}: {what}" for one in outcomes for what in one.falsely]
    noticed = sorted(one.noticed_rounds for one in outcomes)
    rates_bps = [min(one.case.rates_bps.values()) for one in outcomes]
    real = {
        f"{link}, {death}": notice(folder / f"{place}", rate_bps, DEATHS[death])
        for place, (link, rate_bps, death) in enumerate((*one, death) for one in LINKS.items() for death in DEATHS)
    }
    return [
        Claim(f"{SEEDS} deployments without a configured timeout: live devices excluded", len(falsely), "", most=0),
        Claim("a dead device is noticed after, at the median", statistics.median(noticed), "rounds", most=2),
        Claim("at most", noticed[-1], "rounds", most=2),
        Claim("shortest normal round", min(one.normal_s for one in outcomes), "s", most=0.55),
        Claim("longest normal round", max(one.normal_s for one in outcomes), "s", least=600),
        Claim("slowest link", min(rates_bps) / 1e6, "Mbit/s", most=0.1),
        Claim("fastest slowest link of a deployment", max(rates_bps) / 1e6, "Mbit/s", least=100),
        *(_real_claim(what, one) for what, one in real.items()),
        Claim("live devices excluded in them", sum(len(one.falsely) for one in real.values()), "", most=0),
    ], {
        "real": {what: asdict(one) for what, one in real.items()},
        "falsely": falsely,
        "methods": dict(Counter(one.case.method for one in outcomes)),
        "deaths": dict(Counter(one.case.death for one in outcomes)),
        "seeds": [_row(one) for one in outcomes],
    }


def _real_claim(what: str, one: Noticed) -> Claim:
    return Claim(f"real processes, {what}, rounds of {one.normal_s:.1f} s: noticed after", one.rounds, "rounds", most=2)


def _row(outcome: Outcome) -> dict[str, object]:
    case = outcome.case
    return {
        "seed": case.seed,
        "method": case.method,
        "slowest_mbits": round(min(case.rates_bps.values()) / 1e6, 3),
        "normal_s": round(outcome.normal_s, 3),
        "death": case.death,
        "noticed_rounds": round(outcome.noticed_rounds, 3),
    }
