"""What a forward in train mode depends on besides its sample: its batch, chance, and earlier forwards.

It is tried with a few samples and with weights that were changed a little, as `cut_check` does.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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

    mixes_samples: bool = False  # the output for a sample depends on the other samples, as with batch normalisation
    is_random: bool = False  # as with dropout
    counts_forwards: bool = False  # it changes buffers or attributes, or decides by values, for each micro-batch


def effects_of(network: nn.Module, example: Inputs, *, is_recorded: bool = False) -> ForwardEffects:
    """Return the effects of a network's forward; recorded operations decide nothing by values."""
    samples = drawn_like(example, 5, seed=2)
    # Of two samples alone, normalisation would make 1 and -1 whatever they are. The second one is compared, because a
    # network may use the first or the last one for all.
    first = _tried(network, samples, [1, 0, 2], seed=0)
    other = _tried(network, samples, [3, 0, 4], seed=0)
    again = _tried(network, samples, [1, 0, 2], seed=1)
    mixes_samples = not _same_second_rows(first.outputs, other.outputs)
    decides = (first.reads_values and not is_recorded) or remembers(network, example)
    return ForwardEffects(
        mixes_samples=mixes_samples,
        is_random=first.draws or not _equal(first.outputs, again.outputs),
        counts_forwards=decides or (first.writes_buffers and not mixes_samples),
    )


@torch.no_grad()
def remembers(network: nn.Module, example: Inputs) -> bool:
    """Return whether a second forward differs from the first with the same samples, buffers and random state of torch.

    Then the network counts in an attribute, for example, or draws with Python's random.
    """
    copied = copy.deepcopy(network).train()
    stir(dict(copied.named_parameters()))
    given = in_dtype(drawn_like(example, 2, seed=2), dtype_of(network))
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in copied.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    outputs = []
    for _ in range(2):
        for module, name, buffer, value in buffers:
            buffer.copy_(value)
            setattr(module, name, buffer)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            output = call(copied, mapped(given, Tensor.clone))
        outputs.append([one.clone() for one in tree_leaves(output) if isinstance(one, Tensor)])
    return not _same(*outputs)


def _same_second_rows(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether the second sample has the same outputs; one number for all samples counts as an output of each."""
    return _same(*([one[1:2] if one.ndim else one for one in outputs] for outputs in (ones, others)))


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
    with torch.random.fork_rng(devices=[]), _Watching() as watching:
        torch.default_generator.manual_seed(seed)
        before, buffers = torch.default_generator.get_state(), dict(copied.named_buffers())
        versions = _versions(buffers)
        output = call(copied, chosen)
        draws = before.numpy().tobytes() != torch.default_generator.get_state().numpy().tobytes()
        writes = versions != _versions(dict(copied.named_buffers()))
    outputs = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
    return _Tried(outputs, draws, watching.has_read, writes)


def _versions(buffers: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return what changes when a buffer is written to or replaced, as long as the first ones are kept."""
    return {name: (id(buffer), buffer._version) for name, buffer in buffers.items()}


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices whether the value of a tensor is read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_read = False

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_read |= func in _READING
        return func(*args, **(kwargs or {}))
