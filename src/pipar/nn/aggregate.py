"""Federated averaging of complete models, keyed by global parameter names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

State = Mapping[str, torch.Tensor]


def federated_average(models: Iterable[tuple[State, int]]) -> dict[str, torch.Tensor]:
    """Return M = sum_k D_k M_k / sum_k D_k with D_k the samples really trained; paper III-B, phase 3.

    Sums are taken in float64 in the order given (by device name), so the result does not depend on arrival.
    Floating buffers are averaged like weights; integer counters take the largest value.
    """
    average, dtypes = exact_average(models)
    # One after another: a large model would be there twice, once in float64.
    return {name: average.pop(name).to(dtypes[name]) for name in list(average)}


def exact_average(
    models: Iterable[tuple[State, int]],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.dtype]]:
    """Return the same before it is rounded, everything floating in float64, and the dtypes of the models."""
    total = 0
    sums: dict[str, torch.Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for state, samples in models:
        total += samples
        for name, tensor in state.items():
            if name not in sums:
                dtypes[name] = tensor.dtype
                floating = tensor.is_floating_point()
                sums[name] = torch.zeros(tensor.shape, dtype=torch.float64) if floating else tensor
            if tensor.is_floating_point():
                sums[name].add_(tensor, alpha=samples)  # widened number by number, not as a whole
            else:
                sums[name] = torch.maximum(sums[name], tensor)
        del state  # before the next one is decoded
    average = {name: tensor.div_(total) if tensor.is_floating_point() else tensor for name, tensor in sums.items()}
    return average, dtypes


def weights_sha256(state: State) -> str:
    """Return a hash over the tensors in name order: equal hashes are equal weights, bit for bit."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).numpy().data.cast("B"))
    return digest.hexdigest()
