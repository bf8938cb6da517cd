"""How long each layer takes, forward and backward, in training passes over batches of several sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from pipar.profiling.measurement_task import Batch, Progress
from pipar.profiling.profile import LayerProfile, Profile
from pipar.profiling.repeated_timing import Budget, rest
from pipar.tensors.inputs import Inputs, call, with_gradient
from pipar.tensors.torch_device import CPU, TorchDevice


@dataclass(frozen=True)
class Pass:
    """Seconds of each layer in one training pass."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


def measure_passes(
    model: nn.Sequential,
    batches: Sequence[Batch],
    budget: Budget,
    progress: Progress,
    *,
    with_loss: bool,
    device: TorchDevice = CPU,
) -> list[list[Pass]]:
    """Return the passes of each batch size.

    The sizes take turns, so that a machine that is slower for a while is so for all of them. The first round is a
    warm-up, in which kernels are chosen and memory is allocated; it counts only for a network so large that it alone
    takes twice the budget.
    """
    warm_up: list[list[Pass]] = [[] for _ in batches]
    a_round = partial(one_round, model, batches, with_loss=with_loss, device=device)
    a_round(warm_up, rests=False)
    if budget.spent() >= 2.0:
        return warm_up
    passes: list[list[Pass]] = [[] for _ in batches]
    while budget.wants_another(len(passes[-1])):
        a_round(passes)
        progress(min(0.9, 0.9 * budget.spent()))
    return passes


def one_round(
    model: nn.Sequential,
    batches: Sequence[Batch],
    passes: list[list[Pass]],
    *,
    with_loss: bool,
    rests: bool = True,
    device: TorchDevice = CPU,
    clock: Callable[[], float] | None = None,
) -> None:
    """Add some passes of each batch size: one of the largest, and more of small ones; each from rest."""
    largest = len(batches[-1])
    for batch, done in zip(batches, passes, strict=True):
        # A full batch is the first of its iteration and allocates gradients; a micro-batch mostly adds to them.
        if len(batch) == largest:
            model.zero_grad(set_to_none=True)
        # Small batches cost little and scatter most: two passes at B/16, four at B/32.
        for _ in range(max(1, min(4, largest // (8 * len(batch))))):
            if rests:
                rest()
            done.append(training_pass(model, batch, with_loss=with_loss, device=device, clock=clock))


def training_pass(
    model: nn.Sequential,
    batch: Batch,
    *,
    with_loss: bool = True,
    device: TorchDevice = CPU,
    clock: Callable[[], float] | None = None,
) -> Pass:
    """Return the CPU seconds of each layer, forward and backward; without `with_loss`, the gradient is all ones.

    On an accelerator, where the model and the batch are, they are the seconds until it has done its work.

    The graph stays in one piece, as within a device's or a server's part, and a hook at each cut notes when the
    gradient arrives there: a backward call for each layer would cost 8 % more on small micro-batches. The input needs
    no gradient, as on a device.
    """
    output: Any = batch.inputs
    forward_s = []
    reached: dict[int, float] = {}
    clock = clock or device.clock
    for place, layer in enumerate(model, start=1):
        start = clock()
        with device.computing():
            output = call(layer, output)
            if with_loss and place == len(model):
                output = batch.loss(output)
        forward_s.append(clock() - start)
        if place < len(model):
            _watch(output, partial(_note, reached, place, clock))
    ends = with_gradient(output)
    gradients = None if with_loss else [torch.ones_like(end) for end in ends]
    reached[len(model)] = clock()
    if ends:
        torch.autograd.backward(ends, gradients)
    return Pass(tuple(forward_s), _backward_times(reached, clock(), len(model)))


def _watch(output: Inputs, note: Callable[[Tensor], None]) -> None:
    """Note when gradients arrive; where several tensors cross, the last one counts."""
    for tensor in with_gradient(output):
        tensor.register_hook(note)  # type: ignore[no-untyped-call]


def _note(reached: dict[int, float], place: int, clock: Callable[[], float], _: Tensor) -> None:
    reached[place] = clock()


def _backward_times(reached: Mapping[int, float], end: float, layers: int) -> tuple[float, ...]:
    """Return each layer's time from its output's gradient to its input's; 0 for a layer without a gradient."""
    return tuple(
        max(0.0, reached.get(place - 1, end) - reached[place]) if place in reached else 0.0
        for place in range(1, layers + 1)
    )


def layer_profiles(
    sizes: Profile, passes: Sequence[Sequence[Pass]], measured: tuple[int, ...]
) -> tuple[LayerProfile, ...]:
    """Return the measured layers with their times; for batches that were too large, times in proportion."""
    shares = [size / measured[-1] for size in sizes.batch_sizes[len(measured) :]]

    def times(take: Callable[[Pass], float], of: Callable[[list[float]], float]) -> tuple[float, ...]:
        found = [of([take(one) for one in done]) for done in passes]
        return (*found, *(found[-1] * share for share in shares))

    def layer(place: int) -> LayerProfile:
        return replace(
            sizes.layers[place],
            forward_s=times(lambda one: one.forward_s[place], median),
            backward_s=times(lambda one: one.backward_s[place], median),
            least_s=times(lambda one: one.forward_s[place] + one.backward_s[place], min),
        )

    return tuple(layer(place) for place in range(len(passes[0][0].forward_s)))
