"""Emulated latency: a transport whose frames arrive later."""

from __future__ import annotations

import asyncio

from pipar.errors import LinkError
from pipar.execution.clock import sleep_until
from pipar.transport.interface import SendError, Transport
from pipar.wire.frames import Frame


class DelayLine:
    """A transport whose frames arrive `latency_s` later; the sender's lane is free meanwhile."""

    def __init__(self, transport: Transport, latency_s: float) -> None:
        self._transport = transport
        self._latency_s = latency_s
        self._loop = asyncio.get_running_loop()
        self._under_way: asyncio.Queue[tuple[float, Frame]] = asyncio.Queue()
        self._failure: LinkError | None = None
        self._pump = self._loop.create_task(self._deliver())

    async def write(self, frame: Frame) -> None:
        if self._pump.done():
            raise self._failure or LinkError("The peer closed the connection.")
        self._under_way.put_nowait((self._loop.time() + self._latency_s, frame))

    async def read(self) -> Frame:
        try:
            return await self._transport.read()
        except LinkError as error:
            raise self._failure or error from None

    def drop(self) -> None:
        """Discard the frames in flight: the peer reads nothing more from this transport."""
        self._pump.cancel()

    async def close(self) -> None:
        if not self._pump.done():
            joined = asyncio.ensure_future(self._under_way.join())
            await asyncio.wait([joined, self._pump], return_when=asyncio.FIRST_COMPLETED)
            joined.cancel()
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        await self._transport.close()

    async def _deliver(self) -> None:
        try:
            while True:
                arrives_at, frame = await self._under_way.get()
                await sleep_until(arrives_at)
                await self._transport.write(frame)
                self._under_way.task_done()
        except LinkError:
            return
        except Exception as error:  # noqa: BLE001 - the task ends here; the next read or write raises it
            self._failure = SendError.caused_by(error)
            await self._transport.close()


def delayed(transport: Transport, latency_s: float) -> Transport:
    """Return the transport with this latency, or the transport itself if the latency is 0."""
    return DelayLine(transport, latency_s) if latency_s > 0 else transport
