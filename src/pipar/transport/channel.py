"""A channel sends messages to one peer and receives its messages; the same in both worlds.

Sending is a lane: one frame at a time, at the link's rate. Latency lies behind the lane.
What carries the frames, memory or gRPC, is a `Transport`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

from pipar.errors import LinkError, ProtocolError
from pipar.execution.clock import sleep_until
from pipar.execution.spans import Recorder
from pipar.links import Link
from pipar.transport.limits import MESSAGE_BYTES, RateLimit, TokenBucket
from pipar.transport.rate_estimate import FrameLog
from pipar.transport.shaping import Meter, Pacer, Rates
from pipar.wire.frames import Assembler, BodyLimit, Frame, check_fits, cut_message
from pipar.wire.messages import UNNUMBERED, Chunks, Kind, Message, Payload

#: What a frame on the link is called in the trace, and which work brings it forth.
_SPANS = {
    Kind.ACTIVATION: ("u", "fc"),
    Kind.GRADIENT: ("d", "bs"),
    Kind.MODEL: ("model", "pack"),
    Kind.TRACE: ("trace", "trace"),
    Kind.STATE: ("model", "pack"),
}
#: A link that breaks sends again what had come; a model of 100 GB that had is as many frames as this. Who sends
#: nothing else is up to no good.
_USELESS = RateLimit(burst=100_000, per_second=100.0)
#: Who does not take what is left to say within this time does not get it.
_LAST_WORDS_S = 10.0
_CONTROL = ("control", "control")
_BEHIND_THEIR_EPOCH = frozenset({Kind.REPORT, Kind.TRACE, Kind.STATE})


class Transport(Protocol):
    """Carries frames to one peer and back, in order; a lost peer is a LinkError from `read`."""

    async def write(self, frame: Frame) -> None: ...
    async def read(self) -> Frame: ...
    async def close(self) -> None: ...


class _Posted:
    """A message that waits for its turn, or for its acknowledgement."""

    __slots__ = ("_frames", "_posted_at", "_sent", "message", "sequence")

    def __init__(self, message: Message, sequence: int, posted_at: float) -> None:
        self.message = message
        self.sequence = sequence
        self._posted_at = posted_at
        self._sent = 0  # frames
        self._frames: Iterator[Frame] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether its next frame is encoded."""
        chunks = self.message.body.chunks
        return chunks is None or self._sent < len(chunks.ready)

    def next_frame(self, session: int, acknowledged: int) -> tuple[Frame, float]:
        """Return the next frame, and since when it could have been sent."""
        if self._frames is None:
            self._frames = cut_message(self.message, session, self.sequence, acknowledged)
        chunks = self.message.body.chunks
        ready_at = self._posted_at if chunks is None else max(self._posted_at, chunks.ready[self._sent].at)
        self._sent += 1
        return next(self._frames), ready_at


class _CannotSendError(LinkError):
    """This side fails at sending, which it would do over another transport, too."""


class Channel:
    """Messages to and from one peer: in order, each once, shaped in the direction that this side sends.

    A lost transport loses no message. What the peer has not acknowledged is kept, and goes again over the transport
    that is attached next. Without `on_lost` nobody attaches another one, and the loss is the end.
    """

    def __init__(
        self,
        transport: Transport,
        recorder: Recorder,
        lane: str,
        *,
        on_lost: Callable[[LinkError], None] | None = None,
        is_real: bool = False,
    ) -> None:
        self.session = 0
        self.received = 0  # the number of the last message of the peer that came in whole
        self.sent_bytes: dict[int, int] = {}  # by epoch
        self.received_bytes: dict[int, int] = {}
        self.meter = Meter()  # of what is sent
        self._recorder = recorder
        self._lane = lane
        self._on_lost = on_lost
        self._is_real = is_real  # the link between two machines, whose rate nobody knows
        self.sent_frames, self.received_frames = (
            FrameLog(),
            FrameLog(),
        )  # of a real link: frames to the peer, and from it
        self._went_before = 0  # messages up to this one may go again
        self._loop = asyncio.get_running_loop()
        self.heard_at = self.sent_at = self._loop.time()  # of the last frame from the peer, and of the last one to it
        self._pacer = Pacer(free_at=self._loop.time())
        self._latency_s = 0.0
        self._unnumbered: deque[_Posted] = deque()
        self._numbered: deque[_Posted] = deque()
        self._unacknowledged: deque[_Posted] = deque()
        self._sequence = 0
        self._useless = TokenBucket(_USELESS)
        self._posted: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._assembler = Assembler()
        self._stretch: tuple[Message, float, float] | None = None  # the message under way, since when and until when
        self._link: Transport = transport  # as it was given
        self._transport: Transport | None = transport  # behind its latency
        self._failure: LinkError | None = None
        self._changed = asyncio.Event()  # another transport, none, or the end
        self._closing: set[asyncio.Task[None]] = set()
        self._sender = self._loop.create_task(self._send_all())

    def shape(
        self, rate_bps: float | None, latency_s: float, *, cycle: Sequence[float | None] = (), every_s: float = 0.0
    ) -> None:
        """Send at this rate from now on, or at each rate of a cycle for `every_s`; frames arrive so much later."""
        self._pacer.rates = Rates(tuple(cycle), every_s, self._loop.time()) if cycle else Rates((rate_bps,))
        self._latency_s = latency_s
        if self._transport is not None:
            self._transport = delayed(self._link, latency_s)

    def rate_bps(self, epoch: int) -> float | None:
        """Return how fast this side sends, as emulated or as measured in an epoch so far; None is no limit.

        Of a link between machines that has not carried enough yet it is 0: it may be slow.
        """
        emulated = self._pacer.rates.at(self._loop.time())
        if not self._is_real:
            return emulated
        measured = self.meter.read(epoch)
        return measured.rate_bps if measured.is_enough else emulated or 0.0

    def frame_times(self) -> dict[str, Any]:
        """Return, for the next message to tell, when frames of a real link were ready, and when others came.

        That message is among them: it is small, so it shows what the way takes whatever the link's rate.
        """
        if not self._is_real or not (self.sent_frames.times or self.received_frames.times):
            return {}
        return {
            "ready": [*self.sent_frames.as_json(), [self._sequence + 1, 0, round(self._loop.time(), 6)]],
            "came": self.received_frames.as_json(),
        }

    def emulate(self, link: Link, rate: Callable[[Link], float | None]) -> None:
        """Send as over this link; `rate` is that of the direction in which this side sends."""
        self.shape(rate(link), link.latency_s, cycle=[rate(one) for one in link.cycle], every_s=link.every_s)

    def limit(self, limit: BodyLimit) -> None:
        """Take no messages larger than this from now on."""
        self._assembler.limit = limit

    def post(self, message: Message) -> None:
        """Queue a message for sending; returns at once."""
        check_fits(message)
        if message.kind in UNNUMBERED:
            self._unnumbered.append(_Posted(message, 0, self._loop.time()))
        else:
            self._sequence += 1
            posted = _Posted(message, self._sequence, self._loop.time())
            self._unacknowledged.append(posted)
            self._numbered.append(posted)
        self._wake()

    def add_chunk(self, chunks: Chunks, payload: Payload) -> None:
        """Go on with a message that was posted before all of it was encoded."""
        chunks.add(payload, self._loop.time())
        self._wake()

    def _wake(self) -> None:
        if self._posted is not None and not self._posted.done():
            self._posted.set_result(None)

    async def receive(self) -> Message:
        """Return the next whole message of the peer; raise LinkError if it is gone for good."""
        while True:
            transport = await self._attached()
            try:
                frame = await transport.read()
            except LinkError as error:
                self._lose(transport, error)
                continue
            if transport is self._transport:  # what comes late over a former one comes again over this one
                message = self._take(frame)
                if message is not None:
                    return message

    def _take(self, frame: Frame) -> Message | None:
        self.heard_at = self._loop.time()
        self._forget_acknowledged(frame.acknowledged)
        if (frame.sequence == 0) != (frame.message.kind in UNNUMBERED):
            raise ProtocolError(f"{frame.message} has number {frame.sequence}; only what opens or ends a link has 0.")
        if frame.sequence == 0:
            return self._assembler.feed(frame)
        if frame.sequence <= self.received:
            self.count_useless(frame.message)  # the peer did not know yet that we have it
            return None
        if frame.sequence > self.received + 1:
            raise ProtocolError(
                f"{frame.message} has number {frame.sequence}, but {self.received + 1} is to come next."
            )
        message = self._assembler.feed(frame)
        _count(self.received_bytes, frame)
        if self._is_real:
            self.received_frames.note(frame, self._loop.time() if frame.came_at is None else frame.came_at)
        if message is not None:
            self.received = frame.sequence
        return message

    def _forget_acknowledged(self, number: int) -> None:
        if number > self._sequence:
            raise ProtocolError(f"The peer says that it has message {number}, but only {self._sequence} were sent.")
        while self._unacknowledged and self._unacknowledged[0].sequence <= number:
            self._unacknowledged.popleft()

    def count_useless(self, message: Message) -> None:
        """Count what came for nothing, or raise if the peer sends little else."""
        if not self._useless.take(self._loop.time()):
            raise ProtocolError(
                f"{message} is of no use, as were {_USELESS.burst} frames before it; in the long run there may be "
                f"{_USELESS.per_second:g} of them a second."
            )

    def take_counts(self, epoch: int) -> tuple[int, int]:
        """Return how many bytes came and went in an epoch, and forget what was counted up to it."""
        counts = self.received_bytes.get(epoch, 0), self.sent_bytes.get(epoch, 0)
        for counted in (self.received_bytes, self.sent_bytes):
            for old in [number for number in counted if number <= epoch]:
                del counted[old]
        return counts

    @property
    def held_bytes(self) -> int:
        """How many bytes are kept of messages that the peer may not have, and of those that are half received."""
        kept = sum(posted.message.body.size_bytes + MESSAGE_BYTES for posted in self._unacknowledged)
        return kept + self._assembler.held_bytes

    @property
    def unacknowledged(self) -> int:
        """How many messages are kept because the peer may not have them."""
        return len(self._unacknowledged)

    # --- one transport after another

    @property
    def is_attached(self) -> bool:
        return self._transport is not None

    def attach(self, transport: Transport, acknowledged: int, greeting: Message | None = None) -> None:
        """Go on over another transport to the same peer, which has our messages up to this number.

        The greeting goes first and tells the peer how far we have its own.
        """
        self._forget_acknowledged(acknowledged)
        self._retire()
        self._link, self._transport = transport, delayed(transport, self._latency_s)
        self._assembler.reset()
        self._stretch = None
        self.sent_frames.clear()
        self.received_frames.clear()
        self._went_before = self._sequence
        self.heard_at = now = self._loop.time()
        self._unnumbered = deque([_Posted(greeting, 0, now)] if greeting is not None else [])
        self._numbered = deque(_Posted(posted.message, posted.sequence, now) for posted in self._unacknowledged)
        self._unacknowledged = deque(self._numbered)
        self._pacer.free_at = now  # whatever was on the lane is on it no more
        self._posted = None
        self._sender = self._loop.create_task(self._send_all())
        self._change()

    def fail(self, reason: LinkError) -> None:
        """Nobody waits for another transport any more: whoever receives is told."""
        if self._failure is None:
            self._failure = reason
            self._retire(politely=True)
            self._change()

    async def until_lost(self, transport: Transport) -> None:
        """Return when this transport is no longer the one in use, and its last frames have left."""
        while self._link is transport and self._transport is not None:
            await self._changed.wait()
        if self._closing:
            await asyncio.wait(self._closing)

    async def _attached(self) -> Transport:
        while self._transport is None:
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()
        return self._transport

    def _lose(self, transport: Transport, error: LinkError) -> None:
        if transport is not self._transport:
            return
        if self._on_lost is None or isinstance(error, _CannotSendError):
            self.fail(error)
            return
        self._retire()
        self._change()
        self._on_lost(error)

    def _retire(self, *, politely: bool = False) -> None:
        if self._transport is not None:
            if isinstance(self._transport, DelayLine) and not politely:
                self._transport.drop()
            self._sender.cancel()  # it may be in the middle of a frame that goes nowhere any more
            for ending in (self._sender, self._loop.create_task(self._transport.close())):
                self._closing.add(ending)
                ending.add_done_callback(self._closing.discard)
            self._transport = None

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- sending

    async def drain(self) -> None:
        """Return when all that was posted has left, as far as it is encoded (or the peer is gone)."""
        while self.has_something_to_send and self._transport is not None:
            if self._drained is None or self._drained.done():
                self._drained = self._loop.create_future()
            changed = self._loop.create_task(self._changed.wait())
            waiting: list[asyncio.Future[None] | asyncio.Task[Any]] = [self._drained, changed, self._sender]
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
            if self._sender.done():
                return

    @property
    def has_something_to_send(self) -> bool:
        """Whether a frame is being sent, or could be."""
        is_sending = self._posted is None
        return is_sending or any(queue[0].is_ready for queue in (self._unnumbered, self._numbered) if queue)

    async def close(self) -> None:
        """Send what was posted, then end the connection."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self.drain()
        self._sender.cancel()
        await asyncio.gather(self._sender, return_exceptions=True)
        self._on_lost = None
        self.fail(LinkError("The connection is closed."))
        await asyncio.gather(*self._closing, return_exceptions=True)
        self._assembler.reset()
        for kept in (self._unnumbered, self._numbered, self._unacknowledged):
            kept.clear()

    async def _send_all(self) -> None:
        """Send over one transport until it is retired; what it may have lost goes again over the next one."""
        link = self._link
        try:
            while self._link is link and self._transport is not None:
                await self._send(*await self._next_frame())
        except Exception as error:  # noqa: BLE001 - the task ends here, and whoever receives is told
            if self._link is link:
                self.fail(_cannot_send(error))

    async def _next_frame(self) -> tuple[Frame, float]:
        while True:
            # Between two chunks of a large message the queue of those that overtake is looked at again.
            for queue in (self._unnumbered, self._numbered):
                if queue and queue[0].is_ready:
                    frame, ready_at = queue[0].next_frame(self.session, self.received)
                    if frame.chunk == frame.chunks - 1:
                        queue.popleft()
                    return frame, ready_at
            if self._drained is not None and not self._drained.done():
                self._drained.set_result(None)
            self._posted = self._loop.create_future()
            await self._posted
            self._posted = None

    async def _send(self, frame: Frame, ready_at: float) -> None:
        free_at = self._pacer.free_at
        start, end = self._pacer.reserve(ready_at, frame.size_bytes)
        await sleep_until(end)
        transport = self._transport
        if transport is None:
            return
        try:
            await transport.write(frame)
        except LinkError as error:
            self._lose(transport, error)
            return
        self.sent_at = written_at = self._loop.time()
        self._measure(frame, ready_at, end - start)
        if self._pacer.rates.at(end) is None:
            # Nothing to plan with: the lane is taken for as long as the transport takes the frame.
            end = self._pacer.free_at = max(end, written_at)
        _count(self.sent_bytes, frame)
        self._record(frame, free_at, start, end)

    def _measure(self, frame: Frame, ready_at: float, emulated_s: float) -> None:
        """Count a frame for the rate of the link, or remember it until it is known when it came.

        An emulated link without a limit takes no time: how long a busy machine takes for a frame says nothing of it.
        """
        if not self._is_real or emulated_s > 0:
            self.meter.count(_travels_in(frame.message), frame.size_bytes, emulated_s)
        elif frame.sequence > self._went_before:
            self.sent_frames.note(frame, ready_at)

    def _record(self, frame: Frame, free_at: float, start: float, end: float) -> None:
        """Leave one span a message; one that was overtaken, or not encoded in time, leaves one for each stretch."""
        message = frame.message
        kind, cause = _SPANS.get(message.kind, _CONTROL)
        place = (_travels_in(message), message.iteration, message.micro_batch)
        self._recorder.waited(self._lane, cause, *place, free_at, start)
        began = start
        if self._stretch is not None and self._stretch[0] is message:
            _, began, ended = self._stretch
            if start > ended:  # the lane waited for the chunk
                self._recorder.busy(self._lane, kind, *place, began, ended)
                began = start
        if frame.chunk < frame.chunks - 1 and not self._unnumbered:
            self._stretch = (message, began, end)
        else:
            self._stretch = None
            self._recorder.busy(self._lane, kind, *place, began, end)


def _cannot_send(error: Exception) -> _CannotSendError:
    return _CannotSendError(f"Sending failed by {type(error).__name__}: {error}")


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
        """Forget what is under way: the peer takes nothing over this transport any more."""
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
        except Exception as error:  # noqa: BLE001 - the task ends here, and whoever reads or writes is told
            self._failure = _cannot_send(error)
            await self._transport.close()


def delayed(transport: Transport, latency_s: float) -> Transport:
    """Return the transport itself, or behind a delay line if there is a latency to add."""
    return DelayLine(transport, latency_s) if latency_s > 0 else transport
