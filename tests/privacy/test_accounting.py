"""Epsilon equals what other libraries compute for the same releases, and no budget is exceeded."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipar.privacy import accounting
from pipar.privacy.accounting import budget, cost, epsilon, epsilon_after, smallest_multiplier

DELTA = 1e-5


def library(part: str = "") -> Any:
    """Return dp-accounting or a part of it; it takes seconds to import, which most runs of tests do without."""
    return import_module(f"dp_accounting{part}")


def event(multiplier: float, releases: int = 1) -> Any:
    """Return the releases in the form that dp-accounting's other accountants take."""
    one = library().GaussianDpEvent(multiplier / accounting.SENSITIVITY)
    return library().SelfComposedDpEvent(one, releases)


def renyi_epsilon(releases: Any) -> float:
    """Return epsilon of some releases by dp-accounting's Rényi accountant."""
    return float(library(".rdp").RdpAccountant().compose(releases).get_epsilon(DELTA))


def analytic_gaussian(multiplier: float, delta: float) -> float:
    """Return epsilon of one Gaussian mechanism by Balle and Wang's theorem 8, implemented independently."""

    def phi(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    def delta_of(eps: float) -> float:
        a, b = 1 / (2 * multiplier), eps * multiplier
        return phi(a - b) - math.exp(eps) * phi(-a - b)

    low, high = 0.0, 500.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
    return high


# --- published numbers: neighbours that differ by one added record have half our sensitivity, so our 2 is their 1


@pytest.mark.parametrize(
    ("releases", "sensitivity", "deviation"), [(1, 1.0, 1 / 3), (25, 6.0, 10.0)], ids=["base", "varying"]
)
def test_the_smallest_noise_is_that_of_the_librarys_examples(
    releases: int, sensitivity: float, deviation: float
) -> None:
    """dp_accounting/pld/accountant_test.py, test_get_smallest_gaussian_noise: epsilon 1, delta 0.78760074."""
    clip = sensitivity / 2
    assert clip * smallest_multiplier(releases, 1.0, 0.78760074) == pytest.approx(deviation, abs=1e-7)


def test_epsilon_of_three_releases_is_that_of_the_librarys_example() -> None:
    """dp_accounting/pld/pld_privacy_accountant_test.py, test_gaussian_basic: multiplier sqrt(3), three times."""
    assert epsilon_after(2 * math.sqrt(3), 3, 0.126936) == pytest.approx(1.0, abs=1e-5)


def test_releases_as_the_accountants_take_them_have_the_epsilon_of_opacus() -> None:
    """opacus/tests/accountants_test.py, test_rdp_accountant: multiplier 1.5, sampling 0.04, 2250 steps, delta 1e-5."""
    steps = library().SelfComposedDpEvent(library().PoissonSampledDpEvent(0.04, event(3.0)), 2250)
    assert renyi_epsilon(steps) == pytest.approx(7.32911117143, abs=1e-3)


# --- by the definition


@pytest.mark.parametrize("multiplier", [0.7, 2.0, 11.0, 60.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-9])
def test_one_release_is_the_analytic_gaussian_mechanism_of_twice_the_clip(multiplier: float, delta: float) -> None:
    assert epsilon_after(multiplier, 1, delta) == pytest.approx(analytic_gaussian(multiplier / 2, delta), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("multiplier", "releases"), [(2.0, 1), pytest.param(8.0, 100, marks=pytest.mark.slow)])
def test_many_releases_have_the_epsilon_of_privacy_loss_distributions(multiplier: float, releases: int) -> None:
    by_distribution = library(".pld").PLDAccountant().compose(event(multiplier, releases)).get_epsilon(DELTA)
    assert epsilon_after(multiplier, releases, DELTA) == pytest.approx(by_distribution, rel=1e-6)


@pytest.mark.parametrize(("multiplier", "releases"), [(2.0, 1), (8.0, 100), (30.0, 1000), (0.5, 10)])
def test_renyi_accounting_is_an_upper_bound_that_is_not_far(multiplier: float, releases: int) -> None:
    exact = epsilon_after(multiplier, releases, DELTA)
    assert exact <= renyi_epsilon(event(multiplier, releases)) <= 1.1 * exact


def test_releases_of_different_noise_add_up() -> None:
    together = library().ComposedDpEvent([event(3.0, 4), event(7.0, 2)])
    exact = epsilon(4 * cost(3.0) + 2 * cost(7.0), DELTA)
    assert exact <= renyi_epsilon(together) <= 1.1 * exact
    assert epsilon(6 * cost(5.0), DELTA) == epsilon_after(5.0, 6, DELTA)


def test_nothing_sent_is_nothing_spent() -> None:
    assert epsilon(0.0, DELTA) == 0.0


targets = st.floats(0.01, 100)
deltas = st.sampled_from([1e-2, 1e-5, 1e-10])


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.floats(0.1, 300), targets, deltas)
def test_the_most_releases_of_a_budget_are_within_its_target_and_one_more_is_not(
    multiplier: float, target: float, delta: float
) -> None:
    limit, each = budget(target, delta), cost(multiplier)
    count = int(limit / each)
    count -= count * each > limit  # a quotient that was rounded up
    assert epsilon_after(multiplier, count, delta) <= target
    assert epsilon_after(multiplier, count + 1, delta) > target * (1 - 1e-9)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 10_000), targets, deltas)
def test_the_smallest_multiplier_is_within_the_target_and_a_smaller_one_is_not(
    releases: int, target: float, delta: float
) -> None:
    multiplier = smallest_multiplier(releases, target, delta)
    assert epsilon_after(multiplier, releases, delta) <= target
    assert epsilon_after(multiplier * (1 - 1e-6), releases, delta) > target
    assert releases * cost(multiplier) <= budget(target, delta) < (releases + 1) * cost(multiplier)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(targets, deltas)
def test_a_budget_is_never_worth_more_than_its_target(target: float, delta: float) -> None:
    assert epsilon(budget(target, delta), delta) <= target


def test_without_the_package_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "find_spec", lambda _: None)
    with pytest.raises(accounting.NoAccountantError, match=r"pip install 'pipar\[privacy\]'"):
        accounting.require()
