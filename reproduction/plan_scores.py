"""Scores of chosen plans relative to exhaustive search, with times that the planner does not know; paper V-D.

Times are perturbed by up to 15 % per layer and jittered by up to 5 % per stage, from a seed that the planner does not
know.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipar.methods import Plan
from pipar.planner.background_search import search_again
from pipar.planner.compute_load import compute_seconds
from pipar.planner.exhaustive import search_all
from pipar.planner.fleet import Fleet, PlansByKind, plans_by_device
from pipar.planner.learned_costs import Predictor
from pipar.planner.paper_selection import estimate_plans
from pipar.planner.search import SearchResult, search_kinds
from pipar.planner.search_settings import UNHURRIED
from pipar.planner.simulator import simulate, simulate_within
from pipar.planner.timing import steady_epoch_s
from reproduction.perturbed_times import JITTER, jittered_simulation, jittered_simulation_within, perturbed


@dataclass(frozen=True)
class PlanScores:
    """The scores of one training; plans are those of each kind of device."""

    chosen: str
    chosen_s: float
    best: str
    best_s: float
    score: float
    learned: str  # the plans after some epochs with the perturbed times
    learned_score: float
    profiled: str  # the best plans by the profiles: the most that can be known before a training
    profiled_score: float
    paper: str
    paper_score: float
    planning_s: float
    simulations: int
    searched: int
    ruled_out: int
    search_s: float


@dataclass(frozen=True)
class PlansToScore:
    """The plans to compare, which do not depend on the perturbed times: chosen, by the profiles, by the paper."""

    choice: SearchResult
    planning_s: float
    profiled: PlansByKind
    paper: PlansByKind
    micro_batches: Sequence[int] | None  # N that are searched; None: all

    @classmethod
    def of(cls, fleet: Fleet, micro_batches: Sequence[int] | None = None) -> PlansToScore:
        """Choose plans for a fleet, and search every P with every N, or with the given ones."""
        began = time.process_time()
        choice = search_kinds(fleet, simulate, within=simulate_within)
        planning_s = time.process_time() - began
        profiled = search_all(fleet, simulate, within=simulate_within, micro_batches=micro_batches).by_kind
        paper = estimate_plans(fleet)
        by_kind = tuple(paper[kind[0].name][0] for kind in fleet.device_kinds())
        return cls(choice, planning_s, profiled, by_kind, micro_batches)


def score_plans(fleet: Fleet, known: PlansToScore, *, seed: int, epochs: int) -> PlanScores:
    """Return the scores of plans: chosen at the start, learned over epochs, best by the profiles, by the paper."""
    micro_batches = known.micro_batches
    truth, world = perturbed(fleet, seed), jittered_simulation(seed)
    began = time.process_time()
    best = search_all(truth, world, within=jittered_simulation_within(seed), micro_batches=micro_batches, slack=JITTER)
    search_s = time.process_time() - began
    learned = learned_plans(fleet, truth, known.choice.plans, epochs)

    def score(plans: Mapping[str, Plan]) -> float:
        return best.epoch_s / steady_epoch_s(world, truth, plans)

    chosen_s = steady_epoch_s(world, truth, known.choice.plans)
    return PlanScores(
        chosen="; ".join(map(str, known.choice.by_kind)),
        chosen_s=chosen_s,
        best="; ".join(map(str, best.by_kind)),
        best_s=best.epoch_s,
        score=best.epoch_s / chosen_s,
        learned="; ".join(str(learned[kind[0].name]) for kind in fleet.device_kinds()),
        learned_score=score(learned),
        profiled="; ".join(map(str, known.profiled)),
        profiled_score=score(plans_by_device(fleet, known.profiled)),
        paper="; ".join(map(str, known.paper)),
        paper_score=score(plans_by_device(fleet, known.paper)),
        planning_s=known.planning_s,
        simulations=known.choice.simulations,
        searched=best.simulated,
        ruled_out=best.ruled_out,
        search_s=search_s,
    )


def learned_plans(fleet: Fleet, truth: Fleet, plans: Mapping[str, Plan], epochs: int) -> Mapping[str, Plan]:
    """Return the plans after epochs in which the server measured compute times and chose again."""
    predictor = Predictor(fleet, plans)
    for epoch in range(1, epochs + 1):
        predictor.learn(epoch, *compute_seconds(truth, predictor.plans))
        if predictor.has_learned():
            # No trial plan after the last epoch: the learned plans are to be scored.
            settings = UNHURRIED if epoch < epochs else replace(UNHURRIED, trial_cost=0.0)
            predictor.replan(epoch + 1, search_again(predictor.latest({}), predictor.plans, settings))
    return predictor.plans
