"""Epsilon is what others compute of the same releases, and no budget is exceeded."""

from __future__ import annotations

import math

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from pipar.privacy import accounting
from pipar.privacy.accounting import budget, cost, epsilon, epsilon_after, event, most_releases, smallest_multiplier

DELTA = 1e-5


def analytic_gaussian(multiplier: float, delta: float) -> float:
    """Return epsilon of one Gaussian mechanism by Balle and Wang's theorem 8, written down once more."""

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


def test_the_accountant_gives_the_published_epsilon_of_a_thousand_sampled_steps() -> None:
    """dp-accounting's own example: 1000 steps, sampling 0.01, multiplier 1, delta 1e-5.

    Neighbours by one added record have half of our sensitivity, so our release with noise 2 is theirs with 1.
    """
    step = dp_accounting.PoissonSampledDpEvent(0.01, event(2.0))
    composed = dp_accounting.SelfComposedDpEvent(step, 1000)
    assert RdpAccountant().compose(composed).get_epsilon(DELTA) == pytest.approx(2.1014, abs=1e-4)


@pytest.mark.parametrize("multiplier", [0.7, 2.0, 11.0, 60.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-9])
def test_one_release_is_the_analytic_gaussian_mechanism_of_twice_the_clip(multiplier: float, delta: float) -> None:
    assert epsilon_after(multiplier, 1, delta) == pytest.approx(analytic_gaussian(multiplier / 2, delta), rel=1e-9)


@pytest.mark.parametrize(("multiplier", "releases"), [(2.0, 1), pytest.param(8.0, 100, marks=pytest.mark.slow)])
def test_many_releases_are_what_privacy_loss_distributions_give(multiplier: float, releases: int) -> None:
    by_distribution = PLDAccountant().compose(event(multiplier, releases)).get_epsilon(DELTA)
    assert epsilon_after(multiplier, releases, DELTA) == pytest.approx(by_distribution, rel=1e-6)


@pytest.mark.parametrize(("multiplier", "releases"), [(2.0, 1), (8.0, 100), (30.0, 1000), (0.5, 10)])
def test_renyi_accounting_is_an_upper_bound_that_is_not_far(multiplier: float, releases: int) -> None:
    exact = epsilon_after(multiplier, releases, DELTA)
    assert exact <= RdpAccountant().compose(event(multiplier, releases)).get_epsilon(DELTA) <= 1.1 * exact


def test_releases_of_different_noise_add_up() -> None:
    together = dp_accounting.ComposedDpEvent([event(3.0, 4), event(7.0, 2)])
    exact = epsilon(4 * cost(3.0) + 2 * cost(7.0), DELTA)
    assert exact <= RdpAccountant().compose(together).get_epsilon(DELTA) <= 1.1 * exact
    assert epsilon(6 * cost(5.0), DELTA) == epsilon_after(5.0, 6, DELTA)


def test_nothing_sent_is_nothing_spent() -> None:
    assert epsilon(0.0, DELTA) == 0.0


targets = st.floats(0.01, 100)
deltas = st.sampled_from([1e-2, 1e-5, 1e-10])


@settings(max_examples=40, deadline=None)
@given(st.floats(0.1, 300), targets, deltas)
def test_the_most_releases_are_within_the_target_and_one_more_is_not(
    multiplier: float, target: float, delta: float
) -> None:
    count = most_releases(multiplier, target, delta)
    assert epsilon_after(multiplier, count, delta) <= target
    assert epsilon_after(multiplier, count + 1, delta) > target * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 10_000), targets, deltas)
def test_the_smallest_multiplier_is_within_the_target_and_a_smaller_one_is_not(
    releases: int, target: float, delta: float
) -> None:
    multiplier = smallest_multiplier(releases, target, delta)
    assert epsilon_after(multiplier, releases, delta) <= target
    assert epsilon_after(multiplier * (1 - 1e-6), releases, delta) > target
    assert most_releases(multiplier, target, delta) == releases


@settings(max_examples=40, deadline=None)
@given(targets, deltas)
def test_a_budget_is_never_worth_more_than_its_target(target: float, delta: float) -> None:
    assert epsilon(budget(target, delta), delta) <= target


def test_without_the_package_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "find_spec", lambda _: None)
    with pytest.raises(accounting.NoAccountantError, match=r"pip install 'pipar\[privacy\]'"):
        accounting.require()
