"""Your own network and data, named in the configuration as "module:function".

    pipar run --virtual --set model.factory=examples.own_model:network --set data.factory=examples.own_model:samples

The current directory is on the import path, so run it from the folder that holds `examples`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset


def network() -> nn.Sequential:
    """Return the network. It can be cut after each child, so P is one of 1..4.

    Pooling, normalisation and activation belong to the child before the cut. With group normalisation, or none, the
    training is exact; with batch normalisation it is "statistical" if there is more than one micro-batch.
    """
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU()),
        nn.Linear(64, 2),
    )


def samples(name: str) -> TensorDataset:
    """Return the data of the named device, or a held-out set for "validation" and "test"."""
    # Bright upper halves are class 0, bright lower halves class 1. Every name has its own noise.
    generator = torch.Generator().manual_seed(sum(name.encode()))
    labels = torch.arange(200) % 2
    images = torch.randn(200, 1, 16, 16, generator=generator)
    images[labels == 0, :, :8] += 1
    images[labels == 1, :, 8:] += 1
    return TensorDataset(images, labels)
