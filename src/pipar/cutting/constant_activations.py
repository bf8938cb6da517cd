"""Which first layers give the same activations for a sample in every epoch, whatever batch it is in."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from pipar.cutting.cut_check import dtype_of
from pipar.cutting.forward_effects import random_numbers
from pipar.cutting.frozen import frozen_layers
from pipar.cutting.split import named_layers
from pipar.tensors.inputs import Inputs, call, drawn_like, in_dtype, mapped, tensors_of


def steady_layers(model: nn.Sequential, example: Inputs) -> int:
    """Return how many first layers are frozen and compute each sample by itself, without random numbers.

    It is tried in float64, unless recorded operations fix the dtype of the network, such as zeros that an LSTM starts
    from: a sample goes through the layers by itself and at two places of different batches. Layers that mix samples,
    draw random numbers, change their buffers or do not take a single sample end the count.
    """
    frozen = frozen_layers(model)
    if not frozen:
        return 0
    try:
        return _steady(model, example, frozen, torch.float64)
    except RuntimeError:  # two dtypes in one operation
        return _steady(model, example, frozen, dtype_of(model))


def _steady(model: nn.Sequential, example: Inputs, frozen: int, dtype: torch.dtype) -> int:
    network = copy.deepcopy(model).to(dtype).train()
    samples = in_dtype(drawn_like(example, 3, seed=2), dtype)
    alone, *pairs = [_some(samples, rows) for rows in ([0], [0, 1], [2, 0])]  # alone, as a device computes it
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for number, layer in enumerate(list(named_layers(network).values())[:frozen]):
            before, drawn = [buffer.clone() for buffer in layer.buffers()], random_numbers()
            pairs = [call(layer, pair) for pair in pairs]
            try:
                alone = call(layer, alone)
            except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
                return number  # it does not take a single sample, as batch normalisation does not
            changed = any(not torch.equal(old, new) for old, new in zip(before, layer.buffers(), strict=True))
            if changed or drawn != random_numbers() or not all(map(_same_rows, (alone, alone), pairs, (0, 1))):
                return number
    return frozen


def _some(samples: Inputs, rows: list[int]) -> Any:
    return mapped(samples, lambda tensor: tensor[rows])


def _same_rows(alone: Any, pair: Any, place: int) -> bool:
    """Return True if one sample gives the row at its place of two samples, in every tensor that a layer returns."""
    rows, pairs = tensors_of(alone), tensors_of(pair)
    return len(rows) == len(pairs) and all(_same_row(one, two, place) for one, two in zip(rows, pairs, strict=True))


def _same_row(alone: Any, pair: Any, place: int) -> bool:
    if not isinstance(alone, Tensor) or not pair.ndim or alone.shape != (1, *pair.shape[1:]):
        return False
    if not alone.is_floating_point():
        return torch.equal(alone[0], pair[place])
    close = (1e-9, 1e-12) if alone.dtype == torch.float64 else (1e-5, 1e-6)
    return torch.allclose(alone[0], pair[place], *close)
