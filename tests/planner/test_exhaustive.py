"""The search of all plans leaves out none that could be the best, for any disturbance within its slack."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

import pytest
from support.fleets import fleet_of_two_kinds

from pipar.methods import Plan
from pipar.planner.candidates import allowed_plans
from pipar.planner.exhaustive import search_all
from pipar.planner.fleet import Fleet
from pipar.planner.simulator import simulate
from pipar.planner.stage_times import BatchTimes
from pipar.planner.timing import Simulate, Timing, steady_epoch_s
from reproduction.perturbed_times import JITTER, jittered_simulation, jittered_simulation_within

SOME_N = (1, 2, 4, 7, 12)
SLACK = 0.1


def whole_epochs(fleet: Fleet, plans: Mapping[str, Plan], _: int | None) -> Timing:
    return simulate(fleet, plans)


def disturbed_epochs(seed: int) -> Simulate:
    """Return a simulation in which each stage takes from 0.9 to 1.3 times as long as it should."""

    def disturb(device: str, iteration: int, times: BatchTimes) -> BatchTimes:
        rng = random.Random(f"{seed} {device} {iteration}")
        stages = ("fc", "encode", "u", "served", "d", "decode", "bc")
        changed = {stage: [s * rng.uniform(1 - SLACK, 1.3) for s in getattr(times, stage)] for stage in stages}
        return replace(times, **changed, step=times.step * rng.uniform(1 - SLACK, 1.3))  # type: ignore[arg-type]

    return lambda fleet, plans, _: simulate(fleet, plans, disturb=disturb)


def every_plan(fleet: Fleet) -> Iterator[dict[str, Plan]]:
    """Yield all plans with some N."""
    kinds = fleet.device_kinds()
    options = [[p for p in allowed_plans(fleet, kind[0]) if p.micro_batches in SOME_N] for kind in kinds]
    for by_kind in product(*options):
        yield {member.name: plan for kind, plan in zip(kinds, by_kind, strict=True) for member in kind}


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 20), marks=pytest.mark.slow)], ids=str)
def test_the_best_is_never_ruled_out(seeds: range) -> None:
    ruled_out = 0
    for seed in seeds:
        fleet = fleet_of_two_kinds(seed)
        for world, slack in ((whole_epochs, 0.0), (disturbed_epochs(seed), SLACK)):
            best = search_all(fleet, world, micro_batches=SOME_N, slack=slack)
            shortest_s = min(world(fleet, plans, None).epoch_s for plans in every_plan(fleet))
            assert best.epoch_s == pytest.approx(shortest_s, rel=1e-12), seed
            assert best.simulated + best.ruled_out == (2 * len(SOME_N) + 1) ** 2
            ruled_out += best.ruled_out
    assert ruled_out > 0


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 20), marks=pytest.mark.slow)], ids=str)
def test_stopping_simulations_early_changes_only_the_time_of_the_search(seeds: range) -> None:
    for seed in seeds:
        fleet, world = fleet_of_two_kinds(seed), jittered_simulation(seed)
        quick = search_all(fleet, world, within=jittered_simulation_within(seed), micro_batches=SOME_N, slack=JITTER)
        assert quick == search_all(fleet, world, micro_batches=SOME_N, slack=JITTER), seed
        assert quick.epoch_s == min(steady_epoch_s(world, fleet, plans) for plans in every_plan(fleet)), seed


@pytest.mark.slow
def test_the_best_plan_takes_the_reported_seconds() -> None:
    fleet = fleet_of_two_kinds(1)
    best = search_all(fleet, whole_epochs)
    plans = {m.name: plan for kind, plan in zip(fleet.device_kinds(), best.by_kind, strict=True) for m in kind}
    assert simulate(fleet, plans).epoch_s == pytest.approx(best.epoch_s, rel=1e-12)


def test_progress_grows_and_the_search_can_be_restricted_to_some_n() -> None:
    fleet, seen = fleet_of_two_kinds(2), list[tuple[int, int]]()
    best = search_all(fleet, whole_epochs, micro_batches=[3], progress=lambda *counts: seen.append(counts))
    assert {plan.micro_batches for plan in best.by_kind} == {3}
    assert [done for done, _ in seen] == list(range(1, best.simulated + 1))
    most = [most for _, most in seen]
    assert most == sorted(most, reverse=True)  # the better the best, the fewer are left
    assert seen[-1] == (best.simulated, best.simulated)
