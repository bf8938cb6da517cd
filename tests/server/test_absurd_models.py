"""A device that returns a model far from all others is excluded, and the others train as without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.hostile import Tamper
from support.roaming import A, B, C, roam, same
from support.training import Case
from torch import nn

from pipar.events import Dropped
from pipar.tensors.bodies import read_state, state_body
from pipar.wire.messages import Body, Kind, Message

SMALL = Case("pipar", (1,), (2,), sizes=(9, 8, 7), batch_size=4, encoding="raw", norm="batch", epochs=3)


def returns(change: Callable[[str, torch.Tensor], torch.Tensor], epoch: int = 2) -> Tamper:
    """Change the tensors of the model that a device returns in one round."""

    def tamper(message: Message) -> Message:
        if message.kind is not Kind.MODEL or message.epoch != epoch:
            return message
        state = read_state(Body.of(bytes(message.body.contiguous()), encoding="safetensors"))
        packed = state_body({name: change(name, tensor) for name, tensor in state.items()})
        return replace(message, body=Body.of(bytes(packed.contiguous()), encoding="safetensors"))

    return tamper


def weights(value: float) -> Tamper:
    return returns(lambda name, tensor: torch.full_like(tensor, value) if name.endswith("weight") else tensor)


def statistics(value: float) -> Tamper:
    return returns(lambda name, tensor: torch.full_like(tensor, value) if "running" in name else tensor)


class Ordered(nn.Module):
    """Takes its inputs in an order that is a buffer of integers, as positions of tokens often are."""

    order: torch.Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(count - 1, -1, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, self.order]


def network() -> nn.Sequential:
    torch.manual_seed(3)
    first = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), Ordered(8))
    return nn.Sequential(first, nn.Sequential(nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, 10)).double()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pipar", "fl", "sl", "sfl2"])
@pytest.mark.parametrize("tamper", [weights(1e17), weights(-1e4), statistics(1e12)], ids=["1e17", "-1e4", "statistics"])
def test_a_model_that_is_far_from_all_others_leaves_the_weights_of_a_training_without_its_device(
    method: str, tamper: Tamper
) -> None:
    plans = {"split_points": (5,)} if method == "fl" else {}
    case = replace(SMALL, method=method, micro_batches=(2 if method == "pipar" else 1,), **plans)
    trained = roam(case, {}, tampers={C: tamper})
    assert [(event.device, event.epoch) for event in trained.of(Dropped)] == [(C, 2)]
    assert [sorted(counted) for counted in trained.counted] == [[A, B, C], [A, B], [A, B]]
    if method in ("pipar", "fl"):  # otherwise its batches stay in the shared model
        leaves = roam(case, {}, tampers={C: returns(lambda _, tensor: tensor * np.nan)})
        assert same(trained.state, leaves.state)
    assert all(tensor.abs().max() < 100 for tensor in trained.state.values())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pipar", "sl"])
def test_integers_that_one_device_alone_changes_change_no_model(method: str) -> None:
    def reorders(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 1_000_000 if name.endswith("order") else tensor

    case = replace(SMALL, method=method, micro_batches=(1,))
    trained = roam(case, {}, model=network(), tampers={C: returns(reorders)})
    assert [(event.device, event.epoch) for event in trained.of(Dropped)] == [(C, 2)]
    assert "order" in str(trained.of(Dropped)[0])
    assert torch.equal(trained.state["0.2.order"], torch.arange(7, -1, -1))
    assert [sorted(counted) for counted in trained.counted] == [[A, B, C], [A, B], [A, B]]
