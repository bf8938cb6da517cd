"""The cost model made to agree with what a training has shown: links as measured, machines as slow as they were.

Measurements of equal devices scatter. Devices of one kind whose measurements are about the same stay of one kind, with
the median of them, so that a fleet of a hundred equal boards is still planned once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from pipar.config import Link
from pipar.planner.fleet import Fleet, Member

#: Measurements that differ by less than about this are the same.
_ABOUT = 0.2
#: The share of a new measurement in what is believed: epochs scatter by some per cent.
_NEW = 0.5


@dataclass(frozen=True)
class Fit:
    """How many times as long as profiled each machine computes, and the links as measured."""

    server: float = 1.0
    devices: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[str, Link] = field(default_factory=dict)

    def learned(self, *, server: float | None, devices: Mapping[str, float]) -> Fit:
        """Return the fit after an epoch in which machines were so many times slower than this one says."""
        known = self.devices
        return replace(
            self,
            server=self.server * _blended(server),
            devices={**known, **{name: known.get(name, 1.0) * _blended(times) for name, times in devices.items()}},
        )

    def differs(self, other: Fit, most: float) -> bool:
        """Return whether the server, or a quarter of the devices, are faster or slower than there by more than this."""
        changed = [_changed(times, other.devices.get(name, 1.0), most) for name, times in self.devices.items()]
        return _changed(self.server, other.server, most) or 4 * sum(changed) > len(changed)


def _changed(one: float, other: float, most: float) -> bool:
    return abs(math.log(one / other)) > most


def refitted(fleet: Fleet, fit: Fit) -> Fleet:
    """Return the fleet with measured links and speeds; devices that are about the same share them."""
    members: dict[str, Member] = {}
    for kind in fleet.kinds():
        for alike in _alike(kind, fit):
            costs = alike[0].costs.slower(median(fit.devices.get(member.name, 1.0) for member in alike))
            link = _median_link([fit.links.get(member.name, member.link) for member in alike])
            members.update({member.name: replace(member, costs=costs, link=link) for member in alike})
    in_order = tuple(members[member.name] for member in fleet.members)
    return replace(fleet, members=in_order, server=fleet.server.slower(fit.server))


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
    slower = [fit.devices.get(member.name, 1.0) for member in kind]
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


def _blended(times: float | None) -> float:
    return 1.0 if times is None else times**_NEW
