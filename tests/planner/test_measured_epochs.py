"""Measured epochs outweigh predictions, changes gain more than epochs scatter, and plans come to rest."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pipar.methods import Plan
from pipar.planner.background_search import NewPlans, change_text
from pipar.planner.measured_epochs import MeasuredEpochs

Q = 4
SPLIT, OTHER, WHOLE = {"pi": Plan(2, 4)}, {"pi": Plan(3, 3)}, {"pi": Plan(Q, 1)}


def after(*epochs: tuple[Mapping[str, Plan], float], scatter: float = 0.02, split: float = 1.0) -> MeasuredEpochs:
    measured = MeasuredEpochs(scatter=scatter, layers=Q, split=split)
    for plans, seconds in epochs:
        measured = measured.with_epoch(plans, seconds)
    return measured


def test_a_plan_that_was_measured_counts_by_its_epochs_whatever_is_predicted() -> None:
    measured = after((SPLIT, 2.0), (SPLIT, 2.1), (SPLIT, 9.0))
    assert measured.expected_s(SPLIT, lambda _: 1.0) == 2.1
    assert measured.expected_s(OTHER, lambda _: 1.0) == 2.1  # such plans take longer than predicted
    assert measured.expected_s(WHOLE, lambda _: 1.5) == 1.5  # which says nothing about others


def test_what_delays_whole_networks_also_delays_a_pipeline() -> None:
    measured = after((WHOLE, 1.3))
    assert measured.expected_s(SPLIT, lambda _: 1.0) == pytest.approx(1.3)


def test_a_pipeline_that_was_never_measured_counts_more_than_predicted_between_real_processes() -> None:
    assert after(split=1.1).expected_s(SPLIT, lambda _: 1.0) == pytest.approx(1.1)
    assert after(split=1.1).expected_s(WHOLE, lambda _: 1.0) == 1.0


def test_epochs_of_devices_that_were_swapped_for_as_many_others_say_nothing_about_predictions() -> None:
    here = {"pi": Plan(2, 4), "joined": Plan(2, 4)}

    def predict(plans: Mapping[str, Plan]) -> float:
        assert plans.keys() == here.keys()
        return 1.0

    measured = after(({"pi": Plan(2, 4), "left": Plan(2, 4)}, 2.0))
    assert measured.expected_s(here, predict) == 1.0
    assert measured.with_epoch(here | {"pi": Plan(3, 3)}, 1.2).expected_s(here, predict) == 1.2


def test_plans_that_are_predicted_to_take_no_time_do_not_correct_the_predictions_of_others() -> None:
    assert after((SPLIT, 2.0)).expected_s(OTHER, lambda plans: float(plans == OTHER)) == 1.0


def test_a_plan_is_left_for_one_that_was_measured_to_be_better_and_not_taken_again() -> None:
    measured = after((WHOLE, 1.0), (WHOLE, 1.02), (SPLIT, 1.2), (SPLIT, 1.22))
    assert measured.better_than(SPLIT) == WHOLE
    assert measured.better_than(WHOLE) is None


def test_plans_stay_if_others_were_better_by_no_more_than_epochs_scatter() -> None:
    assert after((WHOLE, 1.0), (SPLIT, 1.02)).better_than(SPLIT) is None
    assert after((WHOLE, 1.0), (SPLIT, 1.02), scatter=0.001).better_than(SPLIT) == WHOLE


def test_each_change_of_plans_doubles_what_the_next_one_has_to_gain() -> None:
    measured = after((SPLIT, 1.0))
    assert measured.least_gain(SPLIT, OTHER, 0.003) == pytest.approx(0.04)
    assert measured.with_change().least_gain(SPLIT, OTHER, 0.003) == pytest.approx(0.08)
    assert measured.with_change().with_change().least_gain(SPLIT, OTHER, 0.003) == pytest.approx(0.16)
    assert measured.with_change().forgotten().least_gain(SPLIT, OTHER, 0.003) == pytest.approx(0.04)


def test_scatter_is_learned_from_epochs_with_the_same_plans() -> None:
    steady = after(*[(SPLIT, 1.0)] * 10, scatter=0.03)
    assert steady.scatter < 0.02
    restless = after(*[(SPLIT, seconds) for seconds in (1.0, 1.2) * 5], scatter=0.03)
    assert restless.scatter > 0.08
    assert after(*[(SPLIT, 1.0), (OTHER, 2.0)] * 3, scatter=0.03).scatter < 0.03  # plans differ, epochs do not


def test_when_epochs_have_become_longer_other_plans_are_as_unknown_as_before() -> None:
    measured = after((WHOLE, 1.0), (SPLIT, 0.9), (SPLIT, 0.9), (SPLIT, 0.9))
    assert measured.with_epoch(SPLIT, 2.0).measured_s(WHOLE) == 1.0  # once may be chance
    assert measured.with_epoch(SPLIT, 2.0).with_epoch(SPLIT, 2.0).measured_s(WHOLE) is None


def test_a_change_is_told_with_its_plans_and_its_gain() -> None:
    assert change_text(SPLIT, NewPlans(OTHER, 0.123)) == "P=2 N=4 -> P=3 N=3, 12 % less predicted"
    assert change_text(SPLIT, NewPlans(OTHER, 0.05, is_measured=True)) == "P=2 N=4 -> P=3 N=3, 5 % less measured"
    assert change_text(SPLIT, NewPlans(SPLIT, 0.05)) == ""
    many = {f"pi-{number}": Plan(1, number) for number in range(1, 5)}
    text = change_text(many, NewPlans(dict.fromkeys(many, Plan(2, 2)), 0.2))
    assert text == "P=1 N=1 -> P=2 N=2, P=1 N=2 -> P=2 N=2, 2 other changes, 20 % less predicted"


def test_the_first_epoch_after_a_change_counts_only_until_there_is_a_second() -> None:
    real = MeasuredEpochs(scatter=0.02, layers=Q, first_epochs=0.9)
    for plans, seconds in ((WHOLE, 1.3), (WHOLE, 1.0), (WHOLE, 1.0), (SPLIT, 1.2)):
        real = real.with_epoch(plans, seconds)
    assert real.measured_s(WHOLE) == 1.0
    assert real.scatter < 0.02
    assert real.measured_s(SPLIT) == pytest.approx(1.08)
    assert real.better_than(SPLIT) is None
    assert real.with_epoch(SPLIT, 0.9).measured_s(SPLIT) == 0.9
    again = real.with_epoch(SPLIT, 1.2)
    assert again.measured_s(SPLIT) == 1.2
    assert again.better_than(SPLIT) == WHOLE
    assert again.with_epoch(WHOLE, 9.0).with_epoch(WHOLE, 1.0).seconds_of(WHOLE) == 1.0


def test_a_first_epoch_that_takes_far_longer_than_other_plans_counts_at_once() -> None:
    real = MeasuredEpochs(scatter=0.02, layers=Q, first_epochs=0.9)
    for plans, seconds in ((WHOLE, 1.0), (WHOLE, 1.0), (SPLIT, 2.0)):
        real = real.with_epoch(plans, seconds)
    assert real.better_than(SPLIT) == WHOLE
