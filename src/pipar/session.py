"""What the server keeps of one connected device, and the rules its micro-batches have to keep."""

from __future__ import annotations

import asyncio

from pipar.errors import ProtocolError, TrainingError
from pipar.link.channel import Channel
from pipar.protocol.messages import Kind, Message, json_body
from pipar.trace import Recorder


class Session:
    """One device's connection and what the server knows of it."""

    def __init__(self, device: str, channel: Channel, recorder: Recorder) -> None:
        self.device = device
        self.channel = channel
        self.recorder = recorder
        self.inbox: asyncio.Queue[Message | Exception] = asyncio.Queue()
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
