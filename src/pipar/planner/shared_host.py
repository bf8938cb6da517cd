"""A machine that the server shares with devices: work takes longer while more lanes compute than it has cores.

The simulator gives every lane a core. From the share of the epoch in which each lane computes follows how many others
want a core at the same time as it does: the slowdown of its work. Slower work takes a larger share, so simulation and
slowdown are repeated until they agree. Carrying bytes and messages takes the cores' time as well: this is what a split
network costs on a machine that computes all of it anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from pipar.methods import Plan
from pipar.planner.fleet import Fleet
from pipar.planner.stage_times import batch_times, message_bytes, work_key
from pipar.planner.timing import Timing

#: Seconds of all cores to carry a byte from one process to another, with TLS, on both sides; and to carry a message.
_BYTE_S, _MESSAGE_S = 6e-9, 1e-3
#: Repetitions after which simulation and slowdown hardly change any more.
_STEPS = 4
#: Slowdowns are rounded to this share, so that few different fleets are simulated.
_ROUNDING = 0.02
#: With more lanes, the number of those that compute at the same time hardly varies.
_MANY_LANES = 64


@dataclass(frozen=True)
class Slowdown:
    """How many times as long work takes because of other lanes: of a device with a whole core, and of the server."""

    hosted: float = 1.0
    server: float = 1.0

    def of(self, share: float) -> float:
        """Return the factor of a device that uses this share of a core: it sleeps less if it has to wait more."""
        return max(1.0, self.hosted * share) if share else 1.0


_NONE = Slowdown()


def settled(fleet: Fleet, plans: Mapping[str, Plan], simulated: Callable[[Fleet], Timing]) -> Timing:
    """Return the timing of an epoch on a shared machine; `simulated` returns that of a fleet with a core per lane."""
    timing, slowdown = simulated(fleet), _NONE
    for step in range(_STEPS):
        found = _slowdown(fleet, plans, timing)
        if step > 1:  # it may alternate between two otherwise
            found = Slowdown(math.sqrt(found.hosted * slowdown.hosted), math.sqrt(found.server * slowdown.server))
        found = Slowdown(_rounded(found.hosted), _rounded(found.server))
        if found == slowdown:
            break
        slowdown = found
        timing = simulated(_slowed(fleet, slowdown))
    return replace(timing, contention=timing.contention * slowdown.server, hosted=slowdown.hosted)


def _slowed(fleet: Fleet, slowdown: Slowdown) -> Fleet:
    if slowdown not in fleet.slowed_fleets:
        fleet.slowed_fleets[slowdown] = fleet.slowed(slowdown.of, slowdown.server)
    return fleet.slowed_fleets[slowdown]


def _slowdown(fleet: Fleet, plans: Mapping[str, Plan], timing: Timing) -> Slowdown:
    host, seconds = fleet.host, timing.epoch_s
    assert host is not None
    if not seconds:  # the profile is too coarse to have seen work as small as this
        return _NONE
    around = _Around(fleet, plans)
    own_s, iterations = timing.own_s, {name: len(ends) for name, ends in timing.ends.items()}
    hosted = [(n, m, iterations[m.name]) for n, m in enumerate(fleet.members) if m.host_share]
    devices = [
        (min(1.0, (own_s[m.name][0] + around.coding_s(n, count)) / seconds) * m.host_share, m.stands_for)
        for n, m, count in hosted
    ]
    server = [(min(1.0, timing.busy_s["server"] / seconds) * host.server_share, fleet.cores_each)] * fleet.cores
    carrying = sum(around.carrying_s(n, count) * m.stands_for for n, m, count in hosted)
    carried = (min(1.0, carrying / seconds), 1.0)
    return Slowdown(
        _times_as_long([*_without_one(devices), *server, carried], host.cores) if devices else 1.0,
        max(1.0, _times_as_long([*devices, *_without_one(server), carried], host.cores) * host.server_share),
    )


def _without_one(lanes: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the lanes without the one whose slowdown is asked for."""
    (share, count), *others = lanes
    return [(share, max(0.0, count - 1.0)), *others]


class _Around:
    """What a plan costs a device's machine around the layers: coding, and carrying messages."""

    def __init__(self, fleet: Fleet, plans: Mapping[str, Plan]) -> None:
        self._fleet, self._plans = fleet, plans
        self._known: dict[tuple[object, ...], tuple[float, float]] = {}

    def coding_s(self, number: int, iterations: int) -> float:
        """Return how long a device loads, encodes and decodes in some iterations."""
        return self._of_one(number)[0] * iterations

    def carrying_s(self, number: int, iterations: int) -> float:
        """Return how long the cores carry messages of a device in some iterations."""
        return self._of_one(number)[1] * iterations

    def _of_one(self, number: int) -> tuple[float, float]:
        fleet = self._fleet
        member = fleet.members[number]
        plan = self._plans[member.name]
        key = work_key(member, plan)
        if key not in self._known:
            batch = min(fleet.batch_size, member.samples)
            times = batch_times(fleet, member, plan, batch)
            sizes = [] if plan.split_point == fleet.layers else message_bytes(fleet, plan, batch)
            carrying = sum(size * _BYTE_S + _MESSAGE_S for size in sizes)
            self._known[key] = times.load + sum(times.encode) + sum(times.decode), carrying
        return self._known[key]


def _times_as_long(others: Iterable[tuple[float, float]], cores: float) -> float:
    """Return how many times as long work takes next to lanes that compute for these shares of the time.

    Each share is followed by the number of lanes that have it, which in a sample of a fleet is no whole number.
    """
    lanes = [(share, count) for share, count in others if count]
    if len(lanes) > _MANY_LANES or any(count != 1.0 for _, count in lanes):
        return max(1.0, (1.0 + sum(share * count for share, count in lanes)) / cores)
    chances = [1.0]  # of 0, 1, 2, ... lanes that compute
    for share, _ in lanes:
        stays, joins = [*chances, 0.0], [0.0, *chances]
        chances = [(1 - share) * stay + share * join for stay, join in zip(stays, joins, strict=True)]
    return sum(chance * max(1.0, (1 + count) / cores) for count, chance in enumerate(chances))


def _rounded(factor: float) -> float:
    return math.exp(_ROUNDING * round(math.log(max(1.0, factor)) / _ROUNDING))
