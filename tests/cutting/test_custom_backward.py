"""A network that changes its own gradients is not recorded: the recording would have those of torch."""

from __future__ import annotations

import copy

import pytest
import torch
from support.networks import Residual, Reversed
from torch import Tensor, nn

from pipar.cutting.custom_backward import custom_backward
from pipar.cutting.exporting import NoRecordingError
from pipar.cutting.named_cuts import named_line
from pipar.cutting.traced import TracedNetwork

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLE = torch.zeros(2, 4)


class Network(nn.Module):
    """Its head is zero: what is before it has no gradient in the first step."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.way = way
        nn.init.zeros_(self.head.weight)
        if way == "module hook":
            self.inner.register_full_backward_hook(lambda *_: None)
        if way == "module hook before":
            self.inner.register_full_backward_pre_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        states = self.first(x)
        if self.way == "function":
            states = Reversed.apply(states)
        if self.way == "hook" and states.requires_grad:
            states.register_hook(torch.neg)
        return self.head(torch.relu(self.inner(states)) + states)


WAYS = {
    "function": "Reversed has a backward of its own",
    "hook": "its forward registers a hook on a gradient",
    "module hook": "inner has a backward hook",
    "module hook before": "inner has a backward hook",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_network_that_changes_its_gradients_is_not_recorded(way: str) -> None:
    with pytest.raises(NoRecordingError, match=rf"Network cannot be cut.*: {WAYS[way]}.*lose these gradients"):
        TracedNetwork.of(Network(way), EXAMPLE)


def test_a_function_without_an_effect_on_trained_weights_is_no_obstacle() -> None:
    network = Network("function")
    network.first.requires_grad_(False)
    assert custom_backward(network, EXAMPLE) is None


@pytest.mark.slow  # imports torch's compiler
def test_an_operator_with_a_registered_backward_is_no_obstacle() -> None:
    twice = torch.library.custom_op(
        "pipar_tests::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    twice.register_autograd(lambda _context, gradient: gradient * 2)

    class Operated(Network):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + twice(self.head.bias)

    assert custom_backward(Operated(""), EXAMPLE) is None


def test_the_network_stays_as_it_is() -> None:
    network = Residual(norm=nn.BatchNorm2d, dropout=0.5).eval()
    before, state = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    assert custom_backward(network, torch.ones(2, 1, 4, 4)) is None
    torch.testing.assert_close(dict(network.state_dict()), dict(before), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert not network.training


def test_modules_one_after_another_keep_their_own_backward() -> None:
    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Network("function"), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    assert next(iter(named_line(Line(), ["first"], EXAMPLE).stages)) == "first"
