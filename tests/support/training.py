"""Small workloads, profiles made by hand, and the reference on the same batches, for tests of training."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pipar.cutting.split import named_layers
from pipar.data.shard import Shard
from pipar.events import EpochResult, ignore
from pipar.execution.spans import Span
from pipar.job.job import Job
from pipar.job.plans import with_plans
from pipar.job.user_objects import UserObjects
from pipar.job.workload import Workload
from pipar.launch.rehearsal import rehearse
from pipar.launch.virtual import train_virtually
from pipar.methods import METHODS, Plan
from pipar.networks.models import counts_forwards, uses_batch_statistics, uses_dropout
from pipar.nn.learner import TorchLearner
from pipar.profiling.profile import CodingTimes, LayerProfile, Profile
from pipar.settings.config import device_specs
from pipar.settings.config_file import config_from
from pipar.settings.links import Link
from pipar.tensors.inputs import InputForm, call, tensors_of
from support import reference
from support.reference import Batch, Data, Rules, State

BATCH = 100
SIZES = (230, 100, 57)  # a short last batch, a single full one, and less than one
EXACT = 1e-12  # of the largest weight: rounding in float64, and nothing else
#: The first device is the slowest, so that the order of arrival is not the order of names.
LINKS = (
    {"up": "2Mbit/s", "down": "5Mbit/s", "latency": "30ms"},
    {"up": "20Mbit/s", "down": "40Mbit/s", "latency": "1ms"},
    "unlimited",
)
SPEEDS = (0.05, 0.4, 1.0)


@dataclass(frozen=True)
class Case:
    """One training, with P and N of each device, or one P and N for all of them."""

    method: str
    split_points: tuple[int, ...] = (1,)
    micro_batches: tuple[int, ...] = (1,)
    sizes: tuple[int, ...] = SIZES
    norm: str = "none"
    momentum: str = "reset"
    schedule: str = "all-forward"
    model: str = "vgg5"
    shape: tuple[int, int, int] = (1, 4, 4)
    dtype: str = "float64"
    epochs: int = 2
    local_epochs: int = 1
    devices_per_round: int | float | str = "all"
    seed: int = 0
    augment: bool = False
    weight_decay: float = 0.0
    aggregator: str = "fedavg"
    aggregation: tuple[tuple[str, float], ...] = ()  # its parameters
    encoding: str = "auto"
    privacy: tuple[tuple[str, float], ...] = ()  # keys of [privacy]
    weights: str | None = None  # a file to start from
    freeze: tuple[str, ...] = ()  # patterns of parameter names
    cache: str | int = 2**30  # of activations
    cut_points: tuple[str, ...] | None = None
    batch_size: int = BATCH
    optimizer: tuple[tuple[str, Any], ...] = ()  # more keys of [optimizer]
    task: tuple[tuple[str, Any], ...] = ()  # keys of [task]
    evaluate: float = 0.0  # the share of samples that devices evaluate on
    torch_device: str = "cpu"  # of the server and of all devices
    even: bool = False  # all devices fast on unlimited links, so that real processes are quick

    def __str__(self) -> str:
        p, n = ("".join(map(str, numbers)) for numbers in (self.split_points, self.micro_batches))
        short = f"{self.method}-K{len(self.sizes)}-P{p}-N{n}-{self.norm}-{self.momentum}-{self.schedule}"
        short += "" if self.aggregator == "fedavg" else f"-{self.aggregator}"
        return short if self.model == "vgg5" else f"{self.model}-{short}"

    def tree(self) -> dict[str, Any]:
        """Return the configuration as nested dictionaries."""
        return {
            "run": {
                "method": self.method,
                "epochs": self.epochs,
                "local_epochs": self.local_epochs,
                "devices_per_round": self.devices_per_round,
                "batch_size": self.batch_size,
                "seed": self.seed,
                "trace": "full",
            },
            "model": self._model(),
            "optimizer": {
                "state_at_aggregation": self.momentum,
                **({"weight_decay": self.weight_decay} if self.weight_decay else {}),
                **dict(self.optimizer),
            },
            "task": dict(self.task),
            "data": {
                "name": "synthetic",
                "shape": list(self.shape),
                "samples_per_device": list(self.sizes),
                "validation": 20,
                "test": 20,
                "augment": self.augment,
                **({"evaluate_on_devices": self.evaluate} if self.evaluate else {}),
            },
            "plan": {"schedule": self.schedule},
            "wire": {"encoding": self.encoding},
            "privacy": dict(self.privacy),
            "server": {
                "cores": 2,
                "aggregator": self.aggregator,
                "aggregation": dict(self.aggregation),
                "activation_cache": self.cache,
                "torch_device": self.torch_device,
            },
            "devices": [self._device(number) for number in range(len(self.sizes))],
        }

    def _model(self) -> dict[str, Any]:
        section: dict[str, Any] = {"name": self.model, "norm": self.norm, "dtype": self.dtype}
        if self.weights is not None:
            section["weights"] = self.weights
        if self.cut_points is not None:
            section["cut_points"] = list(self.cut_points)
        return {**section, "freeze": list(self.freeze)} if self.freeze else section

    def _device(self, number: int) -> dict[str, Any]:
        return {
            "name": f"phone-{chr(ord('a') + number)}",
            "link": "unlimited" if self.even else LINKS[number % 3],
            "speed": 1.0 if self.even else SPEEDS[number % 3],
            "torch_device": self.torch_device,
            "split_point": self.split_points[number % len(self.split_points)],
            "micro_batches": self.micro_batches[number % len(self.micro_batches)],
        }

    def tree_with_profile(self, folder: Path) -> dict[str, Any]:
        """Return the configuration with a profile made by hand, in a file, so that `pipar.run` measures nothing."""
        workload, file, tree = self.workload(), folder / "profile.json", self.tree()
        hand_made_profile(workload.build_model(), workload.samples.input_shape, self.dtype).save(file)
        for machine in (tree["server"], *tree["devices"]):
            machine["profile"] = str(file)
        return tree

    def workload(self, model: nn.Module | None = None, datasets: Any = None, evaluation: Any = None) -> Workload:
        config = config_from(self.tree())
        return Workload(config, UserObjects.of(config, model, datasets, None, None, evaluation=evaluation))

    def rules(self, **changes: Any) -> Rules:
        kept = self.momentum == "keep"
        proximal = dict(self.aggregation).get("proximal", 0.0)
        return Rules(**{"weight_decay": self.weight_decay, "keep_state": kept, "proximal": proximal, **changes})


def hand_made_profile(
    model: nn.Sequential, inputs: Sequence[int] | InputForm, dtype: str, **overheads: float
) -> Profile:
    """Return a profile with the network's own bytes and made-up times: (p + samples) / 10 ms for layer p."""
    x: Any = InputForm.given(inputs).example(2, getattr(torch, dtype))
    layers, sizes = [], (1, BATCH)
    for place, (name, layer) in enumerate(named_layers(copy.deepcopy(model).eval()).items(), start=1):
        x = call(layer, x)
        forward = tuple((place + size) * 1e-4 for size in sizes)
        backward = tuple(2 * seconds for seconds in forward)
        weights = sum(tensor.nbytes for tensor in layer.state_dict().values())
        trained = any(weight.requires_grad for weight in layer.parameters())
        frozen = sum(weight.nbytes for weight in layer.parameters() if not weight.requires_grad)
        crossing = tuple((one[0].nbytes, one[0].nbytes * one.requires_grad) for one in tensors_of(x))
        known = {"frozen_bytes": frozen, "trained": trained, "tensor_bytes": crossing if len(crossing) > 1 else ()}
        layers.append(LayerProfile(name, forward, backward, sum(up for up, _ in crossing), weights, **known))
    # Finding changes of models takes no time here, so they are sent on every limited link.
    changes = {"coding": {"changes": CodingTimes()}, "changes_share": 0.5}
    return Profile("by hand", dtype, sizes, tuple(layers), **changes, **overheads)


def make_job(workload: Workload) -> Job:
    """Return the job of a workload without measuring anything."""
    config, model = workload.config, workload.checked_model()
    profile = hand_made_profile(model, workload.samples.form, config.model.dtype, load_s=1e-5, encode_s_per_byte=1e-9)
    profiles = dict.fromkeys(workload.names, profile)
    job = Job(
        config=config,
        specs=device_specs(config),
        sizes=workload.samples.sizes(),
        server_profile=profile,
        device_profiles=profiles,
        batch_statistics=uses_batch_statistics(model),
        dropout=uses_dropout(model),
        counts_forwards=counts_forwards(model),
        plans={},
        dataset=workload.samples.name,
        model=workload.model_name,
        steady_layers=workload.steady_layers(model),
        target_size=workload.task.size,
        evaluation_sizes=workload.samples.evaluation_sizes(),
    )
    return with_plans(job, rehearse)


@dataclass(frozen=True)
class Trained:
    """The outcome of a training."""

    job: Job
    state: State
    epochs: list[EpochResult]
    spans: list[Span]

    @property
    def samples(self) -> list[int]:
        return [epoch.samples for epoch in self.epochs]


def train_in_virtual_time(case: Case, model: nn.Module | None = None, datasets: Any = None) -> Trained:
    """Return the outcome of a case in virtual time; `datasets` are the devices' own."""
    return train_workload(case.workload(model, datasets))


def train_workload(workload: Workload) -> Trained:
    """Return the outcome of a workload in virtual time."""
    job = make_job(workload)
    epochs: list[EpochResult] = []
    spans: list[Span] = []

    def emit(result: EpochResult, of_epoch: list[Span]) -> None:
        epochs.append(result)
        spans.extend(of_epoch)

    learner: TorchLearner = train_virtually(job, workload, emit, ignore)
    return Trained(job, learner.state(), epochs, spans)


def train_by_script(workload: Workload, script: Sequence[Sequence[Plan]] = ()) -> State:
    """Return the trained weights, in virtual time; a script has the plans of all devices after each round but the last.

    Plans change only if `replanner.NOTICED` is below 0: every round's links then count as changed.
    """
    left = iter(script)

    async def replan(links: Mapping[str, Link]) -> Mapping[str, Plan]:
        return dict(zip(sorted(links), next(left), strict=True))

    more = {"replan": replan} if script else {}
    learner = train_virtually(make_job(workload), workload, lambda *_: None, ignore, **more)
    assert next(left, None) is None
    return learner.state()


def batches(shard: Shard, epoch: int, size: int = BATCH, *, joins_single: bool = False) -> list[Batch]:
    """Return an epoch's batches, the last one partial; with batch statistics a single sample joins the one before."""
    order = shard.order(epoch)
    cuts = list(range(size, len(order), size))
    if joins_single and cuts and len(order) - cuts[-1] == 1:
        cuts.pop()
    return [shard.batch(epoch, positions) for positions in np.split(order, cuts)]


def reference_data(workload: Workload, *, joins_single: bool = False) -> Data:
    """Return the batches of every device, in name order, epoch by epoch."""
    run = workload.config.run
    shards = [workload.samples.shard(name) for name in sorted(workload.names)]

    def of_epoch(shard: Shard, epoch: int) -> list[Batch]:
        passes = range(epoch * run.local_epochs + 1, (epoch + 1) * run.local_epochs + 1)
        cut = [batches(shard, number, run.batch_size, joins_single=joins_single) for number in passes]
        return [batch for of_pass in cut for batch in of_pass]

    return [[of_epoch(shard, epoch) for epoch in range(run.epochs)] for shard in shards]


def reference_state(case: Case, model: nn.Sequential | None = None, **changes: Any) -> State:
    """Return the outcome of a case by its method's definition; `changes` are deliberate mistakes."""
    if model is None and not changes:
        return _kept_reference_state(_what_counts(case))
    workload = case.workload(model)
    first = workload.build_model()
    data = reference_data(workload, joins_single=uses_batch_statistics(first))
    split_point = len(first) if case.method == "fl" else case.split_points[0]
    return reference.train(case.method, first, data, split_point, case.rules(**changes))


def _what_counts(case: Case) -> Case:
    """Return the case with fixed values for everything that its method's definition does not mention."""
    splits = METHODS[case.method].shares_server_model
    fields = {**case.__dict__, "micro_batches": (1,), "schedule": "all-forward", "even": False, "cache": 0}
    return Case(**fields) if splits else Case(**{**fields, "method": "fl", "split_points": (1,)})


@lru_cache(maxsize=64)
def _kept_reference_state(case: Case) -> State:
    workload = case.workload()
    first = workload.build_model()
    data = reference_data(workload, joins_single=uses_batch_statistics(first))
    return reference.train(case.method, first, data, case.split_points[0], case.rules())


def largest_error(state: State, expected: State) -> float:
    """Return the largest difference of two numbers, relative to the largest weight; counters must be equal."""
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        assert (state[name].shape, state[name].dtype) == (tensor.shape, tensor.dtype), name
        assert tensor.is_floating_point() or torch.equal(state[name], tensor), name
    floating = [name for name, tensor in expected.items() if tensor.is_floating_point()]
    assert all(state[name].isfinite().all() for name in floating)
    largest = max(float(expected[name].abs().max()) for name in floating)
    return max(float((state[name] - expected[name]).abs().max()) for name in floating) / largest
