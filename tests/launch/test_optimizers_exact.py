"""Every optimiser trains the weights of a plain loop, wherever the network and the batch are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import plain_optimizers as plain
from support.plain_optimizers import Plain
from support.training import (
    EXACT,
    Case,
    hand_made_profile,
    largest_error,
    make_job,
    reference_data,
    reference_state,
    train_by_script,
)
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import pipar
from pipar.job.user_objects import UserObjects
from pipar.job.workload import Workload
from pipar.methods import Plan
from pipar.nn.parts import Part
from pipar.planner import replanner
from pipar.settings.config_file import config_from
from pipar.settings.optimizers import OPTIMIZERS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

Q = 5
SIZES = (23, 10, 7)  # a tail, one whole batch, and less than one
VISIBLE = 1e-6


def network(*, bias: bool = True) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(16, 6, bias=bias),
            nn.Tanh(),
            nn.Linear(6, 5, bias=bias),
            nn.Linear(5, 10, bias=bias),
        ).double()


def deeper(*, bias: bool = True) -> nn.Sequential:
    """Return a network whose first layer has weights, so that a device at P = 1 trains some; Q is 3."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        first = nn.Sequential(nn.Flatten(), nn.Linear(16, 6, bias=bias), nn.Tanh())
        return nn.Sequential(first, nn.Linear(6, 5, bias=bias), nn.Linear(5, 10, bias=bias)).double()


#: All pairs of P in {1, 2, Q} and N in {1, 3, 7}, one for each device; a single device has those of a row in turn.
SQUARE = [
    [Plan(1, 1), Plan(2, 3), Plan(3, 7)],
    [Plan(2, 7), Plan(3, 1), Plan(1, 3)],
    [Plan(3, 3), Plan(1, 7), Plan(2, 1)],
]
FIRST = (1, 2, 3), (1, 3, 7)


def case_of(name: str, keep: str, split_points: tuple[int, ...], micro_batches: tuple[int, ...], **more: Any) -> Case:
    return Case(
        "pipar",
        split_points,
        micro_batches,
        sizes=SIZES[: len(split_points)],
        momentum=keep,
        optimizer=(("name", name), *more.items()),
        epochs=3,
        batch_size=10,
    )


def class_of(name: str) -> type[torch.optim.Optimizer]:
    found: type[torch.optim.Optimizer] = getattr(torch.optim, OPTIMIZERS[name].class_name)
    return found


def plain_of(name: str, keep: str, **arguments: Any) -> Plain:
    given = {"lr": 0.01, "momentum": 0.9, **arguments} if name == "sgd" else arguments
    return Plain(lambda model: class_of(name)(model.parameters(), **given), keep == "keep")


def train(case: Case, model: nn.Module, script: Sequence[Sequence[Plan]] = ()) -> dict[str, torch.Tensor]:
    return train_by_script(case.workload(model), script)


def expected(case: Case, model: nn.Module, how: Plain) -> dict[str, torch.Tensor]:
    data = reference_data(case.workload(model))
    return plain.train(model, data, how)


@pytest.mark.parametrize("keep", ["reset", "keep"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_optimiser_trains_the_weights_of_a_plain_loop(
    name: str, keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = deeper(bias=name != "muon")  # which takes matrices only
    how = plain_of(name, keep)
    case = partial(case_of, name, keep)
    wanted = {many: expected(case((1,) * many, (1,) * many), model, how) for many in (1, 3)}
    for plans in SQUARE:  # each P with each N, by three devices at a time
        together = case(tuple(plan.split_point for plan in plans), tuple(plan.micro_batches for plan in plans))
        assert largest_error(train(together, model), wanted[3]) < EXACT
    monkeypatch.setattr(replanner, "NOTICED", -1.0)  # every round's links count as changed
    assert largest_error(train(case(*FIRST), model, SQUARE[1:]), wanted[3]) < EXACT
    for first, *later in SQUARE:  # and by one device, from round to round
        alone = case((first.split_point,), (first.micro_batches,))
        assert largest_error(train(alone, model, [[plan] for plan in later]), wanted[1]) < EXACT
    other = expected(case(*FIRST), model, plain_of("sgd", keep))
    assert largest_error(other, wanted[3]) > VISIBLE or name == "sgd"


ARGUMENTS: dict[str, dict[str, Any]] = {
    "adam": {"amsgrad": True, "betas": [0.8, 0.95]},
    "adamw": {"weight_decay": 0.3, "maximize": True},
    "rmsprop": {"momentum": 0.5, "centered": True},
    "sgd": {"nesterov": True, "momentum": 0.7},
    "adafactor": {"eps": [1e-9, 0.01], "d": 2.0},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_an_optimiser_have_the_meaning_that_they_have_in_torch(name: str) -> None:
    model, given = network(), ARGUMENTS[name]
    case = case_of(name, "keep", (2, 4), (3, 7), **given)
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    assert largest_error(train(case, model), expected(case, model, plain_of(name, "keep", **arguments))) < EXACT


SCHEDULES: dict[str, tuple[dict[str, Any], Any]] = {
    "cosine": ({"schedule": "cosine"}, lambda o, steps: lr_scheduler.CosineAnnealingLR(o, steps)),
    "onecycle": ({"schedule": "onecycle"}, lambda o, steps: lr_scheduler.OneCycleLR(o, 0.001, steps)),
    "step": (
        {"schedule": "step", "scheduling": {"step_size": 2}},
        lambda o, steps: lr_scheduler.StepLR(o, 2),  # noqa: ARG005
    ),
}


@pytest.mark.parametrize("keep", ["reset", "keep"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_is_followed_on_both_sides_over_rounds_and_other_plans(
    schedule: str, keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, make = SCHEDULES[schedule]
    case, model = case_of("adamw", keep, (2, 4, Q), (3, 7, 1), **given), network()
    how = replace(plain_of("adamw", keep), schedule=make)
    monkeypatch.setattr(replanner, "NOTICED", -1.0)
    script = [[Plan(4, 3), Plan(Q, 1), Plan(2, 7)], [Plan(1, 7), Plan(2, 3), Plan(3, 1)]]
    wanted = expected(case, model, how)
    assert largest_error(train(case, model, script), wanted) < EXACT
    assert largest_error(expected(case, model, replace(how, schedule=None)), wanted) > VISIBLE


def test_groups_have_settings_of_their_own() -> None:
    groups = [{"match": ["4.*"], "learning_rate": 0.02, "betas": [0.5, 0.9]}]
    given = {"groups": groups, "decay_norms_and_biases": False, "weight_decay": 0.5, "schedule": "cosine"}
    case, model = case_of("adamw", "keep", (2, 4, Q), (3, 7, 1), **given), network()

    def make(model: nn.Module) -> torch.optim.Optimizer:
        weights = dict(model.named_parameters())
        own = {"lr": 0.02, "betas": (0.5, 0.9)}
        return torch.optim.AdamW(
            [
                {"params": [weights["1.weight"], weights["3.weight"]]},
                {"params": [weights["1.bias"], weights["3.bias"]], "weight_decay": 0.0},
                {"params": [weights["4.weight"]], **own},
                {"params": [weights["4.bias"]], **own, "weight_decay": 0.0},
            ],
            weight_decay=0.5,
        )

    how = Plain(make, keep=True, schedule=lambda o, steps: lr_scheduler.CosineAnnealingLR(o, steps))
    assert largest_error(train(case, model), expected(case, model, how)) < EXACT


CLIPPED: dict[str, dict[str, Any]] = {
    "clip_norm": {"clip_norm": 0.3},
    "cosine": {"clip_norm": 0.3, "schedule": "cosine"},
}


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("given", CLIPPED)
def test_gradients_are_clipped_by_the_norm_of_the_whole_network(
    given: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, model = case_of(name, "keep", (2, 4, Q), (3, 7, 1), **CLIPPED[given]), network()
    how = replace(plain_of(name, "keep"), clip_norm=0.3)
    if "schedule" in CLIPPED[given]:
        how = replace(how, schedule=lambda o, steps: lr_scheduler.CosineAnnealingLR(o, steps))
    wanted = expected(case, model, how)
    assert largest_error(train(case, model), wanted) < EXACT
    monkeypatch.setattr(replanner, "NOTICED", -1.0)
    script = [[Plan(4, 3), Plan(Q, 1), Plan(2, 7)], [Plan(1, 7), Plan(2, 3), Plan(3, 1)]]
    assert largest_error(train(case, model, script), wanted) < EXACT
    assert largest_error(expected(case, model, replace(how, clip_norm=None)), wanted) > VISIBLE


def test_the_gradient_of_a_proximal_term_is_clipped_too() -> None:
    case = case_of("sgd", "reset", (2, 4, Q), (3, 7, 1), clip_norm=0.3)
    case = replace(case, aggregator="fedprox", aggregation=(("proximal", 3.0),))
    how = replace(plain_of("sgd", "reset"), clip_norm=0.3, proximal=3.0)
    assert largest_error(train(case, network()), expected(case, network(), how)) < EXACT


def sides(model: nn.Module) -> list[list[nn.Parameter]]:
    return [list(model[:2].parameters()), list(model[2:].parameters())]  # type: ignore[index]


def test_each_side_can_clip_by_its_own_norm() -> None:
    case, model = case_of("sgd", "keep", (2, 2, 2), (3, 7, 1), clip_norm=0.1, clip="side"), network()
    how = replace(plain_of("sgd", "keep"), clip_norm=0.1, clip_sides=sides)
    assert largest_error(train(case, model), expected(case, model, how)) < EXACT
    assert make_job(case.workload(model)).equivalence == "statistical"
    across = case_of("sgd", "keep", (2, 2, 2), (3, 7, 1), clip_norm=0.1)
    assert make_job(across.workload(model)).equivalence == "exact"


@pytest.mark.parametrize("method", ["fl", "sfl"])
def test_every_method_trains_with_clipping_that_it_allows(method: str) -> None:
    case = replace(case_of("adamw", "keep", (2, 2, 2), (1,), clip_norm=0.1), method=method)
    how = replace(plain_of("adamw", "keep"), clip_norm=0.1)
    assert largest_error(train(case, network()), expected(case, network(), how)) < EXACT


def test_sfl2_of_one_device_trains_with_clipping_by_side() -> None:
    case = replace(case_of("adamw", "keep", (2,), (1,), clip_norm=0.1, clip="side"), method="sfl2")
    how = replace(plain_of("adamw", "keep"), clip_norm=0.1, clip_sides=sides)
    assert largest_error(train(case, network()), expected(case, network(), how)) < EXACT


def test_in_sl_the_shared_model_has_the_learning_rate_of_the_device_that_trains_it() -> None:
    more = {"clip_norm": 0.1, "clip": "side", "schedule": "linear"}
    case, model = replace(case_of("adamw", "reset", (2, 2, 2), (1,), **more), method="sl"), network()
    how = replace(plain_of("adamw", "keep"), clip_norm=0.1, clip_sides=sides)
    how = replace(how, schedule=lambda made, steps: lr_scheduler.LinearLR(made, 1.0, 0.0, steps))
    data = reference_data(case.workload(model))
    found, given = train(case, model), plain.train_in_turn(model, data, how, sides)
    assert largest_error(found, given) < EXACT
    assert largest_error(found, plain.train_in_turn(model, data, replace(how, schedule=None), sides)) > VISIBLE


def test_state_that_is_lost_on_the_way_would_be_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    case, model = case_of("adamw", "keep", (2, 2, 2), (3,)), network()
    monkeypatch.setattr(replanner, "NOTICED", -1.0)
    monkeypatch.setattr(Part, "receive_state", lambda *_: None)
    script = [[Plan(4, 3)] * 3, [Plan(1, 3)] * 3]
    assert largest_error(train(case, model, script), expected(case, model, plain_of("adamw", "keep"))) > VISIBLE


@pytest.mark.parametrize("keep", ["reset", "keep"])
def test_processes_train_with_adamw_a_schedule_and_clipping_to_the_bits_of_virtual_time(
    keep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    more = {"schedule": "cosine", "warmup": 2, "clip_norm": 0.5, "decay_norms_and_biases": False}
    case = replace(case_of("adamw", keep, (1, 3, Q), (3, 7, 1), **more), even=True)
    workload, file = case.workload(), tmp_path / "profile.json"
    hand_made_profile(workload.build_model(), workload.samples.input_shape, case.dtype).save(file)
    settings = [f'server.profile="{file}"', f'devices.profile="{file}"']
    real, virtual = (pipar.run(case.tree(), world=world, settings=settings) for world in ("real", "virtual"))

    def make(model: nn.Module) -> torch.optim.Optimizer:
        matrices, others = ([w for w in model.parameters() if (w.ndim > 1) is side] for side in (True, False))
        return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}])

    def schedule(optimizer: torch.optim.Optimizer, steps: int) -> lr_scheduler.LRScheduler:
        first = lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 2)
        return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.CosineAnnealingLR(optimizer, steps - 2)], [2])

    how = Plain(make, keep == "keep", schedule, clip_norm=0.5)
    wanted = plain.train(workload.build_model(), reference_data(workload), how)
    state = real.state_dict()
    assert largest_error({name: state[name] for name in wanted}, wanted) < EXACT
    assert real.content["weights_sha256"] == virtual.content["weights_sha256"]
    assert real.content["equivalence"] == "exact"


# --- methods whose devices share a server-side model


@pytest.mark.parametrize("keep", ["reset", "keep"])
@pytest.mark.parametrize("method", ["sl", "sfl2"])
def test_methods_that_share_a_model_train_the_weights_of_their_definition_with_adamw(method: str, keep: str) -> None:
    case = replace(case_of("adamw", keep, (2, 2, 2), (1,)), method=method)
    wanted = reference_state(case, network(), make=torch.optim.AdamW)
    assert largest_error(train(case, network()), wanted) < EXACT


# --- with a loss that counts tokens


def spoken(samples: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return sequences of tokens, and the classes of those that count."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, (samples, 4), generator=draw)
    wanted = torch.randint(5, (samples, 4), generator=draw)
    wanted[torch.rand(wanted.shape, generator=draw) < 0.4] = -100
    wanted[:, 0] = 1
    return list(zip(tokens, wanted, strict=True))


def over_tokens(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


@pytest.mark.usefixtures("measured_at_once")
def test_processes_train_with_adamw_a_schedule_clipping_and_a_loss_that_counts_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).double()
    case = case_of("adamw", "keep", (1, 2, 4), (3, 7, 1), schedule="cosine", clip_norm=0.5)
    case = replace(case, even=True, task=(("loss", "next_token"),))
    datasets = [spoken(size, seed) for seed, size in enumerate(case.sizes)]
    tree = {key: value for key, value in case.tree().items() if key != "data"}
    real, virtual = (pipar.run(tree, model=model, datasets=datasets, world=world) for world in ("real", "virtual"))
    config = config_from(tree)
    workload = Workload(config, UserObjects.of(config, model, datasets, None, None))
    how = replace(plain_of("adamw", "keep"), clip_norm=0.5, loss=over_tokens)
    how = replace(how, schedule=lambda o, steps: lr_scheduler.CosineAnnealingLR(o, steps))
    wanted = plain.train(workload.build_model(), reference_data(workload), how)
    state = real.state_dict()
    assert largest_error({name: state[name] for name in wanted}, wanted) < EXACT
    assert real.content["weights_sha256"] == virtual.content["weights_sha256"]
    assert real.content["equivalence"] == "exact"
