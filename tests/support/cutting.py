"""In-memory links that are lost in the middle of a message, for tests of reconnecting."""

from __future__ import annotations

import asyncio
from enum import Enum

from pipar.errors import LinkError
from pipar.transport.in_memory import MemoryTransport
from pipar.wire.frames import Frame


class Loss(Enum):
    """How a link is lost."""

    CLEAN = "what was sent arrives"
    FRAMES = "frames under way are lost"
    SILENT = "the other side does not notice"


class CutLink:
    """One end of a link that is lost after a number of frames, counted in both directions together."""

    def __init__(self, link: MemoryTransport, frames: int | None = None, loss: Loss = Loss.CLEAN) -> None:
        self.carried = 0
        self._link = link
        self._frames = frames
        self._loss = loss

    async def write(self, frame: Frame) -> None:
        await self._link.write(frame)
        await self._count()

    async def read(self) -> Frame:
        frame = await self._link.read()
        await self._count()
        if self._is_lost() and self._loss is not Loss.CLEAN:
            raise LinkError("The link was cut.")
        return frame

    async def close(self) -> None:
        await self._link.close()

    async def cut(self) -> None:
        """Lose the link now."""
        if self._loss is not Loss.CLEAN:
            for queue in (self._link._inbox, self._link._outbox):
                _empty(queue)
        if self._loss is Loss.SILENT:
            self._link._closed = True
            self._link._inbox.put_nowait(None)
        else:
            await self._link.close()

    async def _count(self) -> None:
        self.carried += 1
        if self.carried == self._frames:
            await self.cut()

    def _is_lost(self) -> bool:
        return self._frames is not None and self.carried >= self._frames


def _empty(queue: asyncio.Queue[Frame | None]) -> None:
    while not queue.empty():
        queue.get_nowait()
