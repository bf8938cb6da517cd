"""The server's program: Algorithm 2 of the paper.

It holds the layers behind the cut, one replica a device, serves their micro-batches first come first served,
aggregates the complete models at the end of each round and sends every device its part of the new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

from pipar.compute import Compute
from pipar.config import Link
from pipar.errors import PiparError, ProtocolError, TrainingError
from pipar.events import Observer, Progress, Replanned, ignore
from pipar.ledger import Ledger
from pipar.link.channel import Transport
from pipar.link.shaping import Traffic
from pipar.methods import Method, Plan
from pipar.planner.profile import Profile
from pipar.protocol.messages import Body, Kind, Message
from pipar.protocol.orders import Orders, Returned, plan_body
from pipar.reception import Reception
from pipar.replanning import MeasuredLink, Replanner
from pipar.session import Pieces, Session, expect, read_end
from pipar.stages import Work
from pipar.trace import DOWNLINK, SERVER, Recorder
from pipar.turns import Turns
from pipar.validation import Validation


class ServerPart(Protocol):
    """M^s_k, the server-side model of one device."""

    def decode(self, message: Message) -> Any: ...
    def forward(self, decoded: Any) -> Any: ...
    def backward(self, forwarded: Any) -> Any: ...
    def encode(self, gradient: Any) -> Body: ...
    def step(self) -> None: ...
    def take_loss(self) -> float | None: ...
    def take_momentum(self, body: Body) -> None: ...


class Learner(Protocol):
    """The global model and its replicas."""

    def replica(self, device: str) -> ServerPart: ...
    def pack(self, device: str) -> Body: ...
    def part_bytes(self, device: str) -> int: ...
    def model_bytes(self) -> int: ...
    def aggregate(self, returned: Sequence[Returned]) -> None: ...
    def move(self, split_points: Mapping[str, int]) -> Mapping[str, Body]: ...
    def evaluator(self) -> Callable[[Any], tuple[float, int]]: ...


@dataclass(frozen=True)
class Training:
    """What the server is to do: the method, for how long, and with which devices."""

    method: Method
    epochs: int
    patience: int | None
    orders: Mapping[str, Orders]  # by device name, with the first plans; who is not in it is not admitted
    links: Mapping[str, Link]
    validation: Sequence[tuple[int, Any]] = ()  # held-out batches: samples, and what the evaluator takes
    profile: Profile | None = None  # of the network; a device's own has to be of the same one


#: Returns every device's plan for the profiles that the devices brought with them.
PlanJoined = Callable[[Mapping[str, Profile]], Mapping[str, Plan]]


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
        plan_joined: PlanJoined | None = None,
        replanner: Replanner | None = None,
        observe: Observer = ignore,
    ) -> None:
        self._training = training
        self._orders = dict(training.orders)  # with the plans that are in force
        self._learner = learner
        self._pool = pool
        self._background = background
        self._recorder = recorder
        self._ledger = ledger
        self._plan_joined = plan_joined
        self._replanner = replanner
        self._measured: dict[str, MeasuredLink] = {}
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._reception = Reception(
            self._orders,
            training.links,
            ledger,
            network=training.profile,
            welcomes_at_once=plan_joined is None,
            keep_spans=keep_spans,
            observe=observe,
        )
        self._sessions = self._reception.sessions
        self._turns: Turns | None = None
        self._validation = Validation(learner.evaluator, training.validation, background=background, ledger=ledger)
        self._samples = 0
        self._iterations = 0

    # --- who takes part

    async def admit(self, transport: Transport) -> None:
        """Let a device in and take in its messages until it leaves; one call a connection."""
        await self._reception.admit(transport)

    def close(self) -> None:
        """Let running work end, so that nobody changes the model any more."""
        self._pool.close()
        self._background.close()

    async def farewell(self) -> None:
        """Return when every device has left, after 'stop training'."""
        await self._reception.farewell()

    def _welcome_all(self, sessions: list[Session], plan_joined: PlanJoined) -> None:
        """Welcome everybody, with plans for the profiles that they have brought."""
        brought = {session.device: session.profile for session in sessions}
        plans = plan_joined({name: profile for name, profile in brought.items() if profile is not None})
        changed = self._changed(plans)
        if changed:
            self._learner.move({name: plan.split_point for name, plan in changed.items()})
            self._put_into_force(1, changed)
        for session in sessions:
            self._reception.welcome(session)

    # --- the training

    async def train(self) -> None:
        """Train for all epochs, or until validation has not improved for `patience` of them."""
        sessions = await self._reception.everybody()
        try:
            if self._plan_joined is not None:
                self._welcome_all(sessions, self._plan_joined)
            await self._train(sessions)
        except PiparError as error:
            for session in sessions:
                session.refuse(error)
            raise
        finally:
            if self._replanner is not None:
                self._replanner.close()

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
        if epoch < self._training.epochs:
            await self._adopt_new_plans(epoch)
        await self._distribute(groups[0], epoch)
        # The trace of this epoch travels while the next one's first batch is computed.
        for session in self._sessions.values():
            session.asked_for = epoch
            session.channel.post(Message(Kind.REPORT, epoch))
        has_loss = any(loss is not None for _, loss in served)
        self._ledger.add_round(epoch, samples, loss_sum / samples if has_loss else None)
        self._validation.start(epoch)  # beside the next round, at the lowest priority

    async def _serve(self, session: Session, epoch: int) -> tuple[Returned, float | None]:
        """Serve one device's epoch; a device that breaks the protocol ends the training."""
        try:
            return await self._serve_epoch(session, epoch)
        except ProtocolError as error:
            raise TrainingError(f"{session.device} broke the protocol: {error}") from error

    async def _serve_epoch(self, session: Session, epoch: int) -> tuple[Returned, float | None]:
        """Serve one device until 'stop epoch'; return its trained part and its summed loss."""
        replica, orders = self._learner.replica(session.device), self._orders[session.device]
        if session.awaits_momentum:
            await self._take_momentum(session, replica, epoch)
        splits = orders.plan.split_point < orders.layers
        pieces, losses = Pieces(epoch, orders.plan.micro_batches if splits else 0), []
        while (message := await session.next()).kind is Kind.ACTIVATION:
            pieces.take(message)
            await self._serve_micro_batch(session, replica, message)
            if pieces.whole:
                losses.append(await self._finish_iteration(session, replica, message))
        if self._turns is not None:
            self._turns.finish(session.device)
        end = read_end(message, epoch)
        if not pieces.whole or end.samples != (pieces.samples if splits else end.samples):
            raise ProtocolError(f"{message} says {end.samples} samples, but {pieces.samples} came in whole batches.")
        self._measure(session, epoch, end.uplink)
        model = await session.next()
        expect(model, Kind.MODEL, epoch)
        known = [batch for batch in losses if batch is not None]
        return Returned(session.device, model.body, end.samples), sum(known) if known else end.loss_sum

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
        await self._validation.copied()  # before the global model changes
        work = Work("aggregate", epoch, size_bytes=self._learner.model_bytes() * len(returned))
        try:
            await self._pool.run((work, partial(self._learner.aggregate, returned)))
        except ProtocolError as error:  # it names the device whose model cannot be used
            raise TrainingError(str(error)) from error

    async def _distribute(self, group: list[Session], epoch: int) -> None:
        """Send each device of a group its part of the global model; one split point is packed once."""
        packed: dict[int, Body] = {}
        for session in group:
            split_point = self._orders[session.device].plan.split_point
            if split_point not in packed:
                device = session.device
                work = Work("pack", epoch, size_bytes=self._learner.part_bytes(device))
                packed[split_point] = await self._pool.run((work, partial(self._learner.pack, device)))
            session.channel.post(Message(Kind.MODEL, epoch, body=packed[split_point]))

    # --- other plans between two rounds

    def _measure(self, session: Session, epoch: int, uplink: Traffic) -> None:
        """Note what an epoch's traffic says of a device's link; with the last device's, of all links."""
        self._measured[session.device] = MeasuredLink(uplink, session.channel.meter.read(epoch))
        if len(self._measured) < len(self._sessions):
            return
        self._ledger.measure_links(epoch, self._measured)
        if self._replanner is not None:
            # Before the models travel: a choice that needs no time is made when they have come.
            self._replanner.observe_round(self._measured)
        self._measured = {}

    async def _adopt_new_plans(self, epoch: int) -> None:
        """Go on by other plans if some were chosen: devices are told theirs, and layers change sides."""
        plans = self._replanner.take() if self._replanner is not None else None
        changed = self._changed(plans or {})
        if not changed:
            return
        moved = {
            name: plan.split_point
            for name, plan in changed.items()
            if plan.split_point != self._orders[name].plan.split_point
        }
        move = Work("install", epoch, size_bytes=self._learner.model_bytes() * len(moved))
        leaving = await self._pool.run((move, partial(self._learner.move, moved))) if moved else {}
        self._put_into_force(epoch + 1, changed)
        for name, plan in changed.items():
            session = self._sessions[name]
            session.channel.post(Message(Kind.PLAN, epoch, body=plan_body(plan)))
            if name in moved and self._orders[name].keep_momentum:
                session.channel.post(Message(Kind.STATE, epoch, body=leaving[name]))
                session.awaits_momentum = True

    def _changed(self, plans: Mapping[str, Plan]) -> dict[str, Plan]:
        return {name: plan for name, plan in sorted(plans.items()) if plan != self._orders[name].plan}

    def _put_into_force(self, first_epoch: int, changed: Mapping[str, Plan]) -> None:
        for name, plan in changed.items():
            self._orders[name] = replace(self._orders[name], plan=plan)
        plans = {name: orders.plan for name, orders in sorted(self._orders.items())}
        self._ledger.replan(first_epoch, plans)
        self._observe(Replanned(first_epoch, {name: asdict(plan) for name, plan in plans.items()}))

    async def _take_momentum(self, session: Session, replica: ServerPart, epoch: int) -> None:
        """Take the momentum of the layers that a device has handed over, before it trains on without them."""
        message = await session.next()
        expect(message, Kind.STATE, epoch - 1)
        session.awaits_momentum = False
        install = Work("install", epoch, size_bytes=message.body.size_bytes, device=session.device)
        await self._pool.run((install, partial(replica.take_momentum, message.body)))

    # --- small things

    async def _should_stop(self, epoch: int) -> bool:
        """Decide with the validation losses up to the epoch before: this epoch's is computed beside the next."""
        if self._training.patience is None:
            return False
        return await self._ledger.stale_epochs(epoch - 1) >= self._training.patience

    def _work(self, device: str, message: Message) -> Callable[[str], Work]:
        orders = self._orders[device]
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


async def _all(coroutines: list[Any]) -> list[Any]:
    """Return all results; the first failure ends the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
