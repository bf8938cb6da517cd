"""The server's program: Algorithm 2 of the paper.

It holds the layers behind the cut, one replica a device, serves their micro-batches first come first served,
aggregates the complete models at the end of each round and sends every device its part of the new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from pipar.compute import Compute
from pipar.config import Link
from pipar.errors import LinkError, PiparError, ProtocolError, TrainingError
from pipar.events import Joined, Observer, Progress, ignore
from pipar.ledger import Ledger
from pipar.link.channel import Channel, Transport
from pipar.methods import Method
from pipar.protocol.messages import Body, Kind, Message, json_body, read_json
from pipar.protocol.orders import Orders, Returned
from pipar.session import Pieces, Session
from pipar.stages import Work
from pipar.trace import COMPUTE, DOWNLINK, IO, SERVER, Recorder, unpack_trace
from pipar.turns import Turns


class ServerPart(Protocol):
    """M^s_k, the server-side model of one device."""

    def decode(self, message: Message) -> Any: ...
    def forward(self, decoded: Any) -> Any: ...
    def backward(self, forwarded: Any) -> Any: ...
    def encode(self, gradient: Any) -> Body: ...
    def step(self) -> None: ...
    def take_loss(self) -> float | None: ...


class Learner(Protocol):
    """The global model and its replicas."""

    def replica(self, device: str) -> ServerPart: ...
    def pack(self, device: str) -> Body: ...
    def part_bytes(self, device: str) -> int: ...
    def model_bytes(self) -> int: ...
    def aggregate(self, returned: Sequence[Returned]) -> None: ...
    def evaluator(self) -> Callable[[Any], tuple[float, int]]: ...


@dataclass(frozen=True)
class Training:
    """What the server is to do: the method, for how long, and with which devices."""

    method: Method
    epochs: int
    patience: int | None
    orders: Mapping[str, Orders]  # by device name; who is not in it is not admitted
    links: Mapping[str, Link]
    validation: Sequence[tuple[int, Any]] = ()  # held-out batches: samples, and what the evaluator takes


class Server:
    """The server, from the first device's hello to 'stop training'."""

    def __init__(
        self,
        training: Training,
        learner: Learner,
        *,
        pool: Compute,
        background: Compute,
        recorder: Recorder,
        ledger: Ledger,
        keep_spans: frozenset[str] | None = None,
        observe: Observer = ignore,
    ) -> None:
        self._training = training
        self._learner = learner
        self._pool = pool
        self._background = background
        self._recorder = recorder
        self._ledger = ledger
        self._keep_spans = keep_spans
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._sessions: dict[str, Session] = {}
        self._all_joined = asyncio.Event()
        self._present: set[str] = set()
        self._left = asyncio.Event()
        self._turns: Turns | None = None
        self._validating: asyncio.Task[None] | None = None
        self._copied = asyncio.Event()
        self._samples = 0
        self._iterations = 0

    # --- who takes part

    async def admit(self, transport: Transport) -> None:
        """Welcome a device and take in its messages until it leaves; one call a connection."""
        channel = Channel(transport, Recorder(SERVER, frozenset()), DOWNLINK)
        try:
            session = self._welcome(channel, await channel.receive())
        except (ProtocolError, LinkError) as error:
            channel.post(Message(Kind.FAULT, body=json_body({"reason": str(error)})))
            await channel.close()
            return
        try:
            await self._take_in(session)
        finally:
            await channel.close()
            self._present.discard(session.device)
            self._left.set()

    def close(self) -> None:
        """Let running work end, so that nobody changes the model any more."""
        self._pool.close()
        self._background.close()

    async def farewell(self) -> None:
        """Return when every device has left, after 'stop training'."""
        while self._present:
            self._left.clear()
            await self._left.wait()

    def _welcome(self, channel: Channel, hello: Message) -> Session:
        name = str(read_json(hello).get("name")) if hello.kind is Kind.HELLO else ""
        orders = self._training.orders.get(name)
        if orders is None:
            raise ProtocolError(f"'{name}' is not a device of this training.")
        if name in self._sessions:
            raise ProtocolError(f"A device called '{name}' has joined already.")
        session = Session(name, channel, Recorder(name, self._keep_spans))
        channel.session = orders.session
        channel.record_on(session.recorder)
        link = self._training.links[name]
        cycle = [other.down_bps for other in link.cycle]
        channel.shape(link.down_bps, link.latency_s, cycle=cycle, every_s=link.every_s)
        channel.post(Message(Kind.WELCOME, body=orders.to_body()))
        self._sessions[name] = session
        self._present.add(name)
        self._observe(Joined(name, len(self._sessions)))
        if len(self._sessions) == len(self._training.orders):
            self._all_joined.set()
        return session

    async def _take_in(self, session: Session) -> None:
        try:
            while True:
                message = await session.channel.receive()
                match message.kind:
                    case Kind.TRACE:
                        self._take_trace(session, message)
                    case Kind.FAULT:
                        raise LinkError(f"it gave up: {read_json(message).get('reason', 'no reason')}")
                    case Kind.ACTIVATION:
                        self._count_outstanding(session, message)
                        session.inbox.put_nowait(message)
                    case _:
                        session.inbox.put_nowait(message)
        except (LinkError, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                session.refuse(error)
            # Behind 'stop training' and its last trace, a device may leave.
            if session.stopped_after is None or session.last_trace < session.stopped_after:
                session.inbox.put_nowait(error)
                self._ledger.fail(TrainingError(f"{session.device} was lost: {error}"))

    def _count_outstanding(self, session: Session, message: Message) -> None:
        allowed = self._training.orders[session.device].plan.micro_batches
        session.outstanding += 1
        if session.outstanding > allowed:
            raise ProtocolError(f"{message} came with {allowed} micro-batches outstanding, which is all it may have.")

    def _take_trace(self, session: Session, message: Message) -> None:
        trace = unpack_trace(message.body.contiguous(), owner=session.device)
        if not trace.epoch == message.epoch == session.last_trace + 1 <= session.asked_for:
            raise ProtocolError(f"{message} carries the trace of epoch {trace.epoch}, which was not asked for.")
        if not {COMPUTE, IO} <= trace.totals.keys():
            raise ProtocolError(f"{message} carries a trace without the device's own lanes.")
        session.last_trace = trace.epoch
        downlink = session.recorder.take(trace.epoch)
        received, sent = session.channel.received_bytes, session.channel.sent_bytes
        self._ledger.add_trace(trace, downlink, received.pop(trace.epoch, 0), sent.pop(trace.epoch, 0))

    # --- the training

    async def train(self) -> None:
        """Train for all epochs, or until validation has not improved for `patience` of them."""
        await self._all_joined.wait()
        sessions = [self._sessions[name] for name in sorted(self._sessions)]
        try:
            await self._train(sessions)
        except PiparError as error:
            for session in sessions:
                session.refuse(error)
            raise

    async def _train(self, sessions: list[Session]) -> None:
        groups = [[session] for session in sessions] if self._training.method.one_device_at_a_time else [sessions]
        for session in sessions:  # copying the layers behind the cut takes a while: before the clock starts
            copy = Work("install", device=session.device)
            await self._pool.run((copy, partial(self._learner.replica, session.device)))
        await self._distribute(groups[0], epoch=0)
        for epoch in range(1, self._training.epochs + 1):
            await self._round(epoch, groups)
            if epoch == self._training.epochs or await self._should_stop(epoch):
                break
        for session in sessions:
            session.stopped_after = epoch
            session.channel.post(Message(Kind.STOP, epoch))
        await self._ledger.complete(epoch)

    async def _round(self, epoch: int, groups: list[list[Session]]) -> None:
        """One round: from the devices' first loads to their new models. Groups train one after another."""
        samples, loss_sum = 0, 0.0
        for number, group in enumerate(groups):
            if number > 0:  # split learning hands the weights on
                await self._distribute(group, epoch)
            if self._training.method.shares_server_model:
                self._turns = Turns(session.device for session in group)
            for session in group:
                session.channel.post(Message(Kind.ROUND, epoch))
            served = await _all([self._serve(session, epoch) for session in group])
            await self._aggregate(epoch, [returned for returned, _ in served])
            samples += sum(returned.samples for returned, _ in served)
            loss_sum += sum(loss or 0.0 for _, loss in served)
        await self._distribute(groups[0], epoch)
        # The trace of this epoch travels while the next one's first batch is computed.
        for session in self._sessions.values():
            session.asked_for = epoch
            session.channel.post(Message(Kind.REPORT, epoch))
        has_loss = any(loss is not None for _, loss in served)
        self._ledger.add_round(epoch, samples, loss_sum / samples if has_loss else None)
        self._start_validation(epoch)

    async def _serve(self, session: Session, epoch: int) -> tuple[Returned, float | None]:
        """Serve one device's epoch; a device that breaks the protocol ends the training."""
        try:
            return await self._serve_epoch(session, epoch)
        except ProtocolError as error:
            raise TrainingError(f"{session.device} broke the protocol: {error}") from error

    async def _serve_epoch(self, session: Session, epoch: int) -> tuple[Returned, float | None]:
        """Serve one device until 'stop epoch'; return its trained part and its summed loss."""
        replica, orders = self._learner.replica(session.device), self._training.orders[session.device]
        pieces, losses = Pieces(epoch, orders.plan.micro_batches), []
        while (message := await session.next()).kind is Kind.ACTIVATION:
            pieces.take(message)
            await self._serve_micro_batch(session, replica, message)
            if pieces.whole:
                losses.append(await self._finish_iteration(session, replica, message))
        if self._turns is not None:
            self._turns.finish(session.device)
        samples, loss = _read_end(message, epoch)
        splits = orders.plan.split_point < orders.layers
        if not pieces.whole or samples != (pieces.samples if splits else samples):
            raise ProtocolError(f"{message} says {samples} samples, but {pieces.samples} came in whole batches.")
        model = await session.next()
        _expect(model, Kind.MODEL, epoch)
        known = [batch for batch in losses if batch is not None]
        return Returned(session.device, model.body, samples), sum(known) if known else loss

    async def _serve_micro_batch(self, session: Session, replica: ServerPart, message: Message) -> None:
        if self._turns is not None:
            await self._turns.mine(session.device)
        work = self._work(session.device, message)
        body = await self._pool.run(
            (work("decode"), partial(replica.decode, message)),
            (work("fs"), replica.forward),
            (work("bs"), replica.backward),
            (work("encode"), replica.encode),
        )
        place = (message.epoch, message.iteration, message.micro_batch, message.samples, message.batch_samples)
        session.outstanding -= 1
        session.channel.post(Message(Kind.GRADIENT, *place, body=body))

    async def _finish_iteration(self, session: Session, replica: ServerPart, message: Message) -> float | None:
        """Apply the gradients of a batch; return its summed loss."""
        step = self._work(session.device, message)("step")
        await self._pool.run((step, replica.step))
        loss = replica.take_loss()  # while nobody else's forward, in another thread, adds to that of a shared model
        if self._turns is not None:
            self._turns.done(session.device)
        self._report_progress(message, loss)
        return loss

    async def _aggregate(self, epoch: int, returned: list[Returned]) -> None:
        if self._validating is not None:
            await self._copied.wait()  # validation takes its copy of the global model before that changes
        work = Work("aggregate", epoch, size_bytes=self._learner.model_bytes() * len(returned))
        try:
            await self._pool.run((work, partial(self._learner.aggregate, returned)))
        except ProtocolError as error:  # it names the device whose model cannot be used
            raise TrainingError(str(error)) from error

    async def _distribute(self, group: list[Session], epoch: int) -> None:
        """Send each device of a group its part of the global model; one split point is packed once."""
        packed: dict[int, Body] = {}
        for session in group:
            split_point = self._training.orders[session.device].plan.split_point
            if split_point not in packed:
                device = session.device
                work = Work("pack", epoch, size_bytes=self._learner.part_bytes(device))
                packed[split_point] = await self._pool.run((work, partial(self._learner.pack, device)))
            session.channel.post(Message(Kind.MODEL, epoch, body=packed[split_point]))

    # --- validation and early stop

    def _start_validation(self, epoch: int) -> None:
        """Validate the new global model beside the next round, at the lowest priority."""
        self._copied.clear()
        before = self._validating
        self._validating = self._loop.create_task(self._validate(epoch, before))

    async def _validate(self, epoch: int, before: asyncio.Task[None] | None) -> None:
        try:
            await self._evaluate(epoch, before)
        except Exception as error:  # noqa: BLE001 - the task ends here, and whoever waits for its result is told
            self._ledger.fail(TrainingError(f"The validation of epoch {epoch} failed: {error}"))
        finally:
            self._copied.set()

    async def _evaluate(self, epoch: int, before: asyncio.Task[None] | None) -> None:
        if not self._training.validation:
            self._ledger.add_validation(epoch, None, None)
            return
        copy = Work("validate", epoch, samples=0)
        evaluate = await self._background.run((copy, self._learner.evaluator))
        self._copied.set()
        if before is not None:
            await before
        loss_sum, correct, total = 0.0, 0, 0
        for samples, batch in self._training.validation:
            work = Work("validate", epoch, samples=samples)
            loss, right = await self._background.run((work, partial(evaluate, batch)))
            loss_sum, correct, total = loss_sum + loss, correct + right, total + samples
        self._ledger.add_validation(epoch, loss_sum / total, correct / total)

    async def _should_stop(self, epoch: int) -> bool:
        """Decide with the validation losses up to the epoch before: this epoch's is computed beside the next."""
        if self._training.patience is None:
            return False
        return await self._ledger.stale_epochs(epoch - 1) >= self._training.patience

    # --- small things

    def _work(self, device: str, message: Message) -> Callable[[str], Work]:
        orders = self._training.orders[device]
        place = (message.epoch, message.iteration, message.micro_batch)
        first, last = orders.plan.split_point + 1, orders.layers
        size = message.body.size_bytes
        return lambda kind: Work(kind, *place, first, last, message.samples, size, device)

    def _report_progress(self, message: Message, loss_sum: float | None) -> None:
        self._samples += message.batch_samples
        self._iterations += 1
        # Once for all devices: a report adds up their downlinks, which would cost K * K for an iteration of each.
        if self._observe is not ignore and self._iterations % len(self._sessions) == 0:
            place = (SERVER, message.epoch, message.iteration, self._samples)
            downlinks = [session.recorder.busy_s.get(DOWNLINK, 0.0) for session in self._sessions.values()]
            busy = {**self._recorder.busy_s, DOWNLINK: sum(downlinks) / len(downlinks)}
            loss = None if loss_sum is None else loss_sum / message.batch_samples
            self._observe(Progress(*place, loss, self._loop.time(), busy))


def _expect(message: Message, kind: Kind, epoch: int) -> None:
    if message.kind is not kind or message.epoch != epoch:
        raise ProtocolError(f"{message} came where {kind.name} of epoch {epoch} belongs.")


def _read_end(message: Message, epoch: int) -> tuple[int, float | None]:
    """Return on how many samples a device says it trained, and the loss summed over them if it has computed it."""
    _expect(message, Kind.END_EPOCH, epoch)
    content = read_json(message)
    samples, loss = content.get("samples"), content.get("loss_sum")
    if type(samples) is not int or samples < 1 or not (loss is None or type(loss) is float):
        raise ProtocolError(f"{message} carries {samples!r} samples and the loss {loss!r}.")
    return samples, loss


async def _all(coroutines: list[Any]) -> list[Any]:
    """Return all results; the first failure ends the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
