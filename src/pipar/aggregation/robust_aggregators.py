"""Robust aggregators: the result stays sound although some devices return arbitrary models.

Every device has the same weight, because a device could claim any number of samples. Every entry of the state is
treated like a weight; a counter becomes a value that one of the devices has counted to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipar.aggregation.aggregators import DeviceModels, Stateless, mean_of
from pipar.aggregation.averaging import State
from pipar.errors import TooFewDevicesError
from pipar.settings.aggregators import check_devices, trimmed_at_each_end

#: Values of all devices together that are sorted or compared at a time: 8 MiB in float64.
_BLOCK = 1 << 20


class Median(Stateless):
    """The median of each coordinate, of an even number the mean of the middle two; Yin et al. 2018, Definition 1."""

    def _combined(self, models: DeviceModels) -> dict[str, torch.Tensor]:
        return _by_coordinate(models, _median)


@dataclass
class TrimmedMean(Stateless):
    """The mean of each coordinate without its largest and smallest values; Yin et al. 2018, Definition 2.

    At each end, ceil(`trim` x devices) values are left out.
    """

    trim: float

    def _combined(self, models: DeviceModels) -> dict[str, torch.Tensor]:
        _check_count("trimmed_mean", {"trim": self.trim}, len(models))
        left_out = trimmed_at_each_end(self.trim, len(models))
        return _by_coordinate(models, lambda ordered: ordered[left_out : len(models) - left_out].mean(0))


@dataclass
class Krum(Stateless):
    """The model with the lowest score, or the mean of the `selected` lowest (Multi-Krum); Blanchard et al. 2017.

    The score is the sum of squared distances to the K - f - 2 nearest other models, with K devices and f = `byzantine`.
    Ties go to the first device by name. The paper lets Multi-Krum select up to K models; here the limit is K - f.
    """

    byzantine: int
    selected: int

    def _combined(self, models: DeviceModels) -> dict[str, torch.Tensor]:
        _check_count("krum", {"byzantine": self.byzantine, "selected": self.selected}, len(models))
        held = list(models)
        best = krum_scores([model.state for model in held], self.byzantine).sort(stable=True).indices[: self.selected]
        return mean_of([held[place]._replace(samples=1) for place in sorted(best.tolist())])


def krum_scores(states: Sequence[State], byzantine: int) -> torch.Tensor:
    """Return each model's sum of squared distances, over floating-point entries, to its K - f - 2 nearest others."""
    squares = torch.zeros((len(states), len(states)), dtype=torch.float64)
    for name in [name for name, tensor in states[0].items() if tensor.is_floating_point()]:
        for _, block in _blocks([state[name] for state in states]):
            for place in range(len(states) - 1):
                square = (block[place + 1 :] - block[place]).square_().sum(1)
                squares[place, place + 1 :] += square
                squares[place + 1 :, place] += square
    # A model with a NaN is infinitely far from all others.
    squares = squares.nan_to_num(nan=torch.inf, posinf=torch.inf).fill_diagonal_(torch.inf)
    return squares.sort(1).values[:, : len(states) - byzantine - 2].sum(1)


def _check_count(aggregator: str, parameters: Mapping[str, Any], devices: int) -> None:
    try:
        check_devices(aggregator, parameters, devices)
    except ValueError as error:
        raise TooFewDevicesError(f"{error}.") from None


def _by_coordinate(models: DeviceModels, reduced: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `reduced` of the devices' sorted values of each coordinate; NaN sorts as the largest."""
    states = [model.state for model in models]
    return {name: _reduce([state[name] for state in states], reduced) for name in states[0]}


def _reduce(tensors: Sequence[torch.Tensor], reduced: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    result = torch.empty(tensors[0].shape, dtype=tensors[0].dtype)
    flat = result.view(-1)
    for place, block in _blocks(tensors):
        ordered = block.sort(0).values
        # Not a mean: a counter keeps a value that some device reported.
        flat[place] = reduced(ordered) if block.is_floating_point() else ordered[(len(ordered) - 1) // 2]
    return result


def _median(ordered: torch.Tensor) -> torch.Tensor:
    low, high = (len(ordered) - 1) // 2, len(ordered) // 2
    return ordered[low] if low == high else (ordered[low] + ordered[high]) / 2


def _blocks(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield slices of a tensor's coordinates with the devices' values there, one row per device, floats in float64.

    Block by block, so that memory holds little more than the models themselves.
    """
    flat = [tensor.reshape(-1) for tensor in tensors]
    width = max(1, _BLOCK // len(flat))
    for start in range(0, flat[0].numel(), width):
        place = slice(start, start + width)
        block = torch.stack([tensor[place] for tensor in flat])
        yield place, block.to(torch.float64) if block.is_floating_point() else block
