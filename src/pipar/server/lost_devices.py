"""Ends the sessions of devices from which nothing is heard, although they show signs of life when they are there."""

from __future__ import annotations

import asyncio

from pipar.server.membership import Membership
from pipar.server.session import Session
from pipar.transport.heartbeat import Waking

#: How often all devices are looked at, at least: their timeouts may have become shorter meanwhile.
_LOOK_EVERY_S, _LEAST_S = 1.0, 0.01


class LostDeviceWatch:
    """Watches all devices that show signs of life, also between rounds."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._loop = asyncio.get_running_loop()

    async def watch(self) -> None:
        """Look at all devices whenever one could have been silent for too long, until cancelled."""
        waking = Waking(self._loop.time)
        while True:
            late_s = await waking.sleep(self._check(waking.late_at))
            self._membership.timeouts.woke_late(late_s)

    def _check(self, not_before: float) -> float:
        """End the sessions of silent devices; return when to look again."""
        again_s = _LOOK_EVERY_S
        for session in self._membership.welcomed():
            again_s = min(again_s, self._check_one(session, not_before))
        return max(_LEAST_S, again_s)

    def _check_one(self, session: Session, not_before: float) -> float:
        """Return for how much longer a device may be silent."""
        channel, limit_s = session.channel, self._membership.timeouts.silent_after_s(session)
        silent_s = channel.silence.seconds(self._loop.time(), not_before)
        if channel.is_attached and silent_s >= limit_s:
            self._membership.give_up_silent(session, silent_s)
        return limit_s - silent_s
