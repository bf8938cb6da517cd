"""The order in which devices use a server-side model that all share: by iteration, then by device name."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable


class TurnOrder:
    """The turns of one round: device k's iteration i comes before device k+1's, and all of i before any of i+1.

    So the result does not depend on the order of arrival. A device that has finished its epoch is skipped.
    """

    def __init__(self, devices: Iterable[str]) -> None:
        self._next = [(1, name) for name in sorted(devices)]
        self._finished: set[str] = set()
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def wait_for(self, device: str) -> None:
        """Return when it is this device's turn."""
        if self._next[0][1] != device:
            self._waiting[device] = asyncio.get_running_loop().create_future()
            await self._waiting[device]
            del self._waiting[device]

    def end_turn(self, device: str) -> None:
        """Pass the turn on to the next device; this one's next turn is in the next iteration."""
        iteration, holder = self._next[0]
        assert holder == device, f"{device} passed on a turn of {holder}"
        heapq.heapreplace(self._next, (iteration + 1, device))
        self._wake_next()

    def is_turn_of(self, device: str) -> bool:
        """Return whether it is this device's turn."""
        return bool(self._next) and self._next[0][1] == device

    def held_up_by(self) -> str | None:
        """Return the device whose turn others wait for, None if none waits."""
        is_awaited = any(not waiting.done() for waiting in self._waiting.values())
        return self._next[0][1] if is_awaited else None

    def finish(self, device: str) -> None:
        """Take a device out of the round."""
        self._finished.add(device)
        self._wake_next()

    def _wake_next(self) -> None:
        while self._next and self._next[0][1] in self._finished:
            heapq.heappop(self._next)
        if self._next and (waiting := self._waiting.get(self._next[0][1])) is not None and not waiting.done():
            waiting.set_result(None)
