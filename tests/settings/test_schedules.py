"""Schedules have the values of torch's own, at every step and on both sides of a cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from pipar.errors import ConfigError
from pipar.execution.schedule import StepCount, count_steps
from pipar.settings.schedules import SCHEDULES, Schedule

STEPS = 40


def torch_values(make: Any, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    schedule, found = make(optimizer), []
    for number in range(STEPS):
        found.append(dict(optimizer.param_groups[0]))
        optimizer.step()
        if number < STEPS - 1:
            schedule.step()
    return found


CASES: dict[str, tuple[Schedule, Any]] = {
    "step": (Schedule("step", {"step_size": 7, "gamma": 0.3}), lambda o: lr_scheduler.StepLR(o, 7, 0.3)),
    "exponential": (Schedule("exponential", {"gamma": 0.9}), lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
    "linear": (Schedule("linear"), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, STEPS)),
    "linear, shorter": (
        Schedule("linear", {"end_factor": 0.2, "steps": 11}),
        lambda o: lr_scheduler.LinearLR(o, 1.0, 0.2, 11),
    ),
    "cosine": (Schedule("cosine", {"eta_min": 0.001}), lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, 0.001)),
    "onecycle": (Schedule("onecycle"), lambda o: lr_scheduler.OneCycleLR(o, 0.1, STEPS)),
    "onecycle, without momentum": (
        Schedule("onecycle", {"cycle_momentum": False, "pct_start": 0.5, "div_factor": 10.0}),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, STEPS, pct_start=0.5, div_factor=10.0, cycle_momentum=False),
    ),
    "warm-up": (
        Schedule("cosine", warmup=8),
        lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LinearLR(o, 1 / 8, 1.0, 8), lr_scheduler.CosineAnnealingLR(o, STEPS - 8)],
            [8],
        ),
    ),
}


@pytest.mark.parametrize("gamma", [1.5, 2, 1e20])
def test_a_rate_that_grows_without_end_stays_a_number(gamma: float) -> None:
    growing = Schedule("exponential", {"gamma": gamma})
    assert growing.group({"lr": 0.1}, 10**9, 10**9)["lr"] == pytest.approx(1e29)
    step = Schedule("step", {"gamma": gamma, "step_size": 1})
    assert step.group({"lr": 0.1}, 1, 10**9)["lr"] == pytest.approx(0.1 * gamma)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR's own
def test_values_are_those_of_torch(case: str, kind: Any) -> None:
    ours, theirs = CASES[case]
    momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind([nn.Parameter(torch.zeros(1))], lr=0.1, **momentum)
    first = dict(optimizer.param_groups[0])
    for number, group in enumerate(torch_values(theirs, optimizer)):
        for key, value in ours.group(first, number, STEPS).items():
            assert value == pytest.approx(group[key], rel=1e-12, abs=1e-15), (number, key)


@pytest.mark.parametrize("case", CASES)
def test_a_schedule_keeps_its_last_value_after_its_end(case: str) -> None:
    schedule, first = CASES[case][0], {"lr": 0.1, "momentum": 0.9}
    if schedule.name not in ("step", "exponential"):  # which have none
        last = schedule.group(first, STEPS, STEPS)
        assert schedule.group(first, 10 * STEPS, STEPS) == last


def test_one_that_is_constant_changes_nothing() -> None:
    assert Schedule().is_constant
    assert not Schedule(warmup=1).is_constant
    assert Schedule().group({"lr": 0.1}, 7, 10) == {"lr": 0.1}


def halved(step: int, total: int) -> float:
    return 0.5 if step >= total // 2 else 1.0


def below_zero(*_: int) -> float:
    return -1.0


def test_a_function_of_the_user_gives_a_factor_of_the_step() -> None:
    schedule = Schedule(f"{__name__}:halved")
    assert [schedule.group({"lr": 0.1}, number, 4)["lr"] for number in range(4)] == [0.1, 0.1, 0.05, 0.05]
    with pytest.raises(ConfigError, match=r"below_zero' returned -1.0 for step 3 of 4: return a number from 0"):
        Schedule(f"{__name__}:below_zero").group({"lr": 0.1}, 3, 4)


def test_steps_are_counted_from_epoch_and_iteration_alone() -> None:
    assert count_steps(1, 1, epochs=5, samples=23, batch_size=10) == StepCount(0, 15)
    assert count_steps(3, 2, epochs=5, samples=23, batch_size=10) == StepCount(7, 15)
    assert count_steps(3, 4, epochs=5, samples=23, batch_size=10, passes=2) == StepCount(15, 30)
    assert count_steps(2, 1, epochs=5, samples=21, batch_size=10, batch_statistics=True) == StepCount(2, 10)


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        (Schedule("cosine", warmup=15), "optimizer.warmup = 15, but a takes only 15 steps"),
        (
            Schedule("onecycle", {"steps": 14}),
            "optimizer.scheduling.steps = 14, but a takes 15 steps",
        ),
        (Schedule("onecycle", {"steps": 10}, warmup=4), "optimizer.scheduling.steps = 10, but a takes 11 steps"),
    ],
)
def test_a_schedule_that_does_not_fit_the_training_is_refused(schedule: Schedule, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        schedule.check_length(15, "a")
    assert sentence in str(refused.value)


def test_a_schedule_as_long_as_the_training_is_accepted() -> None:
    for name in SCHEDULES:
        Schedule(name, {"steps": 15} if "steps" in SCHEDULES[name] else {}, warmup=14).check_length(29, "a")
