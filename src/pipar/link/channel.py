"""A channel sends messages to one peer and receives its messages; the same in both worlds.

Sending is a lane: one frame at a time, at the link's rate, control before data. Latency lies behind the lane.
What carries the frames, memory or gRPC, is a `Transport`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from pipar.clock import sleep_until
from pipar.errors import LinkError
from pipar.link.shaping import Meter, Pacer, Rates
from pipar.protocol.messages import OVERTAKING, Kind, Message
from pipar.protocol.wire import Assembler, Frame, cut_message
from pipar.trace import Recorder

#: What a frame on the link is called in the trace, and which work brings it forth.
_SPANS = {
    Kind.ACTIVATION: ("u", "fc"),
    Kind.GRADIENT: ("d", "bs"),
    Kind.MODEL: ("model", "pack"),
    Kind.TRACE: ("trace", "trace"),
    Kind.STATE: ("model", "pack"),
}
_CONTROL = ("control", "control")
_BEHIND_THEIR_EPOCH = frozenset({Kind.REPORT, Kind.TRACE, Kind.STATE})


class Transport(Protocol):
    """Carries frames to one peer and back, in order; a lost peer is a LinkError from `read`."""

    async def write(self, frame: Frame) -> None: ...
    async def read(self) -> Frame: ...
    async def close(self) -> None: ...


class Channel:
    """Messages to and from one peer over a transport, shaped in the direction that this side sends."""

    def __init__(self, transport: Transport, recorder: Recorder, lane: str) -> None:
        self.session = 0
        self.sent_bytes: dict[int, int] = {}  # by epoch
        self.received_bytes: dict[int, int] = {}
        self.meter = Meter()  # of what is sent
        self._transport = transport
        self._recorder = recorder
        self._lane = lane
        self._loop = asyncio.get_running_loop()
        self._pacer = Pacer(free_at=self._loop.time())
        self._control: deque[tuple[Iterator[Frame], float]] = deque()
        self._data: deque[tuple[Iterator[Frame], float]] = deque()
        self._sequence = 0
        self._posted: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._assembler = Assembler()
        self._stretch: tuple[Message, float] | None = None  # the message under way, and since when
        self._sender = self._loop.create_task(self._send_all())

    def shape(
        self, rate_bps: float | None, latency_s: float, *, cycle: Sequence[float | None] = (), every_s: float = 0.0
    ) -> None:
        """Send at this rate from now on, or at each rate of a cycle for `every_s`; frames arrive so much later."""
        self._pacer.rates = Rates(tuple(cycle), every_s, self._loop.time()) if cycle else Rates((rate_bps,))
        self._transport = delayed(self._transport, latency_s)

    def record_on(self, recorder: Recorder) -> None:
        """Leave the spans of what is sent with another recorder: a server learns late whose channel this is."""
        self._recorder = recorder

    def post(self, message: Message) -> None:
        """Queue a message for sending; returns at once."""
        self._sequence += 1
        frames = cut_message(message, self.session, self._sequence)
        queue = self._control if message.kind in OVERTAKING else self._data
        queue.append((frames, self._loop.time()))
        if self._posted is not None and not self._posted.done():
            self._posted.set_result(None)

    async def receive(self) -> Message:
        """Return the next whole message of the peer; raise LinkError if it is gone."""
        while True:
            frame = await self._transport.read()
            _count(self.received_bytes, frame)
            message = self._assembler.feed(frame)
            if message is not None:
                return message

    async def drain(self) -> None:
        """Return when all that was posted has left (or the peer is gone)."""
        while (self._control or self._data or self._posted is None) and not self._sender.done():
            if self._drained is None or self._drained.done():
                self._drained = self._loop.create_future()
            await asyncio.wait([self._drained, self._sender], return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """Send what was posted, then end the connection."""
        await self.drain()
        self._sender.cancel()
        await asyncio.gather(self._sender, return_exceptions=True)
        await self._transport.close()

    async def _send_all(self) -> None:
        try:
            while True:
                frame, ready_at = await self._next_frame()
                await self._send(frame, ready_at)
        except LinkError:
            return  # whoever receives on this channel is told

    async def _next_frame(self) -> tuple[Frame, float]:
        while True:
            # Between two chunks of a large message the queue of control messages is looked at again.
            for queue in (self._control, self._data):
                while queue:
                    frames, ready_at = queue[0]
                    frame = next(frames, None)
                    if frame is not None:
                        if frame.chunk == frame.chunks - 1:
                            queue.popleft()
                        return frame, ready_at
                    queue.popleft()
            if self._drained is not None and not self._drained.done():
                self._drained.set_result(None)
            self._posted = self._loop.create_future()
            await self._posted
            self._posted = None

    async def _send(self, frame: Frame, ready_at: float) -> None:
        free_at = self._pacer.free_at
        start, end = self._pacer.reserve(ready_at, frame.size_bytes)
        await sleep_until(end)
        # Without a limit it counts as no time: how long a busy machine takes for a frame says nothing of the link.
        self.meter.count(_travels_in(frame.message), frame.size_bytes, end - start)
        await self._transport.write(frame)
        if self._pacer.rates.at(end) is None:
            # Nothing to plan with: the lane is taken for as long as the transport takes the frame.
            end = self._pacer.free_at = max(end, self._loop.time())
        _count(self.sent_bytes, frame)
        self._record(frame, free_at, start, end)

    def _record(self, frame: Frame, free_at: float, start: float, end: float) -> None:
        """Leave one span a message; a large one that was overtaken leaves one for each stretch."""
        message = frame.message
        kind, cause = _SPANS.get(message.kind, _CONTROL)
        place = (_travels_in(message), message.iteration, message.micro_batch)
        self._recorder.waited(self._lane, cause, *place, free_at, start)
        going_on = self._stretch is not None and self._stretch[0] is message
        began = self._stretch[1] if self._stretch is not None and going_on else start
        if frame.chunk < frame.chunks - 1 and not self._control:
            self._stretch = (message, began)
        else:
            self._stretch = None
            self._recorder.busy(self._lane, kind, *place, began, end)


def _count(total: dict[int, int], frame: Frame) -> None:
    epoch = _travels_in(frame.message)
    total[epoch] = total.get(epoch, 0) + frame.size_bytes


def _travels_in(message: Message) -> int:
    """Return the epoch in which a message is on the link: these are sent when their own epoch is over."""
    return message.epoch + (message.kind in _BEHIND_THEIR_EPOCH)


class DelayLine:
    """A transport whose frames arrive `latency_s` later; the sender's lane is free meanwhile."""

    def __init__(self, transport: Transport, latency_s: float) -> None:
        self._transport = transport
        self._latency_s = latency_s
        self._loop = asyncio.get_running_loop()
        self._under_way: asyncio.Queue[tuple[float, Frame]] = asyncio.Queue()
        self._pump = self._loop.create_task(self._deliver())

    async def write(self, frame: Frame) -> None:
        if self._pump.done():
            raise LinkError("The peer closed the connection.")
        self._under_way.put_nowait((self._loop.time() + self._latency_s, frame))

    async def read(self) -> Frame:
        return await self._transport.read()

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


def delayed(transport: Transport, latency_s: float) -> Transport:
    """Return the transport itself, or behind a delay line if there is a latency to add."""
    return DelayLine(transport, latency_s) if latency_s > 0 else transport
