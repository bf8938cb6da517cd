"""From a configuration to a job: data counted, network checked, profiles found or measured, plans made."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipar.config import Config, config_from, device_specs
from pipar.data.catalog import SYNTHETIC_SAMPLES, DatasetInfo, Request, check_request, dataset_info, published_counts
from pipar.errors import ConfigError, DataError
from pipar.events import Observer, Preparing, ignore
from pipar.job import Job, make_plans
from pipar.methods import METHODS
from pipar.planner.cache import find_profile, keep_profile
from pipar.planner.profile import Profile
from pipar.planner.select import check_given
from pipar.schedule import cut_epoch

if TYPE_CHECKING:
    from torch import nn

    from pipar.workload import Workload


def prepare(workload: Workload, observe: Observer = ignore) -> Job:
    """Return the job of a workload; everything that can be wrong with it is found here, before anything starts."""
    from pipar.nn.models import uses_batch_statistics, uses_dropout

    workload.check_samples()
    model = workload.checked_model()
    check_given_plans(workload.config, len(model), workload.model_name)
    sizes, batch_statistics = workload.sizes(), uses_batch_statistics(model)
    _check_sizes(workload.config, sizes, batch_statistics=batch_statistics)
    _check_patience(workload)
    profile = _given_profile(workload.config, len(model)) or measured_profile(workload, model, observe)
    job = _job(workload.config, profile, sizes, dataset=workload.data_name, model=workload.model_name)
    return replace(job, batch_statistics=batch_statistics, dropout=uses_dropout(model))


def prepare_timing_only(config: Config, observe: Observer = ignore) -> Job | None:
    """Return the job of a timing-only run, from counts and a profile; None for factories, which must be looked at.

    The dataset need not be on this machine. Torch is imported only if the network was never profiled here.
    """
    if config.data.factory or config.model.factory:
        return None
    info = dataset_info(config.data.name)
    sizes = _counted(config, info)
    _check_sizes(config, sizes, batch_statistics=config.model.norm == "batch")
    shape, classes = config.data.shape or info.shape, config.data.classes or info.classes
    profile = _given_profile(config) or find_profile(profile_key(config, shape, classes))
    if profile is None:
        profile = _profile_of_shape(config, shape, classes, observe)
    return _job(config, profile, sizes, dataset=config.data.name, model=config.model.name)


def _counted(config: Config, info: DatasetInfo) -> dict[str, int]:
    """Return each device's number of samples, as far as the dataset's published size allows."""
    from pipar.data.partition import device_sizes  # brings numpy, which `pipar --help` has no time for

    data = config.data
    request = Request(validation=data.validation, test=data.test, classes=data.classes, shape=data.shape)
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
        if batch_statistics and 1 in cut_epoch(size, config.run.batch_size, batch_statistics=True):
            raise DataError(
                f"{name} would train on a single sample, and batch normalisation needs at least 2: give a larger "
                "run.batch_size or more samples, or another normalisation."
            )


def _check_patience(workload: Workload) -> None:
    if workload.config.run.patience is not None and workload.held_out("validation") is None:
        raise ConfigError("run.patience needs a validation set, and there is none: give one, or leave patience out.")


def _profile_of_shape(config: Config, shape: tuple[int, ...], classes: int, observe: Observer) -> Profile:
    """Return this machine's profile of the network for samples of this shape, whatever is in them."""
    from pipar.workload import Workload

    tree = config.model_dump()
    tree["data"] |= {
        "name": "synthetic",
        "shape": shape,
        "classes": classes,
        "samples_per_device": config.run.batch_size,
    }
    tree["devices"] = [{}]
    workload = Workload(config_from(tree))
    return measured_profile(workload, workload.checked_model(), observe)


def check_given_plans(config: Config, layers: int, model: str) -> None:
    """Raise PlanError if a given P or N fits no method: before anything is measured, or trained by another method."""
    for p, n in {(spec.split_point, spec.micro_batches) for spec in device_specs(config)}:
        check_given(METHODS["pipar"], p, n, layers=layers, batch_size=config.run.batch_size, model=model)


def _job(config: Config, profile: Profile, sizes: Mapping[str, int], *, dataset: str, model: str) -> Job:
    check_given_plans(config, len(profile.layers), model)
    server = _load_profile(config.server.profile, profile)
    files = {group.profile for group in config.devices}
    loaded = {file: _load_profile(file, profile) for file in files}
    specs = device_specs(config)
    devices = {spec.name: loaded[spec.profile] for spec in specs}
    return Job(
        config=config,
        specs=specs,
        sizes=sizes,
        server_profile=server,
        device_profiles=devices,
        batch_statistics=config.model.norm == "batch",
        dropout=False,
        plans=make_plans(config, server, devices),
        dataset=dataset,
        model=model,
    )


def _given_profile(config: Config, layers: int | None = None) -> Profile | None:
    """Return the server's profile if every machine's profile is given as a file: then nothing has to be measured."""
    if not (config.server.profile and all(group.profile for group in config.devices)):
        return None
    profile = Profile.load(Path(config.server.profile))
    if layers not in (None, len(profile.layers)):
        raise ConfigError(
            f"The profile {config.server.profile} is of {profile.model} with {len(profile.layers)} layers, but the "
            f"network has {layers}: write one with 'pipar profile'."
        )
    return profile


def _load_profile(file: str | None, measured: Profile) -> Profile:
    """Return the profile of a file, if it is one of the same network; without a file the measured one."""
    if file is None:
        return measured
    profile = Profile.load(Path(file))
    if len(profile.layers) != len(measured.layers) or profile.dtype != measured.dtype:
        raise ConfigError(
            f"The profile {file} is of {profile.model} with {len(profile.layers)} layers in {profile.dtype}, but the "
            f"network has {len(measured.layers)} in {measured.dtype}: write one with 'pipar profile'."
        )
    return profile


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
    workload: Workload, model: nn.Sequential, observe: Observer = ignore, *, fresh: bool = False, budget_s: float = 4.0
) -> Profile:
    """Return this machine's profile of the network: kept from an earlier run if there was one, else measured."""
    from pipar.nn.measure import measure_profile

    config = workload.config
    named = workload.model_name == config.model.name
    shape, classes = workload.input_shape, workload.classes
    key = profile_key(config, shape, classes) if named else _own_profile_key(workload, model)
    kept = None if fresh else find_profile(key)
    if kept is not None:
        return kept
    shard = workload.shard(workload.names[0])
    positions = shard.order(1)
    profile = measure_profile(
        model,
        model_name=workload.model_name,
        input_shape=workload.input_shape,
        classes=workload.classes,
        batch_size=config.run.batch_size,
        dtype=workload.dtype,
        load=lambda count: shard.batch(1, positions[:count].repeat(-(-count // len(positions)))[:count]),
        progress=lambda share: observe(Preparing("Measuring the layers", share)),
        budget_s=budget_s,
    )
    keep_profile(key, profile)
    return profile
