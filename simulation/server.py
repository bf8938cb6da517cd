"""The simulated server: the program of `pipar server --resume`, restarted whenever it ends, over the world's disk."""

from __future__ import annotations

import asyncio
import contextvars
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from pipar.errors import InputError, ProtocolError, StorageError
from pipar.events import (
    Drawn,
    Dropped,
    EpochResult,
    Event,
    Lost,
    Progress,
    Refused,
    Resumed,
    RoundOver,
    Saved,
    SaveFailed,
)
from pipar.execution.lanes import VirtualLanes
from pipar.execution.spans import SERVER, Recorder, Span
from pipar.execution.work import Work
from pipar.job.job import Job
from pipar.job.plans import make_plans
from pipar.launch.assemble import ServerSetup, assemble_server
from pipar.launch.rehearsal import rehearse
from pipar.methods import METHODS, Plan
from pipar.nn.learner import LearnerSettings
from pipar.server.enrolment import OpenEnrolment
from pipar.server.program import Server
from pipar.settings.config import DeviceSpec
from pipar.settings.links import Link
from pipar.storage.checkpoint import Checkpoint, Checkpoints, identity_of, latest
from pipar.storage.checkpoint_writer import CheckpointWriter
from pipar.storage.run_folder import RunFolder
from pipar.storage.run_lock import folder_locked
from pipar.storage.whole_files import keep_trying
from pipar.tasks.task import classification
from pipar.wire.orders import TrainedPart
from simulation.clocks import running_loop
from simulation.disk import DiskTroubles, UnreliableDisk, overwrite_newest_checkpoint, prepare_start
from simulation.environment import Environment
from simulation.instrumented import CountingLearner
from simulation.invariants import (
    MemoryUse,
    evaluation_is_of_the_model,
    one_server_at_a_time,
    programs_do_not_fail,
    trace_is_true,
    unread_files_are_kept,
)
from simulation.processes import Process
from simulation.reference_training import State, copied, losses_of
from simulation.scenario import EVALUATION_SAMPLES, LAYERS, draw_encodings, draw_plans
from simulation.tiny_training import CLASSES

_SAVING_S = 0.3
#: That a device may report.
_MOST_SAMPLES = 1000
_CHECKPOINTS = 3


@dataclass(frozen=True)
class _Running:
    """The parts of one process of the server."""

    process: Process
    program: Server
    learner: CountingLearner
    folder: RunFolder
    checkpointer: CheckpointWriter
    observe: Callable[[Event], None]
    done: int  # rounds of the checkpoint that it resumed from
    is_resumed: bool


class SimulatedServer:
    """The server from the beginning of the world to the end of the training."""

    def __init__(self, environment: Environment, troubles: DiskTroubles) -> None:
        self.starts = 0
        self.finish_again = asyncio.Event()  # the end of the training was announced and then lost
        self.troubles = troubles
        self._disk: UnreliableDisk | None = None
        self._env = environment
        self._process: Process | None = None
        self._program: Server | None = None
        self._learner: CountingLearner | None = None
        self._folder: RunFolder | None = None
        self._models: dict[int, State] = {}  # by round, until its result is there; only if devices evaluate them
        self._holders = 0  # servers that use the folder of the run
        self._draws = random.Random(f"sessions {environment.scenario.seed}")

    async def run(self) -> None:
        """Restart the server whenever it ends, as systemd does, until the training is over."""
        checks, processes = self._env.checks, self._env.processes
        while True:
            process = self._process = self._env.process(f"server {self.starts}", SERVER)
            self.starts += 1
            excuses, files = self._excuses(), self._checkpoint_files()
            task = processes.start(process, self._serve(process))
            await asyncio.wait([task])
            if process.is_dead:
                await processes.bury(process)
                checks.disk()
                if checks.save_failures:
                    self.finish_again.set()
            elif not task.cancelled():
                error = task.exception()
                if error is None:
                    checks.result()
                    checks.end()
                    return
                if not isinstance(error, InputError | StorageError) or not _may_fail(excuses, self._excuses()):
                    checks.note(SERVER, "".join(traceback.format_exception(error)))
                    checks.check(programs_do_not_fail, "the server", error)
                self._note(f"does not start: {type(error).__name__}: {str(error).partition(' by process ')[0]}")
                checks.check(unread_files_are_kept, files, self._checkpoint_files())
            await asyncio.sleep(process.restart_after_s)

    def _note(self, sentence: str) -> None:
        """Note a sentence without the name of the folder, which differs each time."""
        self._env.checks.note(SERVER, sentence.replace(str(self._env.folder), "the run"))

    def _excuses(self) -> tuple[bool, bool, int]:
        """Return what may keep a server from starting: a file that cannot be read, a lock, and failed writes."""
        return self.troubles.is_unreadable(), self._holders > 0, self.troubles.failed_writes

    def _checkpoint_files(self) -> dict[str, bytes]:
        if not self.troubles.is_unreadable():
            return {}
        return {path.name: path.read_bytes() for path in (self._env.folder / "checkpoint").glob("*")}

    # --- one process

    async def _serve(self, process: Process) -> None:
        """As `pipar server --resume` does."""
        with folder_locked(self._env.folder, "python -m simulation"), self._holding():
            await self._train(self._assemble(process))

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """Count a server that uses the folder."""
        self._holders += 1
        try:
            self._env.checks.check(one_server_at_a_time, self._holders)
            yield
        finally:
            self._holders -= 1

    async def _train(self, running: _Running) -> None:
        server, network, process = running.program, self._env.network, running.process
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
        self._finish(running)

    def _finish(self, running: _Running) -> None:
        """Write the final files, however often that has to be tried."""
        learner, note = running.learner, partial(self._env.checks.note, SERVER)
        write = partial(running.folder.finish, weights=learner.packed_state(), weights_sha256=learner.sha256())
        keep_trying(write, "The result", note, sleep=running_loop().leap)

    def _assemble(self, process: Process) -> _Running:
        env = self._env
        config, checkpoints = env.training.config, env.folder / "checkpoint"
        prepare_start(env.folder, self.troubles)
        self.troubles.power_fails_in = None
        self._disk = UnreliableDisk(lambda: self.crash(1.0, silently=True), self.troubles)
        found = latest(checkpoints, identity_of(config), self._note, self._disk)
        job = self._job(found)
        folder = self._folder = self._open_folder(job, found)
        learner = self._learner = self._make_learner(job, process)
        env.memory.restart()
        done = 0 if found is None else found.round
        if found is not None:
            learner.restore(found.tensors)
        env.checks.resume_after(done)
        env.draws.resume_after(done, {} if found is None else found.notes.get("drawn", {}))
        observe = process.while_alive(folder.event_recorder(lambda event: self._observe(event, learner)))
        job = replace(job, plans={}, sizes={})
        enrolment = OpenEnrolment(job, {}, self._spec, partial(make_plans, rehearse=rehearse))
        enrolment.keep_plans({**env.scenario.plans, **(found.plans if found is not None else {})})
        enrolment.add_listener(folder.update_job)
        checkpointer = CheckpointWriter(
            Checkpoints(checkpoints, _CHECKPOINTS, self._disk),
            learner,
            folder,
            job=lambda: enrolment.job,
            lane=VirtualLanes(["checkpoint"], Recorder(SERVER, frozenset()), self._saving_s),
            observe=observe,
            done=done,
        )
        lanes = env.lanes()
        self._program = assemble_server(
            job,
            ServerSetup(
                learner=learner,
                enrolment=enrolment,
                pool=lanes,
                background=lanes,
                emit=process.while_alive(self._emit(folder, observe)),
                observe=observe,
                replan=self._choose if env.scenario.replans else None,
                session_numbers=iter(lambda: 1 + self._draws.getrandbits(31), 0),
                checkpointer=checkpointer,
                accountant=folder.accountant,
                drawn=folder.drawn,
                done=[result.val_loss for result in folder.epochs][:done],
            ),
        )
        return _Running(process, self._program, learner, folder, checkpointer, observe, done, found is not None)

    def _saving_s(self, work: Work) -> float:  # noqa: ARG002
        """Return how long the next save takes: on a slow disk, longer than a round."""
        slow_s = self.troubles.save_s
        self._env.checks.is_saving_slow = bool(slow_s)
        return slow_s.popleft() if slow_s else _SAVING_S

    def _emit(self, folder: RunFolder, observe: Callable[[Event], None]) -> Callable[[EpochResult, list[Span]], None]:
        """Return what records the result and the spans of an epoch, after they are checked."""
        record, clock = folder.epoch_recorder(observe), asyncio.get_running_loop().time
        began_s = clock()

        def emit(result: EpochResult, spans: list[Span]) -> None:
            self._env.checks.check(trace_is_true, spans, began_s, clock())
            record(result, spans)

        return emit

    def _job(self, found: Checkpoint | None) -> Job:
        job = Job(
            config=self._env.training.config,
            specs=(),
            sizes={},
            server_profile=self._env.training.profile,
            device_profiles={},
            batch_statistics=self._env.scenario.has_batch_statistics,
            dropout=self._env.scenario.network == "dropout",
            plans={},
            dataset="own",
            model="own",
            most_samples=_MOST_SAMPLES,
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
            classification(CLASSES),
            shares_server_model=job.method.shares_server_model,
            keep_state=job.keep_state,
            trusts_devices=False,
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
        if self._disk is not None:
            self._disk.lose_unsynced()
        self._env.network.hang_up(silently=silently)
        self._env.processes.kill(process, restart_after_s=restart_after_s)

    def stop(self, restart_after_s: float) -> None:
        """As SIGTERM does: the server dismisses its devices and finishes a checkpoint that it has begun."""
        process = self._process
        if process is not None and process.is_running:
            assert process.task is not None
            process.restart_after_s = restart_after_s
            process.task.cancel()

    def make_unreadable(self, seconds: float, error: int | None) -> None:
        """Let the newest checkpoint be unreadable for this time, with an error number or as another version."""
        loop = running_loop()
        until = loop.true_time() + seconds
        self.troubles.read_error, self.troubles.is_unreadable = error, lambda: loop.true_time() < until

    def overwrite_checkpoint(self) -> None:
        """Damage the newest checkpoint, unless it is the last one that is left."""
        if not self._env.checks.save_failures:
            overwrite_newest_checkpoint(self._env.folder / "checkpoint", self.troubles)

    def start_second(self, seconds: float) -> None:
        """Start another server in the same folder; if it can start, it stays for this time."""
        process = self._env.process("second server", SERVER)
        self._env.processes.start(process, self._serve_second(seconds))

    async def _serve_second(self, seconds: float) -> None:
        try:
            with folder_locked(self._env.folder, "a second server"), self._holding():
                self._env.checks.note("second server", "holds the folder")
                await asyncio.sleep(seconds)
        except InputError as error:
            self._env.checks.note("second server", "is refused" if "in use" in str(error) else str(error))

    # --- what is seen of it

    def _observe(self, event: Event, learner: CountingLearner) -> None:
        checks = self._env.checks
        match event:
            case Progress():
                return
            case EpochResult():
                self._check_evaluation(event)
                return
            case Saved():
                checks.note(SERVER, f"Saved(epoch={event.epoch})")
                checks.saved(event.epoch)
                return
            case SaveFailed():
                checks.note(SERVER, f"SaveFailed(epoch={event.epoch})")
                if event.reason.startswith("The checkpoint of round"):
                    checks.save_failed()
                return
        checks.note(SERVER, str(event))
        self._env.memory.observe(event)
        match event:
            case Lost() if "Sending failed" in event.reason:
                checks.check(programs_do_not_fail, "the server", RuntimeError(event.reason))
            case Dropped() | Lost() if "the server failed to" in event.reason:
                checks.server_failed(event.device, event.reason)
            case Refused() if not event.again:
                checks.breach(event.device, ProtocolError(event.reason))
            case Dropped() if "broke the protocol" in event.reason:
                checks.breach(event.device, ProtocolError(event.reason))
            case Drawn():
                assert self._program is not None
                self._env.draws.drawn(event, [one.device for one in self._program.sessions if one.is_welcome])
            case RoundOver():
                self._env.draws.round_is_over(event.epoch, [*event.counted, *event.partly])
                self._note_replicas(event.epoch)
                checks.round_is_over(event, learner.state())
                if self._env.scenario.evaluates:
                    self._models[event.epoch] = copied(learner.state())
                if self._folder is not None:
                    self._env.ledgers.round_is_over(self._folder.accountant, checks.counted)
            case _:
                pass

    def _check_evaluation(self, result: EpochResult) -> None:
        """Compare what devices said of a round's model with what plain PyTorch says."""
        if (model := self._models.pop(result.epoch, None)) is None or not result.device_metrics:
            return
        workload, names = self._env.training.workload, self._env.scenario.names
        sets = {name: kept for name in names if (kept := workload.samples.evaluation_images(name)) is not None}
        losses = losses_of(workload.build_model(), model, sets)
        self._env.checks.check(
            evaluation_is_of_the_model, result.epoch, result.device_metrics, losses, EVALUATION_SAMPLES
        )

    def _note_replicas(self, epoch: int) -> None:
        """Note which replicas there are at the end of a round: those of the devices that are here and were drawn."""
        if self._program is not None and self._learner is not None:
            present = {session.device for session in self._program.sessions}
            if self._env.scenario.draws:
                present.intersection_update(self._env.draws.of_round(epoch))
            self._env.memory.end_round(present, self._learner.replica_bytes())

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


def _may_fail(before: tuple[bool, bool, int], after: tuple[bool, bool, int]) -> bool:
    """Return whether a fault kept a server from starting, given what might before and after its attempt."""
    return any((*before[:2], *after[:2])) or before[2] != after[2]
