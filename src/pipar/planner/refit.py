"""The cost model made to agree with what a training has shown: links as measured, machines as slow as they were.

An epoch shows how long a machine took for all of the layers that it had. That says much of these layers together and
of other cuts nearby, little of a single layer; two cuts that were tried say what lies between them.

Measurements of equal devices scatter. Devices of one kind whose measurements are about the same stay of one kind, with
those of the middle one, so that a fleet of a hundred equal boards is still planned once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from pipar.config import Link
from pipar.planner.costs import Costs
from pipar.planner.fleet import Fleet, Member

#: Measurements that differ by less than about this are the same.
_ABOUT = 0.2
#: The share of a new measurement in what is believed of work that was measured before: epochs scatter by some per cent.
_NEW = 0.5
#: Work is the same if no more of it lies elsewhere.
_SAME_WORK = 0.01
#: How far layers are off their profile, each by itself and all together, beside what the latest epoch has shown of
#: all; and by how much an epoch deceives. (Standard deviations.)
_EACH, _ALL, _DECEIVED = 0.1, 0.1, 0.005
#: No layer is believed to be further off the others.
_FURTHEST = 0.5
#: Kinds of work that are remembered of a machine.
_REMEMBERED = 6


@dataclass(frozen=True)
class Machine:
    """What epochs have shown of a machine: how many times as long as profiled it took for which work.

    Work is given by shares: the part of all that is no layer, then of each layer.
    """

    seen: tuple[tuple[Sequence[float], float], ...] = ()  # shares, and times; the latest last
    news: float = 0.0  # all that was not expected so far, as a logarithm

    @property
    def times(self) -> float:
        """How many times as long as profiled it took for what it did last."""
        return self.seen[-1][1] if self.seen else 1.0

    def believed(self, shares: Sequence[float]) -> float:
        """Return how many times as long as profiled it is expected to take for some work."""
        known = self._like(shares)
        return float(np.dot(shares, self.factors(len(shares)))) if known is None else self.seen[known][1]

    def learned(self, shares: Sequence[float], times: float) -> Machine:
        """Return what is known behind an epoch in which it took so many times as long as profiled.

        Other work than before tells of its layers and is believed. Of work that was seen before, half of what is new
        is: the machine has changed, or was disturbed, and would be as slow with everything that it has done.
        """
        surprise = math.log(times / self.believed(shares))
        known = self._like(shares)
        if known is None:
            return Machine((*self.seen[1 - _REMEMBERED :], (shares, times)), self.news + surprise)
        changed = _NEW * surprise
        others = [(work, before * math.exp(changed)) for work, before in self.seen]
        latest = others.pop(known)
        return Machine((*others, (shares, latest[1])), self.news + changed)

    def _like(self, shares: Sequence[float]) -> int | None:
        """Return which of the works that were seen is about the same."""
        for place, (work, _) in enumerate(self.seen):
            if work is shares or sum(abs(a - b) for a, b in zip(work, shares, strict=True)) < 2 * _SAME_WORK:
                return place
        return None

    def factors(self, count: int) -> np.ndarray:
        """Return how many times as long as profiled everything else and each layer are expected to take.

        That is the mean of a Gaussian process: before anything is seen, layers are as profiled times what is common to
        all of them, and each is off by itself.
        """
        if not self.seen:
            return np.ones(count)
        work = np.array([shares for shares, _ in self.seen])
        off = np.array([times for _, times in self.seen]) / self.times - 1
        before = _ALL**2 + _EACH**2 * np.eye(count)
        seen = work @ before @ work.T + _DECEIVED**2 * np.eye(len(off))
        layers = before @ work.T @ np.linalg.solve(seen, off)
        believed: np.ndarray = self.times * (1 + np.clip(layers, -_FURTHEST, _FURTHEST))
        return believed


@dataclass(frozen=True)
class Fit:
    """What was learned of each machine, and the links as measured."""

    server: Machine = Machine()
    devices: Mapping[str, Machine] = field(default_factory=dict)
    links: Mapping[str, Link] = field(default_factory=dict)

    def differs(self, other: Fit, most: float) -> bool:
        """Return whether the server, or a quarter of the devices, are faster or slower than there by more than this."""
        changed = [abs(one.news - other.of(name).news) > most for name, one in self.devices.items()]
        return abs(self.server.news - other.server.news) > most or 4 * sum(changed) > len(changed)

    def of(self, device: str) -> Machine:
        """Return what is known of a device."""
        return self.devices.get(device, _UNKNOWN)


_UNKNOWN = Machine()


def refitted(fleet: Fleet, fit: Fit) -> Fleet:
    """Return the fleet with measured links and speeds; devices that are about the same share them."""
    members: dict[str, Member] = {}
    for kind in fleet.kinds():
        for alike in _alike(kind, fit):
            costs = _costs(alike[0].costs, _middle([fit.of(member.name) for member in alike]), fleet.layers)
            link = _median_link([fit.links.get(member.name, member.link) for member in alike])
            members.update({member.name: replace(member, costs=costs, link=link) for member in alike})
    in_order = tuple(members[member.name] for member in fleet.members)
    return replace(fleet, members=in_order, server=_costs(fleet.server, fit.server, fleet.layers))


def _middle(machines: list[Machine]) -> Machine:
    return sorted(machines, key=lambda machine: machine.times)[(len(machines) - 1) // 2]


def _costs(profiled: Costs, machine: Machine, layers: int) -> Costs:
    everything_else, *each = machine.factors(1 + layers).tolist()
    return profiled.slower(everything_else, each[: len(profiled.profile.layers)])


def about(fleet: Fleet) -> tuple[object, ...]:
    """Return what is to be known of a fleet's links and speeds, rounded to 20 %: equal if they are about the same.

    For how long they are to stay so counts as about the same up to a factor of 1.4.
    """
    rounded = [
        (
            tuple(member.name for member in kind),
            *map(_rounded, (kind[0].link.up_bps, kind[0].link.down_bps, kind[0].costs.speed)),
        )
        for kind in fleet.kinds()
    ]
    lasts = None if math.isinf(fleet.lasts) else round(math.log2(fleet.lasts))
    return (_rounded(fleet.server.speed), lasts, *rounded)


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(math.log(value) / math.log(1 + _ABOUT))


def _alike(kind: tuple[Member, ...], fit: Fit) -> list[list[Member]]:
    """Return the members of a kind in groups whose measurements are about the same."""
    groups: dict[tuple[int | None, ...], list[Member]] = {}
    links = [fit.links.get(member.name, member.link) for member in kind]
    slower = [fit.of(member.name).times for member in kind]
    middle = _median_link(links)
    for member, link, times in zip(kind, links, slower, strict=True):
        key = (
            _steps(times, median(slower)),
            _steps(link.up_bps, middle.up_bps),
            _steps(link.down_bps, middle.down_bps),
        )
        groups.setdefault(key, []).append(member)
    return list(groups.values())


def _steps(value: float | None, middle: float | None) -> int | None:
    """Return how many steps of 20 % a measurement lies above the middle."""
    return None if value is None or middle is None else round(math.log(value / middle) / math.log(1 + _ABOUT))


def _median_link(links: list[Link]) -> Link:
    return Link(
        up_bps=_median_rate([link.up_bps for link in links]),
        down_bps=_median_rate([link.down_bps for link in links]),
        latency_s=median(link.latency_s for link in links),
    )


def _median_rate(rates: list[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return median(known) if 2 * len(known) > len(rates) else None
