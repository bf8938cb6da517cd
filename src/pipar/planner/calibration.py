"""The cost model, calibrated by what a training has shown: measured links, and machines as fast as observed.

An epoch shows how long a machine took for all layers that it had. That says much about these layers together and about
nearby cuts, but little about a single layer; two cuts that were tried show the layers between them. Epochs scatter, so
each layer's factor is estimated from all of them: by a Gaussian process over the layers.

Measurements of equal devices scatter, too. Devices of one kind with about the same measurements stay of one kind, with
their median, so that a fleet of a hundred equal boards is still planned once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import NamedTuple

from pipar.planner.costs import Costs
from pipar.planner.fleet import Fleet, Member
from pipar.settings.links import Link

#: Measurements that differ by less than about this share count as the same.
_ABOUT = 0.2

# Standard deviations of logarithms. A priori, the layers of a machine deviate from the profile by a factor that they
# have in common and one of each layer's own; all other work (the optimiser, coding, models) deviates independently. An
# epoch's measurement scatters, and machines drift from epoch to epoch.
_COMMON, _OWN, _ELSE = 0.5, 0.1, 0.5
_SCATTER, _DRIFT = 0.01, 0.01
#: A mean is taken over this many epochs; after that, older ones count less and less.
_MEAN_OF = 3
#: Kinds of work that are remembered for each machine.
_REMEMBERED = 6
#: Work is of the same kind if every share of it is the same in per cent.
_DIGITS = 2
#: Of work in which all else than layers has a larger share, the time shows nothing about layers.
_MOSTLY = 0.5
#: The logarithm of a sum is not linear, so the estimate is found iteratively, in this many steps.
_STEPS = 3

#: Shares of an epoch's work, which sum to 1: all other work, layer 1, layer 2, ...
Shares = tuple[float, ...]


class Observation(NamedTuple):
    """What some epochs have shown about one kind of work."""

    shares: Shares
    log_times: float  # the logarithm of its time relative to the profile
    epochs: int
    age: int  # in epochs


@dataclass(frozen=True)
class MachineHistory:
    """What epochs have shown about a machine: for which work it took how many times as long as profiled."""

    seen: dict[Shares, Observation] = field(default_factory=dict)  # by rounded shares; the latest comes last

    def learned(self, shares: Shares, times: float) -> MachineHistory:
        """Return the history with one more epoch, in which this work took `times` as long as profiled."""
        key = tuple(round(share, _DIGITS) for share in shares)
        others = {one: seen._replace(age=seen.age + 1) for one, seen in self.seen.items() if one != key}
        before = self.seen.get(key, Observation(shares, 0.0, 0, 0))
        epochs = min(before.epochs + 1, _MEAN_OF)
        mean = before.log_times + (math.log(times) - before.log_times) / epochs
        kept = dict(list(others.items())[1 - _REMEMBERED :])
        return MachineHistory({**kept, key: Observation(shares, mean, epochs, 0)})

    def times(self, shares: Shares) -> float:
        """Return how many times as long as profiled some work is expected to take."""
        return math.fsum(share * factor for share, factor in zip(shares, self.factors(len(shares)), strict=True))

    def factors(self, count: int) -> Sequence[float]:
        """Return the expected factors of all other work, and of each layer, relative to the profile."""
        return self._factors if self.seen else (1.0,) * count

    @property
    def has_computed_layers(self) -> bool:
        """Whether epochs have shown anything about the layers of the network."""
        return any(seen.shares[0] < _MOSTLY for seen in self.seen.values())

    @property
    def last(self) -> Observation:
        """The latest observation."""
        return next(reversed(self.seen.values()))

    @cached_property
    def latest(self) -> float:
        """The expected factor of the latest work."""
        return self.times(self.last.shares) if self.seen else 1.0

    @cached_property
    def _factors(self) -> Sequence[float]:
        import numpy as np  # here, because commands that must start quickly do not need it

        work = np.array([seen.shares for seen in self.seen.values()])
        took = np.array([seen.log_times for seen in self.seen.values()])
        count = work.shape[1]
        likely = np.zeros((count, count))
        likely[1:, 1:] = _COMMON**2 + _OWN**2 * np.eye(count - 1)
        likely[0, 0] = _ELSE**2
        noise = np.diag([_SCATTER**2 / seen.epochs + (_DRIFT * seen.age) ** 2 for seen in self.seen.values()])
        logs = np.zeros(count)
        for _ in range(_STEPS):  # work that takes longer than profiled has a larger share than profiled
            parts = work * np.exp(logs)
            sums = parts.sum(axis=1)
            parts /= sums[:, None]
            surprise = took - np.log(sums) + parts @ logs
            logs = likely @ parts.T @ np.linalg.solve(parts @ likely @ parts.T + noise, surprise)
        factors: list[float] = np.exp(logs).tolist()
        return factors


def pooled(machines: Iterable[MachineHistory]) -> MachineHistory:
    """Return the common history of equal machines: for each kind of work the median of those that have done it."""
    by_work: dict[Shares, list[Observation]] = {}
    for machine in machines:
        for key, seen in machine.seen.items():
            by_work.setdefault(key, []).append(seen)
    middle = {
        key: seen[0]._replace(
            log_times=median(one.log_times for one in seen),
            epochs=max(one.epochs for one in seen),
            age=min(one.age for one in seen),
        )
        for key, seen in by_work.items()
    }
    in_order = sorted(middle.items(), key=lambda item: -item[1].age)
    return MachineHistory(dict(in_order[-_REMEMBERED:]))


@dataclass(frozen=True)
class Calibration:
    """What was learned about each machine, and the measured links."""

    server: MachineHistory = field(default_factory=MachineHistory)
    devices: Mapping[str, MachineHistory] = field(default_factory=dict)
    links: Mapping[str, Link] = field(default_factory=dict)

    def differs(self, other: Calibration, most: float, most_of_known: float) -> bool:
        """Return whether the server, or more than a quarter of the devices, are faster or slower than in the other.

        The limit is `most` for work that the other has not seen, and `most_of_known` for work that it has, because its
        epochs scatter. Devices with new work are also counted among themselves: they may be few, and the other devices
        show nothing about that work.
        """

        def changed(now: MachineHistory, before: MachineHistory) -> bool:
            if not now.seen:
                return False
            limit = most if is_new(now, before) else most_of_known
            shares = now.last.shares
            return abs(math.log(now.times(shares) / before.times(shares))) > limit

        def is_new(now: MachineHistory, before: MachineHistory) -> bool:
            return bool(now.seen) and next(reversed(now.seen)) not in before.seen

        of_devices = {name: changed(one, other.of(name)) for name, one in self.devices.items()}
        of_new = [of_devices[name] for name, one in self.devices.items() if is_new(one, other.of(name))]
        many = any(4 * sum(group) > len(group) for group in (of_devices.values(), of_new))
        return changed(self.server, other.server) or many

    def of(self, device: str) -> MachineHistory:
        """Return the history of a device."""
        return self.devices.get(device, _UNKNOWN)


_UNKNOWN = MachineHistory()


def calibrated(fleet: Fleet, fit: Calibration) -> Fleet:
    """Return the fleet with measured links and speeds; devices with about the same measurements share them."""
    members: dict[str, Member] = {}
    for kind in fleet.device_kinds():
        for alike in _alike(kind, fit):
            costs = _costs(alike[0].costs, pooled(fit.of(member.name) for member in alike), fleet.layers)
            link = _median_link([fit.links.get(member.name, member.link) for member in alike])
            members.update({member.name: replace(member, costs=costs, link=link) for member in alike})
    in_order = tuple(members[member.name] for member in fleet.members)
    return replace(fleet, members=in_order, server=_costs(fleet.server, _server(fleet, fit), fleet.layers))


def _server(fleet: Fleet, fit: Calibration) -> MachineHistory:
    """Return what is known of the server; if it has computed no layers, what devices show that use its cores.

    Otherwise a machine that is busy or slow would seem so for layers on the devices only, and moving layers to the
    server would seem to make them faster. An emulated slow device shows nothing: it waits less if work takes longer.
    """
    if fleet.host is None or fit.server.has_computed_layers:
        return fit.server
    here = [fit.of(member.name) for member in fleet.members if member.host_share == 1.0]
    return pooled(seen) if (seen := [machine for machine in here if machine.has_computed_layers]) else fit.server


def _costs(profiled: Costs, machine: MachineHistory, layers: int) -> Costs:
    everything_else, *each = machine.factors(1 + layers)
    return profiled.slower(everything_else, each[: len(profiled.profile.layers)])


def situation_key(fleet: Fleet) -> tuple[object, ...]:
    """Return a fleet's links and speeds, rounded to 20 %: equal for fleets that are about the same.

    The number of rounds for which links stay stable is rounded to a power of 2.
    """
    rounded = [
        (
            tuple(member.name for member in kind),
            *map(_rounded, (kind[0].link.up_bps, kind[0].link.down_bps, kind[0].costs.all_layers_s(fleet.batch_size))),
        )
        for kind in fleet.device_kinds()
    ]
    stable_rounds = None if math.isinf(fleet.stable_rounds) else round(math.log2(fleet.stable_rounds))
    return (_rounded(fleet.server.all_layers_s(fleet.batch_size)), stable_rounds, *rounded)


def _rounded(value: float | None) -> int | None:
    return None if not value else round(math.log(value) / math.log(1 + _ABOUT))


def _alike(kind: tuple[Member, ...], fit: Calibration) -> list[list[Member]]:
    """Return the members of a kind in groups with about the same measurements."""
    links = [fit.links.get(member.name, member.link) for member in kind]
    machines = [fit.of(member.name) for member in kind]
    usual = median([machine.latest for machine in machines if machine.seen] or [1.0])
    measured: tuple[list[float | None], ...] = (
        [machine.latest if machine.seen else usual for machine in machines],
        [link.up_bps for link in links],
        [link.down_bps for link in links],
    )
    groups: dict[tuple[int | None, ...], list[Member]] = {}
    for member, *numbers in zip(kind, *map(_grouped, measured), strict=True):
        groups.setdefault(tuple(numbers), []).append(member)
    return list(groups.values())


def _grouped(values: list[float | None]) -> list[int | None]:
    """Return the group of each value; in a group no value is more than 20 % above the lowest."""
    groups: dict[float | None, int | None] = {None: None}
    lowest, number = 0.0, 0
    for value in sorted({value for value in values if value is not None}):
        if value > lowest * (1 + _ABOUT):
            lowest, number = value, number + 1
        groups[value] = number
    return [groups[value] for value in values]


def _median_link(links: list[Link]) -> Link:
    return Link(
        up_bps=_median_rate([link.up_bps for link in links]),
        down_bps=_median_rate([link.down_bps for link in links]),
        latency_s=median(link.latency_s for link in links),
    )


def _median_rate(rates: list[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return median(known) if 2 * len(known) > len(rates) else None
