"""Federated averaging of complete models, keyed by global parameter names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import torch

State = Mapping[str, torch.Tensor]

#: Numbers summed at a time: 8 MiB in float64.
_BLOCK = 1 << 20


def federated_average(models: Iterable[tuple[State, int]]) -> dict[str, torch.Tensor]:
    """Return M = sum_k D_k M_k / sum_k D_k, with D_k the samples that device k trained on; paper III-B, phase 3.

    Sums are taken in float64 in the given order (by device name), so the result does not depend on the order of
    arrival. Floating-point buffers are averaged like weights; integer counters take the largest value.
    """
    held = list(models)
    samples = [count for _, count in held]
    return {name: _rounded_average([state[name] for state, _ in held], samples) for name in held[0][0]}


def exact_average(tensors: Sequence[torch.Tensor], samples: Sequence[int]) -> torch.Tensor:
    """Return the average of one tensor of each model before rounding: in float64 if it is floating point."""
    if not tensors[0].is_floating_point():
        return reduce(torch.maximum, tensors)
    average = torch.zeros(tensors[0].shape, dtype=torch.float64)
    for tensor, count in zip(tensors, samples, strict=True):
        average.add_(tensor, alpha=count)  # converts element by element: no float64 copy of the tensor
    return average.div_(sum(samples))


def _rounded_average(tensors: Sequence[torch.Tensor], samples: Sequence[int]) -> torch.Tensor:
    """Return the average in the tensors' own dtype, block by block: the whole in float64 may not fit in memory."""
    average = torch.empty(tensors[0].shape, dtype=tensors[0].dtype)
    flat, parts = average.view(-1), [tensor.reshape(-1) for tensor in tensors]
    for start in range(0, len(flat), _BLOCK):
        place = slice(start, start + _BLOCK)
        flat[place] = exact_average([part[place] for part in parts], samples)
    return average
