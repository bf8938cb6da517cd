"""The server of a deployment: devices on other machines connect to it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipar.errors import PlanError, StorageError, describe
from pipar.events import Barred, Expiring, Listening, Observer, Reloaded, ReloadFailed, Resumed, SaveFailed, Stopping
from pipar.execution.lanes import Lanes, ThreadLanes
from pipar.execution.spans import SERVER, Recorder
from pipar.job.job import Job
from pipar.job.model_setup import make_learner, seed_dropout
from pipar.job.plans import make_plans
from pipar.job.workload import Workload
from pipar.launch.assemble import ServerSetup, assemble_server
from pipar.launch.deployed_job import (
    check_validation_set,
    job_without_devices,
    known_test_scores,
    server_workload,
    validation_batches,
)
from pipar.launch.deployed_process import (
    as_deployed,
    listed_specs,
    prepare_process,
    run_until_signal,
    unlisted_spec,
    until_left,
)
from pipar.launch.device_lanes import claim_cores
from pipar.launch.final_model import final_files
from pipar.launch.rehearsal import rehearse
from pipar.launch.run import started_event
from pipar.monitored_metric import VAL_LOSS
from pipar.monitoring.tracker_threads import Tracking, tracked
from pipar.nn.learner import TorchLearner
from pipar.planner.background_search import SearchProcess
from pipar.planner.fleet import Fleet
from pipar.recording.recorder import Recording, check_can_record, recorded
from pipar.report import try_write_report
from pipar.server.enrolment import OpenEnrolment
from pipar.server.epoch_results import stale_epochs
from pipar.server.program import Server
from pipar.server.silent_devices import SilentDeviceMonitor
from pipar.settings.config import Config
from pipar.storage.audit_log import AuditLog
from pipar.storage.checkpoint import Checkpoint, Checkpoints, identity_of, latest, refuse_to_overwrite
from pipar.storage.checkpoint_writer import CheckpointWriter
from pipar.storage.run_folder import RunFolder, save_result, signals_deferred, without_signals
from pipar.storage.run_lock import folder_locked
from pipar.storage.run_names import refuse_to_replace_result, run_name, runs_folder
from pipar.transport import open_files
from pipar.transport.addresses import check_listening
from pipar.transport.expiry import announce_expiry, expiring
from pipar.transport.grpc_listener import Listener
from pipar.transport.interface import Transport
from pipar.transport.limits import Keepalive, Limits
from pipar.transport.reloading import Notices
from pipar.transport.tls import ServerSecurity
from pipar.wire.messages import EMPTY

#: A changed file of credentials or of allowed devices takes effect within this time.
_REREAD_EVERY_S = 2.0


@dataclass(frozen=True)
class ServerOptions:
    """Options of `pipar server` that are not in the configuration."""

    listen: str
    security: ServerSecurity = field(default_factory=ServerSecurity)
    resume: bool = False
    command: str = "pipar server"
    pictures: bool = False  # also send observers the lanes of each round
    record: bool = False  # write a recording, for `pipar replay`


def serve(config: Config, options: ServerOptions, observe: Observer) -> int:
    """Train with the devices that connect; return the exit code: 0 at the end or on SIGTERM, 130 on SIGINT."""
    if options.record:
        check_can_record(config)
    with tracked(config, observe) as tracking:
        return _serve(config, options, tracking)


def _serve(config: Config, options: ServerOptions, tracking: Tracking) -> int:
    prepare_process(config)
    claim_cores()  # devices that are started next to this server leave the cores to it
    open_files.raise_limit()
    workload = server_workload(as_deployed(config))
    path = runs_folder() / run_name(config, workload.model_name, workload.samples.name)
    with folder_locked(path, options.command):
        return _serve_in(path, workload, options, tracking)


def _serve_in(path: Path, workload: Workload, options: ServerOptions, tracking: Tracking) -> int:
    """Train in a folder that no other process uses."""
    observe = tracking.observe
    run = _open_run(path, workload, options, observe)
    reason = run.reason_finished()
    if reason is not None:
        _finish_again(run, reason, observe)
        return 0
    with recorded(run.folder, world="real", is_on=options.record) as recording:
        program = _ServerProgram(run, options, observe, recording)
        stopped = run_until_signal(program.train())
    code = 130 if stopped == signal.SIGINT else 0
    try:
        result = run.finish(observe, is_over=stopped is None)
    except StorageError as error:  # after a signal: the checkpoints are all that remains
        observe(SaveFailed(len(run.folder.round_log), str(error)))
        return code
    folder = run.folder
    if folder.epochs:
        try_write_report(folder.path, observe, job=folder.job if stopped is None else None, fleet=program.fleet)
    tracking.end(result if stopped is None else None)
    return code


def _finish_again(run: _Run, reason: str, observe: Observer) -> None:
    """Report a resumed training that has no rounds left, and write its result if a crash came before that."""
    observe(Resumed(run.done))
    observe(Stopping(reason))
    if not run.folder.has_result():
        run.finish(observe, is_over=True)
        try_write_report(run.folder.path, observe)


# --- the run, new or resumed


@dataclass(frozen=True)
class _Run:
    """A training that starts, or resumes after a checkpoint."""

    job: Job  # without devices
    workload: Workload
    learner: TorchLearner
    folder: RunFolder
    found: Checkpoint | None  # without its tensors, which the learner has

    @property
    def done(self) -> int:
        """The number of complete rounds."""
        return 0 if self.found is None else self.found.round

    @property
    def val_losses(self) -> list[float | None]:
        """The validation losses of the complete rounds, or what is monitored instead; lower is better."""
        monitor = self.workload.monitor
        return [result.compared(monitor) for result in self.folder.epochs]

    def reason_finished(self) -> str | None:
        """Return why a resumed training has no rounds left; None if it has some."""
        return None if self.found is None else reason_finished(self.job.config, self.val_losses)

    def finish(self, observe: Observer, *, is_over: bool) -> dict[str, Any]:
        """Write the final files, with the test accuracy if the training is over; return the result.

        At the end it is tried until it succeeds. A training that was stopped has one attempt, or it raises
        StorageError.
        """
        learner, folder = self.learner, self.folder
        patience_s = math.inf if is_over else 0.0
        state = without_signals(final_files(folder, learner, observe))
        result = save_result(folder, state, observe, patience_s=patience_s)
        if not is_over:
            return result
        with signals_deferred():
            scores = known_test_scores(learner, self.workload)
        last = without_signals(partial(folder.add_test_scores, scores))
        return save_result(folder, last, observe, patience_s=patience_s)


def _open_run(path: Path, workload: Workload, options: ServerOptions, observe: Observer) -> _Run:
    """Return the run of a configuration, resumed from its last checkpoint if the options say so."""
    config = workload.config
    found = _find_checkpoint(config, _checkpoint_folder(path), options, observe)
    if found is None:
        refuse_to_replace_result(path)
    if found is None or found.round < config.run.epochs:
        check_listening(options.listen)  # now, not after the network is measured
    check_validation_set(workload)
    job = job_without_devices(workload, observe)
    _check_cut(job, found)
    known = job if found is None else replace(job, plans=found.plans, sizes=found.samples)
    learner = make_learner(known, workload, trusts_devices=False)
    if found is not None:
        learner.restore(found.tensors)
        found = replace(found, tensors=EMPTY)  # or they would stay in memory for the whole training
    else:
        seed_dropout(config.run.seed, SERVER, learner.torch_device)
    return _Run(job, workload, learner, _open_folder(path, known, found, options.command), found)


def _checkpoint_folder(path: Path) -> Path:
    return path / "checkpoint"


def _find_checkpoint(config: Config, folder: Path, options: ServerOptions, observe: Observer) -> Checkpoint | None:
    if not options.resume:
        refuse_to_overwrite(folder)
        return None
    return latest(folder, identity_of(config), lambda sentence: observe(SaveFailed(0, sentence)))


def reason_finished(config: Config, val_losses: Sequence[float | None]) -> str | None:
    """Return why a training with these validation losses has no rounds left; None if it has some."""
    done, patience = len(val_losses), config.run.patience
    if done >= config.run.epochs:
        return f"All {done} rounds are trained. Increase run.epochs to train more."
    # Validation runs during the next round, so the training, too, has stopped without the last loss.
    if patience is not None and stale_epochs(val_losses[:-1]) >= patience:
        what = "validation loss" if config.run.monitor == VAL_LOSS else config.run.monitor
        return f"The {what} has not improved for {patience} rounds. Increase run.patience to train more."
    return None


def _check_cut(job: Job, found: Checkpoint | None) -> None:
    """Raise PlanError if a shared model was cut where it leaks too much: its cut cannot be changed on resuming."""
    cuts = {plan.split_point for plan in found.plans.values()} if found and job.method.shares_server_model else set()
    for p in cuts & job.leaky_cuts.keys():
        raise PlanError(
            f"The saved training with {job.method.name} is cut at split point {p}, which leaks "
            f"{job.leaky_cuts[p]:.3f}, more than privacy.max_leakage = {job.config.privacy.max_leakage:g}: raise "
            "the limit, or give another run.name and start without --resume."
        )


def _open_folder(path: Path, job: Job, found: Checkpoint | None, command: str) -> RunFolder:
    has_checkpoints = job.config.server.checkpoint_every > 0
    folder = RunFolder(path, job, world="real", command=command, has_checkpoints=has_checkpoints, has_threads=True)
    if found is not None:
        folder.resume(found)
    else:
        folder.start_over()
    return folder


# --- the program


class _ServerProgram:
    """The server's program with what a deployment adds: a listener, checkpoints, silent devices."""

    def __init__(self, run: _Run, options: ServerOptions, observe: Observer, recording: Recording) -> None:
        self._run = run
        self._options = options
        self._emitting, watching = recording
        watch = watching(run.folder.event_recorder(observe))
        self._observe = AuditLog(run.folder.path, options.command).recorder(watch)
        self._has_started = self._is_stopping = False
        self.fleet: Fleet | None = None  # as measured during training, at its end

    async def train(self) -> None:
        """Train to the end of the last round; cancelling it stops after the devices are dismissed."""
        enrolment = self._make_enrolment()
        search_process = SearchProcess()
        saving = ThreadLanes(["checkpoint"], Recorder(SERVER, frozenset()), nice=10)
        checkpointer = self._make_checkpointer(enrolment, saving)
        server = self._make_server(enrolment, search_process, checkpointer)
        listener = self._make_listener(server)
        await self._listen(listener)
        try:
            async with (
                until_left(announce_expiry(lambda: expiring(listener.certificates), self._announce)),
                until_left(self._reread_files(listener, enrolment, server)),
            ):
                await self._train(server)
        finally:
            await checkpointer.finish()
            await search_process.close()
            await listener.stop()
            server.close()
            saving.close()

    def _announce(self, sentence: str) -> None:
        self._observe(Expiring(sentence))

    async def _reread_files(self, listener: Listener, enrolment: OpenEnrolment, server: Server) -> None:
        """Use files of credentials and of allowed devices soon after they have changed."""
        while True:
            await asyncio.sleep(_REREAD_EVERY_S)
            try:
                listener.refresh()
                if (change := enrolment.take_change()) is not None:
                    self._observe(Reloaded(change))
                    await server.dismiss_unless(enrolment.check_allowed)
            except Exception as error:  # noqa: BLE001 - becomes an event: later changes have to be noticed, too
                self._observe(ReloadFailed(f"A changed file could not be used: {describe(error)}."))

    async def _listen(self, listener: Listener) -> None:
        host, _, _ = self._options.listen.rpartition(":")
        port = await listener.start(self._options.listen)
        most = listener.most_connections
        self._observe(Listening(f"{host}:{port}", most if most < Limits().connections else None))
        if self._run.found is not None:
            self._observe(Resumed(self._run.done, self._run.folder.trained_again))

    async def _train(self, server: Server) -> None:
        silent = SilentDeviceMonitor(lambda: server.sessions, self._observe)
        # Only the live page, which asks for pictures, shows silent devices.
        watching = until_left(silent.watch()) if self._options.pictures else contextlib.nullcontext()
        try:
            async with watching:
                await server.train(self._run.done)
                self.fleet = server.fleet()
                await server.wait_until_left()
        except asyncio.CancelledError:
            self._is_stopping = True
            self._observe(Stopping("The server was asked to stop. Start it with --resume to continue."))
            await server.suspend("The server stops for now.")
            raise

    def _make_enrolment(self) -> OpenEnrolment:
        job, found = self._run.job, self._run.found
        specs = {spec.name: spec for spec in listed_specs(job.config)}
        unlisted = partial(unlisted_spec, job.config)
        enrolment = OpenEnrolment(job, specs, unlisted, partial(make_plans, rehearse=rehearse))
        if found is not None:
            enrolment.keep_plans(found.plans)
        enrolment.add_listener(self._update_job)
        return enrolment

    def _make_checkpointer(self, enrolment: OpenEnrolment, lane: Lanes) -> CheckpointWriter:
        folder, keep = self._run.folder, self._run.job.config.server.checkpoint_keep
        return CheckpointWriter(
            Checkpoints(_checkpoint_folder(folder.path), keep),
            self._run.learner,
            folder,
            job=lambda: enrolment.job,
            lane=lane,
            observe=self._observe,
            done=self._run.done,
        )

    def _make_server(self, enrolment: OpenEnrolment, search: SearchProcess, checkpointer: CheckpointWriter) -> Server:
        run, folder = self._run, self._run.folder
        return assemble_server(
            run.job,
            ServerSetup(
                learner=run.learner,
                validation=validation_batches(run.workload),
                enrolment=enrolment,
                pool=partial(
                    ThreadLanes, speed=run.job.config.server.speed, accelerator=run.learner.torch_device.accelerator
                ),
                background=partial(ThreadLanes, nice=19),
                emit=self._emitting(folder.epoch_recorder(self._observe, pictures=self._options.pictures)),
                observe=self._observe,
                search=search,
                session_numbers=_session_numbers(),
                checkpointer=checkpointer,
                accountant=folder.accountant,
                done=run.val_losses,
                best=folder.best,
                drawn=folder.drawn,
            ),
        )

    def _make_listener(self, server: Server) -> Listener:
        async def admit(transport: Transport, peer: str | None) -> None:
            if self._is_stopping:  # dismissed devices reconnect immediately, and must find the next server
                await transport.close()
            else:
                await server.admit(transport, peer)

        return Listener(
            admit,
            security=self._options.security,
            keepalive=Keepalive.of(self._run.job.config.server.keepalive),
            refused=server.report_refused,
            revoked=server.revoke,
            notices=Notices(
                reloaded=lambda what: self._observe(Reloaded(what)),
                failed=lambda why: self._observe(ReloadFailed(why)),
                barred=lambda why: self._observe(Barred(why)),
            ),
        )

    def _update_job(self, job: Job) -> None:
        """Record the job after a device has joined."""
        self._run.folder.update_job(job)
        if not self._has_started:
            self._has_started = True
            self._observe(started_event(job, self._run.folder.path))


def _session_numbers() -> Iterator[int]:
    """Yield session numbers that no other server, nor this one before a crash, has used."""
    while True:
        yield 1 + secrets.randbelow(2**32 - 1)
