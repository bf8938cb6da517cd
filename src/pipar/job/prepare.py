"""From a configuration to a job: counts the data, checks the network, finds or measures profiles, makes plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pipar.data.catalog import SYNTHETIC_SAMPLES, DatasetInfo, dataset_info
from pipar.data.request import Request, check_request, published_counts
from pipar.errors import ConfigError, DataError
from pipar.events import LOADING, Observer, Preparing, ignore
from pipar.execution.schedule import count_batches, count_steps
from pipar.job.job import Job
from pipar.job.plans import Rehearse, with_plans
from pipar.job.profiles import (
    ON_CPU,
    NetworkProfiles,
    cached_profile,
    check_threads,
    computes_on,
    count_network,
    counts_of_shape,
    measured_profile,
    profile_key,
    profile_of_shape,
)
from pipar.leakage.limit import LeakageLimit
from pipar.leakage.table import Subject
from pipar.methods import METHODS
from pipar.monitored_metric import ON_DEVICES
from pipar.planner.candidates import check_given
from pipar.privacy.budget import choose_noise
from pipar.profiling.cache import usable_cores
from pipar.profiling.machines import MACHINES
from pipar.profiling.operation_counts import known_counts
from pipar.profiling.profile import item_bytes
from pipar.settings.config import (
    Config,
    DeviceSpec,
    device_specs,
    refuse_cut_points,
    validated_keys,
)
from pipar.settings.optimizers import OWN
from pipar.wire.messages import COUNT_BYTES, LABEL_BYTES, TargetSize

if TYPE_CHECKING:
    from pipar.job.workload import Workload


def prepare(workload: Workload, rehearse: Rehearse, observe: Observer = ignore, *, shares_machine: bool = False) -> Job:
    """Return the job of a workload; raise for everything that can be wrong with it, before a process starts.

    With `shares_machine`, server and devices are processes of this machine.
    """
    choose_noise(workload.config)  # raises on a wrong privacy budget, before the network is measured
    job = unplanned_job(workload, observe)
    hosted = frozenset(spec.name for spec in job.specs) if shares_machine else job.hosted
    return with_plans(replace(job, hosted=hosted), rehearse, observe)


def prepare_timing_only(config: Config, rehearse: Rehearse, observe: Observer = ignore) -> Job | None:
    """Return the job of a timing-only run from counts and a profile; None for factories, which have to be called.

    The dataset need not be on this machine. Torch is imported only if the network was never profiled here.
    """
    choose_noise(config)
    job = unplanned_timing_only_job(config, observe)
    return None if job is None else with_plans(job, rehearse, observe)


def unplanned_job(workload: Workload, observe: Observer = ignore, *, needs_data: bool = True) -> Job:
    """Return the job of a workload before its plans are chosen.

    A plan does not need the files of a named dataset: without `needs_data`, its samples are counted as published.
    """
    # Import torch, which a timing-only run does without.
    from pipar.aggregation.named_aggregators import make_aggregator
    from pipar.cutting.stage_line import writes_weights
    from pipar.networks.models import counts_forwards, uses_batch_statistics, uses_dropout
    from pipar.nn.adapters import uses_adapters

    workload.observe = observe
    counts_data = needs_data or not workload.samples.has_catalog_form
    workload.samples.check_samples()
    model = workload.checked_model()
    check_given_plans(workload.config, device_specs(workload.config), len(model), workload.model_name)
    if counts_data:
        sizes, evaluation_sizes = workload.samples.sizes(), workload.samples.evaluation_sizes()
        _check_validation_set(workload)
    else:
        counted = _counted(workload.config, dataset_info(workload.config.data.name))
        sizes, evaluation_sizes = _without_held_out(workload.config, counted)
    batch_statistics = uses_batch_statistics(model)
    _check_sizes(workload.config, sizes, batch_statistics=batch_statistics)
    _check_evaluation(workload.config, evaluation_sizes)
    workload.optimizer().check(model)
    # Only to check it: building a user's own aggregator may raise.
    make_aggregator(workload.config.server.aggregator, workload.config.server.aggregation)
    profiles = NetworkProfiles(
        workload.config,
        workload.model_name,
        batch_statistics=batch_statistics,
        count=lambda: count_network(workload, model),
        measure=lambda on, threads: measured_profile(workload, model, observe, on=on, threads=threads),
    )
    subject = workload.subject
    job = _job(workload.config, profiles, sizes, subject)
    cuts = getattr(model, "cuts", None)
    return replace(
        _with_own_state(job, partial(workload.optimizer().state_copies, model)),
        batch_statistics=batch_statistics,
        dropout=uses_dropout(model),
        counts_forwards=counts_forwards(model),
        writes_weights=writes_weights(model),
        adapters=uses_adapters(model),
        cuts=cuts,
        steady_layers=workload.steady_layers(model),
        target_size=workload.task.size,
        evaluation_sizes=evaluation_sizes,
    )


def _with_own_state(job: Job, state_copies: Callable[[], float]) -> Job:
    """Return the job with what a user's own optimiser keeps, also where the profile of a machine had to guess it."""
    if job.config.optimizer.kind != OWN:
        return job
    copies = state_copies()
    profiles = {id(one): one for one in (job.server_profile, *job.device_profiles.values())}
    known = {key: replace(one, state_copies=copies) for key, one in profiles.items()}  # equal devices share one
    devices = {name: known[id(one)] for name, one in job.device_profiles.items()}
    return replace(job, server_profile=known[id(job.server_profile)], device_profiles=devices)


def unplanned_timing_only_job(config: Config, observe: Observer = ignore) -> Job | None:
    """Return the job of a timing-only run before its plans are chosen; None for factories."""
    if config.data.factory or config.model.factory:
        return None
    refuse_cut_points(config)
    info, targets = dataset_info(config.data.name), _label_size(config)
    sizes, evaluation_sizes = _without_held_out(config, _counted(config, info))
    _check_sizes(config, sizes, batch_statistics=config.model.norm == "batch")
    shape, classes = config.data.shape or info.shape, config.data.classes or info.classes
    profiles = NetworkProfiles(
        config,
        config.model.name,
        batch_statistics=config.model.norm == "batch",
        count=lambda: (
            (None if config.model.freeze else known_counts(config.model.name, config.model.norm, shape, classes))
            or counts_of_shape(config, shape, classes)
        ),
        measure=lambda on, threads: (
            (
                cached_profile(profile_key(config, shape, classes), config.optimizer)
                if (on, threads) == (ON_CPU, 1)
                else None
            )
            or profile_of_shape(config, shape, classes, observe, on, threads)
        ),
    )
    job = _job(config, profiles, sizes, Subject.of(config, config.model.name, config.data.name, shape))
    return replace(job, target_size=targets, evaluation_sizes=evaluation_sizes)


def _label_size(config: Config) -> TargetSize:
    """Return the bytes of a named dataset's targets in messages, which are labels; as `tasks.task` computes them."""
    task = config.task
    if not task.is_own and task.loss not in ("cross_entropy", "nll"):
        raise ConfigError(
            f"task.loss = '{task.loss}' does not fit {config.data.name}, which has a label for each sample: use "
            "cross_entropy, or give data.factory for targets of your own."
        )
    counts = task.class_weights is not None or task.count is not None or task.ignore_index >= 0
    return TargetSize(8 if task.is_own else LABEL_BYTES, COUNT_BYTES if counts else 0)


def _counted(config: Config, info: DatasetInfo) -> dict[str, int]:
    """Return each device's number of samples, from the published size of the dataset."""
    from pipar.data.partition import device_sizes  # imports numpy, without which commands start faster

    data = config.data
    request = Request(validation=data.validation, test=data.test, classes=data.classes, shape=data.image_shape)
    check_request(info, request)
    if info.name == "synthetic":
        return device_sizes(config, SYNTHETIC_SAMPLES * len(device_specs(config)))
    available = published_counts(info, request).train
    sizes = device_sizes(config, available)
    if sum(sizes.values()) > available:
        raise DataError(
            f"{sum(sizes.values())} samples are requested, but {info.name} has {available}: give a smaller "
            "data.samples_per_device, or fewer devices."
        )
    return sizes


def _without_held_out(config: Config, sizes: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Return each device's number of samples to train on, and to evaluate on."""
    from pipar.data.partition import held_out_count  # imports numpy, without which commands start faster

    share = config.data.evaluate_on_devices
    kept = {name: held_out_count(name, size, share) for name, size in sizes.items()} if share else {}
    return {name: size - kept.get(name, 0) for name, size in sizes.items()}, kept


def _check_sizes(config: Config, sizes: Mapping[str, int], *, batch_statistics: bool) -> None:
    """Raise DataError if a device has no samples, or a batch too small for batch normalisation."""
    for name, size in sizes.items():
        if size == 0:
            raise DataError(f"{name} has 0 samples, but needs at least 1: give it more data, or use fewer devices.")
        if batch_statistics and 1 in count_batches(size, config.run.batch_size, batch_statistics=True):
            raise DataError(
                f"{name} would train on a single sample, but batch normalisation needs at least 2: give a larger "
                "run.batch_size, more samples, or another model.norm."
            )


def check_schedule(config: Config, sizes: Mapping[str, int], *, batch_statistics: bool) -> None:
    """Raise ConfigError if a schedule does not fit the number of steps that a device takes."""
    run = config.run
    for name, size in sizes.items():
        total = count_steps(
            1,
            1,
            epochs=run.epochs,
            samples=size,
            batch_size=run.batch_size,
            batch_statistics=batch_statistics,
            passes=run.local_epochs,
        ).total
        config.optimizer.learning_schedule.check_length(total, name)


def _check_validation_set(workload: Workload) -> None:
    if workload.config.run.monitor.startswith(ON_DEVICES):
        return
    for key, value in validated_keys(workload.config).items():
        if workload.samples.held_out("validation") is None:
            raise ConfigError(f"{key} = {value} needs a validation set, and there is none: give one, or unset {key}.")


def _check_evaluation(config: Config, sizes: Mapping[str, int]) -> None:
    """Raise ConfigError if no device evaluates models, and something needs their values."""
    if not sizes and config.run.monitor.startswith(ON_DEVICES):
        raise ConfigError(
            f"run.monitor = '{config.run.monitor}' needs devices that evaluate models: set data.evaluate_on_devices to "
            "a share of their samples, or give evaluation_datasets."
        )


def check_given_plans(config: Config, specs: Iterable[DeviceSpec], layers: int, model: str) -> None:
    """Raise PlanError if a P or N that is given for devices fits no method, before the network is measured."""
    for p, n in {(spec.split_point, spec.micro_batches) for spec in specs}:
        check_given(METHODS["pipar"], p, n, layers=layers, batch_size=config.run.batch_size, model=model)


def _job(config: Config, profiles: NetworkProfiles, sizes: Mapping[str, int], subject: Subject) -> Job:
    specs = tuple(replace(spec, memory_bytes=device_memory(spec)) for spec in device_specs(config))
    server_memory, specs = with_accelerator_memory(config, specs)
    _check_cores(config)
    limit = LeakageLimit.of(config, subject)
    for group in config.devices:
        if group.profile is None:
            check_threads(group.threads, "devices.threads")
    profiles.check_given([(spec.profile, spec.threads) for spec in specs])
    server = profiles.of_server(config.server.profile, computes_on(config.server))
    check_given_plans(config, specs, len(server.layers), profiles.model)
    devices = {spec.name: profiles.of(spec.profile, computes_on(spec), spec.threads) for spec in specs}
    check_schedule(config, sizes, batch_statistics=profiles.batch_statistics)
    config = _with_cores(config)
    check_server_threads(config)
    return Job(
        config=config,
        specs=specs,
        sizes=sizes,
        server_profile=server,
        device_profiles=devices,
        batch_statistics=profiles.batch_statistics,
        dropout=False,
        plans={},  # chosen later
        dataset=subject.dataset,
        model=profiles.model,
        leaky_cuts={} if limit is None else limit.leaky_cuts([layer.name for layer in server.layers]),
        leakage_guess=None if limit is None else limit.table.guess,
        sample_bytes=sample_bytes(subject.input_shape, config.model.dtype),
        server_memory_bytes=server_memory,
    )


def with_accelerator_memory(config: Config, specs: tuple[DeviceSpec, ...]) -> tuple[int | None, tuple[DeviceSpec, ...]]:
    """Return the memory of the server's accelerator, and devices with that of theirs, unless they have a limit."""
    if {config.server.torch_device, *(spec.torch_device for spec in specs)} == {"cpu"}:
        return None, specs
    from pipar.job.torch_devices import accelerator_memory  # imports torch, which a run with profiles does without

    server, devices = accelerator_memory(config, specs)
    return server, tuple(
        replace(spec, memory_bytes=devices.get(spec.name) if spec.memory_bytes is None else spec.memory_bytes)
        for spec in specs
    )


def sample_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of one sample's input during training."""
    return math.prod(shape) * item_bytes(dtype)


def device_memory(spec: DeviceSpec) -> int | None:
    """Return the bytes that a device's process may use: as configured, or of its named machine; None for no limit."""
    machine = MACHINES.get(spec.profile or "")
    return machine.memory_bytes if spec.memory_bytes is None and machine is not None else spec.memory_bytes


def _check_cores(config: Config) -> None:
    """Raise ConfigError if server.cores exceeds the cores of a named machine."""
    machine, cores = MACHINES.get(config.server.profile or ""), config.server.cores
    if machine is not None and cores is not None and cores > machine.cores:
        runs = "one stage, with all of its cores," if machine.cores == 1 else f"{machine.cores} stages"
        raise ConfigError(
            f"server.cores = {cores} is more than {machine.name} has: it runs {runs} at a time. Give at most "
            f"{machine.cores}, leave server.cores out, or use a profile that 'pipar profile' wrote on your machine."
        )


def check_server_threads(config: Config) -> None:
    """Raise ConfigError if the server has fewer cores than it is to compute with for one device."""
    threads, cores = config.server.threads, config.server.cores or usable_cores()
    if threads != "auto" and threads > cores:
        has = "one core" if cores == 1 else f"{cores} cores"
        raise ConfigError(
            f"server.threads = {threads} is more than the server's {has}: give at most {cores}, or 'auto'."
        )


def _with_cores(config: Config) -> Config:
    """Return the configuration with the cores of a named server machine, if server.cores is not set."""
    machine = MACHINES.get(config.server.profile or "")
    if machine is None or config.server.cores is not None:
        return config
    return config.model_copy(update={"server": config.server.model_copy(update={"cores": machine.cores})})


def with_profile(config: Config, profile: str) -> Config:
    """Return the configuration with this profile for the server and all devices that have none."""
    server = config.server if config.server.profile else config.server.model_copy(update={"profile": profile})
    devices = tuple(
        group if group.profile else group.model_copy(update={"profile": profile}) for group in config.devices
    )
    return config.model_copy(update={"server": server, "devices": devices})


def job_to_plan(config: Config, observe: Observer = ignore) -> Job:
    """Return the job of a configuration before its plans are chosen.

    Torch is imported only if the network has to be measured or a factory called.
    """
    job = unplanned_timing_only_job(config, observe)
    if job is None:
        observe(Preparing(LOADING, 0.0))
        from pipar.job.user_objects import UserObjects  # it imports torch
        from pipar.job.workload import Workload

        workload = Workload(config, UserObjects().with_catalog_form(config))
        job = unplanned_job(workload, observe, needs_data=False)
    return job
