"""Adapters of low rank are found by their shapes, or by the names that peft gives them."""

from __future__ import annotations

import pytest
from torch import nn

from pipar.nn.adapters import uses_adapters


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


class Adapted(nn.Module):
    """A frozen layer with two trained matrices."""

    def __init__(self, base: nn.Module, first: tuple[int, int], second: tuple[int, int]) -> None:
        super().__init__()
        self.base = frozen(base)
        self.a = nn.Parameter(nn.Linear(*first[::-1]).weight.detach())
        self.b = nn.Parameter(nn.Linear(*second[::-1]).weight.detach())


def of_peft() -> nn.Module:
    """Return a layer with the names of peft; a convolution's factors are no matrices."""
    layer = nn.Module()
    layer.base_layer = frozen(nn.Conv2d(4, 8, 3))
    layer.lora_A, layer.lora_B = nn.Conv2d(4, 2, 3, bias=False), nn.Conv2d(2, 8, 1, bias=False)
    return layer


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (Adapted(nn.Linear(8, 6), (2, 8), (6, 2)), True),
        (Adapted(nn.Linear(8, 6), (2, 6), (8, 2)), True),  # of a layer that keeps its matrix transposed
        (nn.Sequential(nn.Linear(3, 8), Adapted(nn.Linear(8, 8), (2, 8), (8, 2)), nn.Linear(8, 4)), True),
        (of_peft(), True),
        (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 8)), False),  # nothing is frozen
        (nn.Sequential(frozen(nn.Linear(8, 8)), nn.Linear(8, 2)), False),  # a frozen backbone with a head
        (nn.Sequential(frozen(nn.Linear(8, 8)), nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8)), False),  # with biases
        (Adapted(nn.Linear(8, 6), (3, 8), (6, 2)), False),  # their ranks differ
        (Adapted(nn.Linear(8, 6), (8, 8), (6, 8)), False),  # no low rank
        (frozen(Adapted(nn.Linear(8, 6), (2, 8), (6, 2))), False),
    ],
)
def test_adapters_are_two_trained_factors_of_a_frozen_matrix(model: nn.Module, found: bool) -> None:
    assert uses_adapters(model) is found
