"""A loss and metrics that are passed in Python train and score as if they had names, also in real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pipar
from pipar.errors import ConfigError

pytestmark = pytest.mark.slow

TREE: dict[str, Any] = {
    "run": {"epochs": 2, "batch_size": 8},
    "plan": {"split_point": 1, "micro_batches": 3},
    "model": {"dtype": "float64"},
    "server": {"profile": "i7-11850h", "cores": 1},
    "devices": [{"count": 2, "profile": "raspberry-pi-3b"}],
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def data(count: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 4, generator=draw), torch.randn(count, 2, generator=draw))


def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, tree: dict[str, Any], **options: Any) -> pipar.Result:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path))
    sets = [data(21, 1), data(13, 2)]
    return pipar.run(tree, model=network(), datasets=sets, validation=data(9, 3), test=data(9, 4), **options)


def squares(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().sum(1).mean() / 2


def off(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).abs().mean()


@pytest.mark.parametrize("world", ["virtual", "real"])
def test_a_loss_of_ones_own_trains_the_weights_of_the_same_loss_by_name(
    world: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    named = trained(monkeypatch, tmp_path, {**TREE, "task": {"loss": "mse", "metrics": ["mae"]}}, world="virtual")
    own = trained(monkeypatch, tmp_path, TREE, world=world, loss=squares, metrics={"off": off})
    states = [result.state_dict() for result in (named, own)]
    assert all(torch.allclose(states[0][name], states[1][name], rtol=1e-12, atol=1e-14) for name in states[0])
    assert own.content["test_metrics"]["off"] == pytest.approx(named.content["test_metrics"]["mae"], rel=1e-5)
    assert [epoch["val_metrics"]["off"] for epoch in own.epochs] == pytest.approx(
        [epoch["val_metrics"]["mae"] for epoch in named.epochs], rel=1e-5
    )
    assert own.content["test_accuracy"] is None
    assert own.content["test_loss"] == pytest.approx(named.content["test_loss"], rel=1e-9)


def test_what_is_no_function_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="loss is a str: give a function"):
        trained(monkeypatch, tmp_path, TREE, world="virtual", loss="squares")
    with pytest.raises(ConfigError, match="The metric 'off' is a int: give a function"):
        trained(monkeypatch, tmp_path, TREE, world="virtual", metrics={"off": 3})
