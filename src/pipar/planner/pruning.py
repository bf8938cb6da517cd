"""Whether an epoch that is being simulated can still be shorter than another: if not, the rest need not be simulated.

Only what is certain counts. Before the epoch begins that is the busiest lane of each device, the server's work over its
cores, and the exchange of models behind them. Whenever a device ends an iteration, it is known how long it needs at
least for those that are left, and how much the server has left to do for all devices. Iterations that are not simulated
are like those that are (`Timing.extrapolated_epoch_s`): what makes these longer counts for the others, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pipar.methods import Plan
from pipar.planner.exchange import Exchange
from pipar.planner.fleet import Fleet, Member
from pipar.planner.stage_times import BatchTimes

#: Sums of the same numbers in another order differ by less.
_ROUNDING = 1e-9

#: The times of each device's iterations that are simulated, by its name.
Times = Mapping[str, Sequence[BatchTimes]]


@dataclass
class _Kind:
    """Devices that are alike; seconds are the least that they can be."""

    left_s: dict[str, list[float]]  # of each device, what is left behind so many of its iterations
    repeats: float  # how many times what comes behind the first iteration comes once more, not simulated
    repeated_s: float  # what comes behind the first iteration
    behind_s: float  # from when the server has served a micro-batch to the end of the iteration
    beginning: int  # devices that have not ended their first iteration
    training: int  # devices that have not ended all of them
    first_s: float = 0.0  # when the last of them had ended its first

    def least_s(self, end_s: float) -> float:
        """Return when iterations that are not simulated have ended, if the others do not end before this."""
        behind_first_s = self.repeated_s if self.beginning else max(self.repeated_s, end_s - self.first_s)
        return end_s + self.repeats * behind_first_s


class Cutoff:
    """Says when an epoch of a few iterations and their repetition can no longer be shorter than `within_s`.

    All devices of a kind have one plan, and all of them train at once.
    """

    def __init__(self, fleet: Fleet, plans: Mapping[str, Plan], times: Times, within_s: float) -> None:
        self._within_s = within_s
        kinds = fleet.device_kinds()
        self._exchange = Exchange(fleet)
        self._cuts = [plans[kind[0].name].split_point for kind in kinds]
        self._exchange_s = self._exchange.least_s(self._cuts)
        self._kinds = [_kind(fleet, kind, times) for kind in kinds]
        self._of = {name: kind for kind in self._kinds for name in kind.left_s}
        self._split = [kind for kind, cut in zip(self._kinds, self._cuts, strict=True) if cut < fleet.layers]
        self._server_s = _server_s(fleet, times)
        self._served_s = sum(batch.served_s for batches in times.values() for batch in batches) / fleet.cores

    def rules_out(self) -> bool:
        """Return whether the epoch is too long already by its busiest lane."""
        lane_s = max(kind.least_s(max(left[0] for left in kind.left_s.values())) for kind in self._kinds)
        return self._is_too_long(self._server_s) or self._cannot_end(max(lane_s, self._behind_server_s(self._served_s)))

    def gives_up(self, device: str, ended: int, now: float, served_s: float) -> bool:
        """Return whether the epoch is too long now that a device has ended so many of its iterations.

        `served_s` is when the server can have served all devices to the end, at the earliest; 0 if it has.
        """
        kind = self._of[device]
        if ended == 1:
            kind.beginning -= 1
            kind.first_s = now
        left_s = kind.left_s[device]
        if ended == len(left_s) - 1:
            self._count_out(kind)
        return self._cannot_end(max(kind.least_s(now + left_s[ended]), self._behind_server_s(served_s)))

    def _count_out(self, kind: _Kind) -> None:
        """Count who has ended everything: who will be the last of all is among the others."""
        kind.training -= 1
        if not kind.training:
            going_on = [number for number, each in enumerate(self._kinds) if each.training]
            self._exchange_s = self._exchange.least_s(self._cuts, going_on or None)

    def _behind_server_s(self, served_s: float) -> float:
        """Return the end of the iterations of whoever is served last, at the earliest."""
        return (
            min((k.least_s(served_s + k.behind_s) for k in self._split if k.training), default=0.0) if served_s else 0.0
        )

    def _cannot_end(self, before_s: float) -> bool:
        return self._is_too_long(before_s + self._exchange_s)

    def _is_too_long(self, least_s: float) -> bool:
        return least_s * (1 - _ROUNDING) >= self._within_s


def _kind(fleet: Fleet, members: Sequence[Member], times: Times) -> _Kind:
    every = {member.name: times[member.name] for member in members}
    simulated = max(map(len, every.values()))
    # Of devices with one iteration more or less, nothing is left that would not be simulated: their lanes say enough.
    differ = any(len(batches) < simulated for batches in every.values())
    rest = 0.0 if differ else max(0.0, max(member.samples for member in members) / fleet.batch_size - simulated)
    # Who has the whole network sends nothing that an answer would come to.
    latency_s = members[0].link.latency_s if any(next(iter(every.values()))[0].u) else 0.0
    left_s = {name: _left_s(batches) for name, batches in every.items()}
    first = min(1, simulated - 1)  # a single iteration is itself what is repeated
    return _Kind(
        left_s=left_s,
        repeats=rest / max(1, simulated - 1),
        repeated_s=min(left[first] for left in left_s.values()),
        behind_s=min(batch.behind_s for batches in every.values() for batch in batches) + latency_s,
        beginning=len(members),
        training=len(members),
    )


def _left_s(batches: Sequence[BatchTimes]) -> list[float]:
    """Return how long a device's busiest lane works in the iterations behind the first 0, 1, ... all of them."""
    lanes = list(accumulate((batch.lane_s for batch in reversed(batches)), initial=0.0))[::-1]
    return [batches[0].load + lanes[0], *lanes[1:]]


def _server_s(fleet: Fleet, times: Times) -> float:
    """Return how long each core works in the whole epoch if no other slows it down; as `Timing.steady_epoch_s` does."""
    worked = sum(batch.served_s + batch.server_step for batches in times.values() for batch in batches)
    simulated = {(member.samples, len(times[member.name])) for member in fleet.members}
    samples = {each: sum(fleet.batches(*each)) for each in simulated}
    here = sum(samples[member.samples, len(times[member.name])] for member in fleet.members)
    return worked / fleet.cores * sum(member.samples for member in fleet.members) / here
