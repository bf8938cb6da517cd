"""A server with devices around it in virtual time: devices that are honest, scripted, or lose their links."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pipar.device.interfaces import Equipment, EvaluationSamples
from pipar.errors import PiparError, ProtocolError, TrainingError
from pipar.events import EpochResult, Event, Joined, Observer, RoundOver, Scores, ignore
from pipar.execution.clock import run_virtually
from pipar.execution.lanes import VirtualLanes
from pipar.execution.spans import COMPUTE, IO, SERVER, UPLINK, EpochTrace, Recorder, Span, Totals, pack_trace
from pipar.job.job import Bounds
from pipar.launch.assemble import run_device
from pipar.launch.sizes_only import SizesOnlyDevicePart, SizesOnlyLearner, SizesOnlySamples
from pipar.methods import METHODS, Plan
from pipar.planner.costs import Costs
from pipar.planner.replanner import Replan, Replanner
from pipar.privacy.budget import PrivacyAccountant, PrivacyGuard, UpdateNoise
from pipar.profiling.profile import LayerProfile, Profile
from pipar.server.device_messages import Introduction
from pipar.server.epoch_results import ResultCollector, TimeBounds
from pipar.server.interfaces import Checkpointer, ServerLanes, Services, SessionSettings, Training
from pipar.server.learned_timeouts import ChosenTimeouts
from pipar.server.program import Server
from pipar.settings.links import Link
from pipar.transport.backoff import Backoff
from pipar.transport.channel import Channel
from pipar.transport.in_memory import memory_pair
from pipar.transport.interface import Transport
from pipar.transport.reconnect import Reconnector
from pipar.wire.messages import Body, Kind, Message, json_body, read_json
from pipar.wire.orders import Orders, TrainedPart
from support.cutting import CutLink, Loss

# A batch of 10: on the device 1 s forward and 2 s backward, on the server 0.5 s each. Noise on the first layer: 1.6 s.
PROFILE = Profile(
    "hand",
    "float32",
    (10,),
    (LayerProfile("one", (1.0,), (2.0,), 8, 16), LayerProfile("two", (0.5,), (0.5,), 4, 16)),
    noise_s_per_byte=0.1,
)
LINK = Link(up_bps=8000.0, down_bps=8000.0, latency_s=0.01)
E = TypeVar("E")
PlanJoined = Callable[[Mapping[str, Profile]], Mapping[str, Plan]]


@dataclass(frozen=True)
class ScriptedEvaluator:
    """Gives one loss, whatever it is called with."""

    loss: float

    def __call__(self, batch: Any, /) -> None:
        pass

    def scores(self) -> Scores:
        return Scores(self.loss, 1.0)


class ScriptedLearner(SizesOnlyLearner):
    """A model of sizes only, with given validation losses; remembers which devices were averaged and discarded."""

    def __init__(self, split_points: dict[str, int], losses: Sequence[float]) -> None:
        super().__init__(PROFILE, split_points)
        self._losses = iter(losses)
        self.averaged: list[list[str]] = []
        self.forgotten: list[str] = []

    def evaluator(self) -> ScriptedEvaluator:
        return ScriptedEvaluator(next(self._losses))

    def aggregate(self, returned: Sequence[TrainedPart], *, keep_before: bool = False) -> None:  # noqa: ARG002
        self.averaged.append([back.device for back in returned])

    def discard_progress(self, device: str) -> None:
        self.forgotten.append(device)

    def restore_point(self) -> Callable[[], None]:
        return partial(self.averaged.__delitem__, slice(len(self.averaged), None))


class Enrolled:
    """Some devices, with orders that are given or made when they have joined."""

    def __init__(self, orders: dict[str, Orders], plan_joined: PlanJoined | None) -> None:
        self._orders = orders
        self._plan_joined = plan_joined

    def check(self, introduction: Introduction) -> None:
        if introduction.name not in self._orders:
            raise ProtocolError(f"'{introduction.name}' is not a device of this training.")

    def measured(self, links: Mapping[str, Link]) -> None:
        raise AssertionError(f"{links} are emulated")

    def link_to_plan(self, name: str) -> Link:
        return self.link(name)

    def link(self, _: str) -> Link:
        return LINK

    async def begin(self, introductions: Sequence[Introduction]) -> Mapping[str, Orders]:
        if self._plan_joined is not None:
            plans = self._plan_joined({one.name: one.profile for one in introductions if one.profile is not None})
            self._orders = {
                name: Orders(1, plans[name], 2, 10, False, one.keep_state) for name, one in self._orders.items()
            }
        return self._orders

    def join(self, introduction: Introduction) -> Orders:
        return self._orders[introduction.name]


@dataclass
class Outcome:
    """The outcome of a training: of the server's program, and of each device in the order they were given."""

    failure: BaseException | None = None
    lives: list[BaseException | None] = field(default_factory=list)
    results: list[EpochResult] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    carried: list[int] = field(default_factory=list)  # frames, by link that was dialled
    learner: ScriptedLearner | None = None
    unacknowledged: list[int] = field(default_factory=list)  # the most of any session, at the end of each round
    left_running: int = 0
    accountant: PrivacyAccountant = field(default_factory=lambda: PrivacyAccountant(None))

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def counted(self) -> list[dict[str, int]]:
        """Samples by device, round by round."""
        return [event.counted for event in self.of(RoundOver)]


class World:
    """Connects to the server: one call of `dial` per connection."""

    def __init__(self, server: Server) -> None:
        self.links: list[CutLink] = []
        self.admissions: list[asyncio.Task[None]] = []
        self.server = server

    def dial(self, frames: int | None = None, loss: Loss = Loss.CLEAN, peer: str | None = None) -> CutLink:
        near, far = memory_pair()
        self.links.append(CutLink(near, frames, loss))
        self.admissions.append(asyncio.create_task(self.server.admit(far, peer)))
        return self.links[-1]


Life = Callable[[World], Awaitable[None]]
Named = tuple[str, Life]


def train(
    lives: Sequence[Named],
    *,
    devices: Sequence[str] = ("a", "b"),
    begin_with: int | None = None,
    method: str = "pipar",
    epochs: int = 1,
    patience: int | None = None,
    done: Sequence[float] = (),
    validation: Sequence[tuple[int, Any]] = (),
    losses: Sequence[float] = (),
    keep_state: bool = False,
    norms: int = 0,
    plan_joined: PlanJoined | None = None,
    replan: Replan | None = None,
    min_devices: int = 1,
    round_deadline_s: float | None = None,
    resume_window_s: float = 0.0,
    timeouts: ChosenTimeouts | None = None,
    keep_spans: frozenset[str] | None = None,
    terms: UpdateNoise | None = None,
    checkpointer: Checkpointer | None = None,
    aggregate_s: float = 0.0,
    stops_at_s: float | None = None,
    learner: Callable[[dict[str, int], Sequence[float]], ScriptedLearner] = ScriptedLearner,
) -> Outcome:
    """Run the server with these devices in virtual time; it begins when `begin_with` (or all) have joined.

    `done` are the validation losses of the rounds that were trained before. After `stops_at_s` of training it is
    asked to stop.
    """
    outcome = Outcome(accountant=PrivacyAccountant(terms))
    plan = Plan(2 if method == "fl" else 1, 2 if METHODS[method].pipelines else 1)
    noise = {} if terms is None else {"clip": terms.clip, "noise_multiplier": terms.multiplier}
    if terms is not None and terms.target_epsilon is not None:
        noise["budget"] = terms.budget
    orders = {
        name: Orders(n, plan, 2, 10, False, keep_state, norms=norms, **noise) for n, name in enumerate(devices, start=1)
    }

    def emit(result: EpochResult, spans: list[Span]) -> None:
        outcome.results.append(result)
        outcome.spans += spans

    async def main() -> None:
        recorder, background, enough = Recorder(SERVER), Recorder(SERVER), asyncio.Event()

        def observe(event: Event) -> None:
            outcome.events.append(event)
            if isinstance(event, RoundOver):
                outcome.unacknowledged.append(max((one.channel.unacknowledged for one in server.sessions), default=0))
            if isinstance(event, Joined) and event.devices >= (begin_with or len(devices)):
                enough.set()

        links = dict.fromkeys(devices, LINK)
        bounds = TimeBounds(links, Bounds(dict.fromkeys(devices, 1.0), 1.0), 1)
        costs = Costs(PROFILE)
        outcome.learner = learner(dict.fromkeys(devices, plan.split_point), losses)
        server = Server(
            Training(
                METHODS[method],
                epochs,
                patience,
                plans=dict.fromkeys(devices, plan),
                min_devices=min_devices,
                round_deadline_s=round_deadline_s,
                validation=validation,
            ),
            outcome.learner,
            Enrolled(orders, plan_joined),
            ServerLanes(
                VirtualLanes(
                    ["core 0"], recorder, lambda work: aggregate_s if work.kind == "aggregate" else costs.seconds(work)
                ),
                VirtualLanes(["validation"], background, costs.seconds),
                recorder,
            ),
            Services(
                ResultCollector(bounds, recorder, background, emit, done=done),
                outcome.accountant,
                Replanner({}, replan) if replan is not None else None,  # which devices join is not known yet
                checkpointer,
                observe,
            ),
            SessionSettings(PROFILE, resume_window_s, keep_spans=keep_spans, timeouts=timeouts),
        )
        world = World(server)
        tasks = [asyncio.create_task(_outcome(live(world))) for _, live in lives]
        await enough.wait()
        training = asyncio.ensure_future(_outcome(server.train(len(done))))
        if stops_at_s is not None:
            asyncio.get_running_loop().call_later(stops_at_s, training.cancel)
        try:
            outcome.failure = await training
        except asyncio.CancelledError:
            await server.suspend("The server stops for now.")
        await server.wait_until_left()
        outcome.lives = [await task for task in tasks]
        await asyncio.gather(*world.admissions)
        outcome.carried = [link.carried for link in world.links]
        if timeouts is not None:
            server.close()
            await asyncio.sleep(0)
        outcome.left_running = len(asyncio.all_tasks()) - 1

    run_virtually(main())
    return outcome


async def _outcome(life: Awaitable[None]) -> BaseException | None:
    try:
        await life
    except PiparError as error:
        return error
    return None


# --- devices that run the real program


def _equipment(
    samples: int,
    speed: float,
    profile: Profile | None,
    guard: PrivacyGuard | None = None,
    evaluation: EvaluationSamples | None = None,
) -> Equipment:
    costs = Costs(PROFILE, speed)
    return Equipment(
        SizesOnlySamples(samples),
        lambda orders: SizesOnlyDevicePart(PROFILE, orders.plan.split_point),
        lambda lanes, recorder: VirtualLanes(lanes, recorder, costs.seconds),
        profile,
        guard or PrivacyGuard(),
        evaluation=evaluation,
    )


def honest(
    name: str,
    samples: int = 20,
    speed: float = 1.0,
    profile: Profile | None = None,
    *,
    starts_s: float = 0.0,
    guard: PrivacyGuard | None = None,
    evaluation: EvaluationSamples | None = None,
    observe: Observer = ignore,
) -> Named:
    """The real device program, over one connection."""

    async def live(world: World) -> None:
        await asyncio.sleep(starts_s)
        equipment = _equipment(samples, speed, profile, guard, evaluation)
        await run_device(name, LINK, equipment, world.dial(), observe=observe)

    return name, live


def roaming(
    name: str,
    *cuts: int | None,
    loss: Loss = Loss.CLEAN,
    samples: int = 20,
    speed: float = 1.0,
    pause_s: float = 1.0,
    gives_up_s: float | None = None,
    proved: bool = False,
    starts_s: float = 0.0,
    guard: PrivacyGuard | None = None,
    observe: Observer = ignore,
) -> Named:
    """The real device program, over links that are lost after the given numbers of frames; the last one stays.

    The device comes back after `pause_s`.
    """

    async def live(world: World) -> None:
        await asyncio.sleep(starts_s)
        left = iter(cuts)

        async def dial() -> Transport:
            return world.dial(next(left, None), loss, name if proved else None)

        backoff = Backoff(lambda: 1.0, asyncio.get_running_loop().time, gives_up_s, pause_s, pause_s)
        reconnector = Reconnector(name, "the server", dial, backoff, observe)
        equipment = _equipment(samples, speed, None, guard)

        async def take_part(transport: Transport) -> None:
            await run_device(name, LINK, equipment, transport, reconnector=reconnector, observe=ignore)

        await reconnector.run(take_part)

    return name, live


# --- scripted devices


def scripted(script: Callable[[Channel], Awaitable[None]], name: str = "stranger", peer: str | None = None) -> Named:
    """A peer that has one connection and runs this script on it."""

    async def live(world: World) -> None:
        channel = Channel(world.dial(peer=peer), Recorder("x"), UPLINK)
        channel.shape(LINK.up_bps, LINK.latency_s)
        try:
            await script(channel)
        finally:
            await channel.close()

    return name, live


def hello(name: str, **more: object) -> Message:
    return Message(Kind.HELLO, body=json_body({"name": name, "samples": 10, **more}))


async def until(channel: Channel, kind: Kind) -> Message:
    """Receive until a message of this kind arrives."""
    while (message := await channel.receive()).kind is not kind:
        if message.kind is Kind.FAULT:
            raise TrainingError(str(read_json(message)["reason"]))
    return message


def activation(
    iteration: int = 1, n: int = 1, samples: int = 5, batch: int = 10, epoch: int = 1, kind: Kind = Kind.ACTIVATION
) -> Message:
    return Message(kind, epoch, iteration, n, samples, batch, Body(12 * samples, dtype="float32"))


def end_epoch(epoch: int = 1, **content: object) -> Message:
    return Message(Kind.END_EPOCH, epoch, body=json_body({"samples": 10, "loss_sum": None, **content}))


def model(epoch: int = 1) -> Message:
    return Message(Kind.MODEL, epoch, body=Body(16, encoding="safetensors"))


def trace(epoch: int = 1, *lanes: str, says: int | None = None) -> Message:
    totals = {lane: Totals(1.0, 0.0, 0.0, 1.0) for lane in lanes or (COMPUTE, IO)}
    packed = pack_trace(EpochTrace("b", epoch if says is None else says, totals))
    return Message(Kind.TRACE, epoch, body=Body.of(packed, encoding="trace"))


def by_hand(*said: Message | Kind | float, name: str = "b", leaves: bool = False, **about: object) -> Named:
    """A device that joins, then sends these messages; a kind among them is awaited, a number is a pause in seconds.

    `about` is more of what it says of itself.
    """

    async def live(channel: Channel) -> None:
        channel.post(hello(name, **about))
        for item in said:
            if isinstance(item, Message):
                channel.post(item)
            elif isinstance(item, Kind):
                await until(channel, item)
            else:
                await asyncio.sleep(item)
        if not leaves:
            await until(channel, Kind.STOP)

    return scripted(live, name)


EPOCH_BY_HAND = (
    Kind.ROUND, activation(n=1), activation(n=2), Kind.GRADIENT, Kind.GRADIENT,
    end_epoch(), model(), Kind.REPORT, trace(),
)  # fmt: skip
