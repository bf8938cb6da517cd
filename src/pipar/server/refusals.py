"""Devices that may not join: each refusal is reported, but one that repeats only once a minute."""

from __future__ import annotations

import asyncio
import re

from pipar.errors import peer_text
from pipar.events import Observer, Refused

_AGAIN_AFTER_S = 60.0
#: Names and reasons may come from peers: neither a long text nor many different ones may fill memory or the log.
_MOST_CHARACTERS = 300
_MOST_REMEMBERED = 256
_DIGITS = re.compile(r"\d+")


class RefusalReporter:
    """Reports refused devices to an observer."""

    def __init__(self, observe: Observer) -> None:
        self._observe = observe
        self._reported: dict[tuple[str, str], float] = {}  # when each refusal was last reported, oldest first

    def report(self, device: str, reason: str, *, again: bool) -> None:
        """Report a refusal, unless the same one was reported less than a minute ago."""
        now = asyncio.get_running_loop().time()
        # Without digits: a peer that gives another number each time must not fill the log.
        device, reason = peer_text(device, _MOST_CHARACTERS), peer_text(reason, _MOST_CHARACTERS)
        key = device, _DIGITS.sub("0", reason)
        before = self._reported.pop(key, None)
        if before is not None and now < before + _AGAIN_AFTER_S:
            self._reported[key] = before
            return
        self._reported[key] = now
        if len(self._reported) > _MOST_REMEMBERED:
            del self._reported[next(iter(self._reported))]
        self._observe(Refused(device, reason, again))
