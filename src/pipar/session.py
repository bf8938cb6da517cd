"""What the server keeps of one connected device, and the rules that what it says has to keep."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass
from typing import Any

from pipar.errors import ConfigError, ProtocolError, TrainingError
from pipar.link.channel import Channel
from pipar.link.shaping import Traffic
from pipar.planner.profile import NetworkSizes, Profile, check_network
from pipar.protocol.messages import Kind, Message, json_body, read_json
from pipar.trace import Recorder


class Session:
    """One device's connection and what the server knows of it."""

    def __init__(self, device: str, channel: Channel, recorder: Recorder, profile: Profile | None = None) -> None:
        self.device = device
        self.channel = channel
        self.recorder = recorder
        self.profile = profile  # that the device has brought with it
        self.inbox: asyncio.Queue[Message | Exception] = asyncio.Queue()
        self.awaits_momentum = False  # of layers that the device has handed over
        self.outstanding = 0  # micro-batches that came and are not answered yet
        self.asked_for = 0  # the last epoch whose trace was asked for
        self.last_trace = 0  # the last epoch whose trace came in
        self.stopped_after: int | None = None

    async def next(self) -> Message:
        message = await self.inbox.get()
        if isinstance(message, Exception):
            raise TrainingError(f"{self.device} was lost: {message}") from message
        return message

    def refuse(self, reason: Exception) -> None:
        """Tell the device why its session is over."""
        self.channel.post(Message(Kind.FAULT, body=json_body({"reason": str(reason)})))


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


def read_end(message: Message, epoch: int) -> End:
    """Return what 'stop epoch' says, or how it breaks the protocol."""
    expect(message, Kind.END_EPOCH, epoch)
    content = read_json(message)
    samples, loss = content.get("samples"), content.get("loss_sum")
    if type(samples) is not int or samples < 1 or not (loss is None or type(loss) is float):
        raise ProtocolError(f"{message} carries {samples!r} samples and the loss {loss!r}.")
    sent, seconds = content.get("up_bytes", 0), content.get("up_s", 0.0)
    if type(sent) is not int or not 0 <= sent < _MOST_BYTES or not _is_time(seconds):
        raise ProtocolError(f"{message} carries {sent!r} bytes sent in {seconds!r} s.")
    return End(samples, loss, Traffic(sent, seconds))


_MOST_BYTES = 1 << 62


def _is_time(seconds: object) -> bool:
    return type(seconds) in (int, float) and isinstance(seconds, int | float) and 0 <= seconds < math.inf
