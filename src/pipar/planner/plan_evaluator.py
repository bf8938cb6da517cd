"""How long epochs of plans take: simulated once for each, remembered, and counted against the budget of a search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from random import Random

from pipar.methods import Plan
from pipar.planner.bounds import LowerBound
from pipar.planner.candidates import Allow, Candidate, candidates
from pipar.planner.fleet import Fleet, PlansByKind, plans_by_device
from pipar.planner.search_settings import SearchSettings
from pipar.planner.timing import (
    Simulate,
    SimulateWithin,
    epoch_timing,
    steady_epoch_s,
    steady_epoch_within_s,
    steady_iterations,
)

#: Plans with the seconds of their epoch.
Ranked = tuple[PlansByKind, float]


@dataclass
class PlanEvaluator:
    """The candidates of every kind of device in a fleet, and the times of epochs of their combinations."""

    fleet: Fleet
    simulate: Simulate
    within: SimulateWithin | None
    progress: Callable[[int], None] | None
    settings: SearchSettings
    only: Allow | None = None
    known: dict[PlansByKind, float] = field(default_factory=dict)  # seconds of an epoch; inf if far from the best
    shortest_s: float = inf  # of these
    simulations: int = 0
    spent: int = 0  # micro-batches simulated

    def __post_init__(self) -> None:
        self._worlds = [
            self.fleet.varied(partial(_varied, self.settings.variation, world)) for world in range(self.settings.worlds)
        ]
        self._in_worlds: dict[PlansByKind, list[float]] = {}
        self.kinds = self.fleet.device_kinds()
        found: dict[tuple[object, ...], list[Candidate]] = {}  # kinds that differ only in their data have the same
        for first, *_ in self.kinds:
            if first.kind not in found:
                found[first.kind] = candidates(self.fleet, first, self.only)
        self.options = [found[kind[0].kind] for kind in self.kinds]
        self.cuts = [_by_cut(options) for options in self.options]
        self.bound = LowerBound(self.fleet)
        self._by_plan = [{option.plan: option for option in options} for options in self.options]

    def plans(self, by_kind: PlansByKind) -> dict[str, Plan]:
        """Return each device's plan."""
        return plans_by_device(self.fleet, by_kind)

    def as_candidates(self, by_kind: PlansByKind) -> list[Candidate]:
        """Return the candidates with these plans."""
        return [known[plan] for known, plan in zip(self._by_plan, by_kind, strict=True)]

    def with_every_n(self, by_kind: PlansByKind, kind: int, cut: int) -> dict[int, PlansByKind]:
        """Return these plans with one split point and each N for one kind, by N; the other kinds keep theirs."""
        plans = [option.plan for option in self.cuts[kind][cut]]
        return {plan.micro_batches: (*by_kind[:kind], plan, *by_kind[kind + 1 :]) for plan in plans}

    def bound_s(self, by_kind: PlansByKind) -> float:
        """Return the least time of an epoch of these plans: of the slowest device alone, or all work over all cores."""
        return self.bound.alone_s(self.as_candidates(by_kind))

    def epoch_s(self, by_kind: PlansByKind) -> float:
        """Return the seconds of an epoch of these plans; infinity if they are far from the best known."""
        if by_kind not in self.known:
            seconds = self._simulated_s(self.fleet, by_kind, self.shortest_s * (1 + self.settings.far))
            self.known[by_kind], self.shortest_s = seconds, min(seconds, self.shortest_s)
        return self.known[by_kind]

    def expected_s(self, by_kind: PlansByKind, worlds: int | None = None) -> float:
        """Return the mean over the original profiles and their variations: all of the worlds, or the first ones."""
        if self.epoch_s(by_kind) == inf:
            return inf
        count = self.settings.worlds if worlds is None else worlds
        times = self._in_worlds.setdefault(by_kind, [])
        times += [self._simulated_s(fleet, by_kind) for fleet in self._worlds[len(times) : count]]
        return (self.epoch_s(by_kind) + sum(times[:count])) / (1 + count)

    def compared(self) -> list[PlansByKind]:
        """Return the plans that were simulated in all worlds."""
        return [by_kind for by_kind, times in self._in_worlds.items() if len(times) == self.settings.worlds]

    def whole_epoch_s(self, by_kind: PlansByKind) -> float:
        """Return the seconds of an epoch of these plans, all of its iterations simulated if that is quick."""
        return epoch_timing(self.simulate, self.fleet, self.plans(by_kind)).epoch_s

    def _simulated_s(self, fleet: Fleet, by_kind: PlansByKind, within_s: float = inf) -> float:
        self.simulations += 1
        if self.progress is not None:
            self.progress(self.simulations)
        plans, iterations = self.plans(by_kind), self.settings.iterations
        if self.within is None or within_s == inf:
            seconds = steady_epoch_s(self.simulate, fleet, plans, iterations)
        else:
            seconds = steady_epoch_within_s(self.within, fleet, plans, within_s, iterations)
        around = self.settings.micro_batches_around_batch
        pieces = steady_iterations(fleet, iterations) * sum(
            len(kind) * (plan.micro_batches + around) for kind, plan in zip(self.kinds, by_kind, strict=True)
        )
        self.spent += pieces // self.settings.stopped_early_divisor if seconds == inf else pieces
        return seconds

    def has_budget(self) -> bool:
        """Return whether plans may still be improved."""
        return self.spent < self.settings.micro_batch_budget

    def may_compare(self) -> bool:
        """Return whether plans may still be compared on varied profiles."""
        return self.spent < self.settings.micro_batch_budget * self.settings.comparison_budget

    def best_by_cuts(self, plans: list[PlansByKind]) -> list[PlansByKind]:
        """Return the best of these plans for each combination of split points, best first."""
        nearest: dict[tuple[int, ...], PlansByKind] = {}
        for by_kind in sorted(plans, key=lambda by_kind: (self.epoch_s(by_kind), by_kind)):
            nearest.setdefault(split_points(by_kind), by_kind)
        return list(nearest.values())[: self.settings.starts]

    def runners_up(self, best: PlansByKind) -> tuple[Ranked, ...]:
        """Return the next best plans: one for each combination of split points, then others.

        If all others are far from the best, the nearest of them is simulated to its end and returned.
        """
        stopped = [by_kind for by_kind, seconds in self.known.items() if seconds == inf]
        if stopped and len(stopped) + 1 >= len(self.known):
            nearest = min(stopped, key=self.bound_s)
            self.known[nearest] = self._simulated_s(self.fleet, nearest)
        others = sorted((s, by_kind) for by_kind, s in self.known.items() if by_kind != best and s < inf)
        first: dict[tuple[int, ...], Ranked] = {}
        rest = []
        for seconds, by_kind in others:
            cuts = split_points(by_kind)
            if cuts in first or cuts == split_points(best):
                rest.append((by_kind, seconds))
            else:
                first[cuts] = (by_kind, seconds)
        most = self.settings.runners_up
        shown = [*list(first.values())[: most // 2], *rest]
        return tuple(sorted(shown[:most], key=lambda item: item[1]))


def split_points(by_kind: PlansByKind) -> tuple[int, ...]:
    """Return the split point of each kind."""
    return tuple(plan.split_point for plan in by_kind)


def _varied(variation: float, world: int, machine: str) -> Callable[[], float]:
    """Return what draws a factor for each layer of a machine: the same ones in the same world."""
    draw = Random(f"{world} {machine}")
    return lambda: draw.uniform(1 - variation, 1 + variation)


def _by_cut(options: list[Candidate]) -> dict[int, list[Candidate]]:
    cuts: dict[int, list[Candidate]] = {}
    for option in options:
        cuts.setdefault(option.plan.split_point, []).append(option)
    return cuts
