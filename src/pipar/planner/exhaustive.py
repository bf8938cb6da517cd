"""The best of all plans, by trying them: what a choice is measured against; paper V-D, T_opt / T."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from pipar.planner.candidates import Candidate, LowerBound, candidates
from pipar.planner.fleet import Fleet
from pipar.planner.select import ByKind, everybodys
from pipar.planner.timing import Simulate, steady_epoch_s


@dataclass(frozen=True)
class Best:
    """The plans with the shortest epoch of all, and how many were simulated and how many ruled out."""

    by_kind: ByKind
    epoch_s: float
    simulated: int
    ruled_out: int


def search_all(
    fleet: Fleet,
    simulate: Simulate,
    *,
    micro_batches: Sequence[int] | None = None,
    slack: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> Best:
    """Return the best of all plans of all kinds, or of those with these N.

    One steady iteration of the whole fleet is simulated. A plan is left out only if its busiest lane alone takes longer
    than the best plan found; `slack` is how much shorter than its costs a simulated stage may be. `progress` is told
    how many plans are simulated, and how many there will be at most: the better the best, the fewer.
    """
    kinds = fleet.kinds()
    options = [_allowed(candidates(fleet, kind[0]), micro_batches) for kind in kinds]
    bound = LowerBound(fleet)
    combined = enumerate(product(*options))
    everything = sorted((bound.lanes_s(chosen) * (1 - slack), n, chosen) for n, chosen in combined)
    bounds = [least_s for least_s, _, _ in everything]
    best: tuple[float, ByKind] | None = None
    for tried, (least_s, _, chosen) in enumerate(everything):
        if best is not None and least_s >= best[0]:
            return Best(best[1], best[0], tried, len(everything) - tried)
        by_kind = tuple(option.plan for option in chosen)
        seconds = steady_epoch_s(simulate, fleet, everybodys(fleet, by_kind))
        best = min(best, (seconds, by_kind)) if best is not None else (seconds, by_kind)
        if progress is not None:
            progress(tried + 1, max(tried + 1, bisect_left(bounds, best[0])))
    assert best is not None
    return Best(best[1], best[0], len(everything), 0)


def _allowed(options: list[Candidate], micro_batches: Sequence[int] | None) -> list[Candidate]:
    if micro_batches is None:
        return options
    allowed = [option for option in options if option.plan.micro_batches in micro_batches]
    return allowed or options
