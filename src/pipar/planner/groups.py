"""A fleet of many kinds of devices as one of a few: devices that are nearly alike are taken for the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

from pipar.planner.fleet import Fleet, Member

#: Groups within which nothing differs by more than this are not divided.
_ABOUT = math.log(1.2)
#: Shorter latencies hardly count.
_LATENCY_S = 1e-3


def merged(fleet: Fleet, most: int) -> Fleet:
    """Return the fleet with at most so many kinds, or as many as have to stay apart.

    A round waits for the slowest, so all devices of a group are as slow as the slowest of it, on a link as slow, with
    the memory of the one that has least: what is allowed for a group is so for each of its devices.
    """
    if len(fleet.kinds()) <= most:
        return fleet
    apart: dict[tuple[object, ...], list[Member]] = {}
    for member in fleet.members:
        apart.setdefault(_given(member), []).append(member)
    groups = list(apart.values())
    while len(groups) < most:
        spreads = [max(_spread(fleet, group)) for group in groups]
        widest = max(range(len(groups)), key=lambda number: spreads[number])
        if spreads[widest] <= _ABOUT:
            break
        groups[widest : widest + 1] = _halves(fleet, groups[widest])
    members = {member.name: member for group in groups for member in _alike(fleet, group)}
    return replace(fleet, members=tuple(members[member.name] for member in fleet.members))


def _given(member: Member) -> tuple[object, ...]:
    """Return what devices of one group have in common."""
    given = (member.split_point, member.micro_batches, member.window, member.encoding)
    limits = (member.memory_bytes is None, member.link.up_bps is None, member.link.down_bps is None)
    return (len(member.costs.profile.layers), *limits, *given)


def _places(fleet: Fleet, group: list[Member]) -> list[list[float]]:
    """Return where the devices are among each other by everything that tells them apart, as logarithms."""
    seconds = _seconds(fleet, group)
    measures: tuple[Callable[[Member], float], ...] = (
        lambda member: seconds[id(member.costs)],
        lambda member: member.link.up_bps or 1.0,
        lambda member: member.link.down_bps or 1.0,
        lambda member: max(member.link.latency_s, _LATENCY_S),
        lambda member: member.memory_bytes or 1.0,
        lambda member: member.samples or 1.0,
    )
    return [[math.log(measure(member)) for member in group] for measure in measures]


def _spread(fleet: Fleet, group: list[Member]) -> list[float]:
    return [max(values) - min(values) for values in _places(fleet, group)]


def _halves(fleet: Fleet, group: list[Member]) -> list[list[Member]]:
    """Return a group in two, divided in the middle of what its devices differ most by."""
    values = max(_places(fleet, group), key=lambda values: max(values) - min(values))
    middle = (min(values) + max(values)) / 2
    below = [member for member, value in zip(group, values, strict=True) if value <= middle]
    above = [member for member, value in zip(group, values, strict=True) if value > middle]
    return [below, above]


def _alike(fleet: Fleet, group: list[Member]) -> list[Member]:
    seconds, links = _seconds(fleet, group), [member.link for member in group]
    slowest = max(group, key=lambda member: seconds[id(member.costs)])
    rates = {
        "up_bps": min((link.up_bps for link in links if link.up_bps is not None), default=None),
        "down_bps": min((link.down_bps for link in links if link.down_bps is not None), default=None),
    }
    link = slowest.link.model_copy(update={**rates, "latency_s": max(link.latency_s for link in links)})
    memory = min((member.memory_bytes for member in group if member.memory_bytes is not None), default=None)
    samples = round(fmean(member.samples for member in group))
    return [replace(m, costs=slowest.costs, link=link, samples=samples, memory_bytes=memory) for m in group]


def _seconds(fleet: Fleet, group: list[Member]) -> dict[int, float]:
    """Return how long all layers take, by the identity of costs: equal devices share theirs."""
    every = {id(member.costs): member.costs for member in group}
    return {key: sum(costs.each_layer_s(fleet.batch_size)) for key, costs in every.items()}
