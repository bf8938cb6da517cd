"""Whether an epoch that is being simulated can still be shorter than another: if not, the rest need not be simulated.

Only what is certain counts. Before the epoch begins that is the busiest lane of each device, the server's work over its
cores, and the exchange of models behind them. When all devices of a kind have ended their last iteration but one, it
is known when the last one began, and how much the server has left to do in it. Iterations that are not simulated are
like the last one (`Timing.of_whole_epoch`): what makes it longer counts for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipar.methods import Plan
from pipar.planner.exchange import Exchange
from pipar.planner.fleet import Fleet, Member

if TYPE_CHECKING:
    from pipar.forecast import BatchTimes

#: Sums of the same numbers in another order differ by less.
_ROUNDING = 1e-9

#: The times of each device's iterations that are simulated, by its name.
Times = Mapping[str, Sequence["BatchTimes"]]


@dataclass
class _Kind:
    """Devices that are alike; seconds are the least that they can be."""

    names: Collection[str]
    simulated: int  # iterations
    rest: float  # iterations that are not
    all_s: float  # of those that are simulated
    last_s: float  # of the last of them
    behind_s: float  # from when the server has served a device's last micro-batch to the end of the iteration
    missing: float  # devices that have not ended all of them but one
    training: int  # devices that have not ended all of them; too many where some have fewer iterations
    began: float = 0.0  # when the last of them had ended all but one


class Cutoff:
    """Says when an epoch of a few iterations and their repetition can no longer be shorter than `within_s`."""

    def __init__(self, fleet: Fleet, plans: Mapping[str, Plan], times: Times, within_s: float) -> None:
        self._within_s = within_s
        kinds = fleet.kinds()
        self._exchange = Exchange(fleet)
        self._cuts = [plans[kind[0].name].split_point for kind in kinds]
        self._exchange_s = self._exchange.least_s(self._cuts)
        self._kinds = [_kind(fleet, kind, times) for kind in kinds]
        self._of = {name: kind for kind in self._kinds for name in kind.names}
        self._server_s = _server_s(fleet, times)
        self._served_s = sum(batch.served_s for batches in times.values() for batch in batches) / fleet.cores

    def rules_out(self) -> bool:
        """Return whether the epoch is too long already by its busiest lane."""
        lane_s = max(kind.all_s + kind.rest * kind.last_s for kind in self._kinds)
        rest_s = min(kind.rest * kind.last_s for kind in self._kinds)
        cores_s = self._served_s + min(kind.behind_s for kind in self._kinds) + rest_s if self._served_s else 0.0
        return self._is_too_long(self._server_s) or self._is_too_long(max(lane_s, cores_s) + self._exchange_s)

    def gives_up(self, device: str, ended: int, now: float, served: Callable[[Collection[str]], float]) -> bool:
        """Return whether the epoch is too long now that a device has ended so many of its iterations.

        `served` returns when the server can have served all of these devices' last iteration, at the earliest.
        """
        kind = self._of[device]
        self._count_ended(kind, ended)
        if ended < kind.simulated:
            kind.missing -= ended == kind.simulated - 1
            kind.began = now
        if kind.missing:
            return False
        last_s = max(kind.last_s, now - kind.began)
        if ended < kind.simulated:
            last_s = max(last_s, served(kind.names) + kind.behind_s - now)
        return self._is_too_long(kind.began + (1 + kind.rest) * last_s + self._exchange_s)

    def _count_ended(self, kind: _Kind, ended: int) -> None:
        """Count who has ended everything: who will be the last of all is among the others."""
        kind.training -= ended == kind.simulated
        if not kind.training:
            going_on = [number for number, each in enumerate(self._kinds) if each.training]
            self._exchange_s = self._exchange.least_s(self._cuts, going_on or None)

    def _is_too_long(self, least_s: float) -> bool:
        return least_s * (1 - _ROUNDING) >= self._within_s


def _kind(fleet: Fleet, members: Sequence[Member], times: Times) -> _Kind:
    every = [times[member.name] for member in members]
    simulated = max(map(len, every))
    last = [batches[-1] for batches in every]
    # Of devices with one iteration more or less, nothing is left that would not be simulated: their lanes say enough.
    differ = any(len(batches) < simulated for batches in every)
    # Who has the whole network sends nothing that an answer would come to.
    latency_s = members[0].link.latency_s if any(last[0].u) else 0.0
    return _Kind(
        names=[member.name for member in members],
        simulated=simulated,
        rest=max(0.0, max(member.samples for member in members) / fleet.batch_size - simulated),
        all_s=max(batches[0].load + sum(batch.lane_s for batch in batches) for batches in every),
        last_s=0.0 if differ else min(batch.lane_s for batch in last),
        behind_s=min(batch.behind_s for batch in last) + latency_s,
        missing=math.inf if differ or simulated == 1 else len(members),
        training=len(members),
    )


def _server_s(fleet: Fleet, times: Times) -> float:
    """Return how long each core works in the whole epoch if no other slows it down; as `Timing.steady_epoch_s` does."""
    worked = sum(batch.served_s + batch.server_step for batches in times.values() for batch in batches)
    simulated = {(member.samples, len(times[member.name])) for member in fleet.members}
    samples = {each: sum(fleet.batches(*each)) for each in simulated}
    here = sum(samples[member.samples, len(times[member.name])] for member in fleet.members)
    return worked / fleet.cores * sum(member.samples for member in fleet.members) / here
