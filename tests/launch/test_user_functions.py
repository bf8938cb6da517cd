"""Functions that are passed in Python train and score as if they had names, also in real processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    return pipar.run(tree, **given(), **options)


def given() -> dict[str, Any]:
    sets = [data(21, 1), data(13, 2)]
    return {"model": network(), "datasets": sets, "validation": data(9, 3), "test": data(9, 4)}


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


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    decayed, others = ([one for _, one in named if (one.ndim > 1) is wide] for wide in (True, False))
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.02, weight_decay=0.3)


@pytest.mark.parametrize("world", ["virtual", "real"])
def test_an_optimizer_of_ones_own_trains_its_groups_as_named_ones_are_trained(
    world: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    named = {"name": "adamw", "learning_rate": 0.02, "weight_decay": 0.3, "decay_norms_and_biases": False}
    kept = {"schedule": "cosine", "clip_norm": 0.5, "state_at_aggregation": "keep"}
    task = {"loss": "mse"}
    expected = trained(monkeypatch, tmp_path, {**TREE, "task": task, "optimizer": named | kept}, world="virtual")
    own = trained(monkeypatch, tmp_path, {**TREE, "task": task, "optimizer": kept}, world=world, optimizer=adamw)
    states = [result.state_dict() for result in (expected, own)]
    assert all(torch.allclose(states[0][name], states[1][name], rtol=1e-12, atol=1e-14) for name in states[0])
    assert own.content["equivalence"] == "exact"
    assert pipar.load_config(own.folder / "config.toml").optimizer.factory == "own:adamw"


def test_classes_and_partial_functions_make_optimizers_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    tree, rate = {**TREE, "task": {"loss": "mse"}}, {"learning_rate": 0.05}
    named = trained(monkeypatch, tmp_path, {**tree, "optimizer": {"name": "rmsprop", **rate}}, world="virtual")
    own = partial(torch.optim.RMSprop, lr=0.05)
    both = pipar.compare(tree, methods=["fl", "pipar"], world="virtual", optimizer=own, **given())
    assert len({result.content["weights_sha256"] for result in (named, both["pipar"])}) == 1
    fl, pipelined = (both[method].state_dict() for method in ("fl", "pipar"))
    assert all(torch.allclose(fl[name], pipelined[name], rtol=1e-12, atol=1e-14) for name in fl)


def test_plans_count_what_an_optimizer_of_ones_own_keeps() -> None:
    tree = {**TREE, "task": {"loss": "mse"}}
    plans = partial(pipar.plan, tree, model=network(), datasets=given()["datasets"])
    needed = [plans(optimizer=own).frame()["needed_bytes"].max() for own in (torch.optim.SGD, torch.optim.Adam)]
    assert needed[0] < needed[1]


def test_a_run_without_mathematics_takes_functions_for_a_named_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path))
    data = {"name": "synthetic", "shape": [1, 8, 8], "samples_per_device": 16, "validation": 0, "test": 0}
    tree = {**{key: TREE[key] for key in ("run", "server", "devices")}, "data": data}
    run: Callable[..., pipar.Result] = partial(pipar.run, tree, world="timing-only")
    assert len(run(optimizer=adamw).epochs) == len(run(loss=lambda a, b: (a[:, 0] - b).abs().mean()).epochs) == 2


def test_what_is_no_function_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="loss is a str: give a function"):
        trained(monkeypatch, tmp_path, TREE, world="virtual", loss="squares")
    with pytest.raises(ConfigError, match="The metric 'off' is a int: give a function"):
        trained(monkeypatch, tmp_path, TREE, world="virtual", metrics={"off": 3})
    with pytest.raises(ConfigError, match=r"optimizer is a SGD: give a function .* as in lambda named: torch\.optim"):
        trained(monkeypatch, tmp_path, TREE, world="virtual", optimizer=torch.optim.SGD(network().parameters()))
    with pytest.raises(ConfigError, match=r"loss is the class MSELoss: give an object of it, as in MSELoss\(\)"):
        trained(monkeypatch, tmp_path, TREE, world="virtual", loss=torch.nn.MSELoss)
    with pytest.raises(ConfigError, match="metrics is a list: give functions by name"):
        trained(monkeypatch, tmp_path, TREE, world="virtual", metrics=["f1"])
    named = {**TREE, "optimizer": {"learning_rate": 0.1}}
    with pytest.raises(
        ConfigError, match=r"optimizer\.learning_rate is given with a function .* give only one of them"
    ):
        trained(monkeypatch, tmp_path, named, world="virtual", optimizer=adamw)


def test_what_is_no_list_of_functions_is_refused() -> None:
    run: Any = pipar.run
    with pytest.raises(ConfigError, match="callbacks is a function: give a list of functions"):
        run(callbacks=print)
    with pytest.raises(ConfigError, match="callbacks has a int: give functions"):
        run(callbacks=[3])
    with pytest.raises(ConfigError, match=r"settings is one string: .* settings=\['run.epochs=1'\]"):
        run(settings="run.epochs=1")
