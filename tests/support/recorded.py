"""Trainings in virtual time that are recorded: with steady or changing links, and with a device that is killed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipar.device.interfaces import Equipment, MakeLanes
from pipar.errors import PiparError
from pipar.events import EpochResult, Event, RoundOver
from pipar.execution.clock import run_virtually
from pipar.execution.lanes import VirtualLanes
from pipar.execution.spans import Span
from pipar.execution.work import Work
from pipar.job.job import Job, shared_costs
from pipar.launch.assemble import ServerSetup, assemble_server, run_device
from pipar.launch.sizes_only import SizesOnlyDevicePart, SizesOnlyLearner, SizesOnlySamples
from pipar.methods import Plan
from pipar.planner.costs import Costs
from pipar.profiling.profile import LayerProfile, Profile
from pipar.recording.flight import Flight
from pipar.recording.recorder import FILE, FlightRecorder
from pipar.server.enrolment import ClosedEnrolment
from pipar.settings.config import device_specs
from pipar.settings.config_file import config_from
from pipar.settings.links import Link
from pipar.storage.run_folder import RunFolder
from pipar.transport.in_memory import memory_pair

PROFILE = Profile(
    "hand",
    "float32",
    (1, 10),
    tuple(
        LayerProfile(name, (forward, 4 * forward), (2 * forward, 7 * forward), size, 20_000)
        for name, forward, size in (("one", 0.002, 4000), ("two", 0.003, 2000), ("three", 0.001, 40))
    ),
    load_s=1e-4,
    encode_s_per_byte=1e-9,
    decode_s=1e-5,
    step_s=1e-3,
    pack_s=1e-3,
    install_s=1e-3,
    aggregate_s=2e-3,
)
STEADY = {"up": "2Mbit/s", "down": "5Mbit/s", "latency": "20ms"}
CHANGING = {"cycle": ["4g", {"up": "1Mbit/s", "down": "2Mbit/s"}], "every": "700ms"}
TWICE_STEADY = {"up": "4Mbit/s", "down": "10Mbit/s", "latency": "20ms"}
NO_LATENCY = {"up": "2Mbit/s", "down": "5Mbit/s"}
TWICE_NO_LATENCY = {"up": "4Mbit/s", "down": "10Mbit/s"}
TWICE_CHANGING = {
    "cycle": [{"up": "20Mbit/s", "down": "50Mbit/s"}, {"up": "2Mbit/s", "down": "4Mbit/s"}],
    "every": "700ms",
}


def recorded_job(
    link: Any = STEADY, *, devices: int = 3, epochs: int = 3, run: Mapping[str, Any] | None = None, **server: Any
) -> Job:
    """Return a job of devices with 45 samples each, of which the last is half as fast."""
    config = config_from(
        {
            "run": {"method": "pipar", "epochs": epochs, "batch_size": 20, "trace": "full", **(run or {})},
            "plan": {"split_point": 1, "micro_batches": 3, "schedule": "all-forward"},
            "wire": {"encoding": "raw"},
            "server": {"cores": 2, "min_devices": 1, **server},
            "data": {"path": "/srv/mine/secret"},
            "devices": [
                {"name": "pi", "count": devices - 1, "speed": 0.2, "link": link},
                {"name": "slow", "speed": 0.1, "link": link},
            ],
        }
    )
    specs = device_specs(config)
    names = [spec.name for spec in specs]
    return Job(
        config=config,
        specs=specs,
        sizes=dict.fromkeys(names, 45),
        server_profile=PROFILE,
        device_profiles=dict.fromkeys(names, PROFILE),
        batch_statistics=False,
        dropout=False,
        plans=dict.fromkeys(names, Plan(1, 3)),
        dataset="digits",
        model="hand",
    )


@dataclass(frozen=True)
class Recorded:
    """A recorded training: its file, and what it was."""

    path: Path
    job: Job
    results: list[EpochResult]
    events: list[Event]

    @property
    def flight(self) -> Flight:
        return Flight.read(self.path)

    @property
    def seconds(self) -> list[float]:
        return [result.seconds for result in self.results]

    @property
    def counted(self) -> list[dict[str, int]]:
        return [event.counted for event in self.events if isinstance(event, RoundOver)]


def record(
    folder: Path,
    job: Job,
    *,
    kills: Mapping[str, float] | None = None,
    slower: float = 1.0,
    knows_links: bool = True,
    busy: int | None = None,
) -> Recorded:
    """Return a training with sizes only that was recorded; devices are killed at the given seconds.

    Machines are `slower` than their profiles. Without `knows_links`, the links are real ones to the recorder. With the
    seed `busy`, other programs delay some of the work.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = job if knows_links else replace(job, specs=tuple(replace(spec, link=Link()) for spec in job.specs))
    run = RunFolder(folder, known, world="timing-only", command="a test")
    recorder = FlightRecorder(run, world="timing-only")
    out = Recorded(folder / FILE, job, [], [])

    def emit(result: EpochResult, _: list[Span]) -> None:
        out.results.append(result)

    watch = recorder.watch_with(out.events.append)
    try:
        run_virtually(_train(job, recorder.emit_with(emit), watch, kills or {}, _Machines(slower, busy)))
    finally:
        recorder.close()
    return out


@dataclass(frozen=True)
class _Machines:
    """How long work takes, in comparison with the profiles."""

    slower: float
    busy: int | None

    def lanes(self, costs: Costs, owner: str = "") -> MakeLanes:
        seconds: Callable[[Work], float] = costs.slower(self.slower).seconds
        if self.busy is None:
            return lambda lanes, recorder: VirtualLanes(lanes, recorder, seconds)
        rng = random.Random(f"{self.busy} {owner}")

        def delayed(work: Work) -> float:
            return seconds(work) * rng.uniform(1.0, 1.5) * (rng.uniform(3.0, 10.0) if rng.random() < 0.1 else 1.0)

        return lambda lanes, recorder: VirtualLanes(lanes, recorder, delayed)


async def _train(job: Job, emit: Any, watch: Any, kills: Mapping[str, float], machines: _Machines) -> None:
    server_lanes, costs = machines.lanes(job.server_costs()), shared_costs()
    learner = SizesOnlyLearner(job.server_profile, job.split_points)
    setup = ServerSetup(learner, ClosedEnrolment(job), server_lanes, server_lanes, emit, watch)
    server, loop = assemble_server(job, setup), asyncio.get_running_loop()
    tasks: dict[asyncio.Task[Any], str] = {}

    async def live(name: str, near: Any) -> None:
        profile, spec = job.device_profiles[name], next(spec for spec in job.specs if spec.name == name)
        samples = SizesOnlySamples(job.sizes[name])
        equipment = Equipment(
            samples,
            lambda orders: SizesOnlyDevicePart(profile, orders.plan.split_point),
            machines.lanes(costs(profile, spec.speed), name),
        )
        try:
            await run_device(name, spec.link, equipment, near, observe=lambda _: None)
        except PiparError:
            if name not in kills:
                raise

    async def kill(at: float, *ends: Any) -> None:
        await asyncio.sleep(at - loop.time())
        for end in ends:
            await end.close()

    for spec in job.specs:
        near, far = memory_pair()
        tasks[loop.create_task(server.admit(far))] = ""
        tasks[loop.create_task(live(spec.name, near))] = spec.name
        if spec.name in kills:
            tasks[loop.create_task(kill(kills[spec.name], near, far))] = ""
    while len(server.sessions) < len(job.specs):
        await asyncio.sleep(0.001)
    await server.train()
    await server.wait_until_left()
    await asyncio.gather(*tasks)
    server.close()


def without(job: Job, *names: str) -> Job:
    """Return the job without some of its devices."""
    sizes = {name: size for name, size in job.sizes.items() if name not in names}
    return replace(job, specs=tuple(spec for spec in job.specs if spec.name not in names), sizes=sizes)
