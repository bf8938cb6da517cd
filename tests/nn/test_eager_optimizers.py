"""Optimisers without the hooks for torch.compile: the same steps, and other hooks are still called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipar.nn.eager_optimizers import eager
from pipar.settings.optimizers import OPTIMIZERS

RATE: dict[str, Any] = {"lr": 0.1}
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def trained(make: Make) -> tuple[torch.Tensor, str]:
    """Return a weight after three steps, and the optimiser's state as text."""
    weight = nn.Parameter(torch.arange(12.0, dtype=torch.float64).reshape(3, 4) / 7)
    optimizer = make([weight])
    for step in range(3):
        weight.grad = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).double()
        optimizer.step()
        optimizer.zero_grad()
        assert weight.grad is None
    return weight.detach(), str(optimizer.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_and_state_are_those_of_torch(name: str) -> None:
    known = OPTIMIZERS[name]
    kind = getattr(torch.optim, known.class_name)
    theirs, their_state = trained(lambda weights: kind(weights, lr=known.learning_rate, **known.arguments))
    ours, our_state = trained(lambda weights: eager(kind)(weights, lr=known.learning_rate, **known.arguments))
    assert torch.equal(ours, theirs)
    assert our_state == their_state


def test_hooks_around_a_step_are_called() -> None:
    called = []
    weight = nn.Parameter(torch.ones(2))
    optimizer = eager(torch.optim.SGD)([weight], **RATE)
    own = optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    everywhere = register_optimizer_step_post_hook(lambda *_: called.append("after"))
    try:
        weight.grad = torch.ones(2)
        optimizer.step()
    finally:
        own.remove()
        everywhere.remove()
    assert called == ["before", "after"]


def test_a_step_returns_the_loss_of_a_closure_that_computes_gradients() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = eager(torch.optim.SGD)([weight], **RATE)

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 2.0
    assert torch.allclose(weight.detach(), torch.full((2,), 0.8))
