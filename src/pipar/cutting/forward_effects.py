"""What a forward in train mode depends on besides its sample: its batch, chance, and earlier forwards.

It is tried with a few samples and with weights that were changed a little, as `cut_check` does.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipar.cutting.cut_check import dtype_of, same, stir
from pipar.tensors.inputs import Inputs, call, drawn_like, in_dtype, mapped

#: Operations by which Python reads the value of a tensor, as in `if x.sum() > 0`.
_READING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)


@dataclass(frozen=True)
class ForwardEffects:
    """What makes the steps of a network depend on more than its samples and weights."""

    mixes_samples: bool = False  # the output for a sample depends on its batch, as with batch normalisation
    is_random: bool = False  # as with dropout
    counts_forwards: bool = False  # it changes buffers or attributes, or decides by values, for each micro-batch
    writes_weights: bool = False  # in eval mode, too, as with an embedding's max_norm


def effects_of(network: nn.Module, example: Inputs, *, is_recorded: bool = False) -> ForwardEffects:
    """Return the effects of a network's forward; recorded operations decide nothing by values."""
    samples = drawn_like(example, 6, seed=2)
    # Of two samples alone, normalisation would make 1 and -1 whatever they are. An inner one is compared, because a
    # network may use the first or the last one for all. It may also use their number, and a sample's place.
    first = _tried(network, samples, [1, 0, 2], seed=0)
    other = _tried(network, samples, [3, 0, 4, 5], seed=0)
    moved = _tried(network, samples, [3, 4, 0, 5], seed=0)
    again = _tried(network, samples, [1, 0, 2], seed=1)
    is_random = first.draws or not _equal(first.outputs, again.outputs)
    row = _rows(first.outputs, 1)
    # Random numbers are those of a place, so with them a sample differs at another one.
    mixes_samples = not _same(row, _rows(other.outputs, 1)) or not (is_random or _same(row, _rows(moved.outputs, 2)))
    decides = first.reads_values and not is_recorded
    return ForwardEffects(
        mixes_samples=mixes_samples,
        is_random=is_random,
        counts_forwards=decides
        or unrecorded_state(network, example) is not None
        or (first.writes_buffers and not mixes_samples),
        writes_weights=_writes_weights(network, samples),
    )


def _rows(outputs: Sequence[Tensor], place: int) -> list[Tensor]:
    """Return the outputs for the sample at a place; one number for all samples counts as an output of each."""
    return [one[place : place + 1] if one.ndim else one for one in outputs]


def _same(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether outputs are the same up to rounding."""
    floating = [one for one in ones if one.is_floating_point() and one.numel()]
    scale = max((float(one.abs().max()) for one in floating), default=0.0)
    return len(ones) == len(others) and all(same(one, other, scale) for one, other in zip(ones, others, strict=True))


def _equal(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


class _Tried(NamedTuple):
    outputs: Sequence[Tensor]  # a user's own loss may take several
    draws: bool  # random numbers
    reads_values: bool
    writes_buffers: bool


@torch.no_grad()
def _tried(network: nn.Module, samples: Inputs, rows: list[int], *, seed: int) -> _Tried:
    """Return what a copy in train mode does with some of the samples."""
    copied = copy.deepcopy(network).train()
    stir(dict(copied.named_parameters()))
    chosen = mapped(in_dtype(samples, dtype_of(network)), lambda tensor: tensor[rows])
    with _generators_kept(), _Watching() as watching:
        torch.default_generator.manual_seed(seed)
        before, buffers = random_numbers(), dict(copied.named_buffers())
        versions = _versions(buffers)
        output = call(copied, mapped(chosen, torch.clone))
        draws = watching.has_drawn or before != random_numbers()
        writes = versions != _versions(dict(copied.named_buffers()))
    outputs = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
    return _Tried(outputs, draws, watching.has_read, writes)


@torch.no_grad()
def _writes_weights(network: nn.Module, samples: Inputs) -> bool:
    """Return whether a copy in eval mode writes to its weights."""
    before = copy.deepcopy(network).eval()
    stir(dict(before.named_parameters()))
    used = copy.deepcopy(before)
    versions = _versions(dict(used.named_parameters()))
    with _generators_kept():
        call(used, in_dtype(mapped(samples, torch.clone), dtype_of(network)))
    return any(True for _ in _written(before, used, versions))


def random_numbers() -> tuple[object, ...]:
    """Return the states of the generators that a layer may draw from: a draw may change no value, but changes these."""
    return torch.get_rng_state().numpy().tobytes(), *_random_numbers_of_python()


def _random_numbers_of_python() -> tuple[object, ...]:
    of_numpy = np.random.get_state(legacy=False)["state"]
    return random.getstate(), of_numpy["key"].tobytes(), of_numpy["pos"]


@torch.no_grad()
def unrecorded_state(network: nn.Module, example: Inputs) -> str | None:
    """Return what a forward depends on or changes that a recording cannot hold, as part of a sentence; None if nothing.

    It is tried in a copy, and twice: a first forward may set numbers for good, such as the length of a table.
    """
    before = copy.deepcopy(network).train()
    stir(dict(before.named_parameters()))
    copied = copy.deepcopy(before)
    versions = _versions(dict(copied.named_parameters()))
    inputs = in_dtype(drawn_like(example, 2, seed=2), dtype_of(network))
    with _generators_kept():
        drawn = _random_numbers_of_python()
        first, numbers = _seeded_outputs(copied, inputs), _numbers(copied)
        _restore_buffers(copied, before)
        second, again = _seeded_outputs(copied, inputs), _numbers(copied)
        if drawn != _random_numbers_of_python():
            return "its forward draws random numbers of Python or numpy"
    counted = next((name for name, value in again.items() if numbers.get(name, value) != value), None)
    if counted is not None:
        return f"each forward changes its attribute {counted}"
    written = next(_written(before, copied, versions), None)
    if written is not None:
        return f"its forward writes to the parameter {written}"
    if not _same(first, second):
        return "a second forward differs from the first, as with a counter that is no buffer"
    return None


def _seeded_outputs(network: nn.Module, inputs: Inputs) -> list[Tensor]:
    torch.default_generator.manual_seed(0)
    output = call(network, mapped(inputs, torch.clone))
    return [one.clone() for one in tree_leaves(output) if isinstance(one, Tensor)]


def _restore_buffers(used: nn.Module, before: nn.Module) -> None:
    """Give all buffers the values that they have in the other copy, also those that a forward has replaced."""
    for path, module in before.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(used.get_submodule(path), name, buffer.clone())


def _written(before: nn.Module, used: nn.Module, versions: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    """Yield the names of the parameters that a forward wrote to: their versions or values differ from those before."""
    after = dict(used.named_parameters())
    now = _versions(after)
    for name, value in before.named_parameters():
        has_changed = not torch.equal(value, after[name]) and not value.isnan().any()
        if now[name] != versions[name] or has_changed:
            yield name


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore all generators of random numbers afterwards."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _numbers(network: nn.Module) -> dict[str, object]:
    """Return the attributes of modules that are numbers, and the states of those that draw random numbers."""
    values = {
        f"{path}.{name}".removeprefix("."): _number(value)
        for path, module in network.named_modules()
        for name, value in vars(module).items()
    }
    return {name: value for name, value in values.items() if value is not None}


def _number(value: object) -> object:
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return str(value.get_state(legacy=False))
    return value if isinstance(value, int | float | complex) else None


def _versions(buffers: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return what changes when a buffer is written to or replaced, as long as the first ones are kept."""
    return {name: (id(buffer), buffer._version) for name, buffer in buffers.items()}


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices whether the value of a tensor is read, and whether a generator of the network's own is drawn from."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_read = self.has_drawn = False

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_read |= func in _READING
        self.has_drawn |= (kwargs or {}).get("generator") is not None
        return func(*args, **(kwargs or {}))
