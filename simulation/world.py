"""One simulated world: a server, its devices and every fault, from the first hello to the end of the training.

The programs are those of a deployment. Time, the network, the disk and the duration of computations are simulated.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipar.device import program as device_program
from pipar.errors import PiparError
from pipar.job.model_setup import deterministic
from pipar.server import membership
from pipar.wire import encodings, frames
from pipar.wire.frames import Frame
from pipar.wire.messages import Kind
from simulation.checks import Checks
from simulation.clocks import WorldLoop, machine_here, running_loop
from simulation.device import SimulatedDevice
from simulation.disk import DiskTroubles, PowerLossError, replaced_in, results_on
from simulation.draws import Draws
from simulation.environment import Environment
from simulation.faults import apply_faults
from simulation.invariants import MemoryUse, Violation, memory_is_bounded, programs_do_not_fail, training_ends
from simulation.ledgers import Ledgers
from simulation.memory_bounds import LOOK_EVERY_S, MemoryBounds, largest
from simulation.network import Network
from simulation.processes import Processes
from simulation.resources import Sample, sample
from simulation.scenario import Scenario
from simulation.server import SimulatedServer
from simulation.tiny_training import Training

#: A round takes no longer than this: every fault has ended long before, and every program has reconnected.
_ROUND_LIMIT_S = 900.0
#: The limit of a whole training, which follows its length: at the start, and for each round.
_LIMIT_S, _LIMIT_PER_ROUND_S = 300.0, 120.0
#: More frames than any training needs for a round of a device: two programs send to each other without end.
_MOST_FRAMES = 2_400
#: The process is sampled every ten rounds, but at most this often.
_SAMPLED_ROUNDS, _MOST_SAMPLES = 10, 200


@dataclass(frozen=True)
class Outcome:
    """The result of one world."""

    scenario: Scenario
    violation: Violation | None
    events: list[str]
    digest: str  # of all events and all frames: equal digests are equal worlds
    seconds: float  # of virtual time
    rounds: int
    restarts: int  # of the server
    most: MemoryUse = field(default=MemoryUse("all"))  # at any time
    samples: tuple[Sample, ...] = ()  # of this process, every few rounds of a long world

    @property
    def seed(self) -> int:
        return self.scenario.seed


def simulate(scenario: Scenario) -> Outcome:
    """Run a world to its end, or to the first violation."""
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(prefix="pipar-faults-", dir=memory if memory.is_dir() else None) as folder,
        _chunks_of(scenario.chunk_bytes, scenario.coded_chunk_bytes),
        # Programs on different machines have different clocks.
        replaced_in(membership, "clock_machine", machine_here),
        replaced_in(device_program, "clock_machine", machine_here),
        results_on(troubles := DiskTroubles()),
        deterministic(scenario.seed),
        asyncio.Runner(loop_factory=WorldLoop) as runner,
    ):
        return runner.run(_run(scenario, Path(folder), troubles))


async def _run(scenario: Scenario, folder: Path, troubles: DiskTroubles) -> Outcome:
    world = World(scenario, folder, troubles)
    await world.run()
    return world.outcome()


@contextmanager
def _chunks_of(size_bytes: int, coded_bytes: int) -> Iterator[None]:
    """Cut messages and tensors into smaller pieces than usual, so that even tiny ones have several."""
    usual = frames.CHUNK_BYTES, encodings._CHUNK_BYTES
    frames.CHUNK_BYTES, encodings._CHUNK_BYTES = size_bytes, coded_bytes
    try:
        yield
    finally:
        frames.CHUNK_BYTES, encodings._CHUNK_BYTES = usual


class World:
    """All parts of a simulated deployment."""

    def __init__(self, scenario: Scenario, folder: Path, troubles: DiskTroubles) -> None:
        self._loop = loop = running_loop()
        self._scenario = scenario
        processes, training, run = Processes(loop), Training.of(scenario), folder / "run"
        self._checks = Checks(scenario, training, run, troubles)
        self._network = Network(
            scenario.names, self._checks.note, self._checks.excuse, has_credentials=scenario.has_credentials
        )
        memory = MemoryBounds(scenario, training.profile)
        self._network.observe_down = self._observe_down
        ledgers = Ledgers(scenario.privacy, folder / "devices", self._checks)
        draws = Draws(scenario, self._checks)
        self._env = Environment(scenario, run, training, self._network, processes, self._checks, memory, ledgers, draws)
        self._server = SimulatedServer(self._env, troubles)
        self._devices = {name: SimulatedDevice(name, self._env, self._server.finish_again) for name in scenario.names}
        self._most = MemoryUse("all")
        self._samples: list[Sample] = []
        loop.set_exception_handler(self._task_failed)

    async def run(self) -> None:
        """Run until the training is over or an invariant is violated."""
        programs = [self._server.run(), *(device.run() for device in self._devices.values())]
        faults = apply_faults(self._env, self._server, self._devices)
        tasks = [self._loop.create_task(program) for program in (*programs, faults, self._look())]
        await self._checks.over
        self._checks.disk()
        for task in tasks:
            task.cancel()
        await self._env.processes.end()

    def outcome(self) -> Outcome:
        return Outcome(
            self._scenario,
            self._checks.violation,
            self._checks.events,
            digest=self._checks.digest(self._network.digest),
            seconds=self._loop.time(),
            rounds=self._checks.rounds,
            restarts=self._server.starts - 1,
            most=self._most,
            samples=tuple(self._samples),
        )

    def _observe_down(self, device: str, frame: Frame) -> None:  # noqa: ARG002
        if frame.message.kind is Kind.STOP:
            self._checks.told_the_end(frame.message.epoch)

    def _task_failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and not isinstance(error, PiparError | PowerLossError):
            self._checks.check(programs_do_not_fail, "a background task", error)

    async def _look(self) -> None:
        """Check what the programs hold, and the clock, periodically."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._check_progress()
            self._sample()
            for used, most in self._memory():
                self._most = largest("all", [self._most, used])
                self._checks.check(memory_is_bounded, used, most)

    def _sample(self) -> None:
        every, rounds = max(_SAMPLED_ROUNDS, self._scenario.rounds // _MOST_SAMPLES), self._checks.rounds
        if rounds >= every * (len(self._samples) + 1):
            self._samples.append(sample(rounds))

    def _check_progress(self) -> None:
        scenario, now_s = self._scenario, self._loop.time()
        doing = f"{self._checks.rounds} of {scenario.rounds} rounds are trained"
        self._checks.check(training_ends, now_s, _LIMIT_S + _LIMIT_PER_ROUND_S * scenario.rounds, doing)
        self._checks.check(training_ends, now_s - self._checks.last_new_round_at, _ROUND_LIMIT_S, f"still {doing}")
        if self._network.frames > _MOST_FRAMES * (5 + scenario.rounds) * (5 + len(scenario.names)) / 2:
            self._checks.check(training_ends, 1.0, 0.0, f"{self._network.frames} frames were sent")

    def _memory(self) -> Iterator[tuple[MemoryUse, MemoryUse]]:
        channels = {name: one.channel for name, one in self._devices.items() if one.channel is not None}
        yield from self._env.memory.of_devices(channels)
        yield from self._server.memory()
        most_tasks = 60 + 16 * len(self._devices)
        yield MemoryUse("all", tasks=self._env.processes.tasks), MemoryUse("all", tasks=most_tasks)
