"""Whether a line of stages trains as the network that it was made of, tried with a few samples.

Weights are changed a little first, in the same way on both sides: many networks start with zeros in their last layer,
which hide everything before it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn

from pipar.cutting.dtype_change import recast
from pipar.tensors.inputs import Inputs, call, drawn_like, in_dtype, mapped, tensors_of

#: Batches are tried with these numbers of samples: some networks compute something else for a single one.
_COUNTS = (2, 3, 1)
#: The change of a weight, relative to the size of its tensor, and at least.
_STIRRED, _LEAST_STIRRED = 0.1, 0.02
#: The changes of a weight repeat after this many values: a prime number, so that they differ from row to row.
_DRAWN = 10_007
#: The largest differences by dtype: relative to the tensor itself, and to all tensors together.
_TOLERANCES = {torch.float64: (1e-9, 1e-12)}
_LARGE_TOLERANCES = (1e-4, 1e-6)
#: Where a dtype is replaced: the uncut network may compute parts, such as its normalisation, in float32 all the same.
_RECAST_TOLERANCES = (1e-5, 1e-7)


class Divided(Protocol):
    """A network that is divided into stages."""

    @property
    def whole(self) -> nn.Module: ...

    def __iter__(self) -> Iterator[nn.Module]: ...


def dtype_of(network: nn.Module) -> torch.dtype:
    """Return the dtype of a network's weights."""
    floating = (weight.dtype for weight in network.parameters() if weight.is_floating_point())
    return next(floating, torch.get_default_dtype())


def differs(line: Divided, example: Inputs) -> bool:
    """Return True if a training step through the separate stages is not that of the uncut network.

    In float64. Recorded operations may fix the dtype of the network, such as zeros that an LSTM starts from, or
    positions that are moved to the device of other tensors: these are tried in their own dtype, and in float64 with
    that dtype replaced.
    """
    return any(_differs_for(line, example, count) for count in _COUNTS)


def _differs_for(line: Divided, example: Inputs, count: int) -> bool:
    found, own = _found(line, example, count, torch.float64), dtype_of(line.whole)
    if found is not False and own != torch.float64:
        in_own = _found(line, example, count, own)
        if in_own is False:
            recast = _found(line, example, count, torch.float64, is_recast=True)
            return bool(found) if recast is None else recast
        found = in_own
    return found if found is not None else count > 1 or _takes(line.whole, example, count)


def _found(line: Divided, example: Inputs, count: int, dtype: torch.dtype, *, is_recast: bool = False) -> bool | None:
    """Return whether the steps differ; None if they cannot be computed in this dtype."""
    try:
        return differs_in(line, example, count, dtype, is_recast=is_recast)
    except RuntimeError:  # two dtypes in one operation
        return None


def _takes(whole: nn.Module, example: Inputs, count: int) -> bool:
    """Return whether a network can be trained with batches of this many samples."""
    try:
        _whole_step(whole, example, count, dtype_of(whole))
    except Exception:  # noqa: BLE001 - whatever a network raises
        return False
    return True


def differs_in(line: Divided, example: Inputs, count: int, dtype: torch.dtype, *, is_recast: bool = False) -> bool:
    """Return the same for one number of samples in one dtype; raise RuntimeError if it cannot be computed in it."""
    try:
        expected = _whole_step(line.whole, example, count, dtype)
    except ValueError:
        if count == 1:  # batch normalisation needs more than one value
            return False
        raise
    try:
        found = _cut_step(line, example, count, dtype, is_recast=is_recast)
    except (AttributeError, LookupError, TypeError, ValueError):  # a stage misses what another one has computed
        return True
    floating = [value for value in expected.values() if value.is_floating_point() and value.numel()]
    scale = max((float(value.abs().max()) for value in floating), default=0.0)
    is_same = partial(_same, tolerances=_RECAST_TOLERANCES) if is_recast else same
    return expected.keys() != found.keys() or not all(
        is_same(value, found[name], scale) for name, value in expected.items()
    )


def same(one: Tensor, other: Tensor, scale: float) -> bool:
    """Return whether two tensors are the same up to rounding, in a step whose largest value is `scale`."""
    return _same(one, other, scale, _TOLERANCES.get(one.dtype, _LARGE_TOLERANCES))


def _same(one: Tensor, other: Tensor, scale: float, tolerances: tuple[float, float]) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.numel() or not one.is_floating_point():
        return torch.equal(one, other)
    relative, absolute = tolerances
    largest = float((one - other).abs().max())
    if math.isfinite(largest):
        return largest <= relative * float(one.abs().max()) + absolute * scale
    return _equal_where_finite(one, other, scale, tolerances)


def _equal_where_finite(one: Tensor, other: Tensor, scale: float, tolerances: tuple[float, float]) -> bool:
    """Return whether two tensors have their infinite values and NaN, if any, at the same places."""
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return False
    is_same = torch.equal(one[~finite].nan_to_num(), other[~finite].nan_to_num())
    return is_same and _same(one[finite], other[finite], scale, tolerances)


@torch.no_grad()
def stir(weights: Mapping[str, Tensor]) -> None:
    """Change weights a little, always in the same way."""
    for name in sorted(weights):
        weight = weights[name]
        if weight.is_floating_point() and weight.numel():
            size = _STIRRED * float(torch.linalg.vector_norm(weight)) / math.sqrt(weight.numel())
            weight += _noise(name, weight) * max(size, _LEAST_STIRRED)


def _noise(name: str, weight: Tensor) -> Tensor:
    """Return random numbers in the shape of a weight, which depend on its name only."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    drawn = torch.randn(min(weight.numel(), _DRAWN), generator=generator, dtype=torch.float64).to(weight.dtype)
    repeated = drawn.repeat(-(-weight.numel() // drawn.numel()))
    return repeated[: weight.numel()].reshape(weight.shape)


def _whole_step(whole: nn.Module, example: Inputs, count: int, dtype: torch.dtype) -> dict[str, Tensor]:
    copied = copy.deepcopy(whole).to(dtype).train()
    named = dict(copied.named_parameters())
    stir(named)
    return _step([copied], named, dict(copied.named_buffers()), _inputs(example, count, dtype))


def _cut_step(
    line: Divided, example: Inputs, count: int, dtype: torch.dtype, *, is_recast: bool = False
) -> dict[str, Tensor]:
    """Return the step through copies of the stages, each made by itself: they will be in different processes."""
    names = {id(tensor): name for name, tensor in _tensors(line.whole)}
    parameters: dict[str, Tensor] = {}
    buffers = {
        name: buffer.to(dtype) if buffer.is_floating_point() else buffer for name, buffer in line.whole.named_buffers()
    }
    copies = []
    for stage in line:
        made = recast(stage, dtype_of(line.whole), dtype) if is_recast else copy.deepcopy(stage).to(dtype)
        copies.append(made.train())
        for (_, original), (_, copied) in zip(_tensors(stage), _tensors(copies[-1]), strict=True):
            name = names.get(id(original))  # constants of recorded operations have none
            if name is not None:
                (parameters if isinstance(original, nn.Parameter) else buffers)[name] = copied
    stir(parameters)
    return _step(copies, parameters, buffers, _inputs(example, count, dtype))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _inputs(example: Inputs, count: int, dtype: torch.dtype) -> Inputs:
    return in_dtype(drawn_like(example, count, seed=0), dtype)


def _step(
    stages: Sequence[nn.Module], parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Inputs
) -> dict[str, Tensor]:
    """Return the output, the gradients and the buffers after a pass through stages, each with a graph of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)  # of dropout
        output = _pass(stages, inputs)
    gradients = {name: weight.grad for name, weight in parameters.items() if weight.grad is not None}
    changed = {f"{name} (buffer)": value for name, value in buffers.items()}
    return {"": output.detach(), **gradients, **changed}


def _pass(stages: Sequence[nn.Module], inputs: Inputs) -> Tensor:
    passed: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []  # what a stage gave, and what the next one got
    given, samples = inputs, len(tensors_of(inputs)[0])
    for number, stage in enumerate(stages, start=1):
        outputs = tensors_of(call(stage, mapped(given, torch.clone)))
        if number < len(stages) and any(one.shape[:1] != (samples,) for one in outputs):
            raise ValueError("what crosses a cut has no row for each sample")
        given = tuple(output.detach().requires_grad_(output.requires_grad) for output in outputs)
        passed.append((outputs, given))
    (output,), (end,) = passed[-1]
    end.grad = torch.linspace(-1, 1, end.numel(), dtype=end.dtype).reshape(end.shape)
    for outputs, crossed in reversed(passed):
        if any(other.requires_grad and other.grad is None for other in crossed):
            raise ValueError("the layers before a cut would get a gradient, but those of the whole network get none")
        known = [(one, other.grad) for one, other in zip(outputs, crossed, strict=True) if other.grad is not None]
        if trained := [pair for pair in known if pair[0].requires_grad]:
            # Of single numbers: with given gradients, torch imports sympy, which takes longer than the step.
            torch.autograd.backward([(one * gradient).sum() for one, gradient in trained])
    return output
