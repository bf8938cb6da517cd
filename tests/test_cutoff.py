"""A simulation is given up only if the epoch would have been too long, and many then are."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from fleets import fleet_of_two_kinds

from pipar.forecast import forecast, forecast_within
from pipar.judge import jitter
from pipar.methods import Plan
from pipar.planner.candidates import allowed_plans
from pipar.planner.fleet import Fleet
from pipar.planner.timing import STEADY


def some_plans(fleet: Fleet, seed: int) -> Iterator[dict[str, Plan]]:
    """Yield plans for each kind of device, some of them with a window."""
    rng = random.Random(seed)
    for _ in range(8):
        drawn = [rng.choice(allowed_plans(fleet, kind[0])) for kind in fleet.kinds()]
        windowed = [Plan(p.split_point, p.micro_batches, rng.choice([0, 1, 3])) for p in drawn]
        yield {member.name: plan for kind, plan in zip(fleet.kinds(), windowed, strict=True) for member in kind}


@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 300), marks=pytest.mark.slow)], ids=str)
def test_an_epoch_that_is_short_enough_is_never_given_up_and_many_others_are(seeds: range) -> None:
    given_up = []
    for seed in seeds:
        fleet, disturb = fleet_of_two_kinds(seed), jitter(seed)
        for plans in some_plans(fleet, seed):
            timing = forecast(fleet, plans, iterations=STEADY, disturb=disturb)
            just, far = timing.steady_epoch_s(fleet) * (1 + 1e-8), timing.steady_epoch_s(fleet) * 0.8
            assert forecast_within(fleet, plans, just, iterations=STEADY, disturb=disturb) == timing, (seed, plans)
            given_up.append(forecast_within(fleet, plans, far, iterations=STEADY, disturb=disturb) is None)
    assert sum(given_up) > 0.4 * len(given_up)  # not of epochs of one iteration
