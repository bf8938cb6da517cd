"""One device of a deployment: it connects to a server on another machine."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import signal
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from torch import nn

from pipar.cutting.split import named_layers
from pipar.device.intake import Terms
from pipar.device.interfaces import Equipment
from pipar.errors import ConfigError
from pipar.events import Expiring, Observer, Reloaded, Stopping
from pipar.execution.clock import clock_machine
from pipar.job.model_setup import part_builder, part_sizes, seed_dropout
from pipar.job.prepare import check_schedule
from pipar.job.profiles import Threads, check_threads, measured_profile
from pipar.job.torch_devices import spec_torch_device
from pipar.job.user_objects import UserObjects
from pipar.job.workload import Workload
from pipar.launch.assemble import run_device
from pipar.launch.deployed_process import listed_specs, prepare_process, run_until_signal, unlisted_spec, until_left
from pipar.launch.device_lanes import DeviceThreadLanes, claim_cores
from pipar.leakage.limit import LeakageLimit
from pipar.methods import METHODS
from pipar.networks.models import uses_batch_statistics
from pipar.privacy import accounting
from pipar.privacy.budget import AllowedCuts, PrivacyGuard, PrivacyLimits
from pipar.privacy.budget_file import BudgetFile, locked
from pipar.profiling.memory import Memory
from pipar.profiling.profile import Profile
from pipar.settings.config import Config, DeviceSection, DeviceSpec
from pipar.transport.backoff import Backoff
from pipar.transport.expiry import announce_expiry, expiring_files
from pipar.transport.grpc_connect import connect
from pipar.transport.interface import Transport
from pipar.transport.limits import Keepalive
from pipar.transport.reconnect import PatientDialer, Reconnector
from pipar.transport.reloading import ChangedFiles, reread_text
from pipar.transport.tls import DeviceSecurity


@dataclass(frozen=True)
class DeviceOptions:
    """Options of `pipar device` that are not in the configuration."""

    name: str
    server: str
    security: DeviceSecurity = field(default_factory=DeviceSecurity)
    data: str | None = None  # a folder with the device's own data
    give_up_after_s: float | None = None
    noise_seed: int | None = None  # None: drawn from the system, and not stored anywhere
    privacy_file: Path | None = None  # keeps the privacy budget over restarts; None: it is not kept


def take_part(config: Config, options: DeviceOptions, observe: Observer) -> int:
    """Take part in a training to its end; return the exit code: 130 on SIGINT, else 0."""
    with contextlib.nullcontext() if options.privacy_file is None else locked(options.privacy_file):
        return _take_part(config, options, observe)


def _take_part(config: Config, options: DeviceOptions, observe: Observer) -> int:
    prepare_process(config)
    listed = {spec.name: spec for spec in listed_specs(config)}
    spec = listed.get(options.name) or unlisted_spec(config, options.name)
    computes_on = spec_torch_device(config, spec)
    check_threads(spec.threads, "devices.threads")
    budget_file = None if options.privacy_file is None else BudgetFile.open(options.privacy_file, options.name)
    seed = secrets.randbits(128) if options.noise_seed is None else options.noise_seed
    workload = device_workload(config, options, seed, None if budget_file is None else budget_file.label_seed)
    workload.observe = observe
    workload.samples.check_samples()
    samples, model = workload.samples.keep_only_shard(options.name), workload.checked_model(initial=False)
    workload.optimizer().check(model)
    check_schedule(config, {options.name: len(samples)}, batch_statistics=uses_batch_statistics(model))
    guard = device_guard(config, seed, cuts=allowed_cuts(workload, model), budget_file=budget_file)
    profile = without_sample_statistics(
        config,
        measured_profile(
            workload,
            model,
            observe,
            memory_bytes=spec.memory_bytes,
            on=(spec.torch_device, spec.autocast),
            threads=_threads(spec),
        ),
    )
    seed_dropout(config.run.seed, options.name, computes_on)
    build = part_builder(workload, options.name)
    lanes = DeviceThreadLanes(spec.speed, profile.threads, computes_on.accelerator)
    memory_bytes = (
        spec.memory_bytes or computes_on.memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    terms = Terms(part_sizes(model), profile, memory_bytes, len(samples))
    evaluation = workload.evaluation_samples(options.name, Memory(profile, memory_bytes))
    equipment = Equipment(samples, build, lanes, profile, guard, terms, evaluation, clock_machine())
    equipment = replace(equipment, inputs=str(workload.samples.form), target_bytes=workload.task.size.sample_bytes)
    equipment = replace(equipment, method=config.run.method)
    stopped = run_until_signal(_train(config, options, spec, equipment, observe))
    return 130 if stopped == signal.SIGINT else 0


def _threads(spec: DeviceSpec) -> Threads:
    """Return how many threads compute a stage; "auto" is one if the machine is shared, emulated or an accelerator."""
    is_first = claim_cores()
    is_alone = is_first and spec.speed >= 1 and spec.torch_device == "cpu"
    return 1 if spec.threads == "auto" and not is_alone else spec.threads


async def _train(
    config: Config, options: DeviceOptions, spec: DeviceSpec, equipment: Equipment, observe: Observer
) -> None:
    clock = asyncio.get_running_loop().time
    backoff = Backoff.of_device(config.run.seed, options.name, clock, options.give_up_after_s)
    keepalive = Keepalive.of(config.server.keepalive)
    security = options.security
    files = ChangedFiles(security.certificate, security.key, security.ca, security.token_file)

    async def connect_within(timeout_s: float) -> Transport:
        if changed := files.take():
            observe(Reloaded(reread_text(changed)))
        return await connect(options.server, security=security, keepalive=keepalive, timeout_s=timeout_s)

    dialer = PatientDialer(connect_within, clock, options.give_up_after_s)
    reconnector = Reconnector(options.name, options.server, dialer.dial, backoff, observe)
    take_part = partial(
        run_device, options.name, spec.link, equipment, reconnector=reconnector, is_real=True, observe=observe
    )
    # The next connection reads the files again, so they are announced as they are.
    own = partial(expiring_files, (security.certificate, security.ca))
    async with until_left(announce_expiry(own, lambda sentence: observe(Expiring(sentence)))):
        try:
            await reconnector.run(take_part)
        except asyncio.CancelledError:
            observe(Stopping("This device was asked to stop."))
            raise
    observe(Stopping("The training has ended."))


def device_guard(
    config: Config,
    noise_seed: int | None = None,
    *,
    cuts: AllowedCuts | None = None,
    budget_file: BudgetFile | None = None,
) -> PrivacyGuard:
    """Return the limits of a device's own configuration; they hold for all orders of its server."""
    privacy = config.privacy
    budget = math.inf
    if privacy.target_epsilon is not None:
        budget = accounting.budget(privacy.target_epsilon, privacy.delta)
    return PrivacyGuard(
        noise_seed,
        PrivacyLimits(privacy.noise_multiplier or 0.0, budget, privacy.delta, cuts),
        used=None if budget_file is None else budget_file.used,
        save=None if budget_file is None else budget_file.save,
    )


def allowed_cuts(workload: Workload, model: nn.Sequential) -> AllowedCuts | None:
    """Return the split points that a device allows: only P = Q in federated learning, else those within its limit on
    leakage; None for all.
    """
    config, layers = workload.config, len(model)
    if not METHODS[config.run.method].splits:
        why = f"by its own configuration, method = '{config.run.method}', this device sends no activations"
        return AllowedCuts(layers, frozenset([layers]), why)
    limit = LeakageLimit.of(config, workload.subject)
    if limit is None:
        return None
    leaky = limit.leaky_cuts(list(named_layers(model)))
    why = f"by this device's own privacy.max_leakage = {limit.most:g}, that split point leaks too much"
    return AllowedCuts(layers, frozenset(range(1, layers + 1)) - leaky.keys(), why)


def without_sample_statistics(config: Config, profile: Profile) -> Profile:
    """Return the profile without compression ratios, which were measured with the device's own samples.

    They are removed where the server learns nothing else about the samples without noise: if inputs have noise, or if
    updates have noise and no activations leave the device.
    """
    splits = METHODS[config.run.method].splits
    if not (config.privacy.pixel_scale or (config.privacy.clips and not splits)):
        return profile
    return replace(profile, layers=tuple(replace(one, shares={}) for one in profile.layers), changes_share=1.0)


def device_workload(
    config: Config, options: DeviceOptions, noise_seed: int | None = None, label_seed: int | None = None
) -> Workload:
    """Return the workload of one device: its share of a named dataset, or its own data."""
    if config.privacy.label_epsilon is not None and config.data.factory is not None and config.data.classes is None:
        raise ConfigError(
            "privacy.label_epsilon with data.factory needs data.classes: otherwise the classes are counted from this "
            "device's own labels, which reveals the highest one."
        )
    if options.data is not None and config.data.factory is not None:
        raise ConfigError(
            f"--data {options.data} is given, but data.factory = {config.data.factory!r} returns this device's data: "
            "give only one of them. The factory is called with the device's name."
        )
    if options.data is not None and not Path(options.data).is_dir():
        raise ConfigError(
            f"--data {options.data} is not a folder on this machine: give the folder that holds this device's data."
        )
    names = [spec.name for spec in listed_specs(config)]
    if config.data.factory is None and options.data is None:
        if options.name in names:
            return Workload(config, noise_seed=noise_seed, label_seed=label_seed)
        raise ConfigError(
            f"'{options.name}' is not in the configuration, so it has no share of {config.data.name}: add it to "
            "[[devices]], or give it its own data with --data."
        )
    if options.data is not None and config.data.factory is None and config.data.name in ("digits", "synthetic"):
        raise ConfigError(
            f"--data {options.data} is given, but {config.data.name} is not read from a folder: set data.name to "
            "another dataset, or give your own data with data.factory."
        )
    spec = next((spec for spec in listed_specs(config) if spec.name == options.name), None)
    spec = spec or unlisted_spec(config, options.name)
    alone = DeviceSection(name=options.name, torch_device=spec.torch_device, autocast=spec.autocast)
    data = config.data.model_copy(update={"path": options.data or config.data.path, "samples_per_device": None})
    own = config.model_copy(update={"devices": (alone,), "data": data})
    objects = UserObjects(takes_classes_of_network=True)
    return Workload(own, objects, noise_seed=noise_seed, label_seed=label_seed)
