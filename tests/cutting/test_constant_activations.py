"""Which first layers give the same activations for a sample in every epoch."""

from __future__ import annotations

import random

import pytest
import torch
from support.networks import Recurrent, Residual
from torch import nn

from pipar.cutting.constant_activations import steady_layers
from pipar.cutting.stage_line import line_of


class Fixed(nn.BatchNorm1d):
    """Batch normalisation that stays in eval mode."""

    def train(self, mode: bool = True) -> Fixed:  # noqa: ARG002
        super().train(False)
        return self


class Squeezed(nn.Module):
    """A layer that drops the dimension of the samples if there is only one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.squeeze()


class RarelyDropped(nn.Module):
    """A layer whose random numbers nearly never show in its output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.new_empty(len(x), 1).bernoulli_(1 - 1e-9)


class RarelySkipped(nn.Module):
    """The same with a generator of Python."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if random.random() > 1e-9 else 2 * x


class PairsOnly(nn.Module):
    """A layer that does not take a single sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            raise ValueError("give at least two samples")
        return x


class LikeTheFirst(nn.Module):
    """A layer that uses the first sample, or the last one, for all."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x[self.place]


class Placed(nn.Module):
    """A layer that adds to each sample its place in the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(len(x)).unsqueeze(1)


def network(middle: nn.Module, frozen: int = 2) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(4, 2))
    for layer in list(model)[:frozen]:
        layer.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("middle", "steady"),
    [
        (nn.ReLU(), 2),
        (nn.LayerNorm(4), 2),
        (nn.Dropout(0.5), 1),
        (nn.Dropout(0.0), 2),
        (nn.BatchNorm1d(4), 1),
        (Fixed(4), 2),
        (nn.Softmax(dim=0), 1),
        (Squeezed(), 1),
        (RarelyDropped(), 1),
        (RarelySkipped(), 1),
        (PairsOnly(), 1),
        (LikeTheFirst(0), 1),
        (LikeTheFirst(-1), 1),
        (Placed(), 1),
        (nn.Sequential(Squeezed(), nn.Flatten(1)), 1),
        (nn.Sequential(Squeezed(), nn.Unflatten(1, (2, 2)), nn.Flatten(1)), 1),
    ],
    ids=str,
)
def test_layers_count_until_one_depends_on_chance_or_on_other_samples(middle: nn.Module, steady: int) -> None:
    assert steady_layers(network(middle), torch.zeros(2, 4)) == steady


def test_layers_that_are_trained_do_not_count() -> None:
    assert steady_layers(network(nn.ReLU(), frozen=0), torch.zeros(2, 4)) == 0
    assert steady_layers(network(nn.ReLU(), frozen=1), torch.zeros(2, 4)) == 2  # a ReLU has nothing to train


@pytest.mark.slow
def test_stages_of_a_recorded_network_count() -> None:
    model = Residual(norm=nn.BatchNorm2d)
    for part in (model.stem, model.layer1):
        part.requires_grad_(False)
    line = line_of(model, torch.zeros(2, 1, 4, 4))
    assert 1 <= steady_layers(line, torch.zeros(2, 1, 4, 4)) < len(line) - 1


@pytest.mark.slow
def test_stages_that_were_recorded_in_float32_are_tried_in_float32() -> None:
    model = Recurrent()
    for part in (model.embed, model.lstm):
        part.requires_grad_(False)
    line = line_of(model, torch.zeros(2, 1, 4, 4))
    assert steady_layers(line, torch.zeros(2, 1, 4, 4)) == len(line) - 1
