"""The simulated server: the program of `pipar server --resume`, restarted whenever it ends, over the world's disk."""

from __future__ import annotations

import asyncio
import contextvars
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pipar.config import DeviceSpec
from pipar.errors import ProtocolError
from pipar.events import Dropped, Event, Lost, Progress, Resumed, RoundOver, Saved, SaveFailed
from pipar.execution.lanes import VirtualLanes
from pipar.execution.spans import SERVER, Recorder
from pipar.job.job import Job
from pipar.job.plans import make_plans
from pipar.launch.assemble import ServerSetup, assemble_server
from pipar.launch.rehearsal import rehearse
from pipar.links import Link
from pipar.methods import METHODS, Plan
from pipar.nn.learner import LearnerSettings
from pipar.server.enrolment import OpenEnrolment
from pipar.server.program import Server
from pipar.storage.checkpoint import Checkpoint, Checkpoints, identity_of, latest
from pipar.storage.checkpoint_writer import CheckpointWriter
from pipar.storage.run_folder import RunFolder
from pipar.wire.orders import TrainedPart
from simulation.disk import UnreliableDisk
from simulation.environment import Environment
from simulation.instrumented import CountingLearner
from simulation.invariants import MemoryUse, programs_do_not_fail
from simulation.processes import Process
from simulation.scenario import LAYERS, draw_encodings, draw_plans
from simulation.tiny_training import CLASSES

_SAVING_S = 0.3
_CHECKPOINTS = 3


@dataclass(frozen=True)
class _Running:
    """The parts of one process of the server."""

    process: Process
    program: Server
    checkpointer: CheckpointWriter
    observe: Callable[[Event], None]
    done: int  # rounds of the checkpoint that it resumed from
    is_resumed: bool


class SimulatedServer:
    """The server from the beginning of the world to the end of the training."""

    def __init__(self, environment: Environment) -> None:
        self.starts = 0
        self.finish_again = asyncio.Event()  # the end of the training was announced and then lost
        self.disk: UnreliableDisk | None = None
        self._env = environment
        self._process: Process | None = None
        self._program: Server | None = None
        self._learner: CountingLearner | None = None
        self._draws = random.Random(f"sessions {environment.scenario.seed}")

    async def run(self) -> None:
        """Restart the server whenever it ends, as systemd does, until the training is over."""
        checks, processes = self._env.checks, self._env.processes
        while True:
            process = self._process = Process(f"server {self.starts}")
            self.starts += 1
            task = processes.start(process, self._serve(process))
            await asyncio.wait([task])
            if process.is_dead:
                await processes.bury(process)
                checks.disk()
                if checks.save_failures:
                    self.finish_again.set()
            elif not task.cancelled():
                if (error := task.exception()) is not None:
                    checks.note(SERVER, "".join(traceback.format_exception(error)))
                    checks.check(programs_do_not_fail, "the server", error)
                checks.end()
                return
            await asyncio.sleep(process.restart_after_s)

    # --- one process

    async def _serve(self, process: Process) -> None:
        """As `pipar server --resume` does."""
        running = self._assemble(process)
        server, network = running.program, self._env.network
        network.listen(server.admit, contextvars.copy_context(), self._admitted)
        if running.is_resumed:
            running.observe(Resumed(running.done))
        try:
            await server.train(running.done)
            await server.wait_until_left()
        except asyncio.CancelledError:
            if not process.is_dead:
                await server.suspend("The server stops for now.")
            raise
        finally:
            if not process.is_dead:
                await running.checkpointer.finish()
                network.hang_up(silently=False)
            server.close()

    def _assemble(self, process: Process) -> _Running:
        env = self._env
        config, checkpoints = env.training.config, env.folder / "checkpoint"
        found = latest(checkpoints, identity_of(config), lambda sentence: env.checks.note(SERVER, sentence))
        job = self._job(found)
        learner = self._learner = self._make_learner(job, process)
        env.memory.restart()
        done = 0 if found is None else found.round
        if found is not None:
            learner.restore(found.tensors)
        env.checks.resume_after(done)
        folder = self._open_folder(job, found)
        observe = process.while_alive(folder.event_recorder(lambda event: self._observe(event, learner)))
        job = replace(job, plans={}, sizes={})
        enrolment = OpenEnrolment(job, {}, self._spec, partial(make_plans, rehearse=rehearse))
        enrolment.keep_plans({**env.scenario.plans, **(found.plans if found is not None else {})})
        enrolment.add_listener(folder.update_job)
        self.disk = UnreliableDisk(lambda: self.crash(1.0, silently=True))
        checkpointer = CheckpointWriter(
            Checkpoints(checkpoints, _CHECKPOINTS, self.disk),
            learner,
            folder,
            job=lambda: enrolment.job,
            lane=VirtualLanes(["checkpoint"], Recorder(SERVER, frozenset()), lambda _: _SAVING_S),
            observe=observe,
        )
        lanes = env.lanes()
        self._program = assemble_server(
            job,
            ServerSetup(
                learner=learner,
                enrolment=enrolment,
                pool=lanes,
                background=lanes,
                emit=process.while_alive(folder.add_epoch),
                observe=observe,
                replan=self._choose if env.scenario.replans else None,
                session_numbers=iter(lambda: 1 + self._draws.getrandbits(31), 0),
                checkpointer=checkpointer,
                accountant=folder.accountant,
                done=[result.val_loss for result in folder.epochs][:done],
            ),
        )
        return _Running(process, self._program, checkpointer, observe, done, found is not None)

    def _job(self, found: Checkpoint | None) -> Job:
        job = Job(
            config=self._env.training.config,
            specs=(),
            sizes={},
            server_profile=self._env.training.profile,
            device_profiles={},
            batch_statistics=False,
            dropout=False,
            plans={},
            dataset="own",
            model="own",
        )
        return job if found is None else replace(job, plans=found.plans, sizes=found.samples)

    def _open_folder(self, job: Job, found: Checkpoint | None) -> RunFolder:
        folder = RunFolder(self._env.folder, job, world="real", command="python -m simulation", has_checkpoints=True)
        if found is None:
            folder.start_over()
        else:
            folder.resume(found)
        return folder

    def _make_learner(self, job: Job, process: Process) -> CountingLearner:
        workload = self._env.training.workload
        settings = LearnerSettings(
            workload.optimizer(),
            CLASSES,
            shares_server_model=job.method.shares_server_model,
            keep_momentum=job.keep_momentum,
        )
        learner = CountingLearner(workload.build_model(), job.split_points, settings)
        learner.on_aggregate = process.while_alive(self._aggregated)
        return learner

    def _spec(self, name: str) -> DeviceSpec:
        return DeviceSpec(name, self._env.link, 1.0, None, "auto", "auto")

    async def _choose(self, links: Mapping[str, Link]) -> Mapping[str, Plan]:  # noqa: ARG002
        """Choose any plans, after a while: the trained model may not depend on them."""
        scenario = self._env.scenario
        await asyncio.sleep(self._draws.uniform(0.0, 1.0))
        if METHODS[scenario.method].pipelines:
            return draw_plans(self._draws, scenario.names)
        # Without pipelining, or with a shared model that is cut in one place, only encodings can be chosen.
        return {name: draw_encodings(self._draws, plan) for name, plan in scenario.plans.items()}

    def _admitted(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._env.checks.check(programs_do_not_fail, "the server", error)

    # --- faults

    def crash(self, restart_after_s: float, *, silently: bool) -> None:
        """End the process without a message; nothing more is saved or sent."""
        process = self._process
        if process is None or not process.is_running:
            return
        self._env.checks.note(SERVER, "is gone")
        self._program = None
        if self.disk is not None:
            self.disk.lose_unsynced()
        self._env.network.hang_up(silently=silently)
        self._env.processes.kill(process, restart_after_s=restart_after_s)

    def stop(self, restart_after_s: float) -> None:
        """As SIGTERM does: the server dismisses its devices and finishes a checkpoint that it has begun."""
        process = self._process
        if process is not None and process.is_running:
            assert process.task is not None
            process.restart_after_s = restart_after_s
            process.task.cancel()

    # --- what is seen of it

    def _observe(self, event: Event, learner: CountingLearner) -> None:
        checks = self._env.checks
        match event:
            case Progress():
                return
            case Saved():
                checks.note(SERVER, f"Saved(epoch={event.epoch})")
                checks.saved(event.epoch)
                return
            case SaveFailed():
                checks.note(SERVER, f"SaveFailed(epoch={event.epoch})")
                checks.save_failed()
                return
        checks.note(SERVER, str(event))
        self._env.memory.observe(event)
        match event:
            case Lost() if "Sending failed" in event.reason:
                checks.check(programs_do_not_fail, "the server", RuntimeError(event.reason))
            case Dropped() | Lost() if "the server failed to" in event.reason:
                checks.check(programs_do_not_fail, "the server", RuntimeError(event.reason))
            case Dropped() if "broke the protocol" in event.reason:
                checks.breach(event.device, ProtocolError(event.reason))
            case RoundOver():
                if self._program is not None and self._learner is not None:
                    present = [session.device for session in self._program.sessions]
                    self._env.memory.end_round(present, self._learner.replica_bytes())
                checks.round_is_over(event, learner.state())
            case _:
                pass

    def _aggregated(self, returned: Sequence[TrainedPart], trained: Mapping[str, tuple[int, int]]) -> None:
        self._env.checks.aggregated(
            returned,
            {name: (stepped if self._has_replica(name) else None, n) for name, (stepped, n) in trained.items()},
        )

    def _has_replica(self, device: str) -> bool:
        """Whether the server has layers of a device's network."""
        return self._program is not None and self._program.plan_of(device).split_point < LAYERS

    def memory(self) -> Iterator[tuple[MemoryUse, MemoryUse]]:
        """Yield what is held for each device, and its limit."""
        if self._program is not None and self._learner is not None:
            yield from self._env.memory.of_server(self._program.sessions, self._learner.replica_bytes())
