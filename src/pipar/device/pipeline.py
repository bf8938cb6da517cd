"""What runs in parallel to the compute lane: batches are loaded ahead, activations leave, gradients arrive.

The time that the compute lane waits for any of them is recorded as a span.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

from pipar.device.intake import Intake
from pipar.device.interfaces import DeviceLanes, Samples
from pipar.device.model import DeviceSideModel
from pipar.errors import ProtocolError
from pipar.execution.lanes import Lanes
from pipar.execution.schedule import StepCount, count_steps, cut_batch, cut_epoch
from pipar.execution.spans import COMPUTE, Recorder
from pipar.execution.work import Work
from pipar.transport.channel import Channel
from pipar.wire.messages import Kind, Message, Reference, chunk_count, norm_body, read_norm

T = TypeVar("T")
_Place = tuple[int, int, int]  # epoch, iteration, micro-batch


class Batch(NamedTuple):
    """The samples of one iteration: their positions, and the pass over all samples that they belong to."""

    pass_number: int  # counted over the whole training
    positions: Any


class BatchLoader:
    """Loads the batches of a device, off its compute lane."""

    def __init__(self, samples: Samples, model: DeviceSideModel, lanes: DeviceLanes) -> None:
        self._samples = samples
        self._model = model
        self._lanes = lanes

    def of_epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of an epoch, one for each iteration; each pass over the samples has its own order."""
        orders = self._model.orders
        for number in orders.passes(epoch):
            order, start = self._samples.order(number), 0
            for size in cut_epoch(len(order), orders.batch_size, batch_statistics=orders.batch_statistics):
                yield Batch(number, order[start : start + size])
                start += size

    def step(self, epoch: int, iteration: int) -> StepCount:
        """Return which step of the whole training an iteration is."""
        orders = self._model.orders
        return count_steps(
            epoch,
            iteration,
            epochs=orders.epochs,
            samples=len(self._samples),
            batch_size=orders.batch_size,
            batch_statistics=orders.batch_statistics,
            passes=orders.local_epochs,
        )

    def load(self, epoch: int, iteration: int, batch: Batch) -> asyncio.Task[list[Any]]:
        """Start to load a batch; the task returns its micro-batches."""
        return asyncio.get_running_loop().create_task(self._load(epoch, iteration, batch))

    async def _load(self, epoch: int, iteration: int, batch: Batch) -> list[Any]:
        orders, samples, positions = self._model.orders, self._samples, batch.positions
        sizes = cut_batch(len(positions), orders.plan.micro_batches, batch_statistics=orders.batch_statistics)
        load = Work("load", epoch, iteration, samples=len(positions))
        pieces: list[Any] = await self._lanes.io.run(
            (load, partial(samples.micro_batches, batch.pass_number, positions, sizes))
        )
        if samples.noised_bytes:
            # Noise takes many times as long as loading. On the io lane, activations and gradients of this batch would
            # wait for the noise of the next one.
            noise = Work("noise", epoch, iteration, size_bytes=len(positions) * samples.noised_bytes)
            pieces = await self._lanes.noise.run(
                (noise, partial(samples.with_noise, batch.pass_number, positions, pieces))
            )
        return pieces

    async def references(self, place: tuple[int, int], kept: int, positions: Any) -> list[Reference]:
        """Return the micro-batches of a batch as references to the activations of an earlier epoch's first pass."""
        orders = self._model.orders
        first = orders.passes(kept)[0]
        sizes = cut_batch(len(positions), orders.plan.micro_batches, batch_statistics=orders.batch_statistics)
        load = Work("load", *place)  # no sample is read
        found: list[Reference] = await self._lanes.io.run(
            (load, partial(self._samples.references, first, positions, sizes))
        )
        return found


class MicroBatchExchange:
    """Sends the activations of micro-batches in the order of their forwards, and awaits their gradients."""

    def __init__(self, model: DeviceSideModel, channel: Channel, io: Lanes, intake: Intake) -> None:
        self.abandoned = 0  # epochs up to this one are over without this device
        self._intake = intake
        self._model = model
        self._channel = channel
        self._io = io
        self._uploads: asyncio.Queue[tuple[_Place, Any, Any]] = asyncio.Queue()
        self._gradients: dict[_Place, asyncio.Future[Any]] = {}
        self._norm: tuple[tuple[int, int], asyncio.Future[float]] | None = None  # of the server's gradient, and of what

    @property
    def is_idle(self) -> bool:
        """Whether no gradient is awaited."""
        return not self._gradients

    def send(self, place: _Place, activation: Any, piece: Any) -> None:
        """Send the activation and the labels of a micro-batch."""
        self._gradients[place] = asyncio.get_running_loop().create_future()
        self._uploads.put_nowait((place, activation, piece))

    def refer(self, place: _Place, reference: Reference) -> None:
        """Send the numbers of activations that the server has kept in place of a micro-batch."""
        self._gradients[place] = asyncio.get_running_loop().create_future()
        samples, batch_samples = reference.samples, reference.batch_samples
        self._channel.post(Message(Kind.ACTIVATION, *place, samples, batch_samples, body=reference.body))

    def gradient(self, place: _Place) -> asyncio.Future[Any]:
        """Return the gradient of a micro-batch, maybe still to come; it is kept until `release`."""
        return self._gradients[place]

    def expect_norm(self, place: tuple[int, int]) -> None:
        """Expect the norm of the server's gradient in an iteration of an epoch; it may arrive before it is needed."""
        self._norm = (place, asyncio.get_running_loop().create_future())

    def exchange_norms(self, place: tuple[int, int], squared: float) -> asyncio.Future[float]:
        """Send the squared norm of this side's gradient; return the server's, maybe still to come."""
        assert self._norm is not None
        self._channel.post(Message(Kind.NORM, *place, body=norm_body(squared)))
        return self._norm[1]

    def receive_norm(self, message: Message) -> None:
        """Hand the norm of the server's gradient to the step that waits for it."""
        if message.epoch <= self.abandoned:
            return
        place = (message.epoch, message.iteration)
        if self._norm is None or self._norm[0] != place or self._norm[1].done():
            raise ProtocolError(f"The server sent {message}, but no step waits for it.")
        self._norm[1].set_result(read_norm(message))

    def release(self, place: _Place) -> None:
        """Free the gradient of a micro-batch."""
        del self._gradients[place]

    def clear(self) -> None:
        """Forget all micro-batches of an abandoned epoch."""
        while not self._uploads.empty():
            self._uploads.get_nowait()
        self._gradients.clear()
        self._norm = None

    async def upload(self) -> None:
        """Encode and send activations until cancelled.

        A large one leaves with its first chunk, and the others follow as they are encoded.
        """
        while True:
            place, activation, piece = await self._uploads.get()
            part, encoding = self._model.part, self._model.orders.plan.up
            first, *others = (
                Work("encode", *place, size_bytes=size, encoding=encoding)
                for size in part.chunk_bytes(activation, encoding)
            )
            body = await self._io.run((first, partial(part.encode, activation, piece, encoding, place)))
            message = Message(Kind.ACTIVATION, *place, piece.samples, piece.batch_samples, body=body)
            self._intake.note(message)
            self._channel.post(message)
            for chunk in others:
                self._channel.add_chunk(body.chunks, await self._io.run((chunk, body.chunks.encode_next)))

    async def receive(self, message: Message) -> None:
        """Decode a gradient and hand it to the backward that waits for it."""
        place = (message.epoch, message.iteration, message.micro_batch)
        body, encoding = message.body, self._model.orders.plan.down
        if message.epoch <= self.abandoned:
            return
        if not self._model.orders.trains_part:
            _check_empty(message)
            self._take(place, message, None)
            return
        decode = Work("decode", *place, size_bytes=body.size_bytes, encoding=encoding, chunks=chunk_count(body))
        gradient = await self._io.run((decode, partial(self._model.part.decode, message, encoding)))
        if message.epoch <= self.abandoned:
            return
        self._take(place, message, gradient)

    def _take(self, place: _Place, message: Message, gradient: Any) -> None:
        waiting = self._gradients.get(place)
        if waiting is None or waiting.done():
            raise ProtocolError(f"The server sent {message}, but no micro-batch waits for it.")
        waiting.set_result(gradient)


def _check_empty(message: Message) -> None:
    """Raise if an answer to a device without anything to train has a gradient: it only grants the next micro-batch."""
    if message.body.size_bytes:
        raise ProtocolError(f"The server sent {message} with a gradient, but this device has nothing to train.")


class WaitRecorder:
    """Waits for what the compute lane needs next, and records the time as a span."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._loop = asyncio.get_running_loop()

    async def for_result(
        self, kind: str, thing: asyncio.Future[T], epoch: int, iteration: int, micro_batch: int = 0
    ) -> T:
        """Return a result; there is no span if it is ready."""
        if thing.done():
            return thing.result()
        start = self._loop.time()
        result = await thing
        self._recorder.waited(COMPUTE, kind, epoch, iteration, micro_batch, start, self._loop.time())
        return result

    async def for_command(self, commands: asyncio.Queue[Message]) -> Message:
        """Return the server's next command."""
        start = self._loop.time()
        command = await commands.get()
        kind = "model" if command.kind is Kind.MODEL else "round"
        self._recorder.waited(COMPUTE, kind, command.epoch, 0, 0, start, self._loop.time())
        return command
