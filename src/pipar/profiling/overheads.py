"""How long the work around the layers takes: loading, coding, stepping, packing, installing, aggregating and noise."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import nn

from pipar import random_streams
from pipar.cutting.split import named_layers, some_layers, split_model
from pipar.errors import PlanError
from pipar.nn.device_part import TorchDevicePart
from pipar.nn.learner import LearnerSettings, TorchLearner
from pipar.nn.optimizers import sgd
from pipar.privacy.mechanisms import clip_and_noise
from pipar.profiling.coding_costs import line
from pipar.profiling.layer_times import training_pass
from pipar.profiling.measurement_task import Batch, Measurement, free_bytes, state_bytes
from pipar.profiling.repeated_timing import Ready, median_s, rest
from pipar.tasks.losses import Targets
from pipar.tasks.task import Task
from pipar.tensors.bodies import read_tensor, state_body, tensor_body
from pipar.tensors.inputs import call, with_gradient
from pipar.wire.messages import Body, Kind, Message
from pipar.wire.orders import TrainedPart

_CUT_REPETITIONS = 7
#: First layers of up to this size represent the whole network where that would take too much memory or time.
_LIGHT_BYTES = 8 << 20
_NOISED_BYTES = 1 << 20
#: Aggregating two models takes as much memory as five. Of a larger network its light layers are aggregated.
_AGGREGATED_BYTES = 200 << 20
_AGGREGATED_COPIES = 5


def measure_overheads(
    model: nn.Sequential, placed: nn.Sequential, cut_bytes: int, task: Measurement, *, with_loss: bool
) -> dict[str, float]:
    """Return the profile's fields for loading, coding, stepping, packing, installing, aggregating and noise.

    The functions are those that training calls. All but loading and noise run on a small and on a large object, for the
    cost of a call and the cost of a byte: one sample and a quarter of a batch at a cut with `cut_bytes` per sample; the
    first layer and the whole network; the models of one device and of two. `placed` is the model where it computes,
    which the optimiser's steps and the exchange of models depend on.
    """
    budget_s = 0.2 * task.budget_s / 14
    fields = {"load_s": 0.0}
    if task.load is not None:
        load = partial(task.load, task.batch_size)
        fields["load_s"] = median_s(lambda: load, budget_s) / task.batch_size
    fields["noise_s_per_byte"] = _noise_s_per_byte(_light_layers(model), budget_s)
    fields["backward_at_cut_s"] = _backward_at_cut_s(placed, task, with_loss=with_loss)
    coding = [_coding(cut_bytes, samples, task) for samples in (1, max(2, task.batch_size // 4))]
    fields |= _lines(coding, budget_s) | _lines(_aggregations(model, task, with_loss=with_loss), budget_s)
    # A machine that is short of memory for training cannot hold whole models two or three times.
    light = placed if with_loss else _light_layers(placed)
    parts = [_exchange(part, task) for part in (_first_layers(placed, 1), light)]
    return fields | _lines(parts, budget_s, task.torch_device.clock)


def _lines(sizes: Sequence[_Sized], budget_s: float, clock: Callable[[], float] = time.thread_time) -> dict[str, float]:
    """Return the cost of a call and of a byte of every kind of work, from a small and a large object."""
    small, large = sizes
    fields = {}
    for kind in small.work:
        times = (median_s(small.work[kind], budget_s, clock), median_s(large.work[kind], budget_s, clock))
        fields[f"{kind}_s"], fields[f"{kind}_s_per_byte"] = line((small.size_bytes, large.size_bytes), times)
    return fields


def _light_layers(model: nn.Sequential) -> nn.Sequential:
    """Return as many first layers as have few weights together, but at least one."""
    light = sum(1 for size_bytes in accumulate(map(state_bytes, model)) if size_bytes <= _LIGHT_BYTES)
    return _first_layers(model, max(1, light))


def _first_layers(model: nn.Sequential, count: int) -> nn.Sequential:
    return some_layers(model, list(named_layers(model))[:count])


def _backward_at_cut_s(model: nn.Sequential, task: Measurement, *, with_loss: bool) -> float:
    """Return the extra cost of starting a backward after the first layer, instead of arriving there in one pass.

    Both are measured on a micro-batch so small that the layer itself hardly counts, and each by its shortest of several
    times: a difference of two medians was mostly noise.
    """
    first = _first_layers(model, 1)
    device, clock = task.torch_device, task.torch_device.clock
    batch = Batch.random(2, task.form, task.training, task.dtype).on(device)
    ends = with_gradient(call(first, batch.inputs))
    if len(model) == 1 or not ends:
        return 0.0
    gradients = [torch.ones_like(end) for end in ends]
    in_one_piece, alone = [], []
    for _ in range(_CUT_REPETITIONS):
        in_one_piece.append(training_pass(model, batch, with_loss=with_loss, device=device).backward_s[0])
        ends = with_gradient(call(first, batch.inputs))
        rest(0.5)
        start = clock()
        torch.autograd.backward(ends, gradients)
        alone.append(clock() - start)
    return max(0.0, min(alone) - min(in_one_piece))


def _noise_s_per_byte(module: nn.Module, budget_s: float) -> float:
    """Return the seconds to clip a part's update, to draw noise for it and to add that, for each of its bytes."""
    state = {name: value.numpy() for name, value in module.state_dict().items() if value.is_floating_point()}
    missing = _NOISED_BYTES - sum(values.nbytes for values in state.values())
    if missing > 0:  # in a small part, starting a tensor takes longest, which must not count for samples
        dtype = next((values.dtype for values in state.values()), np.dtype(np.float32))
        state["more"] = np.ones(-(-missing // dtype.itemsize), dtype)
    received = {name: values - 1.0 for name, values in state.items()}  # a large update: clipping it takes longest
    chance = partial(random_streams.generator, 0, "noise")

    def protect() -> Callable[[], object]:
        trained = {name: values.copy() for name, values in state.items()}
        return partial(clip_and_noise, trained, received, clip=1.0, multiplier=1.0, noise=chance)

    size_bytes: int = sum(values.nbytes for values in state.values())
    return median_s(protect, budget_s) / size_bytes


@dataclass(frozen=True)
class _Sized:
    """Some kinds of work on an object of one size."""

    size_bytes: int
    work: Mapping[str, Ready]


def _coding(cut_bytes: int, samples: int, task: Measurement) -> _Sized:
    activation = torch.ones((samples, max(1, cut_bytes // task.dtype.itemsize)), dtype=task.dtype)
    targets = task.training.example(samples)
    message = Message(Kind.GRADIENT, samples=samples, batch_samples=samples, body=tensor_body(activation))
    encode, decode = partial(_encode, activation, targets, task.training), partial(read_tensor, message)
    return _Sized(activation.nbytes, {"encode": lambda: encode, "decode": lambda: decode})


def _encode(activation: torch.Tensor, targets: Targets, training: Task) -> Body:
    return tensor_body(activation, training.buffers(targets, 1.0))


def _exchange(module: nn.Sequential, task: Measurement) -> _Sized:
    """Return the optimiser's step and the exchange of this part of a network; its gradients are 0."""
    part = TorchDevicePart(module, task.optimizer, has_loss=False, device=task.torch_device)
    part.unpack_and_install(_as_received(state_body(part.state())), keep_state=False)  # the first has frozen weights
    inputs = Batch.random(2, task.form, task.training, task.dtype).on(task.torch_device).inputs

    def trained() -> Callable[[], object]:
        if ends := with_gradient(call(module, inputs)):
            torch.autograd.backward(ends, [torch.zeros_like(end) for end in ends])
        return part.step

    def arrived() -> Callable[[], object]:
        return partial(part.unpack_and_install, _as_received(part.pack()), keep_state=False)

    work: dict[str, Ready] = {"step": trained, "pack": lambda: part.pack, "install": arrived}
    return _Sized(max(1, state_bytes(module) - part.frozen_bytes), work)


def _aggregations(model: nn.Sequential, task: Measurement, *, with_loss: bool) -> list[_Sized]:
    """Return the aggregation of a new global model from the parts of one device and of two.

    Most of the model is at the server: it is cut as early as possible.
    """
    size_bytes = state_bytes(model)
    fits = size_bytes <= _AGGREGATED_BYTES and 2 * _AGGREGATED_COPIES * size_bytes <= free_bytes()
    layers = model if with_loss and fits and task.memory_bytes is None else _light_layers(model)
    network = copy.deepcopy(layers)
    names = ("one", "two")
    cuts = dict.fromkeys(names, _first_cut(network))
    learner = TorchLearner(network, cuts, LearnerSettings(sgd(), task.training))

    def returned(devices: tuple[str, ...]) -> Callable[[], object]:
        brought = [TrainedPart(device, _as_received(learner.pack(device, frozen=False)), 1) for device in devices]
        return partial(learner.aggregate, brought)

    return [
        _Sized(max(1, len(devices) * learner.model_bytes(frozen=False)), {"aggregate": partial(returned, devices)})
        for devices in (names[:1], names)
    ]


def _first_cut(model: nn.Sequential) -> int:
    """Return the first split point without a weight that is used on both sides."""
    for split_point in range(1, len(model)):
        try:
            split_model(model, split_point)
        except PlanError:
            continue
        return split_point
    return len(model)


def _as_received(body: Body) -> Body:
    """Return a body as it arrives: in one buffer."""
    return Body.of(bytearray().join(body.buffers), encoding=body.encoding)
