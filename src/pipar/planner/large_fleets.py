"""Fleets of any size and number of kinds: chosen for by a sample of them, and in groups of what is nearly alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from pipar.errors import PlanError
from pipar.methods import Plan
from pipar.planner.candidates import Allow, allowed_plans
from pipar.planner.encoding import reencoded
from pipar.planner.fleet import Fleet, Member
from pipar.planner.search import (
    COARSE,
    THOROUGH,
    PlansByKind,
    SearchResult,
    SearchSettings,
    extended,
    from_sample,
    plans_by_device,
    search_kinds,
)
from pipar.planner.timing import Simulate, SimulateWithin, epoch_timing, steady_epoch_s

#: More kinds of devices than so many are searched in so many groups first, then in so many smaller ones.
_GROUPS, _SMALLER_GROUPS = 2, 8
#: Then cuts up to so many layers beside those of the groups count, too.
_NEARLY = 2
#: Groups within which nothing differs by more than this are not divided.
_ABOUT = math.log(1.2)
#: Shorter latencies hardly count.
_LATENCY_S = 1e-3

#: Where each device is by everything that tells them apart, as logarithms: first how long it computes.
_Places = Mapping[str, tuple[float, ...]]


def search_plans(
    fleet: Fleet,
    simulate: Simulate,
    *,
    within: SimulateWithin | None = None,
    start: Mapping[str, Plan] | None = None,
    progress: Callable[[int], None] | None = None,
    settings: SearchSettings = THOROUGH,
) -> SearchResult:
    """Return the choice for a fleet of any size, from a sample of it if it is large; `start` are the plans in force.

    Of many kinds of devices, two groups are searched first, then more and smaller ones around the plans of these.
    """
    sample = fleet.sampled(settings.devices)
    ask = partial(_search_sampled, simulate=simulate, within=within, progress=progress)
    if fleet.method.shares_server_model or len(sample.device_kinds()) <= _GROUPS:
        return ask(fleet, start=start, settings=settings)
    half = replace(settings, pieces=settings.pieces // 2)
    try:
        coarse = ask(merged(fleet, _GROUPS), start=start, settings=half)
    except PlanError:
        for kind in fleet.device_kinds():  # it is said of the device that it is true of
            allowed_plans(fleet, kind[0])
        raise
    groups = merged(fleet, _SMALLER_GROUPS)
    fine = ask(groups, start=coarse.plans, only=_around(coarse.plans.values()), settings=half)

    def of_kinds(plans: Mapping[str, Plan]) -> PlansByKind:
        coded = reencoded(sample, plans)
        return tuple(coded[kind[0].name] for kind in sample.device_kinds())

    by_kind = of_kinds(fine.plans)
    plans = plans_by_device(sample, by_kind)
    in_groups = groups.sampled(settings.devices)
    return SearchResult(
        plans=extended(fleet, plans),
        by_kind=by_kind,
        epoch_s=steady_epoch_s(simulate, sample, plans, settings.iterations),
        timing=epoch_timing(simulate, sample, plans),
        runners_up=tuple((of_kinds(from_sample(groups, in_groups, of)), s) for of, s in fine.runners_up),
        simulations=coarse.simulations + fine.simulations,
    )


def _around(plans: Iterable[Plan]) -> Allow:
    """Return what says whether a {P, N} is like these: cut between them or nearly so, N not far above or round."""
    cuts, numbers = zip(*((plan.split_point, plan.micro_batches) for plan in set(plans)), strict=True)
    least, most, above = min(cuts) - _NEARLY, max(cuts) + _NEARLY, 2 * max(numbers)
    return lambda p, n: least <= p <= most and (n <= above or n in COARSE)


def _search_sampled(
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
    choice = search_kinds(sample, simulate, within=within, start=begin, only=only, progress=progress, settings=settings)
    return replace(choice, plans=extended(fleet, choice.plans))


def merged(fleet: Fleet, most: int) -> Fleet:
    """Return the fleet with at most so many kinds, or as many as have to stay apart.

    A round waits for the slowest, so all devices of a group are as slow as the slowest of it, on a link as slow, with
    the memory of the one that has least: what is allowed for a group is so for each of its devices.
    """
    if len(fleet.device_kinds()) <= most:
        return fleet
    apart: dict[tuple[object, ...], list[Member]] = {}
    for member in fleet.members:
        apart.setdefault(_given(member), []).append(member)
    groups, places = list(apart.values()), _places(fleet)
    while len(groups) < most:
        spreads = [max(map(_spread, _columns(group, places))) for group in groups]
        widest = max(range(len(groups)), key=lambda number: spreads[number])
        if spreads[widest] <= _ABOUT:
            break
        groups[widest : widest + 1] = _halves(groups[widest], places)
    members = {member.name: member for group in groups for member in _alike(group, places)}
    return replace(fleet, members=tuple(members[member.name] for member in fleet.members))


def _given(member: Member) -> tuple[object, ...]:
    """Return what devices of one group have in common."""
    given = (member.split_point, member.micro_batches, member.window, member.encoding)
    limits = (member.memory_bytes is None, member.link.up_bps is None, member.link.down_bps is None)
    return (len(member.costs.profile.layers), *limits, *given)


def _places(fleet: Fleet) -> _Places:
    costs = {id(member.costs): member.costs for member in fleet.members}  # equal devices share theirs
    seconds = {key: of.all_layers_s(fleet.batch_size) for key, of in costs.items()}
    return {
        member.name: tuple(
            math.log(value or 1.0)
            for value in (
                seconds[id(member.costs)],
                member.link.up_bps,
                member.link.down_bps,
                max(member.link.latency_s, _LATENCY_S),
                member.memory_bytes,
                member.samples,
            )
        )
        for member in fleet.members
    }


def _columns(group: list[Member], places: _Places) -> list[tuple[float, ...]]:
    return list(zip(*(places[member.name] for member in group), strict=True))


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


def _halves(group: list[Member], places: _Places) -> list[list[Member]]:
    """Return a group in two, divided in the middle of what its devices differ most by."""
    values = max(_columns(group, places), key=_spread)
    middle = (min(values) + max(values)) / 2
    below = [member for member, value in zip(group, values, strict=True) if value <= middle]
    above = [member for member, value in zip(group, values, strict=True) if value > middle]
    return [below, above]


def _alike(group: list[Member], places: _Places) -> list[Member]:
    slowest, links = max(group, key=lambda member: places[member.name][0]), [member.link for member in group]
    rates = {
        "up_bps": min((link.up_bps for link in links if link.up_bps is not None), default=None),
        "down_bps": min((link.down_bps for link in links if link.down_bps is not None), default=None),
    }
    link = slowest.link.model_copy(update={**rates, "latency_s": max(link.latency_s for link in links)})
    memory = min((member.memory_bytes for member in group if member.memory_bytes is not None), default=None)
    samples = round(fmean(member.samples for member in group))
    return [replace(m, costs=slowest.costs, link=link, samples=samples, memory_bytes=memory) for m in group]
