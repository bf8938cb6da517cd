"""The in-memory transport: a pair of ends in one process, for virtual time and for tests."""

from __future__ import annotations

import asyncio

from pipar.errors import LinkError
from pipar.wire.frames import Frame


class MemoryTransport:
    """One end of a pair; frames are handed over as objects, not as bytes."""

    def __init__(self, inbox: asyncio.Queue[Frame | None], outbox: asyncio.Queue[Frame | None]) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._closed = False

    async def write(self, frame: Frame) -> None:
        if self._closed:
            raise LinkError("The connection is closed.")
        self._outbox.put_nowait(frame)

    async def read(self) -> Frame:
        frame = await self._inbox.get()
        if frame is None:
            self._closed = True
            self._inbox.put_nowait(None)  # for every later read
            raise LinkError("The peer closed the connection.")
        return frame

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._outbox.put_nowait(None)
            self._inbox.put_nowait(None)


def memory_pair() -> tuple[MemoryTransport, MemoryTransport]:
    """Return two transports; each reads what the other writes."""
    one: asyncio.Queue[Frame | None] = asyncio.Queue()
    other: asyncio.Queue[Frame | None] = asyncio.Queue()
    return MemoryTransport(one, other), MemoryTransport(other, one)
