"""The device's program: Algorithm 1 of the paper.

It trains layers 1..P on its own data, sends activations up and takes gradients back, N micro-batches at a time.
What it computes with, what it talks over and what time is are given to it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pipar.errors import (
    LinkError,
    PrivacyError,
    ProtocolError,
    ServerStopsError,
    SessionOverError,
    TrainingError,
)
from pipar.events import Observer, Progress, Trained, Welcomed, ignore
from pipar.execution.clock import clock_machine
from pipar.execution.lanes import Lanes
from pipar.execution.schedule import cut_batch, cut_epoch, device_order
from pipar.execution.spans import COMPUTE, Clock, Recorder, pack_trace
from pipar.execution.stages import Place, Work
from pipar.privacy.budget import BudgetUse, PrivacyGuard
from pipar.profiling.profile import Profile
from pipar.transport.channel import Channel
from pipar.transport.rate_estimate import read_traffic
from pipar.wire.messages import EMPTY, Body, Kind, Message, chunk_count, json_body, read_json
from pipar.wire.orders import Orders

if TYPE_CHECKING:  # it brings numpy
    from pipar.privacy.mechanisms import NoiseSource

T = TypeVar("T")


class DevicePart(Protocol):
    """M^c_k, the device-side model."""

    last_loss: float | None

    def forward(self, micro_batch: int, piece: Any) -> Any: ...
    def backward(self, micro_batch: int, gradient: Any) -> None: ...
    def step(self) -> None: ...
    def discard(self) -> None: ...
    def take_loss(self) -> float | None: ...
    def take_encoding_error(self) -> tuple[float, float] | None: ...  # squared errors and values; None if exact
    def chunk_bytes(self, activation: Any, encoding: str) -> Sequence[int]: ...  # before encoding, chunk by chunk
    def encode(self, activation: Any, piece: Any, encoding: str, place: Place) -> Body: ...  # its first chunk, at least
    def decode(self, message: Message, encoding: str) -> Any: ...
    def protect(self, noise: NoiseSource, *, clip: float, multiplier: float) -> None: ...  # the update of this round
    def pack(self, *, changes: bool = False) -> Body: ...  # all of it, or what has changed since the last one came
    def unpack_and_install(self, body: Body, *, keep_momentum: bool) -> None: ...
    def carry_momentum_from(self, before: Any) -> Body: ...
    def receive_momentum(self, body: Body) -> None: ...


class Samples(Protocol):
    """D^k, the device's data: how many there are, their order in an epoch, and batches cut into micro-batches."""

    def __len__(self) -> int: ...
    def order(self, epoch: int) -> Any: ...
    def micro_batches(self, epoch: int, positions: Any, sizes: list[int]) -> list[Any]: ...
    def with_noise(self, epoch: int, positions: Any, pieces: list[Any]) -> list[Any]: ...  # whatever their sizes
    @property
    def noised_bytes(self) -> int: ...  # of one sample, to which noise is added when it is loaded


class Device:
    """One device, from joining to 'stop training'."""

    def __init__(
        self,
        name: str,
        samples: Samples,
        build_part: Callable[[Orders], DevicePart],
        *,
        channel: Channel,
        compute: Lanes,
        io: Lanes,
        noise: Lanes | None = None,
        recorder: Recorder,
        profile: Profile | None = None,
        guard: PrivacyGuard | None = None,
        observe: Observer = ignore,
    ) -> None:
        self._guard = guard or PrivacyGuard()
        self.name = name
        self._samples = samples
        self._build_part = build_part
        self._channel = channel
        self._compute = compute
        self._io = io
        self._noise = noise or io  # where inputs get theirs, if they get any
        self._recorder = recorder
        self._profile = profile
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._commands: asyncio.Queue[Message | None] = asyncio.Queue()
        self._uploads: asyncio.Queue[tuple[Work, Any, Any]] = asyncio.Queue()
        self._awaits_momentum = False
        self._training: asyncio.Task[None] | None = None  # the epoch under way
        self._abandoned = 0  # epochs up to this one are over without this device
        self._model_bytes: int | None = None  # of the part as it came last; None before there is one
        self._gradients: dict[tuple[int, int, int], asyncio.Future[Any]] = {}  # by epoch, iteration, micro-batch

    async def train(self) -> None:
        """Take part in the training until the server says stop."""
        hello_at = self._loop.time()
        self._channel.post(Message(Kind.HELLO, body=json_body(self._introduction())))
        welcome = await self._expect_welcome()
        self._clock = Clock(clock_machine(), hello_at, self._loop.time())
        if welcome.kind is Kind.STOP:
            return  # the training was over before this device came
        self._orders = Orders.read(welcome)
        self._channel.session = self._orders.session
        try:
            seen = BudgetUse(self._orders.releases, self._orders.spent)
            self._guard.accept(self._orders.noise_multiplier, seen, self._orders.budget)
            before = self._guard.used
            self._guard.accept_cut(self._orders.plan.split_point, self._orders.layers)
            self._part = self._build_part(self._orders)
            self._observe(Welcomed(self.name, str(self._orders.plan)))
            await self._take_orders()
        except (ProtocolError, PrivacyError) as error:
            self._channel.post(Message(Kind.FAULT, body=json_body({"reason": str(error)})))
            raise
        if self._guard.used == before:  # nothing was sent: the training may be over because nothing more may be
            self._guard.check(self._orders.noise_multiplier)

    async def _take_orders(self) -> None:
        """Do what the server says, until it says stop."""
        helpers = [self._loop.create_task(self._receive()), self._loop.create_task(self._upload())]
        try:
            await self._while_running(self._obey(), helpers)
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    def _introduction(self) -> dict[str, Any]:
        about: dict[str, Any] = {"name": self.name, "samples": len(self._samples)}
        if self._guard.used.releases:  # the server may have been another one then
            about |= {"releases": self._guard.used.releases, "spent": self._guard.used.mu_squared}
        return about if self._profile is None else {**about, "profile": json.loads(self._profile.to_json())}

    async def _obey(self) -> None:
        while (command := await self._next_command()).kind is not Kind.STOP:
            match command.kind:
                case Kind.MODEL:
                    await self._install(command)
                case Kind.PLAN:
                    await self._adopt(command)
                case Kind.STATE:
                    await self._take_momentum(command)
                case Kind.ROUND if self._model_bytes is None:
                    raise ProtocolError(f"The server sent {command} before there is a model to train.")
                case Kind.ROUND:
                    self._take_note(command)
                    self._guard.check(self._orders.noise_multiplier)
                    await self._take_part(command.epoch)
                case Kind.ABANDON:
                    await self._forget(command.epoch)
                case Kind.REPORT:
                    trace = pack_trace(replace(self._recorder.take(command.epoch), clock=self._clock))
                    body = Body.of(trace, encoding="trace")
                    self._channel.post(Message(Kind.TRACE, command.epoch, body=body))
                case _:
                    raise ProtocolError(f"The server sent {command}, which a device does not take.")
        self._channel.post(Message(Kind.STOP, command.epoch))  # goodbye: who goes without it may have lost its link

    def _take_note(self, message: Message) -> None:
        """Take what the server has seen of this device's uplink, if it tells."""
        uplink = read_traffic(read_json(message)) if message.body.size_bytes else None
        if uplink is not None:
            self._channel.meter.take(message.epoch - 1, uplink)

    async def _take_part(self, epoch: int) -> None:
        """Train an epoch and send the trained part, unless the server goes on without it."""
        if epoch > self._abandoned:
            self._training = self._loop.create_task(self._train_and_send(epoch))
            try:
                await asyncio.wait([self._training])
            finally:
                self._training.cancel()
                await asyncio.gather(self._training, return_exceptions=True)
            if not self._training.cancelled():
                self._training.result()

    async def _train_and_send(self, epoch: int) -> None:
        await self._train_epoch(epoch)
        await self._send_model(epoch)
        spent = (self._guard.epsilon, self._guard.target_epsilon) if self._orders.protects else ()
        self._observe(Trained(self.name, epoch, len(self._samples), *spent))

    def _abandon(self, epoch: int) -> None:
        """The round has ended without this device: what it does of it is in vain."""
        self._abandoned = epoch
        # An answer, if only for the number that it acknowledges: who is late every time would have nothing else to say.
        self._channel.post(Message(Kind.ABANDON, epoch))
        if self._training is not None:
            self._training.cancel()

    async def _forget(self, epoch: int) -> None:
        while not self._uploads.empty():
            self._uploads.get_nowait()
        self._gradients.clear()
        # On its lane: behind work on the same part that could not be stopped.
        await self._compute.run((Work("install", epoch), self._part.discard))
        self._recorder.take(epoch)

    async def _train_epoch(self, epoch: int) -> None:
        batches = self._cut(epoch)
        self._loading = self._load(epoch, 1, batches[0])
        try:
            for iteration, _ in enumerate(batches, start=1):
                pieces = await self._waiting_for("load", self._loading, epoch, iteration)
                await self._train_iteration(epoch, iteration, pieces, following=batches[iteration : iteration + 1])
                self._report_progress(epoch, iteration)
        finally:
            self._loading.cancel()  # of an epoch that is given up: its lanes may be closed before it is through
        assert not self._gradients

    async def _train_iteration(self, epoch: int, iteration: int, pieces: list[Any], *, following: list[Any]) -> None:
        orders, part = self._orders, self._part
        split_point, splits = orders.plan.split_point, orders.plan.split_point < orders.layers
        for stage in device_order(len(pieces), orders.plan.window):
            n, piece = stage.micro_batch, pieces[stage.micro_batch - 1]
            work = Work(stage.kind, epoch, iteration, n, 1, split_point, piece.samples)
            if stage.kind == "fc":
                activation = await self._compute.run((work, partial(part.forward, n, piece)))
                if splits:
                    self._gradients[epoch, iteration, n] = self._loop.create_future()
                    self._uploads.put_nowait((work, activation, piece))
                # The next batch is loaded beside this one's backwards: before, it would hold up the first uploads.
                if n == len(pieces) and following:
                    self._loading = self._load(epoch, iteration + 1, following[0])
            else:
                gradient = await self._gradient(epoch, iteration, n) if splits else None
                await self._compute.run((work, partial(part.backward, n, gradient)))
        step = Work("step", epoch, iteration, 0, 1, split_point)
        await self._compute.run((step, part.step))

    async def _send_model(self, epoch: int) -> None:
        noise = self._count_release(epoch)
        loss = self._part.take_loss()
        # A loss is computed of the data, too, and has no noise on it.
        counted: dict[str, Any] = {"samples": len(self._samples), "loss_sum": None if self._orders.protects else loss}
        lost = self._part.take_encoding_error()
        if lost is not None:
            counted["error"] = list(lost)
        uplink = self._channel.meter.read(epoch)
        measured = {"up_bytes": uplink.size_bytes, "up_s": uplink.seconds}
        self._channel.post(
            Message(Kind.END_EPOCH, epoch, body=json_body({**counted, **measured, **self._channel.frame_times()}))
        )
        await self._protect(epoch, noise)
        changes = self._orders.sends_changes(self._channel.rate_bps(epoch))
        assert self._model_bytes is not None
        pack = Work("pack", epoch, size_bytes=self._model_bytes, encoding="changes" if changes else "raw")
        body = await self._compute.run((pack, partial(self._part.pack, changes=changes)))
        self._channel.post(Message(Kind.MODEL, epoch, body=body))

    def _count_release(self, epoch: int) -> NoiseSource | None:
        """Count the update that is to be sent, and return the noise for it; None if it is sent without any.

        Before the end of the epoch is told, at which the server counts it: it never knows of more than the device, so
        what the device keeps within the budget is within it by both counts.
        """
        if not self._orders.protects:
            return None
        noise = self._guard.noise_source(self.name, epoch)
        self._guard.note(self._orders.noise_multiplier)
        return noise

    async def _protect(self, epoch: int, noise: NoiseSource | None) -> None:
        """Clip what the round has changed and add noise to it, if that is ordered: the last that is done to it."""
        if noise is not None:
            assert self._model_bytes is not None
            protect = Work("protect", epoch, size_bytes=self._model_bytes)
            how = {"clip": self._orders.clip, "multiplier": self._orders.noise_multiplier}
            await self._compute.run((protect, partial(self._part.protect, noise, **how)))

    async def _install(self, message: Message) -> None:
        body, keep = message.body, self._orders.keep_momentum
        form = "changes" if body.encoding == "changes" else "raw"
        if form == "raw":
            self._model_bytes = body.size_bytes
        if self._model_bytes is None:
            raise ProtocolError(f"The server sent {message} as changes of a model that it has not sent.")
        install = Work("install", message.epoch, size_bytes=self._model_bytes, encoding=form)
        await self._compute.run((install, partial(self._part.unpack_and_install, body, keep_momentum=keep)))

    async def _adopt(self, message: Message) -> None:
        """Go on by another plan; layers that leave this device take their momentum along if it is kept."""
        before, self._orders = self._orders, self._orders.changed_by(message)
        self._guard.accept_cut(self._orders.plan.split_point, self._orders.layers)
        if self._orders.plan.split_point == before.plan.split_point:
            return
        build = Work("install", message.epoch)
        part, leaving = await self._compute.run((build, partial(self._rebuild, self._orders)))
        self._part, self._model_bytes = part, None  # the model for it comes behind the plan
        if self._orders.keep_momentum:
            self._channel.post(Message(Kind.STATE, message.epoch, body=leaving))
            self._awaits_momentum = True

    def _rebuild(self, orders: Orders) -> tuple[DevicePart, Body]:
        part = self._build_part(orders)
        return part, part.carry_momentum_from(self._part) if orders.keep_momentum else EMPTY

    async def _take_momentum(self, message: Message) -> None:
        """Take the momentum of the layers that came from the server; their weights come with the model."""
        if not self._awaits_momentum:
            raise ProtocolError(f"The server sent {message}, but no layers have moved.")
        self._awaits_momentum = False
        install = Work("install", message.epoch, size_bytes=message.body.size_bytes)
        await self._compute.run((install, partial(self._part.receive_momentum, message.body)))

    def _cut(self, epoch: int) -> list[Any]:
        """Return the positions of each iteration's samples, in this epoch's order."""
        order, start, batches = self._samples.order(epoch), 0, []
        sizes = cut_epoch(len(order), self._orders.batch_size, batch_statistics=self._orders.batch_statistics)
        for size in sizes:
            batches.append(order[start : start + size])
            start += size
        return batches

    def _load(self, epoch: int, iteration: int, positions: Any) -> asyncio.Task[list[Any]]:
        return self._loop.create_task(self._loaded(epoch, iteration, positions))

    async def _loaded(self, epoch: int, iteration: int, positions: Any) -> list[Any]:
        """Return a batch, cut and with its noise.

        Noise takes many times as long as loading, so it has a lane of its own: on the io lane what this batch sends and
        gets would wait for the next one's.
        """
        orders, samples = self._orders, self._samples
        sizes = cut_batch(len(positions), orders.plan.micro_batches, batch_statistics=orders.batch_statistics)
        load = Work("load", epoch, iteration, samples=len(positions))
        pieces: list[Any] = await self._io.run((load, partial(samples.micro_batches, epoch, positions, sizes)))
        if samples.noised_bytes:
            noise = Work("noise", epoch, iteration, size_bytes=len(positions) * samples.noised_bytes)
            pieces = await self._noise.run((noise, partial(samples.with_noise, epoch, positions, pieces)))
        return pieces

    async def _upload(self) -> None:
        """Encode and send activations in the order of their forwards, off the compute lane.

        A large one leaves with its first chunk, and the others follow as they are encoded.
        """
        while True:
            work, activation, piece = await self._uploads.get()
            encoding = self._orders.plan.up
            place = (work.epoch, work.iteration, work.micro_batch)
            first, *others = (
                Work("encode", *place, size_bytes=size, encoding=encoding)
                for size in self._part.chunk_bytes(activation, encoding)
            )
            body = await self._io.run((first, partial(self._part.encode, activation, piece, encoding, place)))
            counts = (*place, piece.samples, piece.batch_samples)
            self._channel.post(Message(Kind.ACTIVATION, *counts, body=body))
            for chunk in others:
                self._channel.add_chunk(body.chunks, await self._io.run((chunk, body.chunks.encode_next)))

    async def _receive(self) -> None:
        """Decode gradients as they come, off the compute lane; everything else is a command."""
        while True:
            message = await self._channel.receive()
            if message.kind is Kind.GRADIENT:
                await self._take_gradient(message)
            elif message.kind is Kind.FAULT:
                raise _fault(message, "ended the session")
            elif message.kind is Kind.ABANDON:
                self._abandon(message.epoch)
                self._commands.put_nowait(message)
            else:
                self._commands.put_nowait(message)

    async def _take_gradient(self, message: Message) -> None:
        place = (message.epoch, message.iteration, message.micro_batch)
        encoding = self._orders.plan.down
        if message.epoch <= self._abandoned:
            return
        body = message.body
        decode = Work("decode", *place, size_bytes=body.size_bytes, encoding=encoding, chunks=chunk_count(body))
        gradient = await self._io.run((decode, partial(self._part.decode, message, encoding)))
        if message.epoch <= self._abandoned:
            return
        waiting = self._gradients.get(place)
        if waiting is None or waiting.done():
            raise ProtocolError(f"The server sent {message}, but nothing waits for it.")
        waiting.set_result(gradient)

    async def _gradient(self, epoch: int, iteration: int, n: int) -> Any:
        gradient = await self._waiting_for("d", self._gradients[epoch, iteration, n], epoch, iteration, n)
        del self._gradients[epoch, iteration, n]
        return gradient

    async def _next_command(self) -> Message:
        start = self._loop.time()
        command = await self._commands.get()
        assert command is not None
        kind = "model" if command.kind is Kind.MODEL else "round"
        self._recorder.waited(COMPUTE, kind, command.epoch, 0, 0, start, self._loop.time())
        return command

    async def _waiting_for(
        self, kind: str, thing: asyncio.Future[T], epoch: int, iteration: int, micro_batch: int = 0
    ) -> T:
        """Return what the compute lane needs next; the time until it is there is a waiting span."""
        if thing.done():
            return thing.result()
        start = self._loop.time()
        result = await thing
        self._recorder.waited(COMPUTE, kind, epoch, iteration, micro_batch, start, self._loop.time())
        return result

    async def _expect_welcome(self) -> Message:
        message = await self._channel.receive()
        if message.kind is Kind.FAULT:
            raise _fault(message, "refused this device")
        if message.kind not in (Kind.WELCOME, Kind.STOP):
            raise ProtocolError(f"The server answered with {message} where a welcome belongs.")
        return message

    def _report_progress(self, epoch: int, iteration: int) -> None:
        if self._observe is not ignore:
            busy = dict(self._recorder.busy_s)
            place = (self.name, epoch, iteration, len(self._samples))
            self._observe(Progress(*place, self._part.last_loss, self._loop.time(), busy))

    async def _while_running(self, main: Coroutine[Any, Any, None], helpers: list[asyncio.Task[None]]) -> None:
        """Run to the end of `main`, or raise what ended a helper first."""
        task = self._loop.create_task(main)
        try:
            await asyncio.wait([task, *helpers], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for helper in helpers:
            if helper.done():
                helper.result()
        raise LinkError("The connection to the server was lost.")


def _fault(message: Message, what: str) -> TrainingError | SessionOverError:
    content = read_json(message)
    text = f"The server {what}: {content.get('reason', 'no reason')}"
    if content.get("again") is not True:
        return TrainingError(text)
    return (ServerStopsError if content.get("stops") is True else SessionOverError)(text)
