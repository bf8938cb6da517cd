"""What comes behind an epoch's iterations takes at least: trained parts up, one core's averaging, new parts down.

No device's part leaves before its last iteration has ended, and no new part before the last old one is there: whatever
lane iterations keep busy, this comes on top of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from pipar.execution.stages import Work
from pipar.planner.fleet import Fleet, Member


class Exchange:
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
