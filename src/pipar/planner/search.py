"""The search for every device's {P, N}; paper III-C, phase 3, and beyond it.

The paper plans each device as if it were alone (`paper_selection.estimate_plans`). Here the plans of all devices are
simulated together, because K devices share the server's C cores, and the best plan of one alone may starve the others.
Devices of one kind (same machine, link, data size and limits) get one plan. The paper shortlists one N for each P; the
search considers every N.

1. Start from each kind's own best plan, from plans that share the cores well, and from likely combinations.
2. Improve them, one kind of device at a time.
3. Of the plans that come close to the best, take the one that is best on machines that differ from their profiles, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf, prod

from pipar.errors import PlanError
from pipar.methods import Plan
from pipar.planner.candidates import Allow, Candidate, allowed_plans, plans_in_common
from pipar.planner.device_groups import merge_kinds
from pipar.planner.encoding_choice import reencoded
from pipar.planner.fleet import Fleet, PlansByKind, extend_plans, plans_by_device, plans_from_sample
from pipar.planner.plan_evaluator import PlanEvaluator, Ranked
from pipar.planner.search_settings import THOROUGH, TIE, SearchSettings
from pipar.planner.timing import (
    FEWEST_ITERATIONS,
    Simulate,
    SimulateWithin,
    Timing,
    epoch_timing,
    steady_epoch_s,
)


@dataclass(frozen=True)
class SearchResult:
    """The best plans that were found, and the next best, with the seconds of an epoch with each."""

    plans: dict[str, Plan]
    by_kind: PlansByKind
    epoch_s: float
    timing: Timing
    runners_up: tuple[Ranked, ...] = ()
    simulations: int = 0


# --- a fleet of any size


def search_plans(
    fleet: Fleet,
    simulate: Simulate,
    *,
    within: SimulateWithin | None = None,
    start: Mapping[str, Plan] | None = None,
    progress: Callable[[int], None] | None = None,
    settings: SearchSettings = THOROUGH,
) -> SearchResult:
    """Return the best plans for a fleet of any size, found by a sample if it is large; `start` are the current ones.

    With many kinds of devices, two groups of kinds are searched first, then more and smaller ones around their plans.
    """
    sample = fleet.sampled(settings.devices)
    search = partial(_search_sample, simulate=simulate, within=within, progress=progress)
    if fleet.method.shares_server_model or len(sample.device_kinds()) <= settings.groups:
        return search(fleet, start=start, settings=settings)
    half = replace(settings, micro_batch_budget=settings.micro_batch_budget // 2)
    try:
        coarse = search(merge_kinds(fleet, settings.groups), start=start, settings=half)
    except PlanError:
        for kind in fleet.device_kinds():  # name the device that causes the error, not one that represents a group
            allowed_plans(fleet, kind[0])
        raise
    groups = merge_kinds(fleet, settings.smaller_groups)
    fine = search(groups, start=coarse.plans, only=_around(coarse.plans.values(), settings), settings=half)

    def of_kinds(plans: Mapping[str, Plan]) -> PlansByKind:
        encoded = reencoded(sample, plans)
        return tuple(encoded[kind[0].name] for kind in sample.device_kinds())

    by_kind = of_kinds(fine.plans)
    plans = plans_by_device(sample, by_kind)
    in_groups = groups.sampled(settings.devices)
    return SearchResult(
        plans=extend_plans(fleet, plans),
        by_kind=by_kind,
        epoch_s=steady_epoch_s(simulate, sample, plans, settings.iterations),
        timing=epoch_timing(simulate, sample, plans),
        runners_up=tuple((of_kinds(plans_from_sample(groups, in_groups, of)), s) for of, s in fine.runners_up),
        simulations=coarse.simulations + fine.simulations,
    )


def _around(plans: Iterable[Plan], settings: SearchSettings) -> Allow:
    """Return what says whether a {P, N} is near these plans: P between theirs or nearly so, N at most twice theirs."""
    cuts, numbers = zip(*((plan.split_point, plan.micro_batches) for plan in set(plans)), strict=True)
    least, most = min(cuts) - settings.nearby_layers, max(cuts) + settings.nearby_layers
    above = 2 * max(numbers)
    return lambda p, n: least <= p <= most and (n <= above or n in settings.coarse_micro_batches)


def _search_sample(
    fleet: Fleet,
    *,
    start: Mapping[str, Plan] | None,
    only: Allow | None = None,
    simulate: Simulate,
    within: SimulateWithin | None,
    progress: Callable[[int], None] | None,
    settings: SearchSettings,
) -> SearchResult:
    sample = fleet.sampled(settings.devices)
    begin = None if start is None else tuple(start[kind[0].name] for kind in sample.device_kinds())
    found = search_kinds(sample, simulate, within=within, start=begin, only=only, progress=progress, settings=settings)
    return replace(found, plans=extend_plans(fleet, found.plans))


# --- one plan for each kind of device


def search_kinds(
    fleet: Fleet,
    simulate: Simulate,
    *,
    within: SimulateWithin | None = None,
    start: PlansByKind | None = None,
    only: Allow | None = None,
    progress: Callable[[int], None] | None = None,
    settings: SearchSettings = THOROUGH,
) -> SearchResult:
    """Return the plans with the shortest epoch that simulations of the whole fleet find; ties go to the smaller N.

    `within` is the same simulation, stopped for plans that are far from the best. `start` are plans to begin with
    instead of each kind's own best, such as the current ones. `only` says whether a {P, N} is considered.
    """
    if fleet.method.shares_server_model:  # devices take turns: the second iteration is like all others
        settings = replace(settings, iterations=FEWEST_ITERATIONS)
    evaluator = PlanEvaluator(fleet, simulate, within, progress, settings, only)
    if fleet.method.shares_server_model:
        best = min(plans_in_common(fleet), key=evaluator.epoch_s)
    else:
        search = _Search(evaluator)
        for begin in search.starting_points(start):
            search.improve(begin)
        search.refine()
        best = _FinalChoice(evaluator).best()
    plans = evaluator.plans(best)
    return SearchResult(
        plans=plans,
        by_kind=best,
        epoch_s=evaluator.epoch_s(best),
        timing=epoch_timing(simulate, fleet, plans),
        runners_up=evaluator.runners_up(best),
        simulations=evaluator.simulations,
    )


class _Search:
    """Finds good plans: simulates combinations, and improves them kind by kind."""

    def __init__(self, evaluator: PlanEvaluator) -> None:
        self._evaluator = evaluator
        self._settings = evaluator.settings
        self._epoch_s = evaluator.epoch_s

    def starting_points(self, start: PlansByKind | None) -> list[PlansByKind]:
        """Return plans to improve, best first, each with other split points."""
        own = self._as_allowed(start) if start is not None else None
        own = own or self._own_best()
        return self._evaluator.best_by_cuts([own, self._best_shared(), *self._likely()])

    def _as_allowed(self, by_kind: PlansByKind) -> PlansByKind | None:
        """Return these plans with the encodings and windows that are right now; None if they are not all allowed."""
        if len(by_kind) != len(self._evaluator.options):
            return None
        found = [_same_cut(plan, options) for plan, options in zip(by_kind, self._evaluator.options, strict=True)]
        return None if None in found else tuple(plan for plan in found if plan is not None)

    def _own_best(self) -> PlansByKind:
        """Return each kind's best plan, as if a device of it were alone."""
        options = self._evaluator.options
        return tuple(min(each, key=lambda option: (option.alone_s, option.plan)).plan for each in options)

    def _best_shared(self) -> PlansByKind:
        """Return the plans with the shortest bound: no device alone, nor all of them on the cores, takes longer.

        For every time that a device may take, each kind has the plan within it that leaves the server most room.
        """
        lightest: list[Candidate | None] = [None] * len(self._evaluator.options)
        best: PlansByKind | None = None
        for _, _, option, kind in self._by_own_time():
            before = lightest[kind]
            if before is not None and before.server_s <= option.server_s:
                continue
            lightest[kind] = option
            if None not in lightest:
                shared = tuple(each.plan for each in lightest if each is not None)
                best = shared if best is None else min(best, shared, key=self._evaluator.bound_s)
        assert best is not None
        return best

    def _by_own_time(self) -> list[tuple[float, Plan, Candidate, int]]:
        every, own_s = enumerate(self._evaluator.options), self._evaluator.bound.own_s
        timed = [(own_s(kind, o), o.plan, o, kind) for kind, options in every for o in options]
        return sorted(timed, key=lambda item: (item[0], item[3], item[1]))

    def _likely(self) -> list[PlansByKind]:
        """Simulate and return combinations of a few plans for each split point, likely ones first."""
        evaluator, settings = self._evaluator, self._settings
        load = [sum(map(evaluator.fleet.core_share, kind)) / evaluator.fleet.cores for kind in evaluator.kinds]
        short = [self._few_of_each_cut(cuts, share) for cuts, share in zip(evaluator.cuts, load, strict=True)]
        most = min(settings.most_combinations, settings.micro_batch_budget)
        if len(evaluator.kinds) == 1 or prod(map(len, short)) > most:
            return []
        tried = []
        for combined in sorted(product(*short), key=evaluator.bound.likely_s):
            by_kind = tuple(option.plan for option in combined)
            if evaluator.spent > settings.micro_batch_budget / 2:
                break
            if evaluator.bound.alone_s(combined) < evaluator.shortest_s:
                self._epoch_s(by_kind)
                tried.append(by_kind)
        return tried

    def _few_of_each_cut(self, cuts: Mapping[int, list[Candidate]], load: float) -> list[Candidate]:
        """Return for each split point the plan that is best alone, best under contention, and those of a few N."""
        measures: tuple[Callable[[Candidate], float], ...] = (
            lambda option: option.alone_s,
            lambda option: option.alone_s + load * option.server_s,
        )
        best = [min(of, key=measure) for of in cuts.values() for measure in measures]
        few = self._settings.combined_micro_batches
        return list(dict.fromkeys(best + [o for of in cuts.values() for o in of if o.plan.micro_batches in few]))

    def improve(self, best: PlansByKind) -> None:
        """Simulate plans until no other plan of one kind makes these better; not if they are far from the best."""
        evaluator = self._evaluator
        if self._epoch_s(best) > evaluator.shortest_s * (1 + self._settings.far):
            return
        for _ in range(self._settings.sweeps if len(evaluator.kinds) > 1 else 1):
            before = self._epoch_s(best)
            for kind in self._slowest_first(best):
                if evaluator.has_budget():
                    best = self._improve_kind(best, kind)
            if self._epoch_s(best) > before * (1 - TIE):
                break

    def refine(self) -> None:
        """Search again for the N of each kind, with the split points of the best plans."""
        evaluator = self._evaluator
        if len(evaluator.kinds) == 1:
            return
        within = evaluator.shortest_s * (1 + self._settings.far)
        for best in evaluator.best_by_cuts(list(evaluator.known)):
            if self._epoch_s(best) <= within and evaluator.has_budget():
                for kind in range(len(best)):
                    best = self._best_n(evaluator.with_every_n(best, kind, best[kind].split_point), best)

    def _slowest_first(self, by_kind: PlansByKind) -> list[int]:
        alone = [option.alone_s for option in self._evaluator.as_candidates(by_kind)]
        return sorted(range(len(alone)), key=lambda kind: -alone[kind])

    def _improve_kind(self, best: PlansByKind, kind: int) -> PlansByKind:
        """Return the best with any plan of this kind; the other kinds keep theirs."""
        found, evaluator = best, self._evaluator
        every = [evaluator.with_every_n(best, kind, cut) for cut in evaluator.cuts[kind]]
        for plans in sorted(every, key=lambda plans: min(map(evaluator.bound_s, plans.values()))):
            found = min(found, self._best_n(plans, found), key=self._epoch_s)
        return found

    def _best_n(self, plans: Mapping[int, PlansByKind], best: PlansByKind) -> PlansByKind:
        """Return the best of one split point's plans, by N: the coarse ones first, then every N around the best."""
        coarse = [n for n in plans if n in self._settings.coarse_micro_batches or n == max(plans)]
        local = self._shortest(plans, coarse, best)
        if local is None or self._epoch_s(plans[local]) == inf:
            return best
        at = coarse.index(local)
        low = coarse[at - 1] if at else local
        high = coarse[at + 1] if at + 1 < len(coarse) else local
        around = [n for n in plans if low < n < high]
        refined = self._shortest(plans, around, plans[local]) if around else None
        found = plans[local] if refined is None else min(plans[local], plans[refined], key=self._epoch_s)
        return min(best, found, key=self._epoch_s)

    def _shortest(self, plans: Mapping[int, PlansByKind], numbers: list[int], best: PlansByKind) -> int | None:
        """Return the N with the shortest epoch, of those that their bounds do not rule out; likeliest first."""
        evaluator, settings = self._evaluator, self._settings
        found, shortest = None, self._epoch_s(best)
        least = None
        for n in sorted(numbers, key=lambda n: evaluator.bound_s(plans[n])):
            is_ruled_out = evaluator.bound_s(plans[n]) >= shortest * (1 + settings.close / 2)
            if is_ruled_out or evaluator.spent > settings.micro_batch_budget:
                break
            seconds = self._epoch_s(plans[n])
            if least is None or seconds < least:
                found, least = n, seconds
            shortest = min(shortest, seconds)
        return found


def _same_cut(plan: Plan, options: list[Candidate]) -> Plan | None:
    # Each {P, N} is there once, with the window that memory asks for.
    wanted = (plan.split_point, plan.micro_batches)
    return next((o.plan for o in options if (o.plan.split_point, o.plan.micro_batches) == wanted), None)


class _FinalChoice:
    """Takes one of the plans that come close to the best: the one that is best on varied machines, too."""

    def __init__(self, evaluator: PlanEvaluator) -> None:
        self._evaluator = evaluator
        self._settings = evaluator.settings

    def best(self) -> PlansByKind:
        """Return the plans to take."""
        best = self._most_robust()
        return self._confirmed(best) if self._settings.confirms else best

    def _most_robust(self) -> PlansByKind:
        """Return the best of the plans that are close to the best, on varied profiles, too; ties to the smaller N."""
        evaluator = self._evaluator
        best = min(self._finalists(), key=evaluator.expected_s)
        for kind in range(len(best)):
            if evaluator.has_budget():
                best = self._best_nearby(best, kind)
        within_s = evaluator.expected_s(best) * (1 + TIE)
        tied = [by_kind for by_kind in evaluator.compared() if evaluator.expected_s(by_kind) <= within_s]
        best = min(tied, key=lambda by_kind: (sum(plan.micro_batches for plan in by_kind), by_kind))
        for kind in range(len(best)):
            best = self._with_fewer(best, kind, within_s)
        return best

    def _finalists(self) -> list[PlansByKind]:
        """Return the best of the plans that are close to the best, by half of the worlds."""
        evaluator, settings = self._evaluator, self._settings
        within = evaluator.shortest_s * (1 + settings.close)
        close = sorted((seconds, by_kind) for by_kind, seconds in evaluator.known.items() if seconds <= within)
        some = settings.worlds // 2
        short: list[PlansByKind] = []
        for _, by_kind in close[: settings.shortlist]:
            if not short or evaluator.may_compare():
                evaluator.expected_s(by_kind, some)
                short.append(by_kind)
        short.sort(key=lambda by_kind: evaluator.expected_s(by_kind, some))
        return short[: settings.finalists]

    def _best_nearby(self, best: PlansByKind, kind: int) -> PlansByKind:
        """Return the best with an N of this kind nearby, for as long as steps in one direction gain."""
        evaluator = self._evaluator
        plans = evaluator.with_every_n(best, kind, best[kind].split_point)
        stride = max(1, best[kind].micro_batches // 10)
        for step in (-stride, stride):
            while evaluator.may_compare() and (other := plans.get(best[kind].micro_batches + step)) is not None:
                if evaluator.expected_s(other) >= evaluator.expected_s(best):
                    break
                best = other
        return best

    def _with_fewer(self, best: PlansByKind, kind: int, within_s: float) -> PlansByKind:
        """Return the plans with the smallest N of this kind that still ties, found by halving.

        A kind that waits for the others anyway still has the N that was tried first.
        """
        evaluator, coarse = self._evaluator, self._settings.coarse_micro_batches
        plans = evaluator.with_every_n(best, kind, best[kind].split_point)
        fewer = [n for n in plans if n < best[kind].micro_batches and n in coarse]
        low, high = 0, len(fewer)
        while low < high and evaluator.has_budget():
            middle = (low + high) // 2
            if self._is_within(plans[fewer[middle]], within_s):
                best, high = plans[fewer[middle]], middle
            else:
                low = middle + 1
        return best

    def _is_within(self, by_kind: PlansByKind, within_s: float) -> bool:
        """Return whether plans are expected to take no longer; the slowest check comes last."""
        evaluator = self._evaluator
        asked: tuple[Callable[[PlansByKind], float], ...] = (evaluator.bound_s, evaluator.epoch_s, evaluator.expected_s)
        return all(seconds(by_kind) <= within_s for seconds in asked)

    def _confirmed(self, best: PlansByKind) -> PlansByKind:
        """Return the best, or plans of whole batches that are faster over a whole epoch: those of fl and sfl.

        Plans that were taken because they do well on varied machines may take longer on these, and of a long epoch only
        the first iterations were simulated. A user who could have had fl or sfl must not wait longer for pipar.
        """
        evaluator = self._evaluator
        near = [by_kind for by_kind, seconds in evaluator.known.items() if seconds < inf]
        uncut = [by_kind for by_kind in near if all(plan.micro_batches == 1 for plan in by_kind)]
        others = sorted(uncut, key=lambda by_kind: (evaluator.epoch_s(by_kind), by_kind))[: self._settings.confirmed]
        whole_s = {by_kind: evaluator.whole_epoch_s(by_kind) for by_kind in dict.fromkeys((best, *others))}
        quickest = min(whole_s, key=lambda by_kind: whole_s[by_kind])
        # Plans of whole batches that are only slightly faster here may be slower on machines that differ from their
        # profiles.
        return best if best in uncut and whole_s[best] <= whole_s[quickest] * (1 + TIE) else quickest
