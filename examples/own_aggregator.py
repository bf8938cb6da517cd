"""Your own aggregator, named in the configuration as "module:class".

    pipar run --virtual --set server.aggregator=examples.own_aggregator:ByPower --set server.aggregation.power=0.5

FedAvg weights a device by its number of samples, so a device with very many dominates the result. Weighted by the
square root of that number, it still counts more than the others, but not as much more.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import torch

from pipar.aggregation.aggregators import DeviceModels


class ByPower:
    """The mean of the devices' models, weighted by samples to a power: 1 is FedAvg, 0 weights all devices equally."""

    def __init__(self, power: float = 0.5) -> None:
        self.power = power

    def aggregate(
        self,
        before: Mapping[str, torch.Tensor],
        models: DeviceModels,
        parameters: AbstractSet[str],  # noqa: ARG002 - statistics are averaged like weights here
    ) -> dict[str, torch.Tensor]:
        """Return the next global model; `before` is the one that the devices started from."""
        sums = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in before.items()}
        total = 0.0
        for _, state, samples in models:  # one after another, in the order of the devices' names
            weight = samples**self.power
            total += weight
            for name, tensor in state.items():
                sums[name] += weight * tensor
        return {name: _like(tensor, sums[name] / total) for name, tensor in before.items()}


def _like(before: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    # Counters, such as the batches that batch normalisation has seen, are whole numbers.
    return mean if before.is_floating_point() else mean.round().to(before.dtype)
