"""From a configuration to a job: data counted, network checked, profiles found or measured, plans made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipar.config import Config, device_specs
from pipar.data.catalog import dataset_info
from pipar.errors import ConfigError, DataError
from pipar.events import Observer, Preparing, ignore
from pipar.job import Job, make_plans
from pipar.planner.cache import find_profile, keep_profile
from pipar.planner.profile import Profile

if TYPE_CHECKING:
    from torch import nn

    from pipar.workload import Workload


def prepare(workload: Workload, observe: Observer = ignore) -> Job:
    """Return the job of a workload; everything that can be wrong with it is found here, before anything starts."""
    from pipar.nn.models import uses_batch_statistics, uses_dropout

    model = workload.checked_model()
    profile = _given_profile(workload.config) or measured_profile(workload, model, observe)
    sizes = workload.sizes()
    empty = [name for name, size in sizes.items() if size == 0]
    if empty:
        raise DataError(f"{empty[0]} has no samples: give every device at least one, or fewer devices.")
    job = _job(workload.config, profile, sizes, dataset=workload.data_name, model=workload.model_name)
    return replace(job, batch_statistics=uses_batch_statistics(model), dropout=uses_dropout(model))


def prepare_without_torch(config: Config) -> Job | None:
    """Return the job of a timing-only run from counts and a profile that is there already; None if that needs more."""
    sizes = config.data.samples_per_device
    if sizes is None or config.data.factory or config.model.factory:
        return None
    names = [spec.name for spec in device_specs(config)]
    counted = dict(zip(names, sizes if isinstance(sizes, list) else [sizes] * len(names), strict=True))
    info = dataset_info(config.data.name)
    if info.train and sum(counted.values()) > info.train:
        return None  # loading the dataset says what is wrong
    shape = config.data.shape or info.shape
    key = profile_key(config, shape, config.data.classes or info.classes)
    profile = _given_profile(config) or find_profile(key)
    if profile is None:
        return None
    return _job(config, profile, counted, dataset=config.data.name, model=config.model.name)


def _job(config: Config, profile: Profile, sizes: Mapping[str, int], *, dataset: str, model: str) -> Job:
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


def _given_profile(config: Config) -> Profile | None:
    """Return the server's profile if every machine's profile is given as a file: then nothing has to be measured."""
    if config.server.profile and all(group.profile for group in config.devices):
        return Profile.load(Path(config.server.profile))
    return None


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


def measured_profile(
    workload: Workload, model: nn.Sequential, observe: Observer = ignore, *, fresh: bool = False, budget_s: float = 2.0
) -> Profile:
    """Return this machine's profile of the network: kept from an earlier run if it is a named one, else measured."""
    from pipar.nn.measure import measure_profile

    config = workload.config
    named = workload.model_name == config.model.name
    key = profile_key(config, workload.input_shape, workload.classes)
    kept = find_profile(key) if named and not fresh else None
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
    if named:
        keep_profile(key, profile)
    return profile
