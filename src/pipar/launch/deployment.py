"""The two programs of a real deployment: a server on one machine, a device on each of many."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import signal
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipar.config import Config, DeviceSection, DeviceSpec, device_specs
from pipar.data.catalog import dataset_info
from pipar.data.datasets import Images
from pipar.errors import ConfigError, DataError, InputError, PlanError
from pipar.events import Barred, Listening, Observer, Resumed, SaveFailed, Stopping
from pipar.execution.lanes import ThreadLanes
from pipar.execution.spans import SERVER, Recorder
from pipar.job.job import Job
from pipar.job.plans import make_plans
from pipar.job.prepare import check_given_plans, measured_profile, sample_bytes
from pipar.job.torch_setup import make_learner, measure_test_accuracy, part_builder, seed_dropout
from pipar.job.workload import UserObjects, Workload
from pipar.launch.assemble import Equipment, assemble_server, run_device
from pipar.launch.rehearsal import rehearse
from pipar.launch.run import started_event
from pipar.leakage.limit import LeakageLimit
from pipar.leakage.table import Subject
from pipar.links import Link
from pipar.methods import METHODS
from pipar.monitoring.tracker_threads import Tracking, tracked
from pipar.nn.learner import Batches, TorchLearner
from pipar.nn.models import uses_batch_statistics, uses_dropout
from pipar.nn.runtime import keep_freed_memory
from pipar.planner.background_search import SearchProcess
from pipar.planner.fleet import Fleet
from pipar.privacy import accounting
from pipar.privacy.budget import AllowedCuts, PrivacyGuard, PrivacyLimits, choose_noise
from pipar.privacy.budget_file import BudgetFile, locked
from pipar.profiling.profile import Profile
from pipar.report import try_write_report
from pipar.server.enrolment import OpenEnrolment
from pipar.server.epoch_results import stale_epochs
from pipar.server.liveness import LivenessMonitor
from pipar.storage.checkpoint import Checkpoint, Checkpoints, identity_of, latest, refuse_to_overwrite
from pipar.storage.checkpoint_writer import CheckpointWriter
from pipar.storage.run_folder import RunFolder, run_name, runs_folder, signals_deferred
from pipar.transport.backoff import Backoff
from pipar.transport.channel import Transport
from pipar.transport.grpc import Listener, connect
from pipar.transport.limits import Keepalive
from pipar.transport.reconnect import Reconnector
from pipar.transport.tls import DeviceSecurity, ServerSecurity
from pipar.wire.messages import EMPTY

_NO_LINK = Link()
#: A server that has not answered for so long is tried anew.
_DIAL_S = 10.0


@dataclass(frozen=True)
class ServerOptions:
    """What the server's command line says beside the configuration."""

    listen: str
    security: ServerSecurity = field(default_factory=ServerSecurity)
    resume: bool = False
    command: str = "pipar server"
    pictures: bool = False  # of every round's lanes, for who observes


@dataclass(frozen=True)
class DeviceOptions:
    """What a device's command line says beside the configuration."""

    name: str
    server: str
    security: DeviceSecurity = field(default_factory=DeviceSecurity)
    data: str | None = None  # a folder with the device's own data
    give_up_after_s: float | None = None
    noise_seed: int | None = None  # None: drawn from the system, and known to nobody
    privacy_file: Path | None = None  # what the device remembers of its privacy over restarts; None: nothing


# --- the server


def serve(config: Config, options: ServerOptions, observe: Observer) -> int:
    """Train with the devices that come; return the exit code: 0 at the end or on SIGTERM, 130 on SIGINT."""
    with tracked(config, observe) as tracking:
        return _serve(config, options, tracking)


def _serve(config: Config, options: ServerOptions, tracking: Tracking) -> int:
    observe = tracking.observe
    _prepare_process()
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
    stopped = _until_signal(program.run(job, found))
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
            job, {spec.name: spec for spec in _listed(config)}, unlisted_spec, partial(make_plans, rehearse=rehearse)
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


def unlisted_spec(name: str) -> DeviceSpec:
    """Return a device of its own speed on a link of its own."""
    return DeviceSpec(name, _NO_LINK, 1.0, None, "auto", "auto")


def _listed(config: Config) -> list[DeviceSpec]:
    """Return the devices of the configuration; a link or a speed is emulated only where it is written down."""
    given = config.model_copy(update={"devices": tuple(_as_given(group) for group in config.devices)})
    return list(device_specs(given))


def _as_given(group: DeviceSection) -> DeviceSection:
    update: dict[str, Any] = {}
    if "link" not in group.model_fields_set:
        update["link"] = _NO_LINK
    if "speed" not in group.model_fields_set:
        update["speed"] = 1.0
    return group.model_copy(update=update)


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


# --- a device


def take_part(config: Config, options: DeviceOptions, observe: Observer) -> int:
    """Take part in a training to its end; return the exit code."""
    with contextlib.nullcontext() if options.privacy_file is None else locked(options.privacy_file):
        return _take_part(config, options, observe)


def _take_part(config: Config, options: DeviceOptions, observe: Observer) -> int:
    _prepare_process()
    spec = next((spec for spec in _listed(config) if spec.name == options.name), unlisted_spec(options.name))
    memory = None if options.privacy_file is None else BudgetFile.open(options.privacy_file, options.name)
    seed = secrets.randbits(128) if options.noise_seed is None else options.noise_seed
    workload = device_workload(config, options, seed, None if memory is None else memory.label_seed)
    samples, model = workload.keep_only_shard(options.name), workload.checked_model()
    guard = device_guard(config, seed, cuts=allowed_cuts(workload, model), memory=memory)
    profile = without_sample_statistics(
        config, measured_profile(workload, model, observe, memory_bytes=spec.memory_bytes)
    )
    seed_dropout(config.run.seed, options.name)
    build, lanes = part_builder(workload, options.name), partial(ThreadLanes, speed=spec.speed)
    equipment = Equipment(samples, build, lanes, profile, guard)
    stopped = _until_signal(_live(config, options, spec, equipment, observe))
    return 130 if stopped == signal.SIGINT else 0


async def _live(
    config: Config, options: DeviceOptions, spec: DeviceSpec, equipment: Equipment, observe: Observer
) -> None:
    clock = asyncio.get_running_loop().time
    backoff = Backoff.of_device(config.run.seed, options.name, clock, options.give_up_after_s)
    patience_s = min(_DIAL_S, options.give_up_after_s or _DIAL_S)
    keepalive = Keepalive.every(config.server.keepalive)
    dial = partial(connect, options.server, security=options.security, timeout_s=patience_s, keepalive=keepalive)
    reconnector = Reconnector(options.name, options.server, dial, backoff, observe)
    take_part = partial(
        run_device, options.name, spec.link, equipment, reconnector=reconnector, is_real=True, observe=observe
    )
    await reconnector.run(take_part)
    observe(Stopping("The training is over."))


def device_guard(
    config: Config, noise_seed: int | None = None, *, cuts: AllowedCuts | None = None, memory: BudgetFile | None = None
) -> PrivacyGuard:
    """Return what a device allows by its own configuration, whatever its server says."""
    privacy = config.privacy
    budget = math.inf
    if privacy.target_epsilon is not None:
        budget = accounting.budget(privacy.target_epsilon, privacy.delta)
    return PrivacyGuard(
        noise_seed,
        PrivacyLimits(privacy.noise_multiplier or 0.0, budget, privacy.delta, cuts),
        used=None if memory is None else memory.used,
        save=None if memory is None else memory.save,
    )


def allowed_cuts(workload: Workload, model: nn.Sequential) -> AllowedCuts | None:
    """Return where a device lets the network be cut: nowhere in federated learning, or where it leaks little enough."""
    config, layers = workload.config, len(model)
    if not METHODS[config.run.method].splits:
        why = f"by its own configuration, method = '{config.run.method}', no activations leave this device"
        return AllowedCuts(layers, frozenset([layers]), why)
    limit = LeakageLimit.of(config, Subject.of(config, workload.model_name, workload.data_name, workload.input_shape))
    if limit is None:
        return None
    leaky = limit.leaky_cuts(list(model._modules))
    why = f"by this device's own privacy.max_leakage = {limit.most:g} that one leaks too much"
    return AllowedCuts(layers, frozenset(range(1, layers + 1)) - leaky.keys(), why)


def without_sample_statistics(config: Config, profile: Profile) -> Profile:
    """Return a profile without what its samples have told, where a server is to learn nothing of them by that.

    How well activations, gradients and changes are compressed was measured with the device's own samples. Where no
    activations leave it, or these have noise, that would be told besides.
    """
    splits = METHODS[config.run.method].splits
    if not (config.privacy.pixel_scale or (config.privacy.clips and not splits)):
        return profile
    return replace(profile, layers=tuple(replace(one, shares={}) for one in profile.layers), changes_share=1.0)


def device_workload(
    config: Config, options: DeviceOptions, noise_seed: int | None = None, label_seed: int | None = None
) -> Workload:
    """Return the workload of one device: its share of a known dataset, or data of its own."""
    if config.privacy.label_epsilon is not None and config.data.factory is not None and config.data.classes is None:
        raise ConfigError(
            "privacy.label_epsilon with data.factory needs data.classes: counted in this device's own labels, the "
            "classes that others are told from would give the highest one away."
        )
    names = [spec.name for spec in _listed(config)]
    if config.data.factory is None and options.data is None:
        if options.name in names:
            return Workload(config, noise_seed=noise_seed, label_seed=label_seed)
        raise ConfigError(
            f"'{options.name}' is not in the configuration, so no share of {config.data.name} is its own: add it to "
            "[[devices]], or give its own data with --data."
        )
    if options.data is not None and config.data.factory is None and config.data.name in ("digits", "synthetic"):
        raise ConfigError(
            f"--data {options.data} is given, but {config.data.name} is in no folder: name another dataset as "
            "data.name, or give your own by data.factory."
        )
    alone = DeviceSection(name=options.name)
    data = config.data.model_copy(update={"path": options.data or config.data.path, "samples_per_device": None})
    own = config.model_copy(update={"devices": (alone,), "data": data})
    return Workload(own, noise_seed=noise_seed, label_seed=label_seed)


# --- both


def _prepare_process() -> None:
    import torch._dynamo  # the first optimiser would import it, for more than a second, while the server waits

    torch.set_num_threads(1)
    keep_freed_memory()


def _until_signal(main: Coroutine[Any, Any, None]) -> signal.Signals | None:
    """Run a coroutine to its end; SIGTERM and SIGINT cut it short, and the one that did is returned.

    Behind it they do what they did before.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    async def supervised() -> signal.Signals | None:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(main)
        received: list[signal.Signals] = []

        def stop(number: signal.Signals) -> None:
            received.append(number)
            task.cancel()

        for number in handlers:
            loop.add_signal_handler(number, stop, number)
        try:
            await task
        except asyncio.CancelledError:
            if not received:
                raise
        return received[0] if received else None

    try:
        return asyncio.run(supervised())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
