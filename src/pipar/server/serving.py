"""Serves one device in a round, micro-batch by micro-batch: lines 4 to 18 of Algorithm 2."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipar.errors import LinkError, ProtocolError, describe, forget_frames, is_lack_of_memory
from pipar.events import Dropped, NotKept, Observer
from pipar.execution.schedule import StepCount, count_steps
from pipar.execution.work import Place, Work
from pipar.methods import Plan
from pipar.server.at_once import SeveralAtOnce, Turn
from pipar.server.device_messages import EndOfEpoch, SquaredError, added_errors, expect, read_end
from pipar.server.interfaces import ServerPart
from pipar.server.membership import Membership
from pipar.server.model_exchange import ModelExchange
from pipar.server.plan_updates import PlanUpdates
from pipar.server.progress import ProgressReporter
from pipar.server.replicas import Replicas
from pipar.server.session import Session
from pipar.wire.messages import Body, Chunks, Kind, Message, Payload, chunk_count, norm_body, read_norm
from pipar.wire.orders import Orders, TrainedPart


@dataclass(frozen=True)
class DeviceUpdate:
    """The result of one device's round; its session may be over already."""

    session: Session
    returned: TrainedPart
    loss_sum: float | None
    errors: tuple[SquaredError, SquaredError] = (None, None)  # of lossy encodings, up and down


class Serving:
    """Serves the devices of a round, each in a separate task.

    A fault of one device, like any other error in the work for it, ends its session only.
    """

    def __init__(
        self,
        membership: Membership,
        replicas: Replicas,
        plans: PlanUpdates,
        exchange: ModelExchange,
        progress: ProgressReporter,
        observe: Observer,
        *,
        at_once: Callable[[Plan, int], int] = lambda _plan, _devices: 1,
    ) -> None:
        self._at_once = at_once
        self._devices = 1  # that train now
        self._membership = membership
        self._replicas = replicas
        self._plans = plans
        self._exchange = exchange
        self._progress = progress
        self._observe = observe

    def begin(
        self, group: Sequence[Session], epoch: int, signs_of_life: Callable[[Session], Mapping[str, float]]
    ) -> None:
        """Let the devices of a group train, at the same time, and show `signs_of_life` as this says for each."""
        devices = [session.device for session in group]
        self._devices = len(devices)
        self._replicas.begin_turns(devices)
        self._plans.begin_measuring(devices)
        kept = {session: self._kept_epoch(session) for session in group}
        self._plans.recall(epoch, [session.device for session in group if kept[session] is not None])
        for session in group:
            session.begin_round(epoch, signs_of_life(session), kept[session])

    def _kept_epoch(self, session: Session) -> int | None:
        """Return the epoch whose activations a device need not send again."""
        if not self._plans.orders(session.device).keeps_activations:
            return None
        return self._replicas.kept.epoch_of(session.device, session.number)

    async def serve(self, session: Session, epoch: int) -> DeviceUpdate | None:
        """Serve one device's epoch; return its update, or None if the device was lost or broke the protocol."""
        try:
            return await self._serve_epoch(session, epoch)
        except LinkError as error:
            await self.drop(session, epoch, str(error))
            forget_frames(error)  # the session keeps it for the next reader
        except ProtocolError as error:
            await self.dismiss(session, epoch, error)
            forget_frames(error)
        except Exception as error:  # the task ends here, and the failure becomes an event
            if self._membership.is_own_failure(error):
                raise
            await self._fail(session, epoch, error)
        return None

    async def _serve_epoch(self, session: Session, epoch: int) -> DeviceUpdate:
        orders, replica = self._plans.orders(session.device), self._replicas.of(session.device)
        if session.round.expects_state:
            await self._receive_state(session, replica, epoch)
        splits = orders.plan.split_point < orders.layers
        batches = BatchCounter(epoch, orders.plan.micro_batches if splits else 0)
        losses: list[float | None] = []
        errors: list[SquaredError] = []
        most = self._at_once(orders.plan, self._devices)
        several = SeveralAtOnce(session, most)
        try:
            while (message := await self._next(session)).kind is Kind.ACTIVATION:  # until 'stop epoch'
                batches.count(message)
                if batches.samples > session.round_samples:
                    raise ProtocolError(f"{message} exceeds the {session.round_samples} samples of the device.")
                self._begin_to_keep(session, orders, message)
                if most == 1:
                    await self._serve_micro_batch(session, replica, orders, message, is_last=batches.is_whole)
                else:
                    await self._begin_micro_batch(several, session, replica, orders, message)
                if batches.is_whole:
                    await several.finish()
                    loss, error = await self._finish_iteration(session, replica, orders, message)
                    losses.append(loss)
                    errors.append(error)
        finally:
            several.stop()
        self._replicas.finish(session.device)
        end = read_end(message, epoch)
        if splits:
            batches.check_end(message, end)
        session.check_end(message, end)
        self._report_not_kept(session)
        self._plans.add_measured(session.device, session.measure(end, epoch), epoch)
        model = await session.next_message()
        expect(model, Kind.MODEL, epoch)
        session.end_round()
        returned = await self._exchange.receive(session, model, session.introduction.samples)
        known = [loss for loss in losses if loss is not None]
        return DeviceUpdate(session, returned, sum(known) if known else end.loss_sum, (end.error, added_errors(errors)))

    def _begin_to_keep(self, session: Session, orders: Orders, message: Message) -> None:
        """Keep the activations of an epoch from its first micro-batch on, if they will be the same in the next one."""
        is_first = (message.iteration, message.micro_batch) == (1, 1)
        if is_first and orders.keeps_activations and message.body.encoding != "kept":
            samples = session.introduction.samples
            self._replicas.kept.begin(session.device, session.number, message.epoch, samples)

    def _report_not_kept(self, session: Session) -> None:
        """Say once in a session that there is no room to keep a device's activations."""
        reason = self._replicas.kept.refusal(session.device)
        if reason is not None and not session.knows_refusal and self._replicas.kept.limit_bytes:
            session.knows_refusal = True
            self._observe(NotKept(session.device, reason))

    def _decoding(self, session: Session, replica: ServerPart, orders: Orders, message: Message) -> Callable[[], Any]:
        """Return how the activations of a message are read: from the message, or from what the device sent before."""
        device, kept, decode = session.device, self._replicas.kept, partial(replica.decode, message, orders.plan.up)
        if message.body.encoding == "kept":
            if not session.round.refers:
                raise ProtocolError(f"{message} refers to activations, but the server has not said that it has them.")
            return partial(kept.recall, device, message)
        return (lambda: kept.add(device, decode())) if orders.keeps_activations else decode

    async def _next(self, session: Session) -> Message:
        """Return the next message of a device; after an abandoned round, its plan's limits hold again."""
        message = await session.next_message()
        if session.catch_up(message):
            self._plans.limit(session)
        return message

    async def _receive_state(self, session: Session, replica: ServerPart, epoch: int) -> None:
        """Take the optimiser state of the layers that a device has handed over, before it trains."""
        message = await session.next_message()
        expect(message, Kind.STATE, epoch - 1)
        session.expect_no_state()
        await self._exchange.receive_state(session, replica, message, epoch)

    async def _serve_micro_batch(
        self, session: Session, replica: ServerPart, orders: Orders, message: Message, *, is_last: bool
    ) -> None:
        """Compute the gradients of one micro-batch, and send that of its activations to the device."""
        await self._replicas.wait_for_turn(session.device)
        is_measured = is_last and orders.exchanges_norms
        backward = _measured_backward(replica) if is_measured else replica.backward
        reply = GradientReply(session, message, Turn())
        await self._compute(session, replica, orders, message, (replica.forward, backward), reply)

    async def _begin_micro_batch(
        self, several: SeveralAtOnce, session: Session, replica: ServerPart, orders: Orders, message: Message
    ) -> None:
        """Begin to do the same while other micro-batches of the batch are computed."""
        if message.micro_batch == 1:
            replica.begin_batch_at_once()
        functions = replica.forward_at_once, partial(replica.backward_at_once, message.micro_batch)

        async def work(turn: Turn) -> None:
            await self._compute(session, replica, orders, message, functions, GradientReply(session, message, turn))

        await several.begin(work)

    async def _compute(
        self,
        session: Session,
        replica: ServerPart,
        orders: Orders,
        message: Message,
        functions: tuple[Callable[[Any], Any], Callable[[Any], Any]],
        reply: GradientReply,
    ) -> None:
        """Compute a micro-batch by its forward and its backward, and send the gradient of its activations."""
        compute_forward, compute_backward = functions
        plan, work = orders.plan, _work_of(message, orders, session.device)
        place = (*reply.place, session.device)
        encoding = "raw" if message.body.encoding == "kept" else plan.up
        decode = replace(work("decode"), encoding=encoding, chunks=chunk_count(message.body))
        forward = (decode, self._decoding(session, replica, orders, message)), (work("fs"), compute_forward)
        if not orders.trains_part:  # the answer is empty: it only grants the next micro-batch
            backward = (work("bs"), lambda forwarded: replica.encode(compute_backward(forwarded), plan.down, place))
            reply.send_first(await self._replicas.compute(session, *forward, backward))
            reply.end()
            return
        first, *others = (
            replace(work("encode"), size_bytes=size, encoding=plan.down)
            for size in replica.chunk_bytes(message, plan.down)
        )
        steps = (
            *forward,
            (work("bs"), compute_backward),
            (first, partial(replica.encode, encoding=plan.down, place=place)),
        )
        if others:  # the first chunk leaves while they are encoded
            more = tuple((chunk, reply.encode_next) for chunk in others)
            await self._replicas.compute(session, *steps, *more, ended=reply.chunk_sender(len(steps)))
        else:
            reply.send_first(await self._replicas.compute(session, *steps))
        reply.end()

    async def _finish_iteration(
        self, session: Session, replica: ServerPart, orders: Orders, message: Message
    ) -> tuple[float | None, SquaredError]:
        """Apply the gradients of a batch; return its summed loss, and the error of a lossy encoding."""
        others = await self._exchange_norms(session, replica, message) if orders.exchanges_norms else 0.0
        step = _work_of(message, orders, session.device)("step")
        self._replicas.note_step(session.device, message)
        await self._replicas.compute(session, (step, partial(replica.step, _step_of(message, orders, session), others)))
        # Before the turn ends: the next device's forward, in another thread, adds to those of a shared model.
        loss, error = replica.take_loss(), replica.take_encoding_error()
        self._replicas.end_turn(session.device)
        self._progress.note_batch(session, message, loss)
        return loss, error

    async def _exchange_norms(self, session: Session, replica: ServerPart, message: Message) -> float:
        """Send the squared norm of the replica's gradient at once; return the device's, which follows its backwards.

        So the device need not wait for it: it has it when its own gradient is complete.
        """
        place = (message.epoch, message.iteration)
        if session.wants_gradient_of(message.epoch):
            session.channel.post(Message(Kind.NORM, *place, body=norm_body(replica.measure_gradient())))
        answer = await self._next(session)
        expect(answer, Kind.NORM, message.epoch)
        if answer.iteration != message.iteration:
            raise ProtocolError(f"{answer} arrived instead of the norm of iteration {message.iteration}.")
        return read_norm(answer)

    async def drop(self, session: Session, epoch: int, reason: str) -> None:
        """Exclude a device from a round, and discard all that it has done in it."""
        await self._replicas.discard(session, epoch)
        session.expect_no_state()
        self._replicas.finish(session.device)
        self._plans.measure_without(session.device, epoch)
        self._observe(Dropped(session.device, epoch, reason))

    async def dismiss(self, session: Session, epoch: int, error: ProtocolError) -> None:
        """Exclude a device that broke the protocol from a round, and end its session."""
        await self.drop(session, epoch, f"it broke the protocol: {error}")
        await self._membership.dismiss(session, error)

    async def _fail(self, session: Session, epoch: int, error: Exception) -> None:
        """Exclude a device whose work has failed on the server from a round, and end its session.

        It may join again if only memory was missing; anything else would fail again.
        """
        reason = f"the server failed to compute with what it sent: {describe(error)}"
        await self.drop(session, epoch, f"{reason} ({_place_of(error)})")
        await self._membership.dismiss(session, reason, again=is_lack_of_memory(error))


class BatchCounter:
    """Checks that a device's micro-batches arrive in order and add up to whole batches."""

    def __init__(self, epoch: int, micro_batches: int) -> None:
        self.samples = 0  # of the epoch
        self._epoch = epoch
        self._micro_batches = micro_batches
        self._iteration, self._number, self._trained, self._batch = 1, 1, 0, 0

    @property
    def is_whole(self) -> bool:
        """Whether the last batch is complete."""
        return self._trained == 0

    def count(self, message: Message) -> None:
        """Count one micro-batch, or raise if another one is due."""
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
                f"{message} with {message.samples} of {message.batch_samples} samples arrived instead of micro-batch "
                f"{self._number} of iteration {self._iteration} of epoch {self._epoch}, after "
                f"{self._trained} of {self._batch} samples; a batch has at most {self._micro_batches} micro-batches."
            )
        self.samples += message.samples
        self._trained, self._number = trained, self._number + 1
        if trained == self._batch:
            self._iteration, self._number, self._trained = self._iteration + 1, 1, 0

    def check_end(self, message: Message, end: EndOfEpoch) -> None:
        """Raise if the samples of END_EPOCH are not those that arrived in whole batches."""
        if not self.is_whole or end.samples != self.samples:
            raise ProtocolError(
                f"{message} reports {end.samples} samples, but {self.samples} arrived in whole batches."
            )


class GradientReply:
    """Sends the gradient of one micro-batch in its turn; the first chunk leaves while the others are encoded."""

    def __init__(self, session: Session, to: Message, turn: Turn) -> None:
        self._session = session
        self._turn = turn
        self._place = (to.epoch, to.iteration, to.micro_batch, to.samples, to.batch_samples)
        self._body: Body | None = None
        self._is_wanted = True

    @property
    def place(self) -> Place:
        """Epoch, iteration and number of the micro-batch."""
        return self._place[:3]

    def send_first(self, body: Body) -> None:
        """Send the first chunk, or all if there is one, unless the device has been excluded from the round."""
        self._turn.send(partial(self._send_first, body))

    def end(self) -> None:
        """All chunks are given."""
        self._turn.end()

    def _send_first(self, body: Body) -> None:
        self._is_wanted = self._session.wants_gradient_of(self._place[0])
        if self._is_wanted:
            self._session.reply(Message(Kind.GRADIENT, *self._place, body=body))

    def encode_next(self, before: Body | Payload) -> Payload:
        """Return the chunk that follows the given one."""
        if isinstance(before, Body):
            self._body = before
        return self._chunks.encode_next()

    def chunk_sender(self, steps: int) -> Callable[[int, Any], None]:
        """Return a callback for the end of each step that sends its chunk; step number `steps` gives the first one."""

        def step_ended(place: int, value: Any) -> None:
            if place == steps - 1:
                self.send_first(value)
            elif place >= steps:
                self._turn.send(partial(self._send_chunk, value))

        return step_ended

    def _send_chunk(self, chunk: Payload) -> None:
        if self._is_wanted:
            self._session.channel.add_chunk(self._chunks, chunk)

    @property
    def _chunks(self) -> Chunks:
        assert self._body is not None
        assert self._body.chunks is not None
        return self._body.chunks


def _measured_backward(replica: ServerPart) -> Callable[[Any], Any]:
    """Return the last backward of a batch, after which the replica's gradient is complete and is measured."""

    def backward(forwarded: Any) -> Any:
        gradient = replica.backward(forwarded)
        replica.measure_gradient()
        return gradient

    return backward


def _place_of(error: Exception) -> str:
    """Return the file and line where an error was raised, for a report of it."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else "unknown place"


def _step_of(message: Message, orders: Orders, session: Session) -> StepCount:
    """Return which step of the device's training a batch is."""
    return count_steps(
        message.epoch,
        message.iteration,
        epochs=orders.epochs,
        samples=session.introduction.samples,
        batch_size=orders.batch_size,
        batch_statistics=orders.batch_statistics,
        passes=orders.local_epochs,
    )


def _work_of(message: Message, orders: Orders, device: str) -> Callable[[str], Work]:
    """Return a function that gives the work of each kind for one micro-batch, on layers P+1..Q."""
    place = (message.epoch, message.iteration, message.micro_batch)
    first, last = orders.plan.split_point + 1, orders.layers
    return lambda kind: Work(kind, *place, first, last, message.samples, message.body.size_bytes, device)
