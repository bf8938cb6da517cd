"""The choice of every device's {P, N}; paper III-C, phase 3, and beyond it.

`estimate_plans` is the paper's: each device as if it were alone. `choose` simulates the plans of all devices
together, because K devices share the server's C cores and what is best for one alone may starve the others: it starts
from each device's own best and improves. Devices of one kind (same machine, link, data size and limits) get one plan.
The paper shortlists one N for each P; both search every N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import inf, prod
from random import Random

from pipar.errors import PlanError
from pipar.methods import Method, Plan, check_plan
from pipar.planner.candidates import Allow, Candidate, LowerBound, allowed_plans, candidates
from pipar.planner.fleet import Auto, Fleet, Member
from pipar.planner.paper_estimate import StageTimes, closed_form_s, full_batch_times
from pipar.planner.timing import (
    FEWEST_ITERATIONS,
    STEADY_ITERATIONS,
    Simulate,
    SimulateWithin,
    Timing,
    epoch_timing,
    steady_epoch_s,
    steady_epoch_within_s,
    steady_iterations,
)

#: The paper's estimates this close, relative to the best, are a tie. The estimate is no better than that, and where the
#: link or the server is the bottleneck it never grows with N: without a tie, micro-batches of one sample would win.
ESTIMATE_TIE = 0.01
#: Simulations this close, relative to the best, are a tie, which goes to the smaller N: no profile is better than that.
TIE = 0.002
#: The first look at N; behind it, every N around the best.
COARSE = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25, 32, 40, 50, 64, 80, 100, 128, 160, 200, 256, 320, 400, 512)
#: Those that kinds of devices are combined with.
_FEW = (1, 2, 4, 8)
_SWEEPS = 4
#: No profile is exact. Plans this close to the best are compared again in worlds where every layer takes more or less
#: than its profile says: a plan that only just balances two lanes is worse off than it seems.
_CLOSE = 0.05
#: Plans that are further than this from the best are not improved, nor simulated to their end.
_FAR = 2 * _CLOSE
#: What is given up has mostly taken so many times less than a whole simulation.
_GIVEN_UP = 3
_DOUBT = 0.15
_SHORTLIST = 8
#: Comparing may take half as much again as the search.
_COMPARED = 1.5
#: Of these, so many are compared in all of the worlds, the others in half of them.
_FINALISTS = 3
_RUNNERS_UP = 8
_POLISHED = 4
#: Plans of whole batches that the best one is compared with once more, over a whole epoch.
_CONFIRMED = 2
#: With few kinds of devices, so many combinations of their plans are looked at, and so many begun with.
_COMBINED = 50_000
_BEGUN = 3

#: What surrounds a batch takes as long to simulate as so many of its micro-batches.
_AROUND = 2

#: One plan for each kind of device, in the order of `Fleet.kinds`.
PlansByKind = tuple[Plan, ...]


@dataclass(frozen=True)
class SearchSettings:
    """How much a search may compute: a large fleet is searched by a sample, and behind `pieces` nothing is improved."""

    devices: int
    pieces: int  # micro-batches to be simulated, some microseconds each
    worlds: int  # in which plans that are close to the best are compared
    iterations: int = STEADY_ITERATIONS  # of an epoch that are simulated
    confirms: bool = False  # that whole batches are no quicker, over a whole epoch
    worth: float = 0.0  # what other plans have to promise to take the place of those in force: closer, it may err
    trial_cost: float = 0.0  # what plans with new split points may promise to lose: an epoch shows what they really do


#: Seconds, before a training: its plans may stay for hours.
THOROUGH = SearchSettings(devices=128, pieces=500_000, worlds=8, confirms=True)
#: A third of a second, beside a training: links that change every minute are planned for every minute.
QUICK = SearchSettings(devices=24, pieces=10_000, worlds=2, iterations=FEWEST_ITERATIONS, worth=0.01)
#: Some seconds, beside a training: what it has shown of its machines stays true for longer.
UNHURRIED = SearchSettings(devices=128, pieces=300_000, worlds=4, worth=0.003, trial_cost=0.005)


@dataclass(frozen=True)
class SearchResult:
    """The plans that were chosen, and those that came next, with the seconds of an epoch by each."""

    plans: dict[str, Plan]
    by_kind: PlansByKind
    epoch_s: float
    timing: Timing
    runners_up: tuple[tuple[PlansByKind, float], ...] = ()
    simulations: int = 0


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

    `within`, in the same world, gives up plans that are far from the best. `start` are plans to begin with instead of
    each kind's own best: those in force, when bandwidth has changed. `only` says of a {P, N} whether it is looked at.
    """
    if fleet.method.shares_server_model:  # devices take their turns: the second iteration is like all others
        settings = replace(settings, iterations=FEWEST_ITERATIONS)
    search = _Search(fleet, simulate, within, progress, settings, only)
    if fleet.method.shares_server_model:
        best = min(plans_in_common(fleet), key=search.epoch_s)
    else:
        own = search.as_allowed(start) if start is not None else None
        own = own or search.own_best()
        for begin in search.best_of([own, search.best_shared(), *search.likely()]):
            search.improve(begin)
        search.polish()
        best = search.most_dependable()
        best = search.confirmed(best) if settings.confirms else best
    plans = search.plans(best)
    return SearchResult(
        plans=plans,
        by_kind=best,
        epoch_s=search.epoch_s(best),
        timing=epoch_timing(simulate, fleet, plans),
        runners_up=search.runners_up(best),
        simulations=search.simulations,
    )


def plans_in_common(fleet: Fleet) -> list[PlansByKind]:
    """Return the plans with each split point that all may have: a shared server-side model is cut in one place only."""
    options = [{plan.split_point: plan for plan in allowed_plans(fleet, kind[0])} for kind in fleet.device_kinds()]
    common = set.intersection(*map(set, options))
    if not common:
        raise PlanError(
            f"{fleet.method.name} shares one server-side model, but no split point is allowed for all of the devices: "
            "give them the same one, or use sfl or pipar."
        )
    return [tuple(of[cut] for of in options) for cut in sorted(common)]


def plans_by_device(fleet: Fleet, by_kind: PlansByKind) -> dict[str, Plan]:
    """Return each device's plan from those of the kinds."""
    return {m.name: plan for kind, plan in zip(fleet.device_kinds(), by_kind, strict=True) for m in kind}


def extended(fleet: Fleet, plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """Return each device's plan from those of a sample of the fleet, in which the first of every kind are."""
    return {member.name: plans[kind[0].name] for kind in fleet.device_kinds() for member in kind}


def from_sample(fleet: Fleet, sample: Fleet, by_kind: PlansByKind) -> dict[str, Plan]:
    """Return each device's plan from those of the kinds of a sample of the fleet."""
    return extended(fleet, plans_by_device(sample, by_kind))


def estimate_plans(fleet: Fleet) -> dict[str, tuple[Plan, float]]:
    """Return each device's plan with the shortest iteration by the paper's estimate; ties go to the smaller N."""
    chosen = {}
    for kind in fleet.device_kinds():
        best = _best_plan_by_estimate(fleet, kind[0])
        chosen.update({member.name: best for member in kind})
    return chosen


def _best_plan_by_estimate(fleet: Fleet, member: Member) -> tuple[Plan, float]:
    times: dict[tuple[object, ...], StageTimes] = {}
    found = []
    for plan in allowed_plans(fleet, member):
        p, n = plan.split_point, plan.micro_batches
        key = (p, plan.up, plan.down)
        if key not in times:
            shares = member.costs.profile.share(p, "up", plan.up), fleet.server.profile.share(p, "down", plan.down)
            times[key] = full_batch_times(member.costs, fleet.server, p, fleet.batch_size, member.link, shares)
        found.append((plan, closed_form_s(times[key].divided_by(n), n)))
    within = min(seconds for _, seconds in found) * (1 + ESTIMATE_TIE)
    tied = [(plan, seconds) for plan, seconds in found if seconds <= within]
    return min(tied, key=lambda item: (item[0].micro_batches, item[0].split_point))


def check_given(
    method: Method,
    split_point: int | Auto,
    micro_batches: int | Auto,
    *,
    layers: int,
    batch_size: int,
    model: str,
) -> None:
    """Raise PlanError if a given P or N that counts for the method does not fit the network or the batch."""
    p = split_point if method.splits and split_point != "auto" else layers
    n = micro_batches if method.pipelines and micro_batches != "auto" else 1
    check_plan(Plan(p, n), layers=layers, batch_size=batch_size, model=model)


@dataclass
class _Search:
    fleet: Fleet
    simulate: Simulate
    within: SimulateWithin | None
    progress: Callable[[int], None] | None
    settings: SearchSettings
    only: Allow | None = None
    known: dict[PlansByKind, float] = field(default_factory=dict)
    shortest_s: float = inf  # of these
    doubted: dict[PlansByKind, list[float]] = field(default_factory=dict)  # where machines are other than profiled
    simulations: int = 0
    spent: int = 0  # micro-batches simulated

    def __post_init__(self) -> None:
        self._doubted = [self.fleet.varied(partial(_doubts, world)) for world in range(self.settings.worlds)]
        self._kinds = self.fleet.device_kinds()
        known: dict[tuple[object, ...], list[Candidate]] = {}  # kinds that differ in their data alone have the same
        for first, *_ in self._kinds:
            if first.kind not in known:
                known[first.kind] = candidates(self.fleet, first, self.only)
        self._options = [known[kind[0].kind] for kind in self._kinds]
        self._bound = LowerBound(self.fleet)
        self._of = [{option.plan: option for option in options} for options in self._options]
        self._cuts = [_by_cut(options) for options in self._options]

    def as_allowed(self, by_kind: PlansByKind) -> PlansByKind | None:
        """Return these plans with the encodings and windows that are right now; None if they are not all allowed."""
        if len(by_kind) != len(self._options):
            return None
        found = [self._like(plan, options) for plan, options in zip(by_kind, self._options, strict=True)]
        return None if None in found else tuple(plan for plan in found if plan is not None)

    @staticmethod
    def _like(plan: Plan, options: list[Candidate]) -> Plan | None:
        # Each {P, N} is there once, with the window that memory asks for.
        wanted = (plan.split_point, plan.micro_batches)
        return next((o.plan for o in options if (o.plan.split_point, o.plan.micro_batches) == wanted), None)

    def own_best(self) -> PlansByKind:
        """Return each kind's best plan, as if a device of it were alone."""
        return tuple(min(options, key=lambda option: (option.alone_s, option.plan)).plan for options in self._options)

    def best_shared(self) -> PlansByKind:
        """Return the plans whose bound is the shortest: no device alone, nor all of them on the cores, takes longer.

        For every time that a device may take, each kind has the plan within it that leaves the server most room.
        """
        lightest: list[Candidate | None] = [None] * len(self._options)
        best: PlansByKind | None = None
        for _, _, option, kind in self._by_own_time():
            before = lightest[kind]
            if before is not None and before.server_s <= option.server_s:
                continue
            lightest[kind] = option
            if None not in lightest:
                shared = tuple(each.plan for each in lightest if each is not None)
                best = shared if best is None else min(best, shared, key=self.bound_s)
        assert best is not None
        return best

    def _by_own_time(self) -> list[tuple[float, Plan, Candidate, int]]:
        every = enumerate(self._options)
        timed = [(self._bound.own_s(kind, o), o.plan, o, kind) for kind, options in every for o in options]
        return sorted(timed, key=lambda item: (item[0], item[3], item[1]))

    def likely(self) -> list[PlansByKind]:
        """Simulate and return combinations of a few plans for each split point, likely ones first."""
        load = [len(kind) / self.fleet.cores for kind in self._kinds]
        short = [self._few_of_each_cut(cuts, share) for cuts, share in zip(self._cuts, load, strict=True)]
        if len(self._kinds) == 1 or prod(map(len, short)) > min(_COMBINED, self.settings.pieces):
            return []
        tried = []
        for chosen in sorted(product(*short), key=self._bound.likely_s):
            by_kind = tuple(option.plan for option in chosen)
            if self.spent > self.settings.pieces / 2:
                break
            if self._bound.alone_s(chosen) < self.shortest_s:
                self.epoch_s(by_kind)
                tried.append(by_kind)
        return tried

    @staticmethod
    def _few_of_each_cut(cuts: Mapping[int, list[Candidate]], load: float) -> list[Candidate]:
        """Return for each split point the plan that is best alone, best under contention, and those of a few N."""
        measures: tuple[Callable[[Candidate], float], ...] = (
            lambda option: option.alone_s,
            lambda option: option.alone_s + load * option.server_s,
        )
        best = [min(of, key=measure) for of in cuts.values() for measure in measures]
        few = [option for of in cuts.values() for option in of if option.plan.micro_batches in _FEW]
        return list(dict.fromkeys(best + few))

    def best_of(self, starts: Iterable[PlansByKind]) -> list[PlansByKind]:
        """Return the best of these plans, one for each choice of split points."""
        nearest: dict[tuple[int, ...], PlansByKind] = {}
        for by_kind in sorted(starts, key=lambda by_kind: (self.epoch_s(by_kind), by_kind)):
            nearest.setdefault(tuple(plan.split_point for plan in by_kind), by_kind)
        return list(nearest.values())[:_BEGUN]

    def plans(self, by_kind: PlansByKind) -> dict[str, Plan]:
        return plans_by_device(self.fleet, by_kind)

    def epoch_s(self, by_kind: PlansByKind) -> float:
        """Return the seconds of an epoch of these plans; of plans that are far from the best known, infinitely many."""
        if by_kind not in self.known:
            seconds = self._simulated_s(self.fleet, by_kind, self.shortest_s * (1 + _FAR))
            self.known[by_kind], self.shortest_s = seconds, min(seconds, self.shortest_s)
        return self.known[by_kind]

    def expected_s(self, by_kind: PlansByKind, worlds: int | None = None) -> float:
        """Return the mean over the profiles as they are and as they may be, in all of the worlds or in so many."""
        if self.epoch_s(by_kind) == inf:
            return inf
        count = self.settings.worlds if worlds is None else worlds
        times = self.doubted.setdefault(by_kind, [])
        times += [self._simulated_s(fleet, by_kind) for fleet in self._doubted[len(times) : count]]
        return (self.epoch_s(by_kind) + sum(times[:count])) / (1 + count)

    def _simulated_s(self, fleet: Fleet, by_kind: PlansByKind, within_s: float = inf) -> float:
        self.simulations += 1
        if self.progress is not None:
            self.progress(self.simulations)
        plans, iterations = self.plans(by_kind), self.settings.iterations
        if self.within is None or within_s == inf:
            seconds = steady_epoch_s(self.simulate, fleet, plans, iterations)
        else:
            seconds = steady_epoch_within_s(self.within, fleet, plans, within_s, iterations)
        pieces = steady_iterations(fleet, iterations) * sum(
            len(kind) * (plan.micro_batches + _AROUND) for kind, plan in zip(self._kinds, by_kind, strict=True)
        )
        self.spent += pieces // _GIVEN_UP if seconds == inf else pieces
        return seconds

    def bound_s(self, by_kind: PlansByKind) -> float:
        """Return what an epoch of these plans takes at least: the slowest device alone, or all work over all cores."""
        return self._bound.alone_s([of[plan] for of, plan in zip(self._of, by_kind, strict=True)])

    def improve(self, best: PlansByKind) -> None:
        """Simulate plans until no other plan of one kind makes the best better; not from where others are far ahead."""
        if self.epoch_s(best) > self.shortest_s * (1 + _FAR):
            return
        for _ in range(_SWEEPS if len(self._kinds) > 1 else 1):
            before = self.epoch_s(best)
            for kind in self._slowest_first(best):
                if self.spent < self.settings.pieces:
                    best = self._improve_kind(best, kind)
            if self.epoch_s(best) > before * (1 - TIE):
                break

    def polish(self) -> None:
        """Look again for the N of each kind, with the split points of all plans that came near the best."""
        if len(self._kinds) == 1:
            return
        within = self.shortest_s * (1 + _FAR)
        for best in self.best_of(self.known)[:_POLISHED]:
            if self.epoch_s(best) <= within and self.spent < self.settings.pieces:
                for kind in range(len(best)):
                    best = self._best_n(self._with_every_n(best, kind, best[kind].split_point), best)

    def _with_every_n(self, by_kind: PlansByKind, kind: int, cut: int) -> dict[int, PlansByKind]:
        """Return the plans with this split point and each N for one kind, the others staying as they are."""
        plans = [option.plan for option in self._cuts[kind][cut]]
        return {plan.micro_batches: (*by_kind[:kind], plan, *by_kind[kind + 1 :]) for plan in plans}

    def _slowest_first(self, by_kind: PlansByKind) -> list[int]:
        alone = [self._of[kind][plan].alone_s for kind, plan in enumerate(by_kind)]
        return sorted(range(len(alone)), key=lambda kind: -alone[kind])

    def _improve_kind(self, best: PlansByKind, kind: int) -> PlansByKind:
        """Return the best with any plan of this kind, the others staying as they are."""
        found = best
        every = [self._with_every_n(best, kind, cut) for cut in self._cuts[kind]]
        for plans in sorted(every, key=lambda plans: min(map(self.bound_s, plans.values()))):
            found = min(found, self._best_n(plans, found), key=self.epoch_s)
        return found

    def _best_n(self, plans: Mapping[int, PlansByKind], best: PlansByKind) -> PlansByKind:
        """Return the best of one split point's plans, by N: a coarse look, then every N around the best."""
        coarse = [n for n in plans if n in COARSE or n == max(plans)]
        local = self._first_of(plans, coarse, best)
        if local is None or self.epoch_s(plans[local]) == inf:
            return best
        at = coarse.index(local)
        low = coarse[at - 1] if at else local
        high = coarse[at + 1] if at + 1 < len(coarse) else local
        around = [n for n in plans if low < n < high]
        refined = self._first_of(plans, around, plans[local]) if around else None
        chosen = plans[local] if refined is None else min(plans[local], plans[refined], key=self.epoch_s)
        return min(best, chosen, key=self.epoch_s)

    def _first_of(self, plans: Mapping[int, PlansByKind], numbers: list[int], best: PlansByKind) -> int | None:
        """Return the N with the shortest epoch, of those that their bounds do not rule out; likeliest first."""
        found, shortest = None, self.epoch_s(best)
        least = None
        for n in sorted(numbers, key=lambda n: self.bound_s(plans[n])):
            if self.bound_s(plans[n]) >= shortest * (1 + _CLOSE / 2) or self.spent > self.settings.pieces:
                break
            seconds = self.epoch_s(plans[n])
            if least is None or seconds < least:
                found, least = n, seconds
            shortest = min(shortest, seconds)
        return found

    def most_dependable(self) -> PlansByKind:
        """Return the best of the plans that are close to the best, also on slower machines; ties to the smaller N."""
        within = self.shortest_s * (1 + _CLOSE)
        close = sorted((seconds, by_kind) for by_kind, seconds in self.known.items() if seconds <= within)
        some = self.settings.worlds // 2
        short: list[PlansByKind] = []
        for _, by_kind in close[:_SHORTLIST]:
            if not short or self._may_compare():
                self.expected_s(by_kind, some)
                short.append(by_kind)
        short.sort(key=lambda by_kind: self.expected_s(by_kind, some))
        best = min(short[:_FINALISTS], key=self.expected_s)
        for kind in range(len(best)):
            if self.spent < self.settings.pieces:
                best = self._nearby(best, kind)
        within_s = self.expected_s(best) * (1 + TIE)
        compared = [by_kind for by_kind, times in self.doubted.items() if len(times) == self.settings.worlds]
        tied = [by_kind for by_kind in compared if self.expected_s(by_kind) <= within_s]
        best = min(tied, key=lambda by_kind: (sum(plan.micro_batches for plan in by_kind), by_kind))
        for kind in range(len(best)):
            best = self._with_fewer(best, kind, within_s)
        return best

    def _may_compare(self) -> bool:
        """Return whether there is time left for worlds in which machines are other than profiled."""
        return self.spent < self.settings.pieces * _COMPARED

    def confirmed(self, best: PlansByKind) -> PlansByKind:
        """Return the best, or plans of whole batches that are quicker over a whole epoch: those of fl and sfl.

        What is chosen because it bears other machines well may take longer on these, and of a long epoch only the
        first iterations were simulated. Whoever could have had fl or sfl is not to wait longer for it.
        """
        near = [by_kind for by_kind, seconds in self.known.items() if seconds < inf]
        uncut = [by_kind for by_kind in near if all(plan.micro_batches == 1 for plan in by_kind)]
        others = sorted(uncut, key=lambda by_kind: (self.epoch_s(by_kind), by_kind))[:_CONFIRMED]
        whole_s = {
            by_kind: epoch_timing(self.simulate, self.fleet, self.plans(by_kind)).epoch_s
            for by_kind in dict.fromkeys((best, *others))
        }
        quickest = min(whole_s, key=lambda by_kind: whole_s[by_kind])
        # Whole batches that are hardly quicker here than other ones may be slower on machines that are not as profiled.
        return best if best in uncut and whole_s[best] <= whole_s[quickest] * (1 + TIE) else quickest

    def _with_fewer(self, best: PlansByKind, kind: int, within_s: float) -> PlansByKind:
        """Return the plans with a smaller N of this kind that take no longer than a tie allows, by halving.

        Devices for which the others are waited for anyway were left with whatever N was tried first.
        """
        plans = self._with_every_n(best, kind, best[kind].split_point)
        fewer = [n for n in plans if n < best[kind].micro_batches and n in COARSE]
        low, high = 0, len(fewer)
        while low < high and self.spent < self.settings.pieces:
            middle = (low + high) // 2
            if self._is_within(plans[fewer[middle]], within_s):
                best, high = plans[fewer[middle]], middle
            else:
                low = middle + 1
        return best

    def _is_within(self, by_kind: PlansByKind, within_s: float) -> bool:
        """Return whether plans are expected to take no longer; what slower machines take is asked for last."""
        asked: tuple[Callable[[PlansByKind], float], ...] = (self.bound_s, self.epoch_s, self.expected_s)
        return all(seconds(by_kind) <= within_s for seconds in asked)

    def _nearby(self, best: PlansByKind, kind: int) -> PlansByKind:
        """Return the best with an N of this kind that lies around, going on in the direction that is better."""
        plans = self._with_every_n(best, kind, best[kind].split_point)
        stride = max(1, best[kind].micro_batches // 10)
        for step in (-stride, stride):
            while self._may_compare() and (other := plans.get(best[kind].micro_batches + step)) is not None:
                if self.expected_s(other) >= self.expected_s(best):
                    break
                best = other
        return best

    def runners_up(self, best: PlansByKind) -> tuple[tuple[PlansByKind, float], ...]:
        """Return the next best plans, one for each choice of split points, then others; one is far if all are."""
        given_up = [by_kind for by_kind, seconds in self.known.items() if seconds == inf]
        if given_up and len(given_up) + 1 >= len(self.known):
            nearest = min(given_up, key=self.bound_s)
            self.known[nearest] = self._simulated_s(self.fleet, nearest)
        others = sorted((s, by_kind) for by_kind, s in self.known.items() if by_kind != best and s < inf)
        first: dict[tuple[int, ...], tuple[PlansByKind, float]] = {}
        rest = []
        for seconds, by_kind in others:
            cut = tuple(plan.split_point for plan in by_kind)
            if cut in first or cut == tuple(plan.split_point for plan in best):
                rest.append((by_kind, seconds))
            else:
                first[cut] = (by_kind, seconds)
        shown = [*list(first.values())[: _RUNNERS_UP // 2], *rest]
        return tuple(sorted(shown[:_RUNNERS_UP], key=lambda item: item[1]))


def _doubts(world: int, machine: str) -> Callable[[], float]:
    draw = Random(f"{world} {machine}")
    return lambda: draw.uniform(1 - _DOUBT, 1 + _DOUBT)


def _by_cut(options: list[Candidate]) -> dict[int, list[Candidate]]:
    cuts: dict[int, list[Candidate]] = {}
    for option in options:
        cuts.setdefault(option.plan.split_point, []).append(option)
    return cuts
