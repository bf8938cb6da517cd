"""Kinds of devices that are nearly alike, merged into groups: a fleet of many kinds is searched by these first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from pipar.planner.fleet import Fleet, Member

#: Groups within which nothing differs by more than this factor are not divided.
_ABOUT = math.log(1.2)
#: Shorter latencies are taken to be this long: they hardly matter.
_LATENCY_S = 1e-3

#: For each device the logarithms of what tells devices apart; first how long it computes.
_Places = Mapping[str, tuple[float, ...]]


def merge_kinds(fleet: Fleet, most: int) -> Fleet:
    """Return the fleet with at most `most` kinds, or more if some cannot be merged.

    A round waits for the slowest device. So all devices of a group get the speed of its slowest, the slowest link and
    the least memory: what is allowed for a group is allowed for each of its devices.
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
    """Return what devices must have in common to be of one group."""
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
    """Return two halves of a group, divided by what its devices differ most in."""
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
