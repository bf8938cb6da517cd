"""The server's state of one connected device: its phase, its part in the round, and what it may still send."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from pipar.errors import LinkError, NoBudgetLeftError, OtherNetworkError, ProtocolError, VersionError
from pipar.execution.spans import EpochTrace, Recorder
from pipar.methods import Plan
from pipar.planner.replanner import MeasuredLink
from pipar.server.device_messages import EndOfEpoch, EvaluationAnswer, Introduction
from pipar.server.expected_scores import ExpectedScores
from pipar.transport.channel import Channel
from pipar.transport.link_trial import FRAME_BYTES
from pipar.transport.rate_estimate import estimate_traffic
from pipar.transport.shaping import Traffic
from pipar.wire.frames import SMALL_BODY_BYTES, body_limit, package_version
from pipar.wire.messages import EMPTY, Kind, Message, json_body
from pipar.wire.orders import Orders

#: WELCOME, PLAN, STATE, MODEL, ROUND, ABANDON and REPORT of as many rounds as a device that is late may miss.
_MOST_UNACKNOWLEDGED = 20


class Phase(Enum):
    """The phase of a device in the training."""

    JOINED = "joined"  # it has said hello, and gets its orders before the next round
    READY = "ready"  # it has its orders, and trains in the next round
    TRAINING = "training"  # it trains, and has not returned its part of the model
    OVER = "over"  # it no longer takes part


@dataclass(frozen=True)
class Allowance:
    """The most that a device may send with its plan. Without a profile of the network only N is known."""

    micro_batches: int = 0  # that may be outstanding: the plan's N
    is_sized: bool = False  # whether the sizes below are known
    activation_bytes: int = 0
    model_bytes: int = 0
    state_bytes: int = 0
    trace_bytes: int = 0

    def or_more(self, other: Allowance) -> Allowance:
        """Return this allowance with sizes that also fit activations and models of the other one."""
        activation_bytes = max(self.activation_bytes, other.activation_bytes)
        return replace(self, activation_bytes=activation_bytes, model_bytes=max(self.model_bytes, other.model_bytes))


@dataclass
class RoundRecord:
    """A device's part in the latest round, and what is left of earlier ones; only its session changes it."""

    epoch: int = 0  # the last one that the device was asked to train
    outstanding: int = 0  # micro-batches that arrived and are not answered yet
    trained: int = 0  # samples of its whole batches in this round
    last_batch: tuple[int, int] = (0, 0)  # epoch and iteration of its last whole batch
    expects_state: bool = False  # of optimisers, for layers that the device has handed over to the server
    refers: bool = False  # to activations that the server has kept; it was told that it may
    abandoned: int = 0  # epochs up to this one are discarded, also what still arrives of them
    is_late: bool = False  # messages of an abandoned epoch may still arrive


class Inbox(asyncio.Queue[Message | Exception]):
    """Messages of a device that are not read yet, their number and size, and the reason why no more will come."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[Kind] = Counter()
        self.size_bytes = 0

    def _put(self, item: Message | Exception) -> None:
        super()._put(item)
        self._count(item, 1)

    def _get(self) -> Message | Exception:
        item = super()._get()
        self._count(item, -1)
        return item

    def _count(self, item: Message | Exception, sign: int) -> None:
        if isinstance(item, Message):
            self.kinds[item.kind] += sign
            self.size_bytes += sign * item.body.size_bytes

    def discard(self, epoch: int) -> None:
        """Remove all messages of epochs up to this one."""
        for item in [self.get_nowait() for _ in range(self.qsize())]:
            if isinstance(item, Exception) or item.epoch > epoch:
                self.put_nowait(item)


class Session:
    """One device's part in the training, from its hello to its end; its connections may come and go meanwhile.

    Its state is read anywhere and changed by its own methods only.
    """

    def __init__(self, introduction: Introduction, number: int, channel: Channel, recorder: Recorder) -> None:
        self.device = introduction.name
        self.introduction = introduction
        self.number = number
        self.channel = channel
        self.recorder = recorder
        self.inbox = Inbox()
        self.phase = Phase.JOINED
        self.round = RoundRecord()
        self.allowance = Allowance()
        self.passes = 1  # over its samples in one round
        self.plan: Plan | None = None  # as it was last told
        self.knows_refusal = False  # it was said that its activations cannot be kept
        self.installed: tuple[int, int] | None = None  # epoch and split point of the last model that it was sent
        self.has_model_of: int | None = None  # the epoch of that model, until the device trains on it
        self.verdict: Exception | None = None  # why the server ends the session; final
        self.is_stopped = False  # it was told that the training is over
        self.server_stops = False  # the session ends because the server does
        self._hello_at = asyncio.get_running_loop().time()
        self._welcome_at: float | None = None
        self._traces: deque[int] = deque()  # epochs whose traces are requested
        self.evaluation = ExpectedScores(introduction)
        self.measured: MeasuredLink | None = None  # in its last round
        self._uplink = Traffic()  # of a real link, as last measured
        self._probes: asyncio.Queue[tuple[Message, float] | None] | None = None  # while the link is measured
        self._computing: asyncio.Future[Any] | None = None  # on a model that it shares with others

    # --- phases

    @property
    def is_welcome(self) -> bool:
        """Whether the device has got its orders."""
        return self._welcome_at is not None

    @property
    def is_over(self) -> bool:
        return self.phase is Phase.OVER

    @property
    def round_samples(self) -> int:
        """Samples that the device trains on in a round; a sample counts in each pass."""
        return self.introduction.samples * self.passes

    @property
    def greeted_at(self) -> tuple[float, float]:
        """When the hello arrived and when the welcome was sent, on the server's clock."""
        assert self._welcome_at is not None
        return self._hello_at, self._welcome_at

    def welcome(self, orders: Orders) -> None:
        """Send the device its orders."""
        self._welcome_at = asyncio.get_running_loop().time()
        self.passes, self.plan = orders.local_epochs, orders.plan
        self._enter(Phase.READY)
        self.channel.post(Message(Kind.WELCOME, body=replace(orders, session=self.number).to_body()))

    def begin_round(
        self, epoch: int, signs_of_life: Mapping[str, float] | None = None, kept: int | None = None
    ) -> None:
        """Let the device train an epoch, and tell it how fast its real uplink is, which shows on this side.

        `signs_of_life` says how often the device shows that it is alive, and when it gives the connection up; `kept` is
        the epoch whose activations it need not send again.
        """
        self._enter(Phase.TRAINING)
        self.round.epoch, self.round.trained, self.round.refers = epoch, 0, kept is not None
        self.has_model_of = None
        known = self._uplink
        told: dict[str, float] = {"up_bytes": known.size_bytes, "up_s": known.seconds} if known.is_enough else {}
        told |= {**(signs_of_life or {}), **({} if kept is None else {"kept": kept})}
        self.channel.post(Message(Kind.ROUND, epoch, body=json_body(told) if told else EMPTY))

    def end_round(self) -> None:
        """The device has returned its part of the model."""
        self._enter(Phase.READY)

    def abandon(self, epoch: int) -> None:
        """Discard the device's work of an epoch: the round has ended without it."""
        self._enter(Phase.READY)
        self.round.abandoned, self.round.is_late, self.round.outstanding = epoch, True, 0
        self.inbox.discard(epoch)
        self.recorder.take(epoch)
        self.channel.counts.take(epoch)
        self.channel.post(Message(Kind.ABANDON, epoch))

    def stop(self, epoch: int) -> None:
        """Tell the device that the training is over."""
        self.is_stopped = True
        self.channel.post(Message(Kind.STOP, epoch))

    def condemn(self, reason: Exception) -> Exception:
        """Decide that the session ends for this reason; return the first one that was given."""
        self.verdict = self.verdict or reason
        return self.verdict

    def note_server_stops(self) -> None:
        """The session ends because the server stops; the device may join again when there is one."""
        self.server_stops = True

    def refuse(self, reason: Exception | str, *, again: bool = False) -> None:
        """Tell the device why its session is over, and whether it may try `again`."""
        self.channel.post(fault(reason, again=again, stops=self.server_stops))

    def fail(self, error: Exception) -> None:
        """Raise this error in every task that reads the device's messages, now or later."""
        self.inbox.put_nowait(error)

    def end(self, reason: Exception) -> Exception:
        """Enter the last phase; return the reason that holds, which is also what readers of its messages get."""
        self.phase = Phase.OVER
        reason = self.verdict or reason
        self.fail(reason)
        self.evaluation.fail(reason)
        if self._probes is not None and not self._probes.full():
            self._probes.put_nowait(None)
        self.channel.fail(reason if isinstance(reason, LinkError) else LinkError(str(reason)))
        return reason

    def _enter(self, phase: Phase) -> None:
        if not self.is_over:  # the last phase, even if messages are still in flight
            self.phase = phase

    # --- messages of the device

    def take(self, message: Message) -> None:
        """Keep a message until it is read, or raise if the device has sent more than a round has room for.

        That is N micro-batches, and one of each other kind: END_EPOCH and MODEL, and STATE before the round.
        """
        if message.kind is Kind.ACTIVATION:
            self._count_outstanding(message)
        waiting = self.inbox.kinds[message.kind]
        if waiting >= (self.allowance.micro_batches if message.kind is Kind.ACTIVATION else 1):
            raise ProtocolError(f"{message} arrived while {waiting} of its kind is unread, which is the maximum.")
        self.inbox.put_nowait(message)

    def _count_outstanding(self, message: Message) -> None:
        self.round.outstanding += 1
        most = self.allowance.micro_batches
        if self.round.outstanding > most:
            raise ProtocolError(f"{message} arrived with {most} micro-batches outstanding, which is the maximum.")
        if self.owes_acknowledgements:
            raise ProtocolError(
                f"{message} arrived with {self.channel.unacknowledged} messages unacknowledged, which is too many: a "
                "device has all gradients of a batch before it sends the next one."
            )

    async def next_message(self) -> Message:
        """Return the next message of the device, or raise the reason why there is none."""
        message = await self.inbox.get()
        if isinstance(message, Exception):
            self.inbox.put_nowait(message)  # for the next reader
            raise message
        return message

    def is_wanted(self, message: Message) -> bool:
        """Whether a message is not of an abandoned epoch; state for a later plan may have been requested in it."""
        abandoned = self.round.abandoned
        return message.epoch > abandoned or (message.kind is Kind.STATE and message.epoch == abandoned)

    def catch_up(self, message: Message) -> bool:
        """Return whether this message is the first one after an abandoned epoch, none of which follows it."""
        if not self.round.is_late or message.epoch <= self.round.abandoned:
            return False
        self.round.is_late = False
        return True

    def allow(self, allowance: Allowance) -> None:
        """Let the device send this much, and what may still arrive of an abandoned round with an earlier plan."""
        self.allowance = allowance = allowance.or_more(self.allowance) if self.round.is_late else allowance
        if allowance.is_sized:
            limits = {
                Kind.ACTIVATION: allowance.activation_bytes,
                Kind.MODEL: allowance.model_bytes + SMALL_BODY_BYTES,
                Kind.STATE: allowance.state_bytes + SMALL_BODY_BYTES,
                Kind.TRACE: allowance.trace_bytes,
                Kind.PROBE: FRAME_BYTES,
            }
            self.channel.limit(body_limit(limits))

    @property
    def owes_acknowledgements(self) -> bool:
        """Whether more is kept for the device than its plan needs: N gradients, and what a few rounds begin with."""
        return self.channel.unacknowledged > self.allowance.micro_batches + _MOST_UNACKNOWLEDGED

    # --- the round

    def wants_gradient_of(self, epoch: int) -> bool:
        """Whether the device still takes part in this epoch."""
        return not self.is_over and epoch > self.round.abandoned

    def reply(self, gradient: Message) -> None:
        """Send a gradient, or its first chunk."""
        self.round.outstanding -= 1
        self.channel.post(gradient)

    def note_batch(self, message: Message) -> None:
        """The batch that this micro-batch completes has been trained."""
        self.round.last_batch = (message.epoch, message.iteration)
        self.round.trained += message.batch_samples

    def expect_state(self) -> None:
        """Expect the optimiser state of layers that the device hands over."""
        self.round.expects_state = True

    def expect_no_state(self) -> None:
        """The state has arrived, or is not waited for any longer."""
        self.round.expects_state = False

    def send_model(self, message: Message, split_point: int) -> None:
        """Send the device its part of the global model of an epoch."""
        self.channel.post(message)
        self.has_model_of, self.installed = message.epoch, (message.epoch, split_point)

    def evaluate(self, message: Message) -> asyncio.Future[EvaluationAnswer]:
        """Send the device a model to evaluate; return its answer to come."""
        self.channel.post(message)
        return self.evaluation.expect(message.epoch)

    def forget_model_of_another_part(self, split_point: int) -> None:
        """A device that builds another part has nothing of the model: the next one is sent to it whole."""
        if self.installed is not None and self.installed[1] != split_point:
            self.installed = None

    def compute(self, work: asyncio.Future[Any]) -> None:
        """Record work on a shared model, which is never cancelled."""
        self._computing = work

    async def computed(self) -> BaseException | None:
        """Return when the work on a shared model is done: the error that ended it, if any."""
        if self._computing is None:
            return None
        await asyncio.gather(self._computing, return_exceptions=True)
        return self._computing.exception() if not self._computing.cancelled() else None

    # --- traces and links

    @property
    def requested_trace(self) -> int | None:
        """The epoch whose trace is to arrive next."""
        return self._traces[0] if self._traces else None

    def request_trace(self, epoch: int) -> None:
        """Tell the device that a round is over; it answers with its trace."""
        self._traces.append(epoch)
        self.channel.post(Message(Kind.REPORT, epoch))

    def check_trace(self, trace: EpochTrace, message: Message) -> None:
        """Raise if a trace was not requested."""
        if self.requested_trace is None or not trace.epoch == message.epoch == self.requested_trace:
            raise ProtocolError(f"{message} carries the trace of epoch {trace.epoch}, which was not requested.")

    def trace_arrived(self) -> None:
        """The requested trace has arrived."""
        self._traces.popleft()

    def check_end(self, message: Message, end: EndOfEpoch) -> None:
        """Raise if END_EPOCH does not fit the device's introduction, or comes before a trace that was requested."""
        if end.samples != self.round_samples:
            raise ProtocolError(f"{message} reports {end.samples} samples, but the device has {self.round_samples}.")
        if self.requested_trace is not None:
            raise ProtocolError(f"{message} arrived before the trace of epoch {self.requested_trace}.")

    def measure(self, end: EndOfEpoch, epoch: int) -> MeasuredLink:
        """Return the traffic of the link in an epoch, measured with the times of both sides."""
        channel = self.channel
        up = estimate_traffic(end.ready, channel.received_frames.times)
        down = estimate_traffic(channel.sent_frames.times, end.came)
        if up.is_enough:
            self._uplink = up
        channel.meter.take(epoch, down)
        self.measured = MeasuredLink(up if up.is_enough else end.uplink, channel.meter.read(epoch))
        return self.measured

    @contextmanager
    def probing(self, most: int) -> Iterator[None]:
        """Keep PROBE messages of the device and their times of arrival, for `next_probe`: at most this many unread."""
        self._probes = asyncio.Queue(most)
        try:
            yield
        finally:
            self._probes = None

    def take_probe(self, message: Message) -> None:
        """Keep a message that measures the link; one that comes late is of no use."""
        if self._probes is None or self._probes.full():
            self.channel.count_useless(message)
        else:
            self._probes.put_nowait((message, asyncio.get_running_loop().time()))

    async def next_probe(self) -> tuple[Message, float]:
        """Return the next message that measures the link, and when it arrived; raise LinkError if there is none."""
        assert self._probes is not None
        probe = None if self.is_over else await self._probes.get()
        if probe is None:
            raise LinkError(f"the session of '{self.device}' ended while its link was measured")
        return probe

    # --- waiting

    @property
    def is_awaited(self) -> bool:
        """Whether it is the device that has to act next: none of its messages waits or is being computed."""
        return self.inbox.empty() and (self._computing is None or self._computing.done())

    def awaited_s(self, now: float) -> float:
        """Return for how long the server has waited for a message of the device; 0 if the device owes none.

        It owes none while it is being sent something, or waits for an answer itself.
        """
        channel = self.channel
        has_to = self.is_welcome and (self.phase is Phase.TRAINING or channel.unacknowledged > 0)
        waits = not self.inbox.empty() or self.round.outstanding > 0 or channel.has_something_to_send
        return now - max(channel.heard_at, channel.sent_at) if has_to and not waits and channel.is_attached else 0.0


def fault(reason: Exception | str, *, again: bool = False, stops: bool = False) -> Message:
    """Return the message that ends a connection; `again` if the device may join again, `stops` if the server stops."""
    about: dict[str, Any] = {"reason": str(reason), "again": again}
    if isinstance(reason, VersionError):
        about["pipar"] = package_version()
    if isinstance(reason, NoBudgetLeftError):
        about["noise_multiplier"] = reason.multiplier
    if isinstance(reason, OtherNetworkError):
        about["other_network"] = True
    return Message(Kind.FAULT, body=json_body({**about, "stops": True} if stops else about))
