"""The device's program: Algorithm 1 of the paper.

The device trains layers 1..P on its own data, sends activations up and gets gradients back, N micro-batches at a time.
Its lanes, its channel and its clock are given to it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from pipar.device.evaluation import OwnEvaluation
from pipar.device.intake import Commands, Intake
from pipar.device.interfaces import DeviceLanes, DevicePart, Equipment
from pipar.device.link_answer import LinkAnswer
from pipar.device.model import DeviceSideModel
from pipar.device.pipeline import Batch, BatchLoader, MicroBatchExchange, WaitRecorder
from pipar.errors import (
    LinkError,
    NetworkRefusedError,
    OrdersError,
    PrivacyError,
    ProtocolError,
    ServerStopsError,
    SessionOverError,
    TrainingError,
    peer_text,
)
from pipar.events import Observer, Progress, Trained, Welcomed, ignore
from pipar.execution.clock import clock_machine
from pipar.execution.schedule import device_order
from pipar.execution.spans import Clock, Recorder, pack_trace, with_one_evaluation
from pipar.execution.work import Work
from pipar.json_records import is_number
from pipar.privacy.budget import BudgetUse
from pipar.settings.config import LARGEST_SCALE, LEAST_SCALE
from pipar.transport.channel import Channel
from pipar.transport.heartbeat import Heartbeat
from pipar.transport.rate_estimate import read_traffic
from pipar.wire.frames import package_version
from pipar.wire.messages import Body, Kind, Message, json_body, read_json
from pipar.wire.orders import Orders

if TYPE_CHECKING:  # it imports numpy
    from pipar.privacy.mechanisms import NoiseSource


class Device:
    """One device, from joining to 'stop training'."""

    def __init__(
        self,
        name: str,
        equipment: Equipment,
        lanes: DeviceLanes,
        channel: Channel,
        recorder: Recorder,
        observe: Observer = ignore,
    ) -> None:
        self.name = name
        self._equipment = equipment
        self._samples, self._guard = equipment.samples, equipment.guard
        self._lanes = lanes
        self._channel = channel
        self._recorder = recorder
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._wait = WaitRecorder(recorder)
        self._evaluation = OwnEvaluation(equipment.evaluation, lanes, channel, self._wait, observe, name)
        self._intake = Intake(channel, equipment.terms, evaluates=self._evaluation.is_offered)
        self._commands = Commands()
        self._heartbeat = Heartbeat(channel)
        self._training: asyncio.Task[None] | None = None  # the current epoch
        self._recalled: int | None = None  # the epoch whose activations the server has kept
        self._sent: int | None = None  # the last epoch whose activations it has sent, all with its current part

    # --- joining

    async def train(self) -> None:
        """Take part in the training until the server sends STOP."""
        orders = await self._join()
        if orders is None:
            return  # the training was over before this device joined
        try:
            seen = BudgetUse(orders.releases, orders.spent)
            self._guard.accept(orders.noise_multiplier, seen, orders.budget)
            before = self._guard.used
            self._guard.accept_cut(orders.plan.split_point, orders.layers)
            self._intake.follow(orders)
            self._build(orders)  # line 1
            self._observe(Welcomed(self.name, str(orders.plan)))
            await self._run()
        except (ProtocolError, OrdersError, PrivacyError) as error:
            self._channel.post(Message(Kind.FAULT, body=json_body({"reason": str(error)})))
            raise
        if self._guard.used == before:  # nothing was sent, maybe because the budget does not allow it
            self._guard.check(self._model.orders.noise_multiplier)

    async def _join(self) -> Orders | None:
        """Return the server's orders; None if the training is over."""
        hello_at = self._loop.time()
        self._channel.post(Message(Kind.HELLO, body=json_body(self._introduction())))
        welcome = await self._expect_welcome()
        self._clock = Clock(clock_machine(), hello_at, self._loop.time())
        if welcome.kind is Kind.STOP:
            return None
        orders = Orders.read(welcome)
        self._channel.session = orders.session
        return orders

    def _introduction(self) -> dict[str, Any]:
        about: dict[str, Any] = {"name": self.name, "samples": len(self._samples)}
        if self._channel.is_real:  # the other machine may have another version
            about["pipar"] = package_version()
        used, profile = self._guard.used, self._equipment.profile
        if used.releases:  # they may have gone to another server
            about |= {"releases": used.releases, "spent": used.mu_squared}
        if self._equipment.machine:
            about |= {"machine": self._equipment.machine, "probes": True}
        if self._equipment.inputs:
            about |= {"inputs": self._equipment.inputs, "target_bytes": self._equipment.target_bytes}
        if self._equipment.method:
            about["method"] = self._equipment.method
        about |= self._evaluation.introduction()
        return about if profile is None else {**about, "profile": json.loads(profile.to_json())}

    async def _expect_welcome(self) -> Message:
        answer = LinkAnswer(self._channel)
        while (message := await self._channel.receive()).kind is Kind.PROBE:
            answer.take(message)
        if message.kind is Kind.FAULT:
            self._check_budget(message)
            raise _fault(message, "refused this device")
        if message.kind not in (Kind.WELCOME, Kind.STOP):
            raise ProtocolError(f"The server answered HELLO with {message}, not with a welcome.")
        return message

    def _check_budget(self, fault: Message) -> None:
        """Raise BudgetSpentError if the server ends the session because this device's budget is spent, and it is."""
        multiplier = read_json(fault).get("noise_multiplier")
        if is_number(multiplier, LEAST_SCALE, LARGEST_SCALE):
            self._guard.check(float(multiplier))

    def _build(self, orders: Orders) -> None:
        """Build M^c_k by P^k, and what feeds it."""
        self._model = DeviceSideModel(
            orders, self._equipment.build_part, self._lanes.compute, self._channel, self._guard
        )
        self._batches = BatchLoader(self._samples, self._model, self._lanes)
        self._exchange = MicroBatchExchange(self._model, self._channel, self._lanes.io, self._intake)

    async def _run(self) -> None:
        """Follow the server's commands while messages travel both ways."""
        helpers = [self._loop.create_task(work) for work in (self._receive(), self._exchange.upload())]
        try:
            await self._run_with(helpers, self._follow_commands())
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            await self._heartbeat.end()

    async def _run_with(self, helpers: list[asyncio.Task[None]], main: Coroutine[Any, Any, None]) -> None:
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

    # --- messages of the server

    async def _receive(self) -> None:
        """Hand gradients to the exchange as they arrive; every other message is a command."""
        while True:
            message = await self._channel.receive()
            if message.kind is Kind.GRADIENT:
                await self._exchange.receive(message)
                continue
            if message.kind is Kind.NORM:
                self._exchange.receive_norm(message)
                continue
            if message.kind is Kind.FAULT:
                self._check_budget(message)
                raise _fault(message, "ended the session")
            if message.kind is Kind.ABANDON:
                self._abandon(message.epoch)
            if message.kind is Kind.ROUND and message.body.size_bytes:  # before earlier commands are followed
                self._heartbeat.follow(read_json(message))
            self._intake.note(message)
            self._commands.put_nowait(message)
            await self._commands.have_room(self._intake.room_bytes)

    async def _follow_commands(self) -> None:
        """Follow the server's commands until it sends STOP (line 2)."""
        while (command := await self._wait.for_command(self._commands)).kind is not Kind.STOP:
            match command.kind:
                case Kind.MODEL:  # lines 17 and 18
                    await self._model.install(command)
                case Kind.PLAN:
                    self._sent = None
                    await self._model.adopt(command)
                case Kind.STATE:
                    await self._model.receive_state(command)
                case Kind.ROUND if not self._model.is_installed:
                    raise ProtocolError(f"The server sent {command} before any model to train.")
                case Kind.ROUND:
                    self._note_uplink(command)
                    self._recalled = self._kept_epoch(command)
                    self._guard.check(self._model.orders.noise_multiplier)
                    await self._take_part(command.epoch)
                case Kind.ABANDON:
                    await self._discard(command.epoch)
                case Kind.EVALUATE:
                    await self._evaluation.answer(command, self._model)
                case Kind.REPORT:
                    self._report_trace(command.epoch)
                case _:
                    raise ProtocolError(f"The server sent {command}, which devices do not accept.")
        # Line 20. A device that leaves without it may have lost its link.
        self._channel.post(Message(Kind.STOP, command.epoch))

    def _note_uplink(self, message: Message) -> None:
        """Take the rate of this device's uplink as the server has seen it, if the message has it."""
        uplink = read_traffic(read_json(message)) if message.body.size_bytes else None
        if uplink is not None:
            self._channel.meter.take(message.epoch - 1, uplink)

    def _kept_epoch(self, message: Message) -> int | None:
        """Return the epoch whose activations the server has kept, if they are still what this device would send."""
        kept = read_json(message).get("kept") if message.body.size_bytes else None
        orders, varies = self._model.orders, self._samples.varies
        return self._sent if kept == self._sent and orders.keeps_activations and not varies else None

    def _report_trace(self, epoch: int) -> None:
        trace = with_one_evaluation(replace(self._recorder.take(epoch), clock=self._clock))
        self._channel.post(Message(Kind.TRACE, epoch, body=Body.of(pack_trace(trace), encoding="trace")))

    # --- a round

    async def _take_part(self, epoch: int) -> None:
        """Train an epoch and send the trained part, unless the server ends the round without this device."""
        if epoch > self._exchange.abandoned:
            self._training = self._loop.create_task(self._train_and_send(epoch))
            try:
                await asyncio.wait([self._training])
            finally:
                self._training.cancel()
                await asyncio.gather(self._training, return_exceptions=True)
            if not self._training.cancelled():
                self._training.result()

    def _abandon(self, epoch: int) -> None:
        """The round has ended without this device: stop training."""
        self._exchange.abandoned = epoch
        # An answer, if only for the acknowledgement that it carries: a device that is late in every round sends no
        # other one.
        self._channel.post(Message(Kind.ABANDON, epoch))
        if self._training is not None:
            self._training.cancel()

    async def _discard(self, epoch: int) -> None:
        self._exchange.clear()
        await self._model.discard(epoch)
        self._recorder.take(epoch)

    async def _train_and_send(self, epoch: int) -> None:
        await self._train_epoch(epoch)  # lines 3 to 14
        await self._send_model(epoch)  # lines 15 and 16
        spent = (self._guard.epsilon, self._guard.target_epsilon) if self._model.orders.protects else ()
        self._observe(Trained(self.name, epoch, self._samples_of_epoch, *spent))

    @property
    def _samples_of_epoch(self) -> int:
        """Samples that it trains on in an epoch; a sample counts in each pass."""
        return len(self._samples) * self._model.orders.local_epochs

    async def _train_epoch(self, epoch: int) -> None:
        batches = self._batches.of_epoch(epoch)
        if self._recalled is not None:
            await self._refer_to_kept(epoch, self._recalled, batches)
            return
        self._loading = self._batches.load(epoch, 1, next(batches))
        try:
            for iteration, following in enumerate(chain(batches, [None]), start=1):
                pieces = await self._wait.for_result("load", self._loading, epoch, iteration)
                await self._train_iteration(epoch, iteration, pieces, following=following)
                self._report_progress(epoch, iteration)
        finally:
            self._loading.cancel()  # of an abandoned epoch: its lanes may be closed before it ends
        assert self._exchange.is_idle
        self._sent = epoch

    async def _refer_to_kept(self, epoch: int, kept: int, batches: Iterator[Batch]) -> None:
        """Train an epoch without computing: its activations are those of an earlier one, which the server has kept."""
        for iteration, batch in enumerate(batches, start=1):
            references = await self._batches.references((epoch, iteration), kept, batch.positions)
            for n, reference in enumerate(references, start=1):
                self._exchange.refer((epoch, iteration, n), reference)
            for n in range(1, len(references) + 1):
                await self._gradient(epoch, iteration, n)
            self._report_progress(epoch, iteration)

    async def _train_iteration(
        self, epoch: int, iteration: int, pieces: Sequence[Any], *, following: Batch | None
    ) -> None:
        part, orders, compute = self._model.part, self._model.orders, self._lanes.compute
        split_point, splits = orders.plan.split_point, orders.plan.split_point < orders.layers
        if orders.exchanges_norms:
            self._exchange.expect_norm((epoch, iteration))
        for stage in device_order(len(pieces), orders.plan.window):
            n, piece = stage.micro_batch, pieces[stage.micro_batch - 1]
            work = Work(stage.kind, epoch, iteration, n, 1, split_point, piece.samples)
            if stage.kind == "fc":
                work = replace(work, chunks=piece.samples if orders.is_steady else 1)
                activation = await compute.run((work, partial(part.forward, n, piece)))
                if splits:
                    self._exchange.send((epoch, iteration, n), activation, piece)
                if not orders.trains_part:
                    part.release(n)
                # The next batch is loaded during this one's backwards: earlier, it would delay the first uploads.
                if n == len(pieces) and following is not None:
                    self._loading = self._batches.load(epoch, iteration + 1, following)
            else:
                gradient = await self._gradient(epoch, iteration, n) if splits else None
                if orders.trains_part:
                    backward = partial(part.backward, n, gradient)
                    is_last = orders.exchanges_norms and n == len(pieces)
                    await compute.run((work, partial(_backward_and_measure, part, backward) if is_last else backward))
        if orders.trains_part:
            await self._step(epoch, iteration)

    async def _step(self, epoch: int, iteration: int) -> None:
        """Apply the gradients of a batch, clipped together with the server's if that is ordered."""
        part, orders = self._model.part, self._model.orders
        others = 0.0
        if orders.exchanges_norms:
            norm = self._exchange.exchange_norms((epoch, iteration), part.measure_gradient())
            others = await self._wait.for_result("d", norm, epoch, iteration)
        step = Work("step", epoch, iteration, 0, 1, orders.plan.split_point)
        await self._lanes.compute.run((step, partial(part.step, self._batches.step(epoch, iteration), others)))

    async def _gradient(self, epoch: int, iteration: int, n: int) -> Any:
        place = (epoch, iteration, n)
        gradient = await self._wait.for_result("d", self._exchange.gradient(place), *place)
        self._exchange.release(place)
        return gradient

    async def _send_model(self, epoch: int) -> None:
        """Send 'stop epoch' with the device's counts, then its trained part."""
        noise = self._count_release(epoch)
        self._channel.post(Message(Kind.END_EPOCH, epoch, body=json_body(self._end_of_epoch(epoch))))
        if noise is not None:
            await self._model.protect(epoch, noise)
        self._channel.post(Message(Kind.MODEL, epoch, body=await self._model.pack(epoch)))

    def _end_of_epoch(self, epoch: int) -> dict[str, Any]:
        loss, error = self._model.part.take_loss(), self._model.part.take_encoding_error()
        # A loss is computed from the data as well, and has no noise on it.
        counted: dict[str, Any] = {
            "samples": self._samples_of_epoch,
            "loss_sum": None if self._model.orders.protects else loss,
        }
        if error is not None:
            counted["error"] = list(error)
        uplink = self._channel.meter.read(epoch)
        measured = {"up_bytes": uplink.size_bytes, "up_s": uplink.seconds}
        return {**counted, **measured, **self._channel.frame_times()}

    def _count_release(self, epoch: int) -> NoiseSource | None:
        """Count the update that is about to be sent, and return its noise; None if it is sent without noise.

        The server counts it at 'stop epoch', which is sent later. So its count is never above the device's own, and an
        update within the budget by the device's count is within it by both.
        """
        orders = self._model.orders
        if not orders.protects:
            return None
        noise = self._guard.noise_source(self.name, epoch)
        self._guard.note(orders.noise_multiplier)
        return noise

    def _report_progress(self, epoch: int, iteration: int) -> None:
        if self._observe is not ignore:
            busy = dict(self._recorder.busy_s)
            place = (self.name, epoch, iteration, self._samples_of_epoch)
            self._observe(Progress(*place, self._model.part.last_loss, self._loop.time(), busy))


def _backward_and_measure(part: DevicePart, backward: Callable[[], None]) -> None:
    """Run the last backward of a batch, and measure the gradient that is then complete."""
    backward()
    part.measure_gradient()


def _fault(message: Message, what: str) -> TrainingError | SessionOverError:
    content = read_json(message)
    text = f"The server {what}: {peer_text(content.get('reason', 'no reason'))}"
    if content.get("other_network") is True:
        return NetworkRefusedError(text)
    if content.get("again") is not True:
        return TrainingError(text)
    return (ServerStopsError if content.get("stops") is True else SessionOverError)(text)
