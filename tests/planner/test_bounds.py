"""A simulation is given up only if the epoch would have been too long, and many then are."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from support.fleets import fleet as crowded_fleet
from support.fleets import fleet_of_two_kinds

from pipar.methods import Plan
from pipar.planner.candidates import allowed_plans
from pipar.planner.fleet import Fleet
from pipar.planner.simulator import simulate, simulate_within
from pipar.planner.timing import STEADY_ITERATIONS
from reproduction.perturbed_times import jitter


def some_plans(fleet: Fleet, seed: int) -> Iterator[dict[str, Plan]]:
    """Yield plans for each kind of device, mostly of few micro-batches, some of them with a window; and P = Q."""
    yield {member.name: Plan(fleet.layers, 1) for member in fleet.members}
    rng = random.Random(seed)
    most = rng.choice([1, 2, 50])
    options = [[p for p in allowed_plans(fleet, kind[0]) if p.micro_batches <= most] for kind in fleet.device_kinds()]
    for _ in range(4):
        drawn = [rng.choice(of) for of in options]
        windowed = [Plan(p.split_point, p.micro_batches, rng.choice([0, 1, 3])) for p in drawn]
        yield {member.name: plan for kind, plan in zip(fleet.device_kinds(), windowed, strict=True) for member in kind}


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 300), marks=pytest.mark.slow)], ids=str)
def test_an_epoch_that_is_short_enough_is_never_stopped_and_many_others_are(seeds: range) -> None:
    given_up = []
    for seed in seeds:
        # With many devices to a core, some have ended when others have hardly begun.
        fleet = crowded_fleet(8, speed=0.1 * 2 ** (seed % 5)) if seed % 2 else fleet_of_two_kinds(seed)
        disturb = jitter(seed)
        for plans in some_plans(fleet, seed):
            timing = simulate(fleet, plans, iterations=STEADY_ITERATIONS, disturb=disturb)
            just, far = timing.steady_epoch_s(fleet) * (1 + 1e-8), timing.steady_epoch_s(fleet) * 0.8
            assert simulate_within(fleet, plans, STEADY_ITERATIONS, just, disturb=disturb) == timing, (seed, plans)
            given_up.append(simulate_within(fleet, plans, STEADY_ITERATIONS, far, disturb=disturb) is None)
    assert sum(given_up) > 0.4 * len(given_up)  # not of epochs of one iteration
