"""The profiles of a job's network: of a named machine, from a file, from the cache, or measured now."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipar.cutting.cut_points import CutList
from pipar.errors import ConfigError, DataError
from pipar.events import MeasuredBusy, Observer, Preparing, ignore
from pipar.profiling.cache import find_profile, keep_profile, usable_cores
from pipar.profiling.comparison import check_network
from pipar.profiling.machines import MACHINES, machine_profile
from pipar.profiling.memory import largest_prefix
from pipar.profiling.operation_counts import (
    Counts,
    LayerCount,
    Shares,
    known_changes_share,
    known_counts,
    known_shares,
    network_sizes,
    rectified_at,
    with_shares,
)
from pipar.profiling.profile import LayerProfile, Profile
from pipar.settings.config import Config, DeviceSection, DeviceSpec, ServerSection
from pipar.settings.config_file import config_from, config_tree
from pipar.settings.optimizers import OWN, step_cost
from pipar.settings.training_sections import OptimizerSection, TaskSection

if TYPE_CHECKING:
    from torch import nn

    from pipar.data.shard import Shard
    from pipar.job.workload import Workload
    from pipar.profiling.measurement_task import Measurement

Threads = int | Literal["auto"]

MEASURE_AGAIN = (
    "Predicted and virtual times may be wrong: when the machine is quiet, measure again with 'pipar profile' and the "
    "same configuration."
)
_MEASURING_THREADS = "Measuring the layers on several threads"
#: Progress of a measurement when all layers are measured.
_LAYERS_SHARE = 0.9
#: Enough to fill the chunks that are encoded at most cuts.
_SAMPLES_FOR_SHARES = 10


#: A torch_device and an autocast of the configuration.
ComputesOn = tuple[str, str]
ON_CPU = ("cpu", "off")


def computes_on(of: ServerSection | DeviceSection | DeviceSpec) -> ComputesOn:
    """Return what the server or a device computes on."""
    return of.torch_device, of.autocast


class NetworkProfiles:
    """The profiles of one network: of named machines, from files, or of this machine; each is made once.

    Equal devices get the same object. `count` and `measure` are called only if a profile needs them.
    """

    def __init__(
        self,
        config: Config,
        model: str,
        *,
        batch_statistics: bool,
        count: Callable[[], Counts],
        measure: Callable[[ComputesOn, Threads], Profile],
    ) -> None:
        self.model = model
        self.batch_statistics = batch_statistics
        self._config = config
        self._count, self._measure = cache(count), measure
        self._made: dict[tuple[str | None, ComputesOn, Threads], Profile] = {}

    def of(self, given: str | None, on: ComputesOn = ON_CPU, threads: Threads = "auto") -> Profile:
        """Return the profile of a named machine or from a file; None is this machine, computing on this.

        Of those with several threads, "auto" takes their number, but one of this machine, whose cores devices share.
        """
        if given is None:
            threads = 1 if threads == "auto" or on != ON_CPU else threads
        key = (given, on if given is None else ON_CPU, threads)
        if key not in self._made:
            self._made[key] = self._measure(on, threads) if given is None else self._given(given, threads)
        return self._made[key]

    def check_given(self, profiles: Iterable[tuple[str | None, Threads]]) -> None:
        """Raise for wrong files, names and numbers of threads, before this machine is measured."""
        for given, threads in profiles:
            if given is not None:
                self.of(given, threads=threads)

    def of_server(self, given: str | None, on: ComputesOn = ON_CPU) -> Profile:
        """Return the profile of the server, which must have all layers."""
        profile = self.of(given, on, "auto" if given in MACHINES else 1)
        if not profile.whole:
            raise ConfigError(
                f"The server's profile ({given or 'this machine'}) has only the first {len(profile.layers)} of "
                f"{profile.network_layers} layers of {self.model}, but a server needs all: set server.profile to one "
                "of a machine with more memory."
            )
        return profile

    def _given(self, given: str, threads: Threads) -> Profile:
        return of_threads(self._of_any_threads(given), threads, given)

    def _of_any_threads(self, given: str) -> Profile:
        dtype = self._config.model.dtype
        machine = MACHINES.get(given)
        if machine is None:
            profile = check_network(_load_profile(given), network_sizes(self._count(), self.model, dtype), given)
            return _of_optimizer(_of_counted(profile, self._count()), self._config.optimizer)
        profile = machine_profile(
            machine,
            self._count(),
            model=self.model,
            dtype=dtype,
            batch_size=self._config.run.batch_size,
            batch_statistics=self.batch_statistics,
            changes_share=self._changes_share(),
        )
        return _of_optimizer(profile, self._config.optimizer)

    def _changes_share(self) -> float:
        of = self._config.model
        return known_changes_share(of.name, of.norm, of.dtype) if self.model == of.name else 1.0


def of_threads(profile: Profile, threads: Threads, source: str) -> Profile:
    """Return a profile with this number of threads, or raise ConfigError; one of several is converted to one."""
    if threads in ("auto", profile.threads):
        return profile
    if threads == 1 and profile.one_thread:
        return profile.on_one_thread()
    wanted, known = ("1 thread" if n == 1 else f"{n} threads" for n in (threads, profile.threads))
    raise ConfigError(
        f"The profile {source} is of {known} for each stage, but {wanted} would compute it: write another with 'pipar "
        f"profile --threads {threads} -o FILE' on that machine, or set devices.threads = {profile.threads}."
    )


def check_threads(threads: Threads, of: str) -> None:
    """Raise ConfigError if more threads are given than this machine has cores that this process may use."""
    if threads != "auto" and threads > usable_cores():
        cores = "one core" if usable_cores() == 1 else f"{usable_cores()} cores"
        raise ConfigError(
            f"{of} = {threads} is more than the {cores} that this process may use: give at most {usable_cores()}, or "
            "'auto'."
        )


def _of_counted(profile: Profile, counts: Counts) -> Profile:
    """Return the profile with the cuts that follow a ReLU, and what is frozen, taken from the network itself.

    A profile may be of a network with equal sizes but other activations, whose gradients sparse encodings would change,
    or with other layers frozen.
    """
    layers = [_as_counted(one, count, profile.dtype) for one, count in zip(profile.layers, counts, strict=False)]
    return replace(profile, layers=tuple(layers))


def _of_optimizer(profile: Profile, section: OptimizerSection) -> Profile:
    """Return the profile with the steps and the memory of the optimiser of the configuration, if it is of another."""
    if section.kind == profile.optimizer:
        known = profile.state_copies if section.kind == OWN else section.state_copies
        return replace(profile, state_copies=known)
    factor = step_cost(section.kind) / step_cost(profile.optimizer)
    return replace(
        profile,
        step_s=profile.step_s * factor,
        step_s_per_byte=profile.step_s_per_byte * factor,
        optimizer=section.kind,
        state_copies=section.state_copies,
    )


def _as_counted(layer: LayerProfile, count: LayerCount, dtype: str) -> LayerProfile:
    known = replace(layer, rectified=count.rectified, frozen_bytes=count.frozen_bytes(dtype), trained=count.trained)
    if count.backward.calls or count.trained:
        return known
    return replace(known, backward_s=(0.0,) * len(layer.backward_s), least_s=())  # no gradient goes through it


def _load_profile(file: str) -> Profile:
    """Return the profile from a file; a name without a suffix that is not a file is taken for a misspelt machine."""
    path = Path(file)
    if not path.suffix and not path.exists():
        raise ConfigError(
            f"'{file}' is neither a machine that pipar knows nor a file: the machines are {', '.join(MACHINES)}; for "
            "another one, write a file with 'pipar profile -o FILE'."
        )
    return Profile.load(path)


def profile_key(config: Config, input_shape: tuple[int, ...], classes: int) -> dict[str, object]:
    """Return everything that the times of a named network depend on."""
    frozen = {"freeze": config.model.freeze} if config.model.freeze else {}
    section = config.optimizer
    steps = {} if section.kind == "sgd" else {"optimizer": [section.kind, section.factory, section.arguments]}
    task = {} if config.task == TaskSection() else {"task": config.task.model_dump(mode="json")}
    return {
        **frozen,
        **steps,
        **task,
        "model": config.model.name,
        "norm": config.model.norm,
        "dtype": config.model.dtype,
        "input_shape": list(input_shape),
        "classes": classes,
        "batch_size": config.run.batch_size,
        "augment": config.data.augment,
    }


def _own_profile_key(workload: Workload, model: nn.Sequential) -> dict[str, object]:
    """Return everything that the times of a user's own network depend on: its layers and code, but not its weights."""
    # Import torch, which a run with a cached profile does without.
    from pipar.cutting.split import named_layers, whole_module
    from pipar.job.network_code import network_text

    cuts = getattr(model, "cuts", None)
    crossing = cuts.to_dict()["cuts"] if isinstance(cuts, CutList) else None
    # One module has other layers with other cut points.
    architecture = json.dumps([network_text(whole_module(model)), list(named_layers(model)), crossing])
    return {
        **profile_key(workload.config, workload.samples.input_shape, workload.samples.classes),
        "model": workload.model_name,
        "inputs": str(workload.samples.form),
        "architecture": hashlib.sha256(architecture.encode()).hexdigest(),
    }


def _functions_key(workload: Workload) -> dict[str, object]:
    """Return the code of the functions that the user passed: several may have one name, as in a notebook."""
    from pipar.job.network_code import function_text  # imports torch

    given = {"loss": workload.user_objects.loss, "optimizer": workload.user_objects.optimizer}
    texts = {f"own {key}": json.dumps(function_text(one.get())) for key, one in given.items() if one is not None}
    return {key: hashlib.sha256(text.encode()).hexdigest() for key, text in texts.items()}


def measured_profile(
    workload: Workload,
    model: nn.Sequential,
    observe: Observer = ignore,
    *,
    fresh: bool = False,
    budget_s: float = 2.0,
    memory_bytes: int | None = None,
    on: ComputesOn = ON_CPU,
    threads: Threads = 1,
) -> Profile:
    """Return this machine's profile of the network: from the cache of an earlier run, or measured now.

    If the network does not fit into `memory_bytes`, it is the profile of as many first layers as fit. With several
    `threads`, the layers are computed by them; "auto" takes as many as are fastest.
    """
    # Import torch, which a run with a cached profile does without.
    from pipar.job.torch_devices import named_torch_device
    from pipar.networks.models import uses_batch_statistics
    from pipar.profiling.measure import measure_profile
    from pipar.profiling.measurement_task import Measurement

    config = workload.config
    named = workload.model_name == config.model.name
    shape, classes = workload.samples.input_shape, workload.samples.classes
    key = profile_key(config, shape, classes) if named else _own_profile_key(workload, model)
    key |= _functions_key(workload)
    torch_device = named_torch_device(config, on)
    if not torch_device.is_cpu or torch_device.autocast:
        key |= {"torch_device": [torch_device.hardware, torch_device.autocast]}
        threads = 1
    statistics = uses_batch_statistics(model)
    of_all = key if threads == 1 else {**key, "threads": threads, "usable": usable_cores()}
    kept = None if fresh else _kept_profile(of_all, config, memory_bytes, batch_statistics=statistics)
    if kept is not None:
        return kept
    known = _known_counts(workload)
    observe(Preparing(_measuring(0.0), 0.0))  # the first pass of each batch size warms up without reporting progress
    wanted = Measurement(
        model=model,
        model_name=workload.model_name,
        form=workload.samples.form,
        training=workload.task,
        batch_size=config.run.batch_size,
        dtype=workload.dtype,
        load=_loader(workload),
        progress=lambda share: observe(Preparing(_measuring(share), share)),
        budget_s=budget_s,
        memory_bytes=memory_bytes,
        optimizer=workload.optimizer(),
        torch_device=torch_device,
        rectified=None if known is None else [p for p, layer in enumerate(known, start=1) if layer.rectified],
    )
    one = None if fresh else _kept_profile(key, config, memory_bytes, batch_statistics=statistics)
    if one is None:
        one = measure_profile(wanted)
        _keep(key, one, memory_bytes)
    profile = _with_threads(wanted, one, threads, observe)
    if profile.doubt:
        observe(MeasuredBusy(f"The profile of {workload.model_name} {profile.doubt}. {MEASURE_AGAIN}"))
    if of_all is not key:
        _keep(of_all, profile, memory_bytes)
    return profile


def _with_threads(wanted: Measurement, one: Profile, threads: Threads, observe: Observer) -> Profile:
    """Return the profile on this number of threads, from that on one thread."""
    from pipar.profiling.several_threads import numbers_to_try, on_threads, with_threads  # import torch

    numbers = numbers_to_try(usable_cores()) if threads == "auto" else ()
    if threads == 1 or (threads == "auto" and not numbers):
        return one
    observe(Preparing(_MEASURING_THREADS, _LAYERS_SHARE))
    return with_threads(wanted, one, numbers) if threads == "auto" else on_threads(wanted, one, threads)


def _keep(key: dict[str, object], profile: Profile, memory_bytes: int | None) -> None:
    if profile.whole:
        keep_profile(key, profile)
    elif memory_bytes is not None:  # without a given limit, memory was short only for now: not cached
        keep_profile(_cut_key(key, memory_bytes), profile)


def _loader(workload: Workload) -> Callable[[int], tuple[Any, Any]]:
    """Return a function that loads a number of samples of the first device, some of them repeatedly if it has fewer."""
    shard = _first_shard(workload)
    positions = shard.order(1)
    return lambda count: shard.batch(1, positions[:count].repeat(-(-count // len(positions)))[:count])


def _first_shard(workload: Workload) -> Shard:
    """Return the samples of the first device; for a plan without the files of a dataset, synthetic ones of its form."""
    samples = workload.samples
    try:
        return samples.shard(workload.names[0])
    except DataError:
        if not samples.has_catalog_form:
            raise
    synthetic = _workload_of_shape(workload.config, samples.input_shape, samples.classes)
    return synthetic.samples.shard(synthetic.names[0])


def _measuring(share: float) -> str:
    """Return what is measured at this share of the progress: first the layers, then the rest."""
    return "Measuring the layers" if share < _LAYERS_SHARE else "Measuring loading, messages and crowded cores"


def _kept_profile(
    key: dict[str, object], config: Config, memory_bytes: int | None, *, batch_statistics: bool
) -> Profile | None:
    """Return a cached profile of the whole network if that fits into memory, else one for this limit."""
    whole = cached_profile(key, config.optimizer)
    if memory_bytes is None:
        return whole
    if whole is not None:
        size = config.run.batch_size
        fitting = largest_prefix(whole, size, memory_bytes, batch_statistics=batch_statistics)
        if fitting == len(whole.layers):
            return whole
    return cached_profile(_cut_key(key, memory_bytes), config.optimizer)


def cached_profile(key: dict[str, object], optimizer: OptimizerSection) -> Profile | None:
    """Return a profile of an earlier run; SGD with and without momentum share one, and differ in what they keep."""
    found = find_profile(key)
    return None if found is None else _of_optimizer(found, optimizer)


def _cut_key(key: dict[str, object], memory_bytes: int) -> dict[str, object]:
    return {**key, "memory_bytes": memory_bytes}


def count_network(workload: Workload, model: nn.Sequential) -> Counts:
    """Return the counts of a workload's network, named or the user's own."""
    known, form = _known_counts(workload), workload.samples.form
    if known is not None and not workload.config.model.freeze:
        return known
    # Import torch, which a run with stored counts does without.
    from pipar.profiling.operation_counter import count_layers
    from pipar.tensors.relu_outputs import rectified_cuts

    if known is None:
        counts = rectified_at(count_layers(model, form, run=True, task=workload.task), rectified_cuts(model, form))
        named = workload.config.model
        is_named = workload.model_name == named.name
        return with_shares(
            counts, known_shares(named.name, named.norm) if is_named else _shares(counts, workload, model)
        )
    counted = zip(count_layers(model, form, run=True, task=workload.task), known, strict=True)
    return tuple(replace(layer, rectified=of.rectified, shares=of.shares) for layer, of in counted)


def _shares(counts: Counts, workload: Workload, model: nn.Sequential) -> list[Shares]:
    """Return the share of bytes that each exact encoding leaves at each cut, for samples of the first device.

    It depends on the values and not on the machine, so it is found here for every machine. Of lossy encodings it
    hardly depends on the values.
    """
    import torch

    from pipar.profiling.coding_costs import run_through
    from pipar.profiling.measurement_task import Batch
    from pipar.wire.encodings import EXACT

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of dropout
        batch = Batch(*_loader(workload)(_SAMPLES_FOR_SHARES), workload.task)
        crossings = run_through(copy.deepcopy(model).train(), batch, with_loss=True)
    measured = [name for name in EXACT if name != "raw"]
    return [at.shares(rectified=one.rectified, names=measured) for at, one in zip(crossings, counts, strict=False)]


def _known_counts(workload: Workload) -> Counts | None:
    """Return the counts of a workload's network if they are stored with pipar."""
    config = workload.config
    if workload.model_name != config.model.name:
        return None
    return known_counts(config.model.name, config.model.norm, workload.samples.input_shape, workload.samples.classes)


def profile_of_shape(
    config: Config,
    shape: tuple[int, ...],
    classes: int,
    observe: Observer,
    on: ComputesOn = ON_CPU,
    threads: Threads = 1,
) -> Profile:
    """Return this machine's profile of the network for synthetic samples of this shape."""
    workload = _workload_of_shape(config, shape, classes)
    return measured_profile(workload, workload.checked_model(), observe, on=on, threads=threads)


def counts_of_shape(config: Config, shape: tuple[int, ...], classes: int) -> Counts:
    """Return the counts of the network for samples of this shape, if they are not stored with pipar."""
    workload = _workload_of_shape(config, shape, classes)
    return count_network(workload, workload.checked_model())


def _workload_of_shape(config: Config, shape: tuple[int, ...], classes: int) -> Workload:
    from pipar.job.workload import Workload  # imports torch

    tree = config_tree(config)
    tree["data"] |= {
        "name": "synthetic",
        "shape": shape,
        "classes": classes,
        "samples_per_device": config.run.batch_size,
    }
    tree["devices"] = [{}]
    tree["server"] |= {"aggregator": "fedavg", "aggregation": {}}  # other aggregators need several devices
    return Workload(config_from(tree))
