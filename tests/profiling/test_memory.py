"""The memory of a plan is counted as the device uses it, and the largest plan that fits is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipar.methods import Plan
from pipar.profiling.memory import BASE_BYTES, fitting_window, largest_prefix, training_bytes
from pipar.profiling.profile import LayerProfile, Profile


def layer(name: str, parameters: int, saved: int, working: int) -> LayerProfile:
    return LayerProfile(name, (0.1,), (0.2,), 10, parameters, saved_bytes=saved, working_bytes=working)


PROFILE = Profile(
    "small", "float32", (100,), (layer("a", 1000, 50, 70), layer("b", 4000, 20, 30), layer("c", 200, 5, 90))
)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (Plan(1, 1), 4 * 1000 + 100 * 50 + 100 * 70),
        (Plan(1, 4), 4 * 1000 + 100 * 50 + 25 * 70),
        (Plan(1, 4, window=1), 4 * 1000 + 25 * 50 + 25 * 70),
        (Plan(1, 4, window=3), 4 * 1000 + 75 * 50 + 25 * 70),
        (Plan(1, 4, window=9), 4 * 1000 + 100 * 50 + 25 * 70),
        (Plan(2, 4, window=1), 3 * 5000 + 4000 + 25 * 70 + 25 * 70),
        (Plan(1, 3, window=1), 4 * 1000 + 34 * 50 + 34 * 70),
        (Plan(3, 1), 3 * 5200 + 4000 + 100 * 75 + 100 * 90),
        (Plan(3, 4, window=1), 3 * 5200 + 4000 + 100 * 75 + 100 * 90),
    ],
    ids=str,
)
def test_a_plan_needs_three_times_the_weights_one_gradient_and_the_micro_batches_in_flight(
    plan: Plan, expected: int
) -> None:
    assert training_bytes(PROFILE, plan, 100) == BASE_BYTES + expected


def test_the_model_that_changes_are_relative_to_counts_once_more() -> None:
    assert training_bytes(PROFILE, Plan(2, 4), 100, keeps_base=True) == training_bytes(PROFILE, Plan(2, 4), 100) + 5000
    enough = training_bytes(PROFILE, Plan(1, 4), 100)
    assert fitting_window(PROFILE, 1, 4, 100, enough) == 0
    assert fitting_window(PROFILE, 1, 4, 100, enough, keeps_base=True) == 3


def test_with_batch_statistics_there_are_fewer_and_larger_micro_batches() -> None:
    assert training_bytes(PROFILE, Plan(1, 100, 1), 100) == BASE_BYTES + 4000 + 1 * 120
    assert training_bytes(PROFILE, Plan(1, 100, 1), 100, batch_statistics=True) == BASE_BYTES + 4000 + 2 * 120


def test_the_window_is_the_largest_that_fits_and_0_if_all_fits() -> None:
    def window(memory_bytes: int) -> int | None:
        return fitting_window(PROFILE, 1, 4, 100, memory_bytes)

    needs = {window: training_bytes(PROFILE, Plan(1, 4, window), 100) for window in (0, 1, 2, 3)}
    assert window(needs[0]) == 0
    assert window(needs[0] - 1) == 3
    assert window(needs[3] - 1) == 2
    assert window(needs[1]) == 1
    assert window(needs[1] - 1) is None


def test_the_whole_network_needs_the_whole_batch_for_any_n() -> None:
    needs = training_bytes(PROFILE, Plan(3, 1), 100)
    assert fitting_window(PROFILE, 3, 1, 100, needs) == 0
    assert fitting_window(PROFILE, 3, 1, 100, needs - 1) is None
    assert fitting_window(PROFILE, 3, 50, 100, needs - 1) is None


def test_the_largest_prefix_is_the_most_layers_of_which_a_single_small_micro_batch_fits() -> None:
    def prefix(memory_bytes: int, profile: Profile = PROFILE) -> int:
        return largest_prefix(profile, 100, memory_bytes)

    whole, two, one = (training_bytes(PROFILE, plan, 100) for plan in (Plan(3, 1), Plan(2, 32, 1), Plan(1, 32, 1)))
    assert (prefix(whole), prefix(whole - 1)) == (3, 2)
    assert (prefix(two), prefix(two - 1)) == (2, 1)
    assert (prefix(one), prefix(one - 1)) == (1, 0)
    # A prefix is cut after its last layer, so its batch may be split into micro-batches.
    longer = replace(PROFILE, total_layers=9)
    assert prefix(whole - 1, longer) == 3


def test_every_value_that_the_optimiser_keeps_for_a_weight_counts() -> None:
    plan, adam = Plan(2, 4), replace(PROFILE, optimizer="adam", state_copies=2.0)
    assert training_bytes(adam, plan, 100) == training_bytes(PROFILE, plan, 100) + 5000
    assert training_bytes(replace(PROFILE, state_copies=0.1), plan, 100) == training_bytes(PROFILE, plan, 100) - 4500
