"""The optimisers that a configuration may name are those of torch, and a wrong one is refused in one sentence."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from pipar.errors import ConfigError
from pipar.execution.schedule import StepCount
from pipar.nn.optimizers import OptimizerSettings, PartOptimizer
from pipar.settings.config import Config, hints
from pipar.settings.config_file import config_from, dump_config, load_config, with_settings
from pipar.settings.optimizers import OPTIMIZERS, REFUSED, state_copies
from pipar.settings.schedules import Schedule
from pipar.settings.training_sections import OptimizerSection

#: Arguments that only choose how torch computes.
HOW = {"params", "lr", "self", "foreach", "fused", "capturable", "differentiable"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_arguments_and_defaults_are_those_of_torch(name: str) -> None:
    known = OPTIMIZERS[name]
    parameters = inspect.signature(getattr(torch.optim, known.class_name)).parameters
    assert set(known.arguments) == set(parameters) - HOW
    if name != "sgd":  # whose defaults are pipar's own
        assert known.learning_rate == parameters["lr"].default
        assert known.arguments == {key: parameters[key].default for key in known.arguments}


def test_every_optimiser_of_torch_is_known_or_refused() -> None:
    classes = {value for value in vars(torch.optim).values() if isinstance(value, type)}
    names = {one.__name__.lower() for one in classes if issubclass(one, torch.optim.Optimizer)} - {"optimizer"}
    assert names == set(OPTIMIZERS) | set(REFUSED)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adafactor"])
def test_values_that_are_kept_for_each_weight_are_those_that_torch_keeps(name: str) -> None:
    weight = nn.Parameter(torch.ones(64, 64))
    more: dict[str, Any] = {"adam": {"amsgrad": True}, "rmsprop": {"centered": True, "momentum": 0.5}}.get(name, {})
    kept = OptimizerSettings(name, arguments=more).layout("weight", weight).values()
    assert sum(shape.numel() for shape, _ in kept if shape.numel() > 2) / weight.numel() == state_copies(name, more)


@pytest.mark.parametrize(("name", "copies"), [("sgd", 1.0), ("rmsprop", 2.0)])
@pytest.mark.parametrize("warmup", [0, 3])
def test_a_cycle_of_momentum_gives_an_optimiser_momentum_from_its_first_step(
    name: str, copies: float, warmup: int
) -> None:
    weight = nn.Parameter(torch.ones(8))
    settings = OptimizerSettings(name, arguments={"momentum": 0.0}, schedule=Schedule("onecycle", warmup=warmup))
    steps = PartOptimizer(settings, {"weight": weight})
    for number in range(9):
        weight.grad = torch.ones(8)
        steps.step(StepCount(number, 9))
        assert {f"weight/{key}" for key in settings.layout("weight", weight)} == set(steps.state())
        assert steps.largest("momentum") >= 0.85
    section = OptimizerSection(name=name, momentum=0, schedule="onecycle")
    assert settings.state_copies(nn.Linear(2, 2)) == section.state_copies == copies


def test_a_key_that_is_not_given_has_the_default_of_the_optimiser() -> None:
    assert OptimizerSection() == OptimizerSection(name="sgd", learning_rate=0.01, momentum=0.9, weight_decay=0.0)
    adamw = OptimizerSection(name="adamw")
    assert (adamw.learning_rate, adamw.momentum, adamw.weight_decay) == (0.001, None, 0.01)
    assert OptimizerSection(name="rprop").arguments == {}
    assert OptimizerSection(name="adam", betas=[0.8, 0.9]).arguments == {"weight_decay": 0.0, "betas": (0.8, 0.9)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_configuration_with_any_optimiser_is_written_and_read_back(name: str, tmp_path: Any) -> None:
    config = config_from({"optimizer": {"name": name, "maximize": True} if name != "muon" else {"name": name}})
    file = tmp_path / "config.toml"
    file.write_text(dump_config(config))
    assert load_config(file) == config


@pytest.mark.parametrize(
    "section",
    [
        {"factory": "a:b", "schedule": "step", "scheduling": {"step_size": 3}},
        {"groups": [{"match": ["a.*", "b"], "learning_rate": 0.5, "nesterov": True}, {"match": ["c"]}]},
        {"name": "adam", "groups": [{"match": ["a"], "betas": [0.8, 0.9]}], "decay_norms_and_biases": False},
        {"schedule": "onecycle", "scheduling": {"pct_start": 0.5, "cycle_momentum": False}, "warmup": 4},
        {"schedule": "a:b", "clip_norm": 1.0, "clip": "side", "momentum_at_aggregation": "keep"},
    ],
    ids=str,
)
def test_a_configuration_with_any_settings_is_written_and_read_back(section: dict[str, Any], tmp_path: Any) -> None:
    config = config_from({"optimizer": section})
    file = tmp_path / "config.toml"
    file.write_text(dump_config(config))
    assert load_config(file) == config


def test_another_optimiser_by_a_setting_has_its_own_defaults() -> None:
    changed = with_settings(config_from({"optimizer": {"name": "adam"}}), ["optimizer.name=rmsprop"])
    assert changed.optimizer == OptimizerSection(name="rmsprop")


def test_the_former_name_of_a_key_is_accepted_with_a_hint() -> None:
    config = config_from({"optimizer": {"momentum_at_aggregation": "keep"}})
    assert config == config_from({"optimizer": {"state_at_aggregation": "keep"}})
    assert len(hints(config)) == 1
    assert with_settings(config, ["run.epochs=1"]).optimizer.state_at_aggregation == "keep"
    assert hints(Config()) == []


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"name": "adm"}, "optimizer.name = 'adm' is not known (did you mean 'adam'?); allowed are sgd, adam, adamw,"),
    ({"name": 5}, "optimizer.name = 5 is not text"),
    ({"name": "lbfgs"}, "optimizer.name = 'lbfgs' cannot be used: it evaluates the loss several times a step"),
    ({"name": "LBFGS"}, "optimizer.name = 'LBFGS' cannot be used"),
    ({"name": "sparseadam"}, "optimizer.name = 'sparseadam' cannot be used: it takes sparse gradients only"),
    ({"betas": [0.9, 0.99]}, "optimizer.betas = [0.9, 0.99] is not an argument of sgd: it has learning_rate,"),
    ({"lr": 0.1}, "optimizer.lr = 0.1 is not an argument of sgd (did you mean 'learning_rate'?): it has"),
    ({"name": "adam", "momentum": 0.9}, "optimizer.momentum = 0.9 is not an argument of adam"),
    ({"name": "adam", "beta": [0.9, 0.99]}, "is not an argument of adam (did you mean 'betas'?): it has"),
    ({"name": "adam", "betas": 0.9}, "optimizer.betas = 0.9 is not allowed: adam takes a list of 2 numbers."),
    ({"name": "adam", "betas": [0.9]}, "optimizer.betas = [0.9] is not allowed: adam takes a list of 2 numbers."),
    ({"name": "adam", "amsgrad": 1}, "optimizer.amsgrad = 1 is not allowed: adam takes true or false."),
    ({"name": "muon", "ns_steps": 5.5}, "optimizer.ns_steps = 5.5 is not allowed: muon takes a whole number."),
    ({"name": "adam", "eps": 10**400}, "is not allowed: adam takes a number."),
    ({"schedule": "exponential", "scheduling": {"gamma": 10**400}}, "it should be a number above 0"),
    ({"schedule": "onecycle", "scheduling": {"base_momentum": 0.0}}, "it should be a number above 0, below 1"),
    ({"name": "adam", "eps": "small"}, "optimizer.eps = 'small' is not allowed: adam takes a number."),
    ({"name": "rprop", "weight_decay": 0.1}, "optimizer.weight_decay = 0.1 is not an argument of rprop"),
    ({"name": "adam", "foreach": True}, "optimizer.foreach = True is not an argument of adam"),
    ({"factory": "a:b", "learning_rate": 0.1}, "optimizer.learning_rate is given with a function that makes"),
    ({"factory": "a:b", "name": "sgd"}, "optimizer.name is given with a function that makes"),
    (
        {"momentum_at_aggregation": "keep", "state_at_aggregation": "reset"},
        "optimizer.momentum_at_aggregation = 'keep' is the former name of optimizer.state_at_aggregation, which is",
    ),
    ({"state_at_aggregation": "drop"}, "optimizer.state_at_aggregation = 'drop' is not known; allowed are reset,"),
    ({"schedule": "cosin"}, "optimizer.schedule = 'cosin' is not known (did you mean 'cosine'?); allowed are"),
    ({"schedule": 3}, "optimizer.schedule = 3 is not known"),
    ({"schedule": "step"}, "optimizer.schedule = 'step' needs optimizer.scheduling.step_size: a whole number of steps"),
    ({"schedule": "exponential"}, "optimizer.schedule = 'exponential' needs optimizer.scheduling.gamma"),
    (
        {"schedule": "cosine", "scheduling": {"gamma": 0.1}},
        "optimizer.scheduling.gamma = 0.1 does not belong to the schedule 'cosine', whose parameters are",
    ),
    ({"scheduling": {"gamma": 0.1}}, "does not belong to the schedule 'constant', which has no parameters"),
    ({"schedule": "step", "scheduling": {"step_size": 0}}, "step_size = 0 is not allowed: it should be a whole number"),
    ({"schedule": "onecycle", "scheduling": {"pct_start": 1.5}}, "it should be a number from 0, below 1"),
    ({"scheduling": 5}, "optimizer.scheduling = 5 is not allowed: write [optimizer.scheduling] with"),
    ({"warmup": -1}, "optimizer.warmup = -1 is not allowed"),
    (
        {"name": "adagrad", "schedule": "onecycle"},
        "optimizer.schedule = 'onecycle' also changes momentum or betas, and adagrad has neither: set",
    ),
    ({"groups": [{"learning_rate": 0.1}]}, 'is not allowed: write [[optimizer.groups]] with match = ["head.*"]'),
    ({"groups": [{"match": []}]}, "is not allowed: write [[optimizer.groups]] with match"),
    ({"groups": [{"match": ["a"], "betas": [0.1, 0.2]}]}, "optimizer.betas = [0.1, 0.2] is not an argument of sgd"),
    ({"groups": [{"match": ["a"], "learning_rate": 0}]}, "optimizer.groups has learning_rate = 0: it should be"),
    ({"factory": "a:b", "groups": [{"match": ["a"]}]}, "optimizer.groups is given with a function that makes groups"),
]  # fmt: skip


TOGETHER: list[tuple[dict[str, Any], str]] = [
    (
        {"run": {"method": "sl"}, "optimizer": {"clip_norm": 1.0}},
        "needs a server-side model for each device, but in 'sl' all devices share one, which would have to wait",
    ),
    ({"run": {"method": "sfl2"}, "optimizer": {"clip_norm": 1.0}}, "write clip = 'side', or use fl, sfl or pipar."),
    (
        {"privacy": {"noise_multiplier": 1.0}, "optimizer": {"clip_norm": 1.0}},
        "devices would send the norms of their gradients without noise. Write 'side'.",
    ),
    ({"optimizer": {"clip_norm": 0}}, "optimizer.clip_norm = 0 is not allowed"),
    ({"optimizer": {"clip": "all"}}, "optimizer.clip = 'all' is not known; allowed are global, side."),
]


@pytest.mark.parametrize(("tree", "sentence"), TOGETHER)
def test_clipping_that_cannot_be_done_is_refused_in_one_sentence(tree: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_from(tree)
    assert sentence in str(refused.value)


def test_settings_that_differ_have_different_fingerprints() -> None:
    given: list[dict[str, Any]] = [
        {}, {"momentum": 0.8}, {"name": "adam"}, {"name": "adam", "betas": [0.8, 0.9]}, {"clip_norm": 1.0},
        {"schedule": "cosine"}, {"warmup": 3}, {"groups": [{"match": ["a"]}]}, {"factory": "a:b"},
        {"clip_norm": 1.0, "clip": "side"}, {"decay_norms_and_biases": False},
    ]  # fmt: skip
    prints = [OptimizerSection(**one).fingerprint for one in given]
    assert prints[0] == OptimizerSection(state_at_aggregation="keep").fingerprint == 0
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"learning_rate": 0.02}, {}),  # which the server tells
        ({"name": "adam", "eps": 1e-8, "amsgrad": False}, {"name": "adam"}),
        ({"name": "adamw", "weight_decay": 0.01}, {"name": "adamw"}),
        ({"name": "rmsprop", "momentum": 0}, {"name": "rmsprop"}),
        ({"schedule": "step", "scheduling": {"step_size": 3, "gamma": 0.1}},
         {"schedule": "step", "scheduling": {"step_size": 3}}),
        ({"clip": "side"}, {}),  # without clip_norm
    ],
)  # fmt: skip
def test_settings_that_train_alike_have_the_same_fingerprint(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert OptimizerSection(**one).fingerprint == OptimizerSection(**other).fingerprint


@pytest.mark.parametrize(("section", "sentence"), WRONG, ids=[str(one) for one, _ in WRONG])
def test_a_wrong_optimiser_is_refused_in_one_sentence(section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_from({"optimizer": section})
    assert sentence in str(refused.value)
    assert str(refused.value).endswith(".")
    assert "\n" not in str(refused.value)
