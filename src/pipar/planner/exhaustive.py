"""The best of all plans, found by trying them: what a search is compared with; paper V-D, T_opt / T."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from pipar.planner.bounds import LowerBound
from pipar.planner.candidates import Candidate, candidates
from pipar.planner.fleet import Fleet, PlansByKind, plans_by_device
from pipar.planner.timing import Simulate, SimulateWithin, steady_epoch_s, steady_epoch_within_s


@dataclass(frozen=True)
class ExhaustiveResult:
    """The plans with the shortest epoch of all; how many were simulated, some only in part, and how many ruled out."""

    by_kind: PlansByKind
    epoch_s: float
    simulated: int
    ruled_out: int


class _Pair(NamedTuple):
    """Plans to try, the most likely first: the sooner a good one is found, the more are ruled out."""

    likely_s: float
    number: int
    least_s: float
    by_kind: PlansByKind


def search_all(
    fleet: Fleet,
    simulate: Simulate,
    *,
    within: SimulateWithin | None = None,
    micro_batches: Sequence[int] | None = None,
    slack: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> ExhaustiveResult:
    """Return the best of all plans of all kinds, or of those with these N.

    Plans are left out only if their busiest lane and the exchange of models take longer than the best plans found;
    `slack` is the share by which a simulated stage may be shorter than its costs. `within` is the same simulation,
    stopped as soon as it is longer than the best. `progress` gets the number of plans simulated so far, and the most
    that there will be, which shrinks with every better plan.
    """

    def epoch_s(by_kind: PlansByKind, within_s: float) -> float:
        plans = plans_by_device(fleet, by_kind)
        if within is None or within_s == math.inf:
            return steady_epoch_s(simulate, fleet, plans)
        return steady_epoch_within_s(within, fleet, plans, within_s)

    waiting = sorted(_pairs(fleet, micro_batches, slack), reverse=True)
    count, simulated = len(waiting), 0
    best_s, best = math.inf, waiting[-1].by_kind
    while waiting:
        by_kind = waiting.pop().by_kind
        seconds = epoch_s(by_kind, best_s)
        simulated += 1
        if (seconds, by_kind) < (best_s, best) or simulated == 1:
            best_s, best = seconds, by_kind
            waiting = [pair for pair in waiting if pair.least_s < best_s]
        if progress is not None:
            progress(simulated, simulated + len(waiting))
    return ExhaustiveResult(best, best_s, simulated, count - simulated)


def _pairs(fleet: Fleet, micro_batches: Sequence[int] | None, slack: float) -> Iterator[_Pair]:
    options = [_allowed(candidates(fleet, kind[0]), micro_batches) for kind in fleet.device_kinds()]
    bound = LowerBound(fleet)
    for number, chosen in enumerate(product(*options)):
        by_kind = tuple(option.plan for option in chosen)
        yield _Pair(bound.likely_s(chosen), number, bound.lanes_s(chosen, slack), by_kind)


def _allowed(options: list[Candidate], micro_batches: Sequence[int] | None) -> list[Candidate]:
    if micro_batches is None:
        return options
    allowed = [option for option in options if option.plan.micro_batches in micro_batches]
    return allowed or options
