"""A channel sends messages to one peer and receives its messages; the same in both worlds.

Sending is a lane: one frame at a time, at the link's rate. Latency is added after the lane. A `Transport`, in memory or
over gRPC, carries the frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from pipar.errors import LinkError, ProtocolError
from pipar.execution.clock import sleep_until
from pipar.execution.spans import EVALUATION, Recorder
from pipar.settings.links import Link
from pipar.transport.byte_counts import OF_EVALUATION, ByteCounts, travels_in
from pipar.transport.delay_line import DelayLine, delayed
from pipar.transport.heartbeat import Silence
from pipar.transport.interface import SendError, Transport
from pipar.transport.limits import RateLimit, TokenBucket
from pipar.transport.outbox import Outbox
from pipar.transport.rate_estimate import FrameLog
from pipar.transport.shaping import Meter, Pacer, RateOverTime, Rates
from pipar.wire.frames import Assembler, BodyLimit, Frame, check_fits
from pipar.wire.messages import UNNUMBERED, Chunks, Kind, Message, Payload

#: The span of a frame on the link, and the work that the link waited for before it.
_SPANS = {
    Kind.ACTIVATION: ("u", "fc"),
    Kind.GRADIENT: ("d", "bs"),
    Kind.MODEL: ("model", "pack"),
    Kind.TRACE: ("trace", "trace"),
    Kind.STATE: ("model", "pack"),
    Kind.EVALUATE: ("model", "pack"),
}
_CONTROL = ("control", "control")
#: Frames that the receiver does not need. After a link broke, the peer sends frames again that had arrived; this allows
#: for a model of 100 GB. A peer that sends more than that is faulty or hostile.
_USELESS = RateLimit(burst=100_000, per_second=100.0)
#: How long `close` waits for the peer to take what was posted.
_CLOSE_TIMEOUT_S = 10.0


class Channel:
    """Messages to and from one peer: in order, each once, shaped in the direction in which this side sends.

    A lost transport loses no message: those that the peer has not acknowledged are kept, and sent again over the next
    transport that is attached. Without `on_lost`, no other transport is attached and the loss ends the channel.
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
        self.received = 0  # the number of the last complete message from the peer
        self.counts = ByteCounts()
        self.meter = Meter()  # of what is sent
        self.most_unacknowledged: int | None = None  # messages; None: no limit
        self._recorder = recorder
        self._lane = lane
        self._on_lost = on_lost
        self.is_real = is_real  # a link between two machines, whose rate has to be measured
        self.sent_frames, self.received_frames = FrameLog(), FrameLog()  # of a real link
        self._sent_before = 0  # messages up to this number may be sent a second time
        self._loop = asyncio.get_running_loop()
        self.heard_at = self.sent_at = self._loop.time()  # of the last frame from the peer, and of the last one to it
        self.silence = Silence()
        self.answers_alive = False  # whether ALIVE of the peer is answered; only one side does
        self._pacer = Pacer(free_at=self._loop.time())
        self._latency_s = 0.0
        self._outbox = Outbox()
        self._useless = TokenBucket(_USELESS)
        self._posted: asyncio.Future[None] | None = None  # what the sender waits for; None while it sends
        self._drained: asyncio.Future[None] | None = None
        self._assembler = Assembler()
        self._stretch: tuple[Message, float, float] | None = None  # the message being sent, and from when to when
        self._link: Transport = transport  # the given transport
        self._transport: Transport | None = transport  # with its latency
        self._failure: LinkError | None = None
        self._changed = asyncio.Event()  # another transport, none, or the end
        self._closing: set[asyncio.Task[None]] = set()
        self._sender = self._loop.create_task(self._send_all())

    def shape(
        self, rate_bps: float | None, latency_s: float, *, cycle: Sequence[float | None] = (), every_s: float = 0.0
    ) -> None:
        """Send at this rate from now on, or at each rate of a cycle for `every_s`; frames arrive `latency_s` later."""
        self.pace(Rates(tuple(cycle), every_s, self._loop.time()) if cycle else Rates((rate_bps,)), latency_s)

    def pace(self, rates: RateOverTime, latency_s: float) -> None:
        """Send at these rates from now on; frames arrive `latency_s` later."""
        self._pacer.rates = rates
        self._latency_s = latency_s
        if self._transport is not None:
            self._transport = delayed(self._link, latency_s)

    def emulate(self, link: Link, rate: Callable[[Link], float | None]) -> None:
        """Send at the rates of this link; `rate` is that of the direction in which this side sends."""
        self.shape(rate(link), link.latency_s, cycle=[rate(one) for one in link.cycle], every_s=link.every_s)

    def rate_bps(self, epoch: int) -> float | None:
        """Return the rate at which this side sends, emulated or measured in the epoch so far; None means no limit.

        It is 0 for a link between machines that has not carried enough data yet: the link may be slow.
        """
        emulated = self._pacer.rates.at(self._loop.time())
        if not self.is_real:
            return emulated
        measured = self.meter.read(epoch)
        return measured.rate_bps if measured.is_enough else emulated or 0.0

    def frame_times(self) -> dict[str, Any]:
        """Return, as content of the next message, when frames of a real link were ready and when others arrived.

        The next message is one of them: it is small, so it shows the delay of the path at any rate of the link.
        """
        if not self.is_real or not (self.sent_frames.times or self.received_frames.times):
            return {}
        next_number = self._outbox.last_number + 1
        return {
            "ready": [*self.sent_frames.as_json(), [next_number, 0, round(self._loop.time(), 6)]],
            "came": self.received_frames.as_json(),
        }

    def limit(self, limit: BodyLimit) -> None:
        """Accept no messages larger than this from now on."""
        self._assembler.limit = limit

    def post(self, message: Message) -> None:
        """Queue a message for sending; return without waiting. Raise if the peer owes too many acknowledgements."""
        check_fits(message)
        most = self.most_unacknowledged
        if most is not None and self.unacknowledged >= most and message.kind not in UNNUMBERED:
            raise ProtocolError(f"The peer has not acknowledged {self.unacknowledged} messages, which is the maximum.")
        self._outbox.add(message, self._loop.time())
        self._wake()

    def add_chunk(self, chunks: Chunks, payload: Payload) -> None:
        """Add the next encoded chunk of a message that was posted before all of it was encoded."""
        chunks.add(payload, self._loop.time())
        self._wake()

    def _wake(self) -> None:
        if self._posted is not None and not self._posted.done():
            self._posted.set_result(None)

    # --- receiving

    async def receive(self) -> Message:
        """Return the peer's next complete message; raise LinkError if the peer is gone for good."""
        while True:
            transport = await self._attached()
            self.silence.begin(self._loop.time())
            try:
                frame = await transport.read()
            except LinkError as error:
                self.silence.cancel()
                self._lose(transport, error)
                continue
            self.silence.end(self._loop.time())
            if transport is self._transport:  # a late frame of a former transport comes again over this one
                message = self._take(frame)
                if message is not None:
                    return message

    def _take(self, frame: Frame) -> Message | None:
        self.heard_at = self._loop.time()
        self._outbox.acknowledge(frame.acknowledged)
        if (frame.sequence == 0) != (frame.message.kind in UNNUMBERED):
            raise ProtocolError(
                f"{frame.message} has number {frame.sequence}; only messages that open or end a connection have 0."
            )
        if frame.message.kind is Kind.ALIVE:
            self._take_alive(frame.message)
            return None
        if frame.sequence == 0:
            return self._assembler.feed(frame)
        if frame.sequence <= self.received:
            self.count_useless(frame.message)  # the peer did not know yet that we have it
            return None
        if frame.sequence > self.received + 1:
            raise ProtocolError(f"{frame.message} has number {frame.sequence}, but {self.received + 1} comes next.")
        message = self._assembler.feed(frame)
        self.counts.add(frame, received=True)
        if self.is_real:
            self.received_frames.note(frame, self._loop.time() if frame.came_at is None else frame.came_at)
        if message is not None:
            self.received = frame.sequence
        return message

    def _take_alive(self, message: Message) -> None:
        self.count_useless(message)  # a peer may send a few in a second, not thousands
        self.silence.note_alive()
        if self.answers_alive and not self.has_something_to_send:
            self.post(Message(Kind.ALIVE))

    def count_useless(self, message: Message) -> None:
        """Count a frame that was not needed, or raise if the peer sends too many of them."""
        if not self._useless.take(self._loop.time()):
            raise ProtocolError(
                f"{message} is not needed, and neither were {_USELESS.burst} frames before it; at most "
                f"{_USELESS.per_second:g} per second are tolerated on average."
            )

    @property
    def held_bytes(self) -> int:
        """How many bytes are kept of unacknowledged messages, and of messages that are half received."""
        return self._outbox.held_bytes + self._assembler.held_bytes

    @property
    def unacknowledged(self) -> int:
        """How many messages are kept because the peer may not have them."""
        return self._outbox.unacknowledged

    # --- one transport after another

    @property
    def is_attached(self) -> bool:
        return self._transport is not None

    def attach(self, transport: Transport, acknowledged: int, greeting: Message | None = None) -> None:
        """Continue over another transport to the same peer, which has our messages up to this number.

        The greeting is sent first and tells the peer which of its messages we have.
        """
        self._outbox.acknowledge(acknowledged)
        self._retire()
        self._link, self._transport = transport, delayed(transport, self._latency_s)
        self._assembler.reset()
        self._stretch = None
        self.sent_frames.clear()
        self.received_frames.clear()
        self._sent_before = self._outbox.last_number
        self.heard_at = now = self._loop.time()
        self._outbox.start_again(greeting, now)
        self._pacer.free_at = now  # the lane no longer carries anything
        self._posted = None
        self._sender = self._loop.create_task(self._send_all())
        self._change()

    def lose(self, reason: LinkError) -> None:
        """Give up the current transport, as if it had broken; another one may be attached."""
        if self._transport is not None:
            self._lose(self._transport, reason)

    def fail(self, reason: LinkError) -> None:
        """End the channel: no other transport will be attached, and `receive` raises this."""
        if self._failure is None:
            self._failure = reason
            self._retire(politely=True)
            self._change()

    async def until_lost(self, transport: Transport) -> None:
        """Return when this transport is no longer in use and its last frames have left."""
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
        if self._on_lost is None or isinstance(error, SendError):
            self.fail(error)
            return
        self._retire()
        self._change()
        self._on_lost(error)

    def _retire(self, *, politely: bool = False) -> None:
        if self._transport is not None:
            if isinstance(self._transport, DelayLine) and not politely:
                self._transport.drop()
            self._sender.cancel()  # it may be in the middle of a frame that will not arrive
            for ending in (self._sender, self._loop.create_task(self._transport.close())):
                self._closing.add(ending)
                ending.add_done_callback(self._closing.discard)
            self._transport = None

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- sending

    async def drain(self) -> None:
        """Return when everything that is posted and encoded has left, or the peer is gone."""
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
        return is_sending or self._outbox.has_ready_frame

    async def close(self) -> None:
        """Send what was posted, then end the connection."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self.drain()
        self._sender.cancel()
        await asyncio.gather(self._sender, return_exceptions=True)
        self._on_lost = None
        self.fail(LinkError("The connection is closed."))
        await asyncio.gather(*self._closing, return_exceptions=True)
        self._assembler.reset()
        self._outbox.clear()

    async def _send_all(self) -> None:
        """Send over one transport until it is replaced; what it may have lost is sent again over the next one."""
        link = self._link
        try:
            while self._link is link and self._transport is not None:
                await self._send(*await self._next_frame())
        except Exception as error:  # noqa: BLE001 - the task ends here, and `receive` raises it
            if self._link is link:
                self.fail(SendError.caused_by(error))

    async def _next_frame(self) -> tuple[Frame, float]:
        while (found := self._outbox.next_frame(self.session, self.received)) is None:
            if self._drained is not None and not self._drained.done():
                self._drained.set_result(None)
            self._posted = self._loop.create_future()
            await self._posted
            self._posted = None
        return found

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
        if frame.message.kind in (Kind.ALIVE, Kind.PROBE):
            return  # they belong to no epoch
        self._measure(frame, ready_at, end - start)
        if self._pacer.rates.at(end) is None:
            # Without an emulated rate, the lane is busy until the transport has taken the frame.
            end = self._pacer.free_at = max(end, written_at)
        self.counts.add(frame, received=False)
        self._record(frame, free_at, start, end)

    def _measure(self, frame: Frame, ready_at: float, emulated_s: float) -> None:
        """Count a frame for the rate of the link, or log it until the peer has reported when it arrived.

        A frame takes no time on an emulated link without a limit: the time that a busy machine takes to write it says
        nothing about the link.
        """
        if not self.is_real or emulated_s > 0:
            self.meter.count(travels_in(frame.message), frame.size_bytes, emulated_s)
        elif frame.sequence > self._sent_before:
            self.sent_frames.note(frame, ready_at)

    def _record(self, frame: Frame, free_at: float, start: float, end: float) -> None:
        """Record one span per message; one that was overtaken, or waited for a chunk, has a span for each stretch."""
        message = frame.message
        kind, cause = _SPANS.get(message.kind, _CONTROL)
        place = (travels_in(message), message.iteration, message.micro_batch)
        lane = EVALUATION if message.kind in OF_EVALUATION else self._lane
        if lane is self._lane:
            self._recorder.waited(lane, cause, *place, free_at, start)
        began = start
        if self._stretch is not None and self._stretch[0] is message:
            _, began, ended = self._stretch
            if start > ended:  # the lane waited for the chunk
                self._recorder.busy(lane, kind, *place, began, ended)
                began = start
        if frame.chunk < frame.chunks - 1 and not self._outbox.has_unnumbered:
            self._stretch = (message, began, end)
        else:
            self._stretch = None
            self._recorder.busy(lane, kind, *place, began, end)
