"""Which devices have fallen silent: a device that lost its network sends nothing, long before a timeout shows it.

The server sends no probes. A device is silent if its next message takes longer than its messages usually do.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipar.events import Heard, Observer, Silent
from pipar.server.session import Session

#: A device that the server waits for is silent after this time at the earliest: the live page shows it within 2 s.
SILENT_AFTER_S = 1.5
#: It is silent if the wait exceeds the longest one of this round and the previous one by this factor.
_USUAL_FACTOR = 1.25
_CHECK_EVERY_S = 0.2


@dataclass
class _Waits:
    """How long the server waits for the messages of one device."""

    heard_at: float  # on the server's clock
    waited_s: float = 0.0  # for the next message, so far
    round: int = 0
    longest_s: float | None = None  # in this round; None before the first wait has ended
    previous_s: float | None = None  # the longest in the previous round
    is_silent: bool = False

    def end(self, at: float, in_round: int) -> None:
        """A message has arrived. An extreme wait is not learned in full, so that an outage does not become usual."""
        usual_s = min(self.waited_s, 2 * self.timeout_s)
        if in_round != self.round:
            self.round, self.previous_s, self.longest_s = in_round, self.longest_s, None
        self.longest_s = max(self.longest_s or 0.0, usual_s)
        self.heard_at, self.waited_s, self.is_silent = at, 0.0, False

    @property
    def timeout_s(self) -> float:
        """The longest usual wait; infinite before the first wait has ended, because a device may train for an hour."""
        known = [waited_s for waited_s in (self.longest_s, self.previous_s) if waited_s is not None]
        return max(SILENT_AFTER_S, _USUAL_FACTOR * (max(known) + _CHECK_EVERY_S)) if known else math.inf


class SilentDeviceMonitor:
    """Emits an event when a device falls silent, and when it is heard again."""

    def __init__(self, sessions: Callable[[], Sequence[Session]], observe: Observer) -> None:
        self._sessions = sessions
        self._observe = observe
        self._waits: dict[Session, _Waits] = {}

    async def watch(self) -> None:
        """Check all devices repeatedly, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            due_at = clock() + _CHECK_EVERY_S
            await asyncio.sleep(_CHECK_EVERY_S)
            # If this process was busy, messages may have arrived that are not read yet.
            if clock() - due_at < _CHECK_EVERY_S:
                self.check(clock())

    def check(self, now: float) -> None:
        """Emit the events that are due now."""
        self._waits = {
            session: self._waits.get(session) or _Waits(session.channel.heard_at) for session in self._sessions()
        }
        for session, waits in self._waits.items():
            self._check(session, waits, now)

    def _check(self, session: Session, waits: _Waits, now: float) -> None:
        heard_at = session.channel.heard_at
        if heard_at != waits.heard_at:
            if waits.is_silent:
                self._observe(Heard(session.device, waits.waited_s))
            waits.end(heard_at, session.round.epoch)
        if not session.channel.is_attached:
            waits.is_silent = False  # it is known to be away
        waits.waited_s = max(waits.waited_s, session.awaited_s(now))
        if waits.waited_s > waits.timeout_s and not waits.is_silent and session.channel.is_attached:
            waits.is_silent = True
            self._observe(Silent(session.device, waits.waited_s))
