"""The least time that an epoch can take: from the plans alone, and while it is simulated.

Only what is certain counts. Plans that cannot beat the best ones are left out of a search (`LowerBound`), and the
simulation of an epoch stops as soon as it cannot be shorter than another (`Cutoff`); the search finds the same plans
without these bounds, and takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from pipar.execution.work import Work
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
    """The least seconds of a fleet's exchange of models: trained parts up, one core's averaging, new parts down.

    No device sends its part before its last iteration has ended, and no new part leaves before the last trained part is
    there. So these seconds add to those of the iterations, whichever lane is the busiest.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._members = [kind[0] for kind in fleet.device_kinds()]
        self._averaged_s = fleet.server.seconds(Work("aggregate", size_bytes=fleet.averaged_bytes))
        self._up_s, self._down_s = cache(self._find_up_s), cache(self._find_down_s)

    def least_s(self, split_points: Sequence[int], last: Iterable[int] | None = None) -> float:
        """Return the seconds after the last iteration; `last` are the kinds that may end last, None for any.

        It is not known which of them does: the upload counts as the shortest of theirs.
        """
        among = range(len(split_points)) if last is None else last
        return min(self._up_s(kind, split_points[kind]) for kind in among) + self._back_s(split_points)

    def likely_s(self, split_points: Sequence[int]) -> float:
        """Return the seconds with the longest upload: a kind with more layers mostly ends last, too."""
        return max(self._up_s(kind, p) for kind, p in enumerate(split_points)) + self._back_s(split_points)

    def _back_s(self, split_points: Sequence[int]) -> float:
        return self._averaged_s + max(self._down_s(kind, p) for kind, p in enumerate(split_points))

    def _find_up_s(self, kind: int, split_point: int) -> float:
        """Return how long a device packs and sends its part, and the server decodes it if it is sent as changes."""
        member, server = self._members[kind], self._fleet.server
        size, form = self._part(member, member.link.up_bps, split_point)
        seconds = member.costs.seconds(Work("pack", size_bytes=size, encoding=form))
        if form == "changes":
            seconds += server.seconds(Work("decode", size_bytes=size, encoding=form))
        if self._fleet.protects:
            seconds += member.costs.seconds(Work("protect", size_bytes=size))
        return seconds + self._on_link_s(member, member.link.up_bps, split_point)

    def _find_down_s(self, kind: int, split_point: int) -> float:
        """Return how long the server packs and sends a device's new part, and the device installs it."""
        member = self._members[kind]
        size, form = self._part(member, member.link.down_bps, split_point)
        seconds = self._fleet.server.seconds(Work("pack", size_bytes=size, encoding=form))
        seconds += member.costs.seconds(Work("install", size_bytes=size, encoding=form))
        return seconds + self._on_link_s(member, member.link.down_bps, split_point)

    def _part(self, member: Member, rate_bps: float | None, split_point: int) -> tuple[int, str]:
        changes = self._fleet.sends_changes(member, rate_bps)
        return self._fleet.server.profile.changing_bytes(1, split_point), "changes" if changes else "raw"

    def _on_link_s(self, member: Member, rate_bps: float | None, split_point: int) -> float:
        """Return how long a part is on the link, without the headers of its frames."""
        changes = self._fleet.sends_changes(member, rate_bps)
        bits = 8 * self._fleet.server.profile.exchanged_bytes(split_point, changes=changes)
        return member.link.latency_s + (0.0 if rate_bps is None else bits / rate_bps)


# --- an epoch of given plans


class LowerBound:
    """The least time of an epoch: of each kind's device with the most data, and of all work over all cores."""

    def __init__(self, fleet: Fleet) -> None:
        full = [fleet.full_batches(kind) for kind in fleet.device_kinds()]
        self._most = [max(each) for each in full]
        shares = [[fleet.core_share(member) for member in kind] for kind in fleet.device_kinds()]
        self._all = [sum(n * share for n, share in zip(*of, strict=True)) for of in zip(full, shares, strict=True)]
        self._cores = fleet.cores
        self._exchange = ExchangeBound(fleet)

    def alone_s(self, chosen: Sequence[Candidate]) -> float:
        """Return the bound by each device alone with the server, and the exchange of models."""
        exchange_s = self._exchange.least_s([option.plan.split_point for option in chosen])
        return max(self.cores_s(chosen), self._slowest_s(chosen) + exchange_s)

    def lanes_s(self, chosen: Sequence[Candidate], slack: float = 0.0) -> float:
        """Return the bound by the busiest lane, and the exchange of models, which waits for a device's own lanes.

        `slack` is the share by which a simulated stage may be shorter than its costs.
        """
        lane_s = max(o.lane_s * n for o, n in zip(chosen, self._most, strict=True))
        exchange_s = self._exchange.least_s([option.plan.split_point for option in chosen])
        return max(self.cores_s(chosen) * (1 - slack), lane_s * (1 - slack) + exchange_s)

    def likely_s(self, chosen: Sequence[Candidate]) -> float:
        """Return an estimate that is mostly close, but no bound: each device alone, and the exchange of models."""
        exchange_s = self._exchange.likely_s([option.plan.split_point for option in chosen])
        return max(self.cores_s(chosen), self._slowest_s(chosen)) + exchange_s

    def _slowest_s(self, chosen: Sequence[Candidate]) -> float:
        """Return the seconds of the slowest device's iterations, if no other device used the server."""
        return max(o.alone_s * n for o, n in zip(chosen, self._most, strict=True))

    def cores_s(self, chosen: Sequence[Candidate]) -> float:
        return sum(o.server_s * n for o, n in zip(chosen, self._all, strict=True)) / self._cores

    def own_s(self, kind: int, option: Candidate) -> float:
        """Return the least seconds of a kind's plan if no other device used the server; at least one batch counts."""
        return option.alone_s * max(1, self._most[kind])


# --- an epoch that is being simulated


@dataclass
class _Kind:
    """Devices of one kind in the simulated epoch; all seconds are lower bounds."""

    left_s: dict[str, list[float]]  # of each device: the time left after 0, 1, ... all of its iterations
    repeats: float  # how many times the part after the first iteration repeats without being simulated
    repeated_s: float  # the part after the first iteration
    after_server_s: float  # from the end of the server's work on a micro-batch to the end of the iteration
    beginning: int  # devices that have not ended their first iteration
    training: int  # devices that have not ended all of them
    first_s: float = 0.0  # when the last device ended its first iteration

    def least_s(self, end_s: float) -> float:
        """Return the end of all iterations if the simulated ones do not end before `end_s`."""
        after_first_s = self.repeated_s if self.beginning else max(self.repeated_s, end_s - self.first_s)
        return end_s + self.repeats * after_first_s


class Cutoff:
    """Tells when an epoch of a few iterations and their repetition can no longer be shorter than `within_s`.

    Before the epoch starts, the busiest lane of each device, the server's work over its cores and the exchange of
    models are certain. Whenever a device ends an iteration, so are the least time for its remaining iterations and the
    server's remaining work. Iterations that are not simulated are like those that are (`Timing.extrapolated_epoch_s`).
    All devices of a kind have one plan, and all of them train at the same time.
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
        self._served_s = _on_cores_s(fleet, times, lambda batch: batch.served_s)

    def rules_out(self) -> bool:
        """Return whether the epoch is too long by its busiest lane, before anything is simulated."""
        lane_s = max(kind.least_s(max(left[0] for left in kind.left_s.values())) for kind in self._kinds)
        return self._is_too_long(self._server_s) or self._cannot_end(max(lane_s, self._after_server_s(self._served_s)))

    def gives_up(self, device: str, ended: int, now: float, served_s: float) -> bool:
        """Return whether the epoch is too long now that a device has ended `ended` of its iterations.

        `served_s` is the earliest time at which the server can have served all micro-batches; 0 if it has.
        """
        kind = self._of[device]
        if ended == 1:
            kind.beginning -= 1
            kind.first_s = now
        left_s = kind.left_s[device]
        if ended == len(left_s) - 1:
            self._count_out(kind)
        return self._cannot_end(max(kind.least_s(now + left_s[ended]), self._after_server_s(served_s)))

    def _count_out(self, kind: _Kind) -> None:
        """Note that a device of this kind has ended all iterations: the device that ends last is another one."""
        kind.training -= 1
        if not kind.training:
            training = [number for number, each in enumerate(self._kinds) if each.training]
            self._exchange_s = self._exchange.least_s(self._cuts, training or None)

    def _after_server_s(self, served_s: float) -> float:
        """Return the earliest end of the iterations of the device that is served last."""
        if not served_s:
            return 0.0
        return min((k.least_s(served_s + k.after_server_s) for k in self._split if k.training), default=0.0)

    def _cannot_end(self, before_s: float) -> bool:
        return self._is_too_long(before_s + self._exchange_s)

    def _is_too_long(self, least_s: float) -> bool:
        return least_s * (1 - _ROUNDING) >= self._within_s


def _kind(fleet: Fleet, members: Sequence[Member], times: Times) -> _Kind:
    every = {member.name: times[member.name] for member in members}
    simulated = max(map(len, every.values()))
    # If the numbers of simulated iterations differ, some devices have no others: only what is simulated counts.
    differ = any(len(batches) < simulated for batches in every.values())
    rest = 0.0 if differ else fleet.repeats(members, simulated)
    # A device with the whole network sends nothing, and receives no answer.
    latency_s = members[0].link.latency_s if any(next(iter(every.values()))[0].u) else 0.0
    left_s = {name: _left_s(batches) for name, batches in every.items()}
    first = min(1, simulated - 1)  # a single iteration is itself what is repeated
    return _Kind(
        left_s=left_s,
        repeats=rest / max(1, simulated - 1),
        repeated_s=min(left[first] for left in left_s.values()),
        after_server_s=min(batch.after_server_s for batches in every.values() for batch in batches) + latency_s,
        beginning=len(members),
        training=len(members),
    )


def _left_s(batches: Sequence[BatchTimes]) -> list[float]:
    """Return how long a device's busiest lane works in the iterations after the first 0, 1, ... all of them."""
    lanes = list(accumulate((batch.lane_s for batch in reversed(batches)), initial=0.0))[::-1]
    return [batches[0].load + lanes[0], *lanes[1:]]


def _server_s(fleet: Fleet, times: Times) -> float:
    """Return how long each core works in the whole epoch without contention; as in `Timing.steady_epoch_s`."""
    worked = _on_cores_s(fleet, times, lambda batch: batch.served_s + batch.server_step)
    simulated = {(member.samples, len(times[member.name])) for member in fleet.members}
    samples = {each: sum(fleet.batches(*each)) for each in simulated}
    here = sum(samples[member.samples, len(times[member.name])] * member.stands_for for member in fleet.members)
    return worked * fleet.served(fleet.members) / here


def _on_cores_s(fleet: Fleet, times: Times, seconds: Callable[[BatchTimes], float]) -> float:
    """Return how long each core works on some part of the simulated batches."""
    return sum(fleet.core_share(m) * sum(map(seconds, times[m.name])) for m in fleet.members) / fleet.cores
