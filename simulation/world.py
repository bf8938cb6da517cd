"""One simulated world: a server, its devices and every fault, from the first hello to the end of the training.

The programs are those of a deployment. Time, the network, the disk and the duration of computations are simulated.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipar.errors import PiparError
from pipar.execution.clock import VirtualTimeLoop, run_virtually
from pipar.job.model_setup import deterministic
from pipar.wire import encodings, frames
from simulation.checks import Checks
from simulation.device import SimulatedDevice
from simulation.disk import PowerLossError
from simulation.environment import Environment
from simulation.faults import apply_faults
from simulation.invariants import MemoryUse, Violation, memory_is_bounded, programs_do_not_fail, training_ends
from simulation.memory_bounds import LOOK_EVERY_S, MemoryBounds, largest
from simulation.network import Network
from simulation.processes import Processes
from simulation.scenario import Scenario
from simulation.server import SimulatedServer
from simulation.tiny_training import Training

#: Long after every fault has ended and every program has reconnected.
_LIMIT_S = 900.0
#: More frames than any training of this size needs: two programs send to each other without end.
_MOST_FRAMES = 60_000


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

    @property
    def seed(self) -> int:
        return self.scenario.seed


def simulate(scenario: Scenario) -> Outcome:
    """Run a world to its end, or to the first violation."""
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(prefix="pipar-faults-", dir=memory if memory.is_dir() else None) as folder,
        _chunks_of(scenario.chunk_bytes, scenario.coded_chunk_bytes),
    ):
        worlds: list[World] = []
        run_virtually(_run(scenario, Path(folder), worlds), within=deterministic(scenario.seed))
        return worlds[0].outcome()


async def _run(scenario: Scenario, folder: Path, worlds: list[World]) -> None:
    world = World(scenario, folder)
    worlds.append(world)
    await world.run()


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

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        self._loop = loop
        self._scenario = scenario
        processes, training = Processes(loop), Training.of(scenario)
        self._checks = Checks(scenario, training, folder)
        self._network = Network(
            scenario.names, self._checks.note, self._checks.excuse, has_credentials=scenario.has_credentials
        )
        memory = MemoryBounds(scenario, training.profile)
        self._env = Environment(scenario, folder, training, self._network, processes, self._checks, memory)
        self._server = SimulatedServer(self._env)
        self._devices = {name: SimulatedDevice(name, self._env, self._server.finish_again) for name in scenario.names}
        self._most = MemoryUse("all")
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
        text = "\n".join([*self._checks.events, self._network.digest])
        return Outcome(
            self._scenario,
            self._checks.violation,
            self._checks.events,
            digest=hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
            seconds=self._loop.time(),
            rounds=self._checks.rounds,
            restarts=self._server.starts - 1,
            most=self._most,
        )

    def _task_failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and not isinstance(error, PiparError | PowerLossError):
            self._checks.check(programs_do_not_fail, "a background task", error)

    async def _look(self) -> None:
        """Check what the programs hold, and the clock, periodically."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            doing = f"{self._checks.rounds} of {self._scenario.rounds} rounds are trained"
            self._checks.check(training_ends, self._loop.time(), _LIMIT_S, doing)
            if self._network.frames > _MOST_FRAMES:
                self._checks.check(training_ends, 1.0, 0.0, f"{self._network.frames} frames were sent")
            for used, most in self._memory():
                self._most = largest("all", [self._most, used])
                self._checks.check(memory_is_bounded, used, most)

    def _memory(self) -> Iterator[tuple[MemoryUse, MemoryUse]]:
        channels = {name: one.channel for name, one in self._devices.items() if one.channel is not None}
        yield from self._env.memory.of_devices(channels)
        yield from self._server.memory()
        most_tasks = 30 + 16 * len(self._devices)
        yield MemoryUse("all", tasks=self._env.processes.tasks), MemoryUse("all", tasks=most_tasks)
