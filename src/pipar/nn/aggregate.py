"""Federated averaging of complete models, keyed by global parameter names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce

import torch

State = Mapping[str, torch.Tensor]


def federated_average(models: Iterable[tuple[State, int]]) -> dict[str, torch.Tensor]:
    """Return M = sum_k D_k M_k / sum_k D_k with D_k the samples really trained; paper III-B, phase 3.

    Sums are taken in float64 in the order given (by device name), so the result does not depend on arrival.
    Floating buffers are averaged like weights; integer counters take the largest value.
    """
    held = list(models)
    dtypes = {name: tensor.dtype for name, tensor in held[0][0].items()}
    return {name: average.to(dtypes[name]) for name, average in exact_averages(held)}


def exact_averages(models: Sequence[tuple[State, int]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same before it is rounded, everything floating in float64.

    Name by name: no large model is ever there in float64.
    """
    total = sum(samples for _, samples in models)
    for name, tensor in models[0][0].items():
        if not tensor.is_floating_point():
            yield name, reduce(torch.maximum, (state[name] for state, _ in models))
            continue
        average = torch.zeros(tensor.shape, dtype=torch.float64)
        for state, samples in models:
            average.add_(state[name], alpha=samples)  # widened number by number, not as a whole
        yield name, average.div_(total)


def weights_sha256(state: State) -> str:
    """Return a hash over the tensors in name order: equal hashes are equal weights, bit for bit."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).numpy().data.cast("B"))
    return digest.hexdigest()
