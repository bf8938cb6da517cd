"""From a configuration to a job: data counted, network checked, profiles found or measured, plans made."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pipar.config import Config, DeviceSpec, device_specs
from pipar.config_file import config_from
from pipar.data.catalog import SYNTHETIC_SAMPLES, DatasetInfo, dataset_info
from pipar.data.request import Request, check_request, published_counts
from pipar.errors import ConfigError, DataError
from pipar.events import Observer, Preparing, ignore
from pipar.execution.schedule import count_batches
from pipar.job.job import Job
from pipar.job.plans import Rehearse, with_plans
from pipar.leakage.limit import LeakageLimit
from pipar.leakage.table import Subject
from pipar.methods import METHODS
from pipar.planner.search import check_given
from pipar.privacy.budget import choose_noise
from pipar.profiling.cache import find_profile, keep_profile
from pipar.profiling.machines import MACHINES, machine_profile
from pipar.profiling.memory import largest_prefix
from pipar.profiling.operation_counts import Counts, known_changes_share, known_counts, network_sizes, rectified_at
from pipar.profiling.profile import Profile, check_network, item_bytes

if TYPE_CHECKING:
    from torch import nn

    from pipar.job.workload import Workload

#: A measurement's progress behind its layers.
_LAYERS_SHARE = 0.9


def prepare(workload: Workload, rehearse: Rehearse, observe: Observer = ignore) -> Job:
    """Return the job of a workload; everything that can be wrong with it is found here, before anything starts."""
    choose_noise(workload.config)  # what is wrong with a budget is found before anything is measured
    return with_plans(unplanned_job(workload, observe), rehearse, observe)


def prepare_timing_only(config: Config, rehearse: Rehearse, observe: Observer = ignore) -> Job | None:
    """Return the job of a timing-only run, from counts and a profile; None for factories, which must be looked at.

    The dataset need not be on this machine. Torch is imported only if the network was never profiled here.
    """
    choose_noise(config)
    job = unplanned_timing_only_job(config, observe)
    return None if job is None else with_plans(job, rehearse, observe)


def unplanned_job(workload: Workload, observe: Observer = ignore) -> Job:
    """Return the job of a workload before its plans are chosen."""
    from pipar.nn.models import uses_batch_statistics, uses_dropout
    from pipar.nn.named_aggregators import make_aggregator

    workload.check_samples()
    model = workload.checked_model()
    check_given_plans(workload.config, len(model), workload.model_name)
    sizes, batch_statistics = workload.sizes(), uses_batch_statistics(model)
    _check_sizes(workload.config, sizes, batch_statistics=batch_statistics)
    _check_patience(workload)
    # Thrown away: a user's own may be wrong in ways that only building it shows.
    make_aggregator(workload.config.server.aggregator, workload.config.server.aggregation)
    profiles = _Profiles(
        workload.config,
        workload.model_name,
        batch_statistics=batch_statistics,
        count=lambda: _counts(workload, model),
        measure=lambda: measured_profile(workload, model, observe),
    )
    subject = Subject.of(workload.config, workload.model_name, workload.data_name, workload.input_shape)
    job = _job(workload.config, profiles, sizes, subject)
    return replace(job, batch_statistics=batch_statistics, dropout=uses_dropout(model))


def unplanned_timing_only_job(config: Config, observe: Observer = ignore) -> Job | None:
    """Return the job of a timing-only run before its plans are chosen; None for factories."""
    if config.data.factory or config.model.factory:
        return None
    info = dataset_info(config.data.name)
    sizes = _counted(config, info)
    _check_sizes(config, sizes, batch_statistics=config.model.norm == "batch")
    shape, classes = config.data.shape or info.shape, config.data.classes or info.classes
    profiles = _Profiles(
        config,
        config.model.name,
        batch_statistics=config.model.norm == "batch",
        count=lambda: (
            known_counts(config.model.name, config.model.norm, shape, classes)
            or _counts_of_shape(config, shape, classes)
        ),
        measure=lambda: (
            find_profile(profile_key(config, shape, classes)) or _profile_of_shape(config, shape, classes, observe)
        ),
    )
    return _job(config, profiles, sizes, Subject.of(config, config.model.name, config.data.name, shape))


def _counted(config: Config, info: DatasetInfo) -> dict[str, int]:
    """Return each device's number of samples, as far as the dataset's published size allows."""
    from pipar.data.partition import device_sizes  # brings numpy, which `pipar --help` has no time for

    data = config.data
    request = Request(validation=data.validation, test=data.test, classes=data.classes, shape=data.image_shape)
    check_request(info, request)
    if info.name == "synthetic":
        return device_sizes(config, SYNTHETIC_SAMPLES * len(device_specs(config)))
    available = published_counts(info, request).train
    sizes = device_sizes(config, available)
    if sum(sizes.values()) > available:
        raise DataError(
            f"{sum(sizes.values())} samples are asked for, but {info.name} has {available}: "
            "give fewer samples_per_device or fewer devices."
        )
    return sizes


def _check_sizes(config: Config, sizes: Mapping[str, int], *, batch_statistics: bool) -> None:
    """Raise one sentence about the first device that has nothing to train on, or batches without statistics."""
    for name, size in sizes.items():
        if size == 0:
            raise DataError(f"{name} has no samples: give every device at least one, or fewer devices.")
        if batch_statistics and 1 in count_batches(size, config.run.batch_size, batch_statistics=True):
            raise DataError(
                f"{name} would train on a single sample, and batch normalisation needs at least 2: give a larger "
                "run.batch_size or more samples, or another normalisation."
            )


def _check_patience(workload: Workload) -> None:
    if workload.config.run.patience is not None and workload.held_out("validation") is None:
        raise ConfigError("run.patience needs a validation set, and there is none: give one, or leave patience out.")


def _profile_of_shape(config: Config, shape: tuple[int, ...], classes: int, observe: Observer) -> Profile:
    """Return this machine's profile of the network for samples of this shape, whatever is in them."""
    workload = _workload_of_shape(config, shape, classes)
    return measured_profile(workload, workload.checked_model(), observe)


def _counts_of_shape(config: Config, shape: tuple[int, ...], classes: int) -> Counts:
    """Return the counts of the network for samples of a shape that none of the known datasets has."""
    workload = _workload_of_shape(config, shape, classes)
    return _counts(workload, workload.checked_model())


def _workload_of_shape(config: Config, shape: tuple[int, ...], classes: int) -> Workload:
    from pipar.job.workload import Workload

    tree = config.model_dump()
    tree["data"] |= {
        "name": "synthetic",
        "shape": shape,
        "classes": classes,
        "samples_per_device": config.run.batch_size,
    }
    tree["devices"] = [{}]
    tree["server"] |= {"aggregator": "fedavg", "aggregation": {}}  # others need several devices
    return Workload(config_from(tree))


def _counts(workload: Workload, model: nn.Sequential) -> Counts:
    """Return the counts of a workload's network, its user's own or not."""
    known, shape = _known_counts(workload), workload.input_shape
    if known is not None:
        return known
    from pipar.nn.rectified import rectified_cuts
    from pipar.profiling.operation_counter import count_layers

    return rectified_at(count_layers(model, shape, run=True), rectified_cuts(model, shape))


def _known_counts(workload: Workload) -> Counts | None:
    """Return the counts of a workload's network if they are kept."""
    config = workload.config
    if workload.model_name != config.model.name:
        return None
    return known_counts(config.model.name, config.model.norm, workload.input_shape, workload.classes)


def check_given_plans(config: Config, layers: int, model: str) -> None:
    """Raise PlanError if a given P or N fits no method: before anything is measured, or trained by another method."""
    for p, n in {(spec.split_point, spec.micro_batches) for spec in device_specs(config)}:
        check_given(METHODS["pipar"], p, n, layers=layers, batch_size=config.run.batch_size, model=model)


def _job(config: Config, profiles: _Profiles, sizes: Mapping[str, int], subject: Subject) -> Job:
    specs = tuple(replace(spec, memory_bytes=device_memory(spec)) for spec in device_specs(config))
    _check_cores(config)
    limit = LeakageLimit.of(config, subject)
    profiles.check_given([config.server.profile, *(spec.profile for spec in specs)])
    server = profiles.of_server(config.server.profile)
    check_given_plans(config, len(server.layers), profiles.model)
    devices = {spec.name: profiles.of(spec.profile) for spec in specs}
    config = _with_cores(config)
    return Job(
        config=config,
        specs=specs,
        sizes=sizes,
        server_profile=server,
        device_profiles=devices,
        batch_statistics=profiles.batch_statistics,
        dropout=False,
        plans={},  # when all else is known
        dataset=subject.dataset,
        model=profiles.model,
        leaky_cuts={} if limit is None else limit.leaky_cuts([layer.name for layer in server.layers]),
        leakage_guess=None if limit is None else limit.table.guess,
        sample_bytes=sample_bytes(subject.input_shape, config.model.dtype),
    )


def sample_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of one sample's input as it is trained on."""
    return math.prod(shape) * item_bytes(dtype)


def device_memory(spec: DeviceSpec) -> int | None:
    """Return the bytes that a device's process may use: as configured, else its named machine's; None is no limit."""
    machine = MACHINES.get(spec.profile or "")
    return machine.memory_bytes if spec.memory_bytes is None and machine is not None else spec.memory_bytes


def _check_cores(config: Config) -> None:
    """Raise if a named machine is to serve more stages at once than it computes: each would be as fast as alone."""
    machine, cores = MACHINES.get(config.server.profile or ""), config.server.cores
    if machine is not None and cores is not None and cores > machine.cores:
        once = "one stage at a time, with all of its cores" if machine.cores == 1 else f"{machine.cores} stages at once"
        raise ConfigError(
            f"server.cores = {cores} is more than {machine.name} has: it computes {once}. Give at most "
            f"{machine.cores}, leave server.cores out, or take a profile that 'pipar profile' wrote on your machine."
        )


def _with_cores(config: Config) -> Config:
    """Return the configuration with the cores of a named server, if it does not say how many."""
    machine = MACHINES.get(config.server.profile or "")
    if machine is None or config.server.cores is not None:
        return config
    return config.model_copy(update={"server": config.server.model_copy(update={"cores": machine.cores})})


class _Profiles:
    """The profiles of one network: of a named machine, of a file, or of this machine; each is made once.

    Equal devices get the same object. `count` and `measure` are called only if something needs them.
    """

    def __init__(
        self,
        config: Config,
        model: str,
        *,
        batch_statistics: bool,
        count: Callable[[], Counts],
        measure: Callable[[], Profile],
    ) -> None:
        self.model = model
        self.batch_statistics = batch_statistics
        self._config = config
        self._count, self._measure = cache(count), measure
        self._made: dict[str | None, Profile] = {}

    def of(self, given: str | None) -> Profile:
        """Return the profile of a machine's name or of a file; without one this machine's."""
        if given not in self._made:
            self._made[given] = self._measure() if given is None else self._given(given)
        return self._made[given]

    def check_given(self, profiles: Iterable[str | None]) -> None:
        """Raise what is wrong with files and names, before this machine is measured for as long as half a minute."""
        for given in profiles:
            if given is not None:
                self.of(given)

    def of_server(self, given: str | None) -> Profile:
        """Return the same, of all layers."""
        profile = self.of(given)
        if not profile.whole:
            raise ConfigError(
                f"The server's profile ({given or 'this machine'}) has only the first {len(profile.layers)} of "
                f"{profile.network_layers} layers of {self.model}, and a server needs all: give server.profile one of "
                "a machine with more memory."
            )
        return profile

    def _given(self, given: str) -> Profile:
        dtype = self._config.model.dtype
        machine = MACHINES.get(given)
        if machine is None:
            profile = check_network(_load_profile(given), network_sizes(self._count(), self.model, dtype), given)
            return _of_counted(profile, self._count())
        return machine_profile(
            machine,
            self._count(),
            model=self.model,
            dtype=dtype,
            batch_size=self._config.run.batch_size,
            batch_statistics=self.batch_statistics,
            changes_share=self._changes_share(),
        )

    def _changes_share(self) -> float:
        of = self._config.model
        return known_changes_share(of.name, of.norm, of.dtype) if self.model == of.name else 1.0


def _of_counted(profile: Profile, counts: Counts) -> Profile:
    """Return a profile that says of no cut that it lies behind a ReLU unless it does in the network that is here.

    It may be of a network with the same sizes and other activations, whose gradients sparse encodings would falsify.
    """
    layers = [replace(one, rectified=count.rectified) for one, count in zip(profile.layers, counts, strict=False)]
    return replace(profile, layers=tuple(layers))


def _load_profile(file: str) -> Profile:
    """Return the profile of a file; a word that is none is taken for a misspelt machine."""
    path = Path(file)
    if not path.suffix and not path.exists():
        raise ConfigError(
            f"'{file}' is neither a machine that pipar knows nor a file: the machines are {', '.join(MACHINES)}, and "
            "'pipar profile -o FILE' writes the file of another one."
        )
    return Profile.load(path)


def profile_key(config: Config, input_shape: tuple[int, ...], classes: int) -> dict[str, object]:
    """Return what the times of a named network depend on."""
    return {
        "model": config.model.name,
        "norm": config.model.norm,
        "dtype": config.model.dtype,
        "input_shape": list(input_shape),
        "classes": classes,
        "batch_size": config.run.batch_size,
        "augment": config.data.augment,
    }


def _own_profile_key(workload: Workload, model: nn.Sequential) -> dict[str, object]:
    """Return what the times of a user's own network depend on: all that can be seen of it, but not its weights."""
    state = {name: [str(value.dtype), list(value.shape)] for name, value in model.state_dict().items()}
    # An object without a text of its own is printed with its address, which is another one each time.
    printed = re.sub(r"0x[0-9a-f]+", "", repr(model))
    architecture = json.dumps([printed, state, sorted(set(_sources(model)))])
    return {
        **profile_key(workload.config, workload.input_shape, workload.classes),
        "model": workload.model_name,
        "architecture": hashlib.sha256(architecture.encode()).hexdigest(),
    }


def _sources(model: nn.Sequential) -> Iterator[str]:
    """Yield the code of the layers that are the user's: two that print the same may compute something else."""
    for kind in {type(module) for module in model.modules()}:
        if not kind.__module__.startswith("torch."):
            try:
                yield inspect.getsource(kind.forward)
            except (OSError, TypeError):  # typed at a prompt: its text is kept nowhere
                yield kind.__qualname__


def measured_profile(
    workload: Workload,
    model: nn.Sequential,
    observe: Observer = ignore,
    *,
    fresh: bool = False,
    budget_s: float = 4.0,
    memory_bytes: int | None = None,
) -> Profile:
    """Return this machine's profile of the network: kept from an earlier run if there was one, else measured.

    If the network does not fit into `memory_bytes`, it is the profile of as many first layers as do.
    """
    from pipar.nn.models import uses_batch_statistics
    from pipar.profiling.measure import measure_profile

    config = workload.config
    named = workload.model_name == config.model.name
    shape, classes = workload.input_shape, workload.classes
    key = profile_key(config, shape, classes) if named else _own_profile_key(workload, model)
    kept = None if fresh else _kept_profile(key, config, memory_bytes, batch_statistics=uses_batch_statistics(model))
    if kept is not None:
        return kept
    known = _known_counts(workload)
    shard = workload.shard(workload.names[0])
    positions = shard.order(1)
    observe(Preparing(_measuring(0.0), 0.0))  # the first pass of each batch size warms up, and reports nothing
    profile = measure_profile(
        model,
        model_name=workload.model_name,
        input_shape=workload.input_shape,
        classes=workload.classes,
        batch_size=config.run.batch_size,
        dtype=workload.dtype,
        load=lambda count: shard.batch(1, positions[:count].repeat(-(-count // len(positions)))[:count]),
        progress=lambda share: observe(Preparing(_measuring(share), share)),
        budget_s=budget_s,
        memory_bytes=memory_bytes,
        rectified=None if known is None else [p for p, layer in enumerate(known, start=1) if layer.rectified],
    )
    if profile.whole:
        keep_profile(key, profile)
    elif memory_bytes is not None:  # what the system did not give today it may give tomorrow: that is not kept
        keep_profile(_cut_key(key, memory_bytes), profile)
    return profile


def _measuring(share: float) -> str:
    """Return what is measured when so much is: the layers within the budget of time, then what comes on top."""
    return "Measuring the layers" if share < _LAYERS_SHARE else "Measuring loading, messages and crowded cores"


def _kept_profile(
    key: dict[str, object], config: Config, memory_bytes: int | None, *, batch_statistics: bool
) -> Profile | None:
    """Return a kept profile of the whole network if that fits, else one that was cut at this limit."""
    whole = find_profile(key)
    if memory_bytes is None:
        return whole
    if whole is not None:
        size = config.run.batch_size
        fitting = largest_prefix(whole, size, memory_bytes, batch_statistics=batch_statistics)
        if fitting == len(whole.layers):
            return whole
    return find_profile(_cut_key(key, memory_bytes))


def _cut_key(key: dict[str, object], memory_bytes: int) -> dict[str, object]:
    return {**key, "memory_bytes": memory_bytes}
