"""The search of all plans leaves out none that could be the best, whatever is disturbed within its slack."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import pytest

from pipar.config import Link
from pipar.forecast import BatchTimes, forecast
from pipar.methods import METHODS, Plan
from pipar.planner.candidates import allowed_plans
from pipar.planner.costs import Costs
from pipar.planner.exhaustive import search_all
from pipar.planner.fleet import Fleet, Member
from pipar.planner.profile import LayerProfile, Profile
from pipar.planner.timing import Simulate, Timing

SOME_N = (1, 2, 4, 7, 12)
SLACK = 0.1


def fleet_of_two_kinds(seed: int) -> Fleet:
    rng = random.Random(seed)
    layers = []
    for name in "abc":
        forward = tuple(rng.uniform(0, 0.02) + rng.uniform(0.001, 0.02) * samples for samples in (1, 12))
        layers.append(LayerProfile(name, forward, tuple(2 * f for f in forward), rng.randrange(500, 20_000), 1000))
    profile = Profile("any", "float32", (1, 12), tuple(layers), encode_s=1e-3, step_s=1e-3)
    members: list[Member] = []
    for _ in range(2):
        link = Link(up_bps=10 ** rng.uniform(5.5, 8), down_bps=10 ** rng.uniform(5.5, 8), latency_s=0.01)
        costs, samples = Costs(profile, 10 ** rng.uniform(-1.3, 0.3)), rng.choice([5, 12, 30])
        members += [Member(f"d{len(members) + n}", costs, link, samples) for n in range(rng.randint(1, 3))]
    return Fleet(METHODS["pipar"], tuple(members), Costs(profile, 10 ** rng.uniform(-0.5, 1)), rng.randint(1, 2), 12)


def whole_epochs(fleet: Fleet, plans: Mapping[str, Plan], _: int | None) -> Timing:
    return forecast(fleet, plans)


def disturbed_epochs(seed: int) -> Simulate:
    """Return a simulation in which each stage takes from 0.9 to 1.3 times as long as it should."""

    def disturb(device: str, iteration: int, times: BatchTimes) -> BatchTimes:
        rng = random.Random(f"{seed} {device} {iteration}")
        stages = ("fc", "encode", "u", "served", "d", "decode", "bc")
        changed = {stage: [s * rng.uniform(1 - SLACK, 1.3) for s in getattr(times, stage)] for stage in stages}
        return replace(times, **changed, step=times.step * rng.uniform(1 - SLACK, 1.3))  # type: ignore[arg-type]

    return lambda fleet, plans, _: forecast(fleet, plans, disturb=disturb)


def try_everything(fleet: Fleet, simulate: Simulate) -> float:
    """Return the shortest epoch of all plans with some N, none of them ruled out."""
    kinds = fleet.kinds()
    options = [[p for p in allowed_plans(fleet, kind[0]) if p.micro_batches in SOME_N] for kind in kinds]
    every = (
        {member.name: plan for kind, plan in zip(kinds, by_kind, strict=True) for member in kind}
        for by_kind in product(*options)
    )
    return min(simulate(fleet, plans, None).epoch_s for plans in every)


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 40), marks=pytest.mark.slow)], ids=str)
def test_the_best_is_never_ruled_out(seeds: range) -> None:
    ruled_out = 0
    for seed in seeds:
        fleet = fleet_of_two_kinds(seed)
        for simulate, slack in ((whole_epochs, 0.0), (disturbed_epochs(seed), SLACK)):
            best = search_all(fleet, simulate, micro_batches=SOME_N, slack=slack)
            assert best.epoch_s == pytest.approx(try_everything(fleet, simulate), rel=1e-12), seed
            assert best.simulated + best.ruled_out == (2 * len(SOME_N) + 1) ** 2
            ruled_out += best.ruled_out
    assert ruled_out > 0


def test_the_best_is_the_plan_that_takes_so_long() -> None:
    fleet = fleet_of_two_kinds(1)
    best = search_all(fleet, whole_epochs)
    plans = {m.name: plan for kind, plan in zip(fleet.kinds(), best.by_kind, strict=True) for m in kind}
    assert forecast(fleet, plans).epoch_s == pytest.approx(best.epoch_s, rel=1e-12)


def test_progress_goes_up_and_the_search_may_be_kept_to_some_n() -> None:
    fleet, seen = fleet_of_two_kinds(2), list[tuple[int, int]]()
    best = search_all(fleet, whole_epochs, micro_batches=[3], progress=lambda *counts: seen.append(counts))
    assert {plan.micro_batches for plan in best.by_kind} == {3}
    assert [done for done, _ in seen] == list(range(1, best.simulated + 1))
    most = [most for _, most in seen]
    assert most == sorted(most, reverse=True)  # the better the best, the fewer are left
    assert seen[-1] == (best.simulated, best.simulated)
