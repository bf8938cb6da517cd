"""Who is not heard of: a device whose network is gone says nothing, long before its connection is known to be lost.

Nothing is sent to find out. A device that has to say something, and has not for longer than it ever takes, is silent.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipar.events import Heard, Observer, Silent
from pipar.server.session import Session

#: Who is waited for is silent after so long, which a page shows within two seconds,
PATIENCE_S = 1.5
#: or after so many times the longest that was heard nothing of it in this round and the one before.
_USUAL = 1.25
_LOOK_EVERY_S = 0.2


@dataclass
class _Rhythm:
    """How long one device lets others wait for it."""

    heard_at: float  # on the server's clock
    waited_s: float = 0.0  # for what comes next, so far
    round: int = 0
    longest_s: float | None = None  # in this round; None as long as there was nothing to wait for
    before_s: float | None = None  # in the round before
    is_silent: bool = False

    def hear(self, at: float, in_round: int) -> None:
        """Something has come: that was how long it takes. Of what was far too long, only so much is taken for usual."""
        usual_s = min(self.waited_s, 2 * self.patience_s)
        if in_round != self.round:
            self.round, self.before_s, self.longest_s = in_round, self.longest_s, None
        self.longest_s = max(self.longest_s or 0.0, usual_s)
        self.heard_at, self.waited_s, self.is_silent = at, 0.0, False

    @property
    def patience_s(self) -> float:
        """How long is nothing unusual. Before the first wait is over, nobody knows: a device may train for an hour."""
        known = [waited_s for waited_s in (self.longest_s, self.before_s) if waited_s is not None]
        return max(PATIENCE_S, _USUAL * (max(known) + _LOOK_EVERY_S)) if known else math.inf


class LivenessMonitor:
    """Tells of devices that fall silent, and when they are heard again."""

    def __init__(self, sessions: Callable[[], Sequence[Session]], observe: Observer) -> None:
        self._sessions = sessions
        self._observe = observe
        self._rhythms: dict[Session, _Rhythm] = {}

    async def watch(self) -> None:
        """Listen to everybody, until this is cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            looks_at = clock() + _LOOK_EVERY_S
            await asyncio.sleep(_LOOK_EVERY_S)
            if clock() - looks_at < _LOOK_EVERY_S:  # or this program was busy, and what has come is not read yet
                self.look(clock())

    def look(self, now: float) -> None:
        """See who is silent now."""
        self._rhythms = {
            session: self._rhythms.get(session) or _Rhythm(session.channel.heard_at) for session in self._sessions()
        }
        for session, rhythm in self._rhythms.items():
            self._look_at(session, rhythm, now)

    def _look_at(self, session: Session, rhythm: _Rhythm, now: float) -> None:
        heard_at = session.channel.heard_at
        if heard_at != rhythm.heard_at:
            if rhythm.is_silent:
                self._observe(Heard(session.device, rhythm.waited_s))
            rhythm.hear(heard_at, session.round.epoch)
        if not session.channel.is_attached:
            rhythm.is_silent = False  # it is known to be away
        rhythm.waited_s = max(rhythm.waited_s, session.awaited_s(now))
        if rhythm.waited_s > rhythm.patience_s and not rhythm.is_silent and session.channel.is_attached:
            rhythm.is_silent = True
            self._observe(Silent(session.device, rhythm.waited_s))
