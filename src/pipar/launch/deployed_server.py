"""The server of a deployment: devices on other machines connect to it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from pipar.config import Config
from pipar.data.catalog import dataset_info
from pipar.data.datasets import Images
from pipar.errors import ConfigError, DataError, InputError, PlanError
from pipar.events import Barred, Listening, Observer, Resumed, SaveFailed, Stopping
from pipar.execution.lanes import ThreadLanes
from pipar.execution.spans import SERVER, Recorder
from pipar.job.job import Job
from pipar.job.model_setup import make_learner, measure_test_accuracy, seed_dropout
from pipar.job.plans import make_plans
from pipar.job.prepare import check_given_plans, sample_bytes
from pipar.job.profiles import measured_profile
from pipar.job.workload import UserObjects, Workload
from pipar.launch.assemble import assemble_server
from pipar.launch.deployed_process import listed_specs, prepare_process, run_until_signal, unlisted_spec
from pipar.launch.rehearsal import rehearse
from pipar.launch.run import started_event
from pipar.leakage.limit import LeakageLimit
from pipar.leakage.table import Subject
from pipar.monitoring.tracker_threads import Tracking, tracked
from pipar.nn.learner import Batches, TorchLearner
from pipar.nn.models import uses_batch_statistics, uses_dropout
from pipar.planner.background_search import SearchProcess
from pipar.planner.fleet import Fleet
from pipar.privacy.budget import choose_noise
from pipar.report import try_write_report
from pipar.server.enrolment import OpenEnrolment
from pipar.server.epoch_results import stale_epochs
from pipar.server.liveness import LivenessMonitor
from pipar.storage.checkpoint import Checkpoint, Checkpoints, identity_of, latest, refuse_to_overwrite
from pipar.storage.checkpoint_writer import CheckpointWriter
from pipar.storage.run_folder import RunFolder, run_name, runs_folder, signals_deferred
from pipar.transport.channel import Transport
from pipar.transport.grpc import Listener
from pipar.transport.limits import Keepalive
from pipar.transport.tls import ServerSecurity
from pipar.wire.messages import EMPTY


@dataclass(frozen=True)
class ServerOptions:
    """What the server's command line says beside the configuration."""

    listen: str
    security: ServerSecurity = field(default_factory=ServerSecurity)
    resume: bool = False
    command: str = "pipar server"
    pictures: bool = False  # of every round's lanes, for who observes


def serve(config: Config, options: ServerOptions, observe: Observer) -> int:
    """Train with the devices that come; return the exit code: 0 at the end or on SIGTERM, 130 on SIGINT."""
    with tracked(config, observe) as tracking:
        return _serve(config, options, tracking)


def _serve(config: Config, options: ServerOptions, tracking: Tracking) -> int:
    observe = tracking.observe
    prepare_process()
    workload = server_workload(config)
    folder_path = runs_folder() / run_name(config, workload.model_name, workload.data_name)
    checkpoints = folder_path / "checkpoint"
    found = _checkpoint(config, checkpoints, options, observe)
    job = _empty_job(workload, observe)
    _check_cut(job, found)
    before = job if found is None else replace(job, plans=found.plans, sizes=found.samples)
    learner = make_learner(before, workload)
    if found is not None:
        learner.restore(found.tensors)
        found = replace(found, tensors=EMPTY)  # they would stay here as long as the server does
    else:
        seed_dropout(config.run.seed, SERVER)
    folder = _open_folder(folder_path, before, found, options.command)
    if found is not None and (why := reason_finished(config, [result.val_loss for result in folder.epochs])):
        observe(Resumed(found.round))
        observe(Stopping(why))
        if not folder.has_result():
            folder.finish(weights=learner.packed_state(), weights_sha256=learner.sha256())
            folder.add_test_accuracy(_test_accuracy(learner, workload))
            try_write_report(folder_path, observe)
        return 0  # there is nothing left to train, and nobody will come
    kept = Checkpoints(checkpoints, config.server.checkpoint_keep)
    program = _ServerProgram(workload, learner, folder, options, observe, kept)
    stopped = run_until_signal(program.run(job, found))
    with signals_deferred():
        result = folder.finish(weights=learner.packed_state(), weights_sha256=learner.sha256())
        if stopped is None:
            result = folder.add_test_accuracy(_test_accuracy(learner, workload))
    if folder.epochs:
        try_write_report(folder_path, observe, job=folder.job if stopped is None else None, fleet=program.fleet)
    tracking.end(result if stopped is None else None)
    return 130 if stopped == signal.SIGINT else 0


class _ServerProgram:
    """Everything around the server's own program that a deployment needs."""

    def __init__(
        self,
        workload: Workload,
        learner: TorchLearner,
        folder: RunFolder,
        options: ServerOptions,
        observe: Observer,
        checkpoints: Checkpoints,
    ) -> None:
        self._workload = workload
        self._learner = learner
        self._folder = folder
        self._options = options
        self._observe = folder.event_recorder(observe)
        self._checkpoints = checkpoints
        self._has_begun = self._is_stopping = False
        self.fleet: Fleet | None = None  # as the training has shown it, when it is over

    async def run(self, job: Job, found: Checkpoint | None) -> None:
        config, done = job.config, 0 if found is None else found.round
        enrolment = OpenEnrolment(
            job,
            {spec.name: spec for spec in listed_specs(config)},
            unlisted_spec,
            partial(make_plans, rehearse=rehearse),
        )
        if found is not None:
            enrolment.keep_plans(found.plans)
        enrolment.add_listener(self._update_job)
        search_process = SearchProcess()
        saving = ThreadLanes(["checkpoint"], Recorder(SERVER, frozenset()), nice=10)
        checkpointer = CheckpointWriter(
            self._checkpoints,
            self._learner,
            self._folder,
            config=config,
            job=lambda: enrolment.job,
            lane=saving,
            observe=self._observe,
            done=done,
        )
        server = assemble_server(
            job,
            self._learner,
            held_out(self._workload, "validation"),
            enrolment=enrolment,
            pool=partial(ThreadLanes, speed=config.server.speed),
            background=partial(ThreadLanes, nice=19),
            emit=self._folder.epoch_recorder(self._observe, pictures=self._options.pictures),
            observe=self._observe,
            search=search_process,
            session_numbers=_random_numbers(),
            checkpointer=checkpointer,
            accountant=self._folder.accountant,
            done=[result.val_loss for result in self._folder.epochs][:done] if found is not None else (),
        )
        keepalive = Keepalive.every(config.server.keepalive)

        async def admit(transport: Transport, peer: str | None) -> None:
            if self._is_stopping:  # who was let go comes back at once, and is to find the next server
                await transport.close()
            else:
                await server.admit(transport, peer)

        listener = Listener(
            admit,
            security=self._options.security,
            keepalive=keepalive,
            barred=lambda why: self._observe(Barred(why)),
        )
        host, _, _ = self._options.listen.rpartition(":")
        port = await listener.start(self._options.listen)
        self._observe(Listening(f"{host}:{port}"))
        if found is not None:
            self._observe(Resumed(done, self._folder.trained_again))
        liveness = LivenessMonitor(lambda: server.sessions, self._observe)
        listening = asyncio.create_task(liveness.watch()) if self._options.pictures else None  # for who looks at a page
        try:
            await server.train(done)
            self.fleet = server.fleet()
            await server.wait_until_left()
        except asyncio.CancelledError:
            self._is_stopping = True
            self._observe(Stopping("The server was asked to stop; `--resume` goes on from here."))
            await server.dismiss("The server stops for now.")
            raise
        finally:
            if listening is not None:
                listening.cancel()
            await checkpointer.finish()
            await search_process.close()
            await listener.stop()
            server.close()
            saving.close()

    def _update_job(self, job: Job) -> None:
        """The fleet is known, or has grown."""
        self._folder.update_job(job)
        if not self._has_begun:
            self._has_begun = True
            self._observe(started_event(job, self._folder.path))


def server_workload(config: Config) -> Workload:
    """Return the workload of a server, which knows of the data only what the network has to fit."""
    shape, classes = config.data.shape, config.data.classes
    if config.data.factory is None:
        info = dataset_info(config.data.name)
        shape, classes = shape or info.shape, classes or info.classes
    if shape is None or classes is None:
        raise ConfigError(
            "A server has none of the devices' data: with data.factory, give data.shape and data.classes, too."
        )
    return Workload(config, UserObjects(input_shape=tuple(shape), classes=classes))


def held_out(workload: Workload, which: str) -> Batches:
    """Return a held-out set; none if the server does not have it."""
    try:
        return workload.held_out_batches(which)
    except DataError:
        return []


def _test_accuracy(learner: TorchLearner, workload: Workload) -> float | None:
    try:
        return measure_test_accuracy(learner, workload)
    except DataError:  # the server does not have that set, either
        return None


def _to_measure(workload: Workload) -> Workload:
    """Return a workload to profile the network with: blank samples where the server has none of the devices' data."""
    name = workload.names[0]
    if workload.config.data.factory is None:
        with contextlib.suppress(DataError):
            workload.shard(name)
            return workload
    blank = Images(torch.zeros((1, *workload.input_shape)), torch.zeros(1, dtype=torch.int64))
    return Workload(workload.config, replace(workload.user_objects, training={name: blank}))


def _empty_job(workload: Workload, observe: Observer) -> Job:
    """Return a job without devices: they come."""
    choose_noise(workload.config)  # what is wrong with a budget is found before anything is measured
    config, model = workload.config, workload.checked_model()
    check_given_plans(config, len(model), workload.model_name)
    limit = LeakageLimit.of(config, Subject.of(config, workload.model_name, workload.data_name, workload.input_shape))
    return Job(
        config=config,
        specs=(),
        sizes={},
        server_profile=measured_profile(_to_measure(workload), model, observe),
        device_profiles={},
        batch_statistics=uses_batch_statistics(model),
        dropout=uses_dropout(model),
        plans={},
        dataset=workload.data_name,
        model=workload.model_name,
        leaky_cuts={} if limit is None else limit.leaky_cuts(list(model._modules)),
        leakage_guess=None if limit is None else limit.table.guess,
        sample_bytes=sample_bytes(workload.input_shape, config.model.dtype),
    )


def _checkpoint(config: Config, folder: Path, options: ServerOptions, observe: Observer) -> Checkpoint | None:
    if not options.resume:
        refuse_to_overwrite(folder)
        return None
    return latest(folder, identity_of(config), lambda sentence: observe(SaveFailed(0, sentence)))


def reason_finished(config: Config, losses: Sequence[float | None]) -> str | None:
    """Return why a training of which these validation losses are known has nothing left to do; None if it has."""
    done, patience = len(losses), config.run.patience
    if done >= config.run.epochs:
        return f"All {done} rounds are trained already; a larger run.epochs goes on behind them."
    if patience is not None and stale_epochs(losses[:-1]) >= patience:  # as it is judged while it trains
        return f"The validation loss has not improved for {patience} rounds; a larger run.patience goes on behind them."
    return None


def _check_cut(job: Job, found: Checkpoint | None) -> None:
    """Raise if a model that all devices share is cut already where it leaks too much: that cut stays as it is."""
    cuts = {plan.split_point for plan in found.plans.values()} if found and job.method.shares_server_model else set()
    for p in cuts & job.leaky_cuts.keys():
        raise PlanError(
            f"The saved training by {job.method.name} is cut at the split point {p}, which leaks "
            f"{job.leaky_cuts[p]:.3f}, more than privacy.max_leakage = {job.config.privacy.max_leakage:g}: allow more, "
            "or begin a new training."
        )


def _open_folder(path: Path, job: Job, found: Checkpoint | None, command: str) -> RunFolder:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"Cannot make the run's folder {path}: {error.strerror}.") from None
    has_checkpoints = job.config.server.checkpoint_every > 0
    folder = RunFolder(path, job, world="real", command=command, has_checkpoints=has_checkpoints)
    if found is not None:
        folder.resume(found)
    else:
        folder.start_over()
    return folder


def _random_numbers() -> Iterator[int]:
    """Give session numbers that no other server, nor this one before a crash, has given."""
    while True:
        yield 1 + secrets.randbelow(2**32 - 1)
