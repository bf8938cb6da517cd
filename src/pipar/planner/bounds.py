"""What an epoch takes at least: from the plans alone, and while it is simulated.

Only what is certain counts. Plans that cannot beat the best ones are left out of a search (`LowerBound`), and the
simulation of an epoch stops as soon as it cannot be shorter than another (`Cutoff`); the search finds the same plans
without these bounds, and takes longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from pipar.execution.stages import Work
from pipar.methods import Plan
from pipar.planner.candidates import Candidate
from pipar.planner.fleet import Fleet, Member
from pipar.planner.stage_times import BatchTimes

#: Sums of the same numbers in another order differ by less.
_ROUNDING = 1e-9

#: The times of each device's simulated iterations, by its name.
Times = Mapping[str, Sequence[BatchTimes]]


# --- the exchange of models


class ExchangeBound:
    """The least seconds of a fleet's exchange of models, by the split point of each kind of device."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._members = [kind[0] for kind in fleet.device_kinds()]
        self._averaged_s = fleet.server.seconds(Work("aggregate", size_bytes=fleet.averaged_bytes))
        self._up_s, self._down_s = cache(self._find_up_s), cache(self._find_down_s)

    def least_s(self, split_points: Sequence[int], last: Iterable[int] | None = None) -> float:
        """Return it behind the end of the last iteration of all; `last` are the kinds that may be last, None: any.

        Which of them is last is not known: the way up counts as the shortest of theirs.
        """
        among = range(len(split_points)) if last is None else last
        return min(self._up_s(kind, split_points[kind]) for kind in among) + self._back_s(split_points)

    def likely_s(self, split_points: Sequence[int]) -> float:
        """Return it with the longest way up: a kind that keeps more layers is mostly the last, too."""
        return max(self._up_s(kind, p) for kind, p in enumerate(split_points)) + self._back_s(split_points)

    def _back_s(self, split_points: Sequence[int]) -> float:
        return self._averaged_s + max(self._down_s(kind, p) for kind, p in enumerate(split_points))

    def _find_up_s(self, kind: int, split_point: int) -> float:
        """Return how long a device packs its part and sends it, and the server decodes it if it is changes."""
        member, server = self._members[kind], self._fleet.server
        size, form = self._part(member, member.link.up_bps, split_point)
        seconds = member.costs.seconds(Work("pack", size_bytes=size, encoding=form))
        if form == "changes":
            seconds += server.seconds(Work("decode", size_bytes=size, encoding=form))
        if self._fleet.protects:
            seconds += member.costs.seconds(Work("protect", size_bytes=size))
        return seconds + self._on_link_s(member, member.link.up_bps, split_point)

    def _find_down_s(self, kind: int, split_point: int) -> float:
        """Return how long the server packs a device's new part, and the device waits for it and installs it."""
        member = self._members[kind]
        size, form = self._part(member, member.link.down_bps, split_point)
        seconds = self._fleet.server.seconds(Work("pack", size_bytes=size, encoding=form))
        seconds += member.costs.seconds(Work("install", size_bytes=size, encoding=form))
        return seconds + self._on_link_s(member, member.link.down_bps, split_point)

    def _part(self, member: Member, rate_bps: float | None, split_point: int) -> tuple[int, str]:
        changes = self._fleet.sends_changes(member, rate_bps)
        return self._fleet.server.profile.parameter_bytes(1, split_point), "changes" if changes else "raw"

    def _on_link_s(self, member: Member, rate_bps: float | None, split_point: int) -> float:
        """Return how long a part is on its way, its frames' headers left out."""
        changes = self._fleet.sends_changes(member, rate_bps)
        bits = 8 * self._fleet.server.profile.exchanged_bytes(split_point, changes=changes)
        return member.link.latency_s + (0.0 if rate_bps is None else bits / rate_bps)


# --- an epoch of given plans


class LowerBound:
    """What an epoch takes at least: any device with most data of its kind, and all work over all cores."""

    def __init__(self, fleet: Fleet) -> None:
        full = [fleet.full_batches(kind) for kind in fleet.device_kinds()]
        self._most, self._all = [max(each) for each in full], [sum(each) for each in full]
        self._cores = fleet.cores
        self._exchange = ExchangeBound(fleet)

    def alone_s(self, chosen: Sequence[Candidate]) -> float:
        """Return it with each device as if it had the server for itself, and with the exchange of models."""
        exchange_s = self._exchange.least_s([option.plan.split_point for option in chosen])
        return max(self.cores_s(chosen), self._slowest_s(chosen) + exchange_s)

    def lanes_s(self, chosen: Sequence[Candidate], slack: float = 0.0) -> float:
        """Return it by the busiest lane, and by the exchange of models, which waits for a device's own lanes.

        `slack` is how much shorter than its costs a stage of an iteration may be.
        """
        lane_s = max(o.lane_s * n for o, n in zip(chosen, self._most, strict=True))
        exchange_s = self._exchange.least_s([option.plan.split_point for option in chosen])
        return max(self.cores_s(chosen) * (1 - slack), lane_s * (1 - slack) + exchange_s)

    def likely_s(self, chosen: Sequence[Candidate]) -> float:
        """Return what is no bound, but mostly not far off: each device alone, and the exchange of models."""
        exchange_s = self._exchange.likely_s([option.plan.split_point for option in chosen])
        return max(self.cores_s(chosen), self._slowest_s(chosen)) + exchange_s

    def _slowest_s(self, chosen: Sequence[Candidate]) -> float:
        """Return the iterations of the device that takes longest for them, with the server for itself."""
        return max(o.alone_s * n for o, n in zip(chosen, self._most, strict=True))

    def cores_s(self, chosen: Sequence[Candidate]) -> float:
        return sum(o.server_s * n for o, n in zip(chosen, self._all, strict=True)) / self._cores

    def own_s(self, kind: int, option: Candidate) -> float:
        """Return what a kind's plan takes at least where nobody else is; of less than a batch, as if it were one."""
        return option.alone_s * max(1, self._most[kind])


# --- an epoch that is being simulated


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
        self._exchange = ExchangeBound(fleet)
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
