"""Why these plans were chosen: the runners-up, the paper's estimate, and the best of an exhaustive search."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from pipar.errors import InputError
from pipar.events import Observer, Preparing, ignore
from pipar.job.explanation import ExhaustiveSearch, Explanation, LeakageLimitCost, LinkState, Option, Plans
from pipar.job.job import Job
from pipar.job.plans import Rehearse, plans_by_estimate, search_job_plans, simulation
from pipar.planner.background_search import search_again
from pipar.planner.candidates import candidates, plans_in_common
from pipar.planner.encoding_choice import reencoded
from pipar.planner.exhaustive import ExhaustiveResult, search_all
from pipar.planner.fleet import Fleet, Member, plans_by_device, plans_from_sample
from pipar.planner.timing import Simulate, epoch_timing
from pipar.settings.config import device_names
from pipar.settings.links import Link

#: For several kinds of devices, an exhaustive search tries the finest of these grids of N that is within the limit.
_GRIDS = (
    (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25, 32, 40, 50, 64, 80, 100),
    (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 50, 100),
    (1, 2, 4, 8, 16, 32),
    (1, 4, 16),
)
#: Minutes, at a few milliseconds each; most are ruled out by their bounds.
_MOST_COMBINATIONS = 100_000


def explain(job: Job, rehearse: Rehearse, *, exhaustive: bool = False, observe: Observer = ignore) -> Explanation:
    """Return the chosen plans of a job and why they were chosen; `exhaustive` also tries all others."""
    started = time.monotonic()
    fleet, simulate = job.fleet(), simulation(job, rehearse)
    sample = fleet.sampled()
    grid = _grid(_evened(sample)) if exhaustive else None  # raises before the search takes time
    choice = search_job_plans(job, fleet, rehearse, observe=observe)
    seconds = time.monotonic() - started

    def timed(plans: Plans) -> Option:
        return Option(plans, epoch_timing(simulate, sample, plans).epoch_s)

    simulated = Option(choice.plans, choice.timing.epoch_s)
    estimated = timed(plans_by_estimate(job, fleet))
    next_best = [timed(plans_from_sample(fleet, sample, by_kind)) for by_kind, _ in choice.runners_up]
    by_paper = job.config.plan.estimate == "paper"
    chosen, other = (estimated, simulated) if by_paper else (simulated, estimated)
    explanation = Explanation(
        job=job,
        fleet=fleet,
        chosen=chosen,
        timing=epoch_timing(simulate, sample, chosen.plans) if by_paper else choice.timing,
        runners_up=_others(chosen, [simulated, *next_best] if by_paper else next_best),
        other=other,
        simulations=choice.simulations,
        seconds=seconds,
        states=_states(job, fleet, chosen, simulate, observe),
        leakage_limit=_leakage_limit_cost(job, rehearse, chosen, observe),
    )
    if not exhaustive:
        return explanation
    started = time.monotonic()
    best, found = _search(fleet, simulate, grid, timed, observe)
    # The search may have found plans outside the grid that are better than all on it.
    tried = (found, chosen, other, *explanation.runners_up)
    searched = ExhaustiveSearch(
        best=min(tried, key=lambda option: option.epoch_s),
        chosen_epoch_s=chosen.epoch_s,
        grid=grid,
        simulated=best.simulated,
        ruled_out=best.ruled_out,
        seconds=time.monotonic() - started,
    )
    return replace(explanation, exhaustive=searched)


def _states(job: Job, fleet: Fleet, chosen: Option, simulate: Simulate, observe: Observer) -> tuple[LinkState, ...]:
    """Return the plans at each position of the links' cycles; nothing if no link changes.

    All cycles are taken at the same position, as at the start; cycles of different lengths or periods drift apart.
    """
    place = {name: number for number, name in enumerate(device_names(job.config))}
    members = sorted(fleet.members, key=lambda member: place[member.name])
    changing = list(dict.fromkeys(member.link for member in members if member.link.cycle))
    count = max((len(link.cycle) for link in changing), default=0)
    states = []
    for number in range(count):
        observe(Preparing("Planning for links that change", number / count))
        there = replace(fleet, members=tuple(replace(m, link=_at(m.link, number)) for m in fleet.members))
        option = chosen if number == 0 else _replanned(job, there, chosen.plans, simulate)
        states.append(LinkState(tuple(_at(link, number) for link in changing), option))
    return tuple(states)


def _leakage_limit_cost(job: Job, rehearse: Rehearse, chosen: Option, observe: Observer) -> LeakageLimitCost | None:
    """Return the effect of the limit on leakage; None without a limit."""
    most = job.config.privacy.max_leakage
    if most is None:
        return None
    if not job.leaky_cuts or not job.method.splits:
        return LeakageLimitCost(most, job.leaky_cuts, chosen, job.leakage_guess)
    free = replace(job, leaky_cuts={})
    fleet, by_paper = free.fleet(), job.config.plan.estimate == "paper"
    plans = (
        plans_by_estimate(free, fleet) if by_paper else search_job_plans(free, fleet, rehearse, observe=observe).plans
    )
    without = Option(plans, epoch_timing(simulation(free, rehearse), fleet.sampled(), plans).epoch_s)
    return LeakageLimitCost(most, job.leaky_cuts, without, job.leakage_guess)


def _at(link: Link, number: int) -> Link:
    return link.cycle[number % len(link.cycle)] if link.cycle else link


def _replanned(job: Job, fleet: Fleet, plans: Plans, simulate: Simulate) -> Option:
    """Return the plans of a training after such a change: new ones if it may change them and they are better."""
    if job.method.shares_server_model:
        plans = reencoded(fleet, plans) if job.can_replan else plans
    elif job.can_replan:
        by_paper = job.config.plan.estimate == "paper"
        plans = plans_by_estimate(job, fleet) if by_paper else search_again(fleet, plans)
    return Option(plans, simulate(fleet.sampled(), plans, None).epoch_s)


def _others(chosen: Option, options: Sequence[Option]) -> tuple[Option, ...]:
    return tuple(sorted((o for o in options if o.plans != chosen.plans), key=lambda option: option.epoch_s))


def _search(
    fleet: Fleet,
    simulate: Simulate,
    grid: tuple[int, ...] | None,
    timed: Callable[[Plans], Option],
    observe: Observer,
) -> tuple[ExhaustiveResult, Option]:
    """Return the best of all plans, or of those on a grid of N."""
    alike = _evened(fleet.sampled())

    def progress(done: int, most: int) -> None:
        observe(Preparing(f"Trying every plan: {done:,} of at most {most:,} combinations", done / most))

    if alike.method.shares_server_model:
        best = _best_in_common(alike, simulate, progress)
    else:
        best = search_all(alike, simulate, micro_batches=grid, progress=progress)
    return best, timed(plans_from_sample(fleet, alike, best.by_kind))


def _likeness(member: Member, fleet: Fleet) -> tuple[object, ...]:
    """Return a key that is equal for devices that differ only in the size of their last batch."""
    return (replace(member, samples=0).kind, fleet.iterations(member.samples))


def _evened(fleet: Fleet) -> Fleet:
    """Return the fleet with equal numbers of samples for devices that differ only in the size of their last batch.

    A dataset divided evenly often gives some devices one sample more. That does not change their plans, but it makes
    them another kind of device, and the search one of all combinations.
    """
    most: dict[tuple[object, ...], int] = {}
    for member in fleet.members:
        likeness = _likeness(member, fleet)
        most[likeness] = max(member.samples, most.get(likeness, 0))
    members = tuple(replace(member, samples=most[_likeness(member, fleet)]) for member in fleet.members)
    return replace(fleet, members=members)


def _grid(fleet: Fleet) -> tuple[int, ...] | None:
    """Return the N to try; None for all of them, if the kinds of devices have few enough combinations."""
    options = [[option.plan.micro_batches for option in candidates(fleet, kind[0])] for kind in fleet.device_kinds()]
    if len(options) == 1 or fleet.method.shares_server_model:
        return None
    for grid in (None, *_GRIDS):
        count = prod(sum(grid is None or n in grid for n in of) for of in options)
        if count <= _MOST_COMBINATIONS:
            return grid
    raise InputError(
        f"--exhaustive would try {count:,} combinations of {len(options)} kinds of devices, more than the maximum of "
        f"{_MOST_COMBINATIONS:,}: use fewer kinds (for example, the same samples per device), or give a split point."
    )


def _best_in_common(fleet: Fleet, simulate: Simulate, progress: Callable[[int, int], None]) -> ExhaustiveResult:
    """Return the best plans with one common split point, that of the shared server-side model."""
    found, every = [], plans_in_common(fleet)
    for number, by_kind in enumerate(every, start=1):
        found.append((simulate(fleet, plans_by_device(fleet, by_kind), None).epoch_s, by_kind))
        progress(number, len(every))
    seconds, by_kind = min(found)
    return ExhaustiveResult(by_kind, seconds, simulated=len(found), ruled_out=0)
