"""What the server keeps of one connected device, and the rules that what it says has to keep."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipar.errors import ConfigError, ProtocolError
from pipar.execution.spans import Recorder
from pipar.execution.stages import Place
from pipar.planner.replanner import MeasuredLink
from pipar.privacy.budget import BudgetUse
from pipar.profiling.profile import NetworkSizes, Profile, check_network
from pipar.transport.channel import Channel
from pipar.transport.rate_estimate import FrameTimes, estimate_traffic, read_frame_times, read_traffic
from pipar.transport.shaping import Traffic
from pipar.wire.messages import EMPTY, Body, Chunks, Kind, Message, Payload, json_body, read_json

#: Squared errors and squared values of what was coded lossily, summed; None if all was exact.
SquaredError = tuple[float, float] | None


def added_errors(errors: Iterable[SquaredError]) -> SquaredError:
    """Return the sums of those that there are."""
    known = [error for error in errors if error is not None]
    return (sum(lost for lost, _ in known), sum(values for _, values in known)) if known else None


@dataclass(frozen=True)
class Introduction:
    """What a device says of itself when it joins; its name comes from its credential, if it has one."""

    name: str
    samples: int
    profile: Profile | None = None
    spent: BudgetUse = field(default_factory=BudgetUse)  # by updates that it has sent, maybe to another server


class Inbox(asyncio.Queue[Message | Exception]):
    """What a device has said and nobody has asked for yet, how much that is, and why nothing more will come."""

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


class Session:
    """One device's part in the training, from its hello to its end; connections may come and go meanwhile."""

    def __init__(self, who: Introduction, number: int, channel: Channel, recorder: Recorder) -> None:
        self.device = who.name
        self.who = who
        self.number = number
        self.channel = channel
        self.recorder = recorder
        self.inbox = Inbox()
        self.is_welcome = False  # it has its orders
        self.hello_at = self.welcome_at = 0.0  # on the server's clock
        self.is_over = False
        self.verdict: Exception | None = None  # why the server ends it, whatever the device does meanwhile
        self.is_let_go = False  # in good order: the server stops
        self.has_model_of: int | None = None  # the epoch whose global model was sent to it last
        self.installed: tuple[int, int] | None = None  # epoch and split point of the last model that it was sent
        self.awaits_momentum = False  # of layers that the device has handed over
        self.allowed = 0  # micro-batches that may be outstanding: the plan's N
        self.outstanding = 0  # micro-batches that came and are not answered yet
        self.model_bytes = 0  # of the largest part that it may bring back
        self.activation_bytes = 0  # that a micro-batch may have
        self.abandoned = 0  # what still comes of epochs up to this one counts no more
        self.is_late = False  # something of them may still come
        self.asked_for: deque[int] = deque()  # epochs whose traces are to come
        self.round = 0  # the epoch that it was last told to train
        self.is_training = False  # and has not brought back its part of
        self.served = (0, 0)  # epoch and iteration of its last whole batch
        self.uplink = Traffic()  # of a real link, as last measured
        self.stopped = False
        self.computing: asyncio.Future[Any] | None = None  # on a model that it shares with others

    @property
    def is_awaited(self) -> bool:
        """Whether it is the device that has to say something: nothing of it waits, or is being computed."""
        return self.inbox.empty() and (self.computing is None or self.computing.done())

    def awaited_s(self, now: float) -> float:
        """Return for how long it is the device that has to say something, and has not; 0 if it does not have to.

        It does not while it is being sent something, or waits for an answer itself.
        """
        channel = self.channel
        has_to = self.is_welcome and (self.is_training or channel.unacknowledged > 0)
        waits = not self.inbox.empty() or self.outstanding > 0 or channel.has_something_to_send
        return now - max(channel.heard_at, channel.sent_at) if has_to and not waits and channel.is_attached else 0.0

    def take(self, message: Message) -> None:
        """Keep a message until it is asked for, or raise if the device has sent more than a round has room for.

        That is N micro-batches, and one of each other kind: END_EPOCH and MODEL, and STATE before the round.
        """
        waiting = self.inbox.kinds[message.kind]
        if waiting >= (self.allowed if message.kind is Kind.ACTIVATION else 1):
            raise ProtocolError(f"{message} came with {waiting} of its kind waiting, which is all there can be.")
        self.inbox.put_nowait(message)

    async def next(self) -> Message:
        message = await self.inbox.get()
        if isinstance(message, Exception):
            self.inbox.put_nowait(message)  # whoever asks again is told again
            raise message
        return message

    def count_outstanding(self, message: Message) -> None:
        """Count a micro-batch that has come, or raise if it is one too many."""
        self.outstanding += 1
        if self.outstanding > self.allowed:
            raise ProtocolError(
                f"{message} came with {self.allowed} micro-batches outstanding, which is all it may have."
            )
        if self.owes_acknowledgements:
            raise ProtocolError(
                f"{message} came with {self.channel.unacknowledged} messages unacknowledged, which is more than there "
                "can be: a device has the answers of a batch before it sends the next one."
            )

    @property
    def owes_acknowledgements(self) -> bool:
        """Whether more is kept for the device than its plan needs: N gradients, and what a few rounds begin with."""
        return self.channel.unacknowledged > self.allowed + _MOST_UNACKNOWLEDGED

    @property
    def held_bytes(self) -> int:
        """How many bytes are kept for the device: what it may not have, and what it has sent and nobody has read."""
        return self.channel.held_bytes + self.inbox.size_bytes

    def begin(self, epoch: int) -> None:
        """Let the device train an epoch. How fast a real uplink is shows on this side, and the device is told so."""
        self.round, self.is_training = epoch, True
        known = self.uplink
        told = json_body({"up_bytes": known.size_bytes, "up_s": known.seconds}) if known.is_enough else EMPTY
        self.channel.post(Message(Kind.ROUND, epoch, body=told))

    def measure(self, end: End, epoch: int) -> MeasuredLink:
        """Return what the link has carried in an epoch, by what both sides know of it."""
        channel = self.channel
        up, down = (
            estimate_traffic(end.ready, channel.received_frames.times),
            estimate_traffic(channel.sent_frames.times, end.came),
        )
        if up.is_enough:
            self.uplink = up
        channel.meter.take(epoch, down)
        return MeasuredLink(up if up.is_enough else end.uplink, channel.meter.read(epoch))

    def ask_for_trace(self, epoch: int) -> None:
        """Tell the device that a round is over; it answers with its trace."""
        self.asked_for.append(epoch)
        self.channel.post(Message(Kind.REPORT, epoch))

    def abandon(self, epoch: int) -> None:
        """Drop what the device does of an epoch: the round has ended without it."""
        self.abandoned, self.is_late, self.is_training = epoch, True, False
        self.outstanding = 0
        waiting = [self.inbox.get_nowait() for _ in range(self.inbox.qsize())]
        for one in waiting:
            if isinstance(one, Exception) or one.epoch > epoch:
                self.inbox.put_nowait(one)
        self.recorder.take(epoch)
        self.channel.take_counts(epoch)
        self.channel.post(Message(Kind.ABANDON, epoch))

    def refuse(self, reason: Exception | str, *, again: bool = False) -> None:
        """Tell the device why its session is over, and whether it may try `again`."""
        self.channel.post(fault(reason, again=again, stops=self.is_let_go))


def fault(reason: Exception | str, *, again: bool = False, stops: bool = False) -> Message:
    """Return the message that ends a connection; `again` if joining anew may help, `stops` if the server does."""
    about = {"reason": str(reason), "again": again}
    return Message(Kind.FAULT, body=json_body({**about, "stops": True} if stops else about))


class Answer:
    """The gradient of one micro-batch on its way to the device, chunk by chunk as it is encoded."""

    def __init__(self, session: Session, to: Message) -> None:
        self._session = session
        self._place = (to.epoch, to.iteration, to.micro_batch, to.samples, to.batch_samples)
        self._body: Body | None = None
        self._is_wanted = True

    @property
    def place(self) -> Place:
        """Epoch, iteration and number of the micro-batch."""
        return self._place[:3]

    def begin(self, body: Body) -> None:
        """Send the first chunk, or all if there is one; to nobody who has been given up in the meantime."""
        session = self._session
        self._is_wanted = not session.is_over and self._place[0] > session.abandoned
        if self._is_wanted:
            session.outstanding -= 1
            session.channel.post(Message(Kind.GRADIENT, *self._place, body=body))

    def encode_next(self, before: Body | Payload) -> Payload:
        """Return the chunk behind the one before."""
        if isinstance(before, Body):
            self._body = before
        return self._chunks.encode_next()

    def ended_behind(self, steps: int) -> Callable[[int, Any], None]:
        """Return what sends each chunk when it is encoded: the first of them is the last of so many steps."""

        def ended(place: int, value: Any) -> None:
            if place == steps - 1:
                self.begin(value)
            elif place >= steps and self._is_wanted:
                self._session.channel.add_chunk(self._chunks, value)

        return ended

    @property
    def _chunks(self) -> Chunks:
        assert self._body is not None
        assert self._body.chunks is not None
        return self._body.chunks


class Pieces:
    """Sees to it that a device's micro-batches come in order and add up to their batches."""

    def __init__(self, epoch: int, micro_batches: int) -> None:
        self.samples = 0  # of the epoch
        self._epoch = epoch
        self._micro_batches = micro_batches
        self._iteration, self._number, self._trained, self._batch = 1, 1, 0, 0

    @property
    def whole(self) -> bool:
        """True between two batches."""
        return self._trained == 0

    def take(self, message: Message) -> None:
        """Count one micro-batch, or raise if it is not the one that comes next."""
        if self._number == 1:
            self._batch = message.batch_samples
        place = (message.epoch, message.iteration, message.micro_batch, message.batch_samples)
        trained = self._trained + message.samples
        if (
            place != (self._epoch, self._iteration, self._number, self._batch)
            or self._number > self._micro_batches
            or not self._trained < trained <= self._batch
        ):
            raise ProtocolError(
                f"{message} with {message.samples} of {message.batch_samples} samples came where micro-batch "
                f"{self._number} of iteration {self._iteration} of epoch {self._epoch} belongs, behind "
                f"{self._trained} of {self._batch} samples; at most {self._micro_batches} make a batch."
            )
        self.samples += message.samples
        self._trained, self._number = trained, self._number + 1
        if trained == self._batch:
            self._iteration, self._number, self._trained = self._iteration + 1, 1, 0


def read_hello(message: Message, network: Profile | None, peer: str | None) -> Introduction:
    """Return who a device is; `peer` is the name in its credential, and what it says may not differ from that."""
    content = read_json(message)
    name, samples = content.get("name"), content.get("samples")
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
        raise ProtocolError(f"A device said {str(name)[:80]!r} where its name belongs.")
    if peer is not None and name != peer:
        raise ProtocolError(f"A device with the credential of '{peer}' says that it is '{name}'.")
    if type(samples) is not int or not 1 <= samples <= _MOST_SAMPLES:
        raise ProtocolError(f"'{name}' says that it has {samples!r} samples; there may be 1 to {_MOST_SAMPLES}.")
    return Introduction(name, samples, read_profile(content.get("profile"), network), _read_spent(name, content))


def _read_spent(name: str, content: Mapping[str, Any]) -> BudgetUse:
    """Return what a device says that it has sent: nothing, or as many updates as have cost something."""
    releases, spent = content.get("releases", 0), content.get("spent", 0.0)
    if type(releases) is not int or type(spent) is not float or releases < 0 or not 0 <= spent < math.inf:
        raise ProtocolError(f"'{name}' says that it has sent {releases!r} updates, which have cost {spent!r}.")
    return BudgetUse(releases, spent)


def read_profile(said: Any, network: Profile | None) -> Profile | None:
    """Return the profile that a device brings with it, if it does; it has to be of the network that is trained."""
    if said is None:
        return None
    try:
        profile = Profile.from_json(json.dumps(said))
    except (ConfigError, ArithmeticError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ProtocolError(f"The device's profile cannot be used: {error}") from None
    if network is not None:
        try:
            check_network(profile, NetworkSizes.of(network), "that the device brings")
        except ConfigError as error:
            raise ProtocolError(str(error)) from None
    return profile


def expect(message: Message, kind: Kind, epoch: int) -> None:
    """Raise if this is not the message that belongs here."""
    if message.kind is not kind or message.epoch != epoch:
        raise ProtocolError(f"{message} came where {kind.name} of epoch {epoch} belongs.")


@dataclass(frozen=True)
class End:
    """What a device says at the end of an epoch."""

    samples: int  # that it trained on
    loss_sum: float | None  # over them, if it has computed it
    uplink: Traffic  # as it measured it
    error: SquaredError = None  # of its activations
    ready: FrameTimes = field(default_factory=dict)  # of the last frames up
    came: FrameTimes = field(default_factory=dict)  # of the last frames down


def read_end(message: Message, epoch: int) -> End:
    """Return what 'stop epoch' says, or how it breaks the protocol."""
    expect(message, Kind.END_EPOCH, epoch)
    content = read_json(message)
    samples, loss = content.get("samples"), content.get("loss_sum")
    if type(samples) is not int or samples < 1 or not (loss is None or type(loss) is float):
        raise ProtocolError(f"{message} carries {samples!r} samples and the loss {loss!r}.")
    uplink = read_traffic(content)
    if uplink is None:
        raise ProtocolError(f"{message} carries {content.get('up_bytes')!r} bytes sent in {content.get('up_s')!r} s.")
    ready, came = (read_frame_times(content.get(key, [])) for key in ("ready", "came"))
    if ready is None or came is None:
        raise ProtocolError(f"{message} carries something else where the moments of frames belong.")
    return End(samples, loss, uplink, _read_error(message, content.get("error")), ready, came)


def _read_error(message: Message, said: Any) -> SquaredError:
    if said is None:
        return None
    are_sums = isinstance(said, list) and all(type(one) is float and math.isfinite(one) and one >= 0 for one in said)
    if not are_sums or len(said) != 2:
        raise ProtocolError(f"{message} carries {str(said)[:80]!r} where the error of a lossy encoding belongs.")
    return said[0], said[1]


#: WELCOME, PLAN, STATE, MODEL, ROUND, ABANDON and REPORT of as many rounds as a device that is late may miss.
_MOST_UNACKNOWLEDGED = 20
_LONGEST_NAME = 64
_MOST_SAMPLES = 100_000_000
