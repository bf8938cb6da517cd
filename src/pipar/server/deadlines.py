"""When a round ends without a device that has not finished: at a configured time, or by what the device has shown."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from pipar.server.learned_timeouts import LearnedTimeouts
from pipar.server.membership import Membership
from pipar.server.replicas import Replicas
from pipar.server.session import Session
from pipar.units import format_seconds

#: A device that is slow, but holds up no other one, is looked at again after this time.
_AGAIN_S = 1.0


class FixedDeadline:
    """The configured deadline of a round, or of a turn; or none."""

    def __init__(self, seconds: float | None, membership: Membership, replicas: Replicas) -> None:
        self.seconds = seconds
        self._membership = membership
        self._replicas = replicas
        self._loop = asyncio.get_running_loop()
        self._ends_at = 0.0

    def begin(self, group: Collection[Session]) -> None:
        self._membership.timeouts.begin_round(group)
        self.restart(group, any_late=False)

    def restart(self, waiting: Collection[Session], *, any_late: bool) -> None:  # noqa: ARG002
        if self.seconds is not None:
            self._ends_at = self._loop.time() + self.seconds
            self._membership.keep_places_until(self._ends_at)

    def timeout_s(self, waiting: Collection[Session], *, any_finished: bool) -> float | None:  # noqa: ARG002
        if self.seconds is None or not (self._replicas.is_shared or any_finished):
            return None
        return max(0.0, self._ends_at - self._loop.time())

    def late(self, waiting: Collection[Session], *, any_finished: bool) -> dict[Session, str]:
        assert self.seconds is not None
        reason = f"it missed the deadline of {format_seconds(self.seconds)}"
        is_too_late = self._replicas.is_too_late
        return {session: reason for session in waiting if is_too_late(session, any_finished=any_finished)}

    def lengthen(self, *, one_at_a_time: bool) -> None:
        if self.seconds is not None and one_at_a_time:
            self.seconds *= 2


class LearnedDeadline:
    """Gives each device several times as long as it needed before, and more while it makes progress."""

    seconds = None

    def __init__(self, timeouts: LearnedTimeouts, replicas: Replicas) -> None:
        self._timeouts = timeouts
        self._replicas = replicas
        self._loop = asyncio.get_running_loop()
        self._not_before = 0.0

    def begin(self, group: Collection[Session]) -> None:
        self._timeouts.begin_round(group)

    def restart(self, waiting: Collection[Session], *, any_late: bool) -> None:
        if any_late and self._replicas.is_shared:  # the late one has held them up
            self._timeouts.restart(waiting)

    def timeout_s(self, waiting: Collection[Session], *, any_finished: bool) -> float | None:
        if not (self._replicas.is_shared or any_finished):
            return None
        left_s = min(self._left_s(session) for session in waiting)
        return max(0.0, left_s, self._not_before - self._loop.time())

    def late(self, waiting: Collection[Session], *, any_finished: bool) -> dict[Session, str]:
        timeouts, is_too_late = self._timeouts, self._replicas.is_too_late
        late = {
            session: (
                f"it has not finished after {format_seconds(timeouts.elapsed_s(session))}, much longer than expected"
            )
            for session in waiting
            if self._left_s(session) <= 0 and is_too_late(session, any_finished=any_finished)
        }
        for session in late:
            timeouts.missed(session)
        self._not_before = self._loop.time() + (0.0 if late else _AGAIN_S)
        return late

    def _left_s(self, session: Session) -> float:
        left_s = self._timeouts.round_limit_s(session) - self._timeouts.elapsed_s(session)
        return 0.0 if left_s < 1e-6 else left_s  # timers are rounded

    def lengthen(self, *, one_at_a_time: bool) -> None:  # noqa: ARG002
        self._timeouts.lengthen()
