"""The server's program: Algorithm 2 of the paper.

It holds the layers behind the cut, one replica a device, serves their micro-batches first come first served,
aggregates the complete models at the end of each round and sends every device its part of the new one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from pipar.errors import (
    LinkError,
    PiparError,
    ProtocolError,
    TooFewDevicesError,
    UnusableModelError,
    UnusableProfileError,
    forget_frames,
)
from pipar.events import BegunAnew, BudgetSpent, Dropped, Observer, Progress, Replanned, RoundOver, ignore
from pipar.execution.lanes import Ended, Lanes, Step
from pipar.execution.spans import DOWNLINK, SERVER, Recorder
from pipar.execution.stages import Place, Work
from pipar.methods import Method, Plan
from pipar.planner.fleet import Fleet
from pipar.planner.replanner import MeasuredLink, Replanner
from pipar.privacy.budget import PrivacyAccountant
from pipar.profiling.profile import Profile
from pipar.server.epoch_results import ResultCollector
from pipar.server.membership import AdmissionPolicy, Membership
from pipar.server.session import (
    Answer,
    Introduction,
    Pieces,
    Session,
    SquaredError,
    added_errors,
    expect,
    read_end,
)
from pipar.server.turn_order import TurnOrder
from pipar.server.validation import Validation
from pipar.transport.channel import Transport
from pipar.wire.frames import SMALL_BODY_BYTES, body_limit
from pipar.wire.messages import EMPTY, LABEL_BYTES, Body, Kind, Message, chunk_count
from pipar.wire.orders import Orders, TrainedPart, plan_body

T = TypeVar("T")

#: What a trace takes for each micro-batch of an epoch, at most.
_SPAN_BYTES = 1024
_LARGEST_TRACE = 256_000_000
#: How long the traces of the last round are waited for.
_LAST_TRACES_S = 60.0


class ServerPart(Protocol):
    """M^s_k, the server-side model of one device."""

    def decode(self, message: Message, encoding: str) -> Any: ...
    def forward(self, decoded: Any) -> Any: ...
    def backward(self, forwarded: Any) -> Any: ...
    def chunk_bytes(self, message: Message, encoding: str) -> Sequence[int]: ...  # of its gradient, chunk by chunk
    def encode(self, gradient: Any, encoding: str, place: Place) -> Body: ...  # its first chunk, at least
    def step(self) -> None: ...
    def take_loss(self) -> float | None: ...
    def take_encoding_error(self) -> tuple[float, float] | None: ...  # squared errors and values; None if exact
    def receive_momentum(self, body: Body) -> None: ...


class Learner(Protocol):
    """The global model and its replicas."""

    def replica(self, device: str) -> ServerPart: ...
    def pack(self, device: str, *, changes: bool = False) -> Body: ...
    def part_bytes(self, device: str) -> int: ...
    def model_bytes(self) -> int: ...
    def decode(self, device: str, body: Body) -> Any: ...  # of the part that it brings back
    def aggregate(self, returned: Sequence[TrainedPart], *, keep_before: bool = False) -> None: ...
    def discard_progress(self, device: str) -> None: ...  # what it has done since the last aggregation
    def keep_replicas_of(self, devices: Collection[str]) -> None: ...  # their replicas, or the one that all share
    def rewind_shared_model(self) -> None: ...  # what all have done since then to a model that they share
    def restore_point(self) -> Callable[[], None]: ...  # the global model as it is now: what is returned puts it back
    def move_cuts(self, split_points: Mapping[str, int]) -> Mapping[str, Body]: ...
    def evaluator(self) -> Callable[[Any], tuple[float, int]]: ...


@dataclass(frozen=True)
class Training:
    """What the server is to do: the method, for how long, and how patient it is with its devices."""

    method: Method
    epochs: int
    patience: int | None = None
    plans: Mapping[str, Plan] = field(default_factory=dict)  # as they were before the devices came
    min_devices: int = 1
    round_deadline_s: float | None = None  # when somebody has ended the round, nobody is waited for any longer
    resume_window_s: float = 0.0  # a link may be lost for so long
    validation: Sequence[tuple[int, Any]] = ()  # held-out batches: samples, and what the evaluator takes
    profile: Profile | None = None  # of the network; a device's own has to be of the same one


class Checkpointer(Protocol):
    """Saves the training, so that another server can go on with it."""

    async def save_if_due(self, epoch: int, *, last: bool) -> None:
        """Save the state behind a round; returns when it is copied."""

    async def finish(self) -> None:
        """Return when all is saved."""


class Enrolment(AdmissionPolicy, Protocol):
    """Who may take part, and by which orders."""

    async def begin(self, everybody: Sequence[Introduction]) -> Mapping[str, Orders]:
        """Return the first orders of all who begin the training together."""

    def join(self, who: Introduction) -> Orders:
        """Return the orders of a device that comes later; one that was here before keeps its plan."""


@dataclass(frozen=True)
class _Served:
    """What one device brought back in a round; its session may be over by now."""

    session: Session
    returned: TrainedPart
    loss_sum: float | None
    errors: tuple[SquaredError, SquaredError] = (None, None)  # of lossy encodings, up and down


@dataclass(frozen=True)
class _Counted:
    """What is left of it when it is in the new global model."""

    device: str
    samples: int
    loss_sum: float | None
    errors: tuple[SquaredError, SquaredError] = (None, None)


class Server:
    """The server, from the first device's hello to 'stop training'."""

    def __init__(
        self,
        training: Training,
        learner: Learner,
        enrolment: Enrolment,
        *,
        pool: Lanes,
        background: Lanes,
        recorder: Recorder,
        results: ResultCollector,
        keep_spans: frozenset[str] | None = None,
        session_numbers: Iterable[int] | None = None,
        real_links: bool = False,
        replanner: Replanner | None = None,
        checkpointer: Checkpointer | None = None,
        accountant: PrivacyAccountant | None = None,
        observe: Observer = ignore,
    ) -> None:
        self._accountant = accountant or PrivacyAccountant(None)
        self._training = training
        self._enrolment = enrolment
        self._orders: dict[str, Orders] = {}  # with the plans that are in force
        self._learner = learner
        self._pool = pool
        self._background = background
        self._recorder = recorder
        self._results = results
        self._replanner = replanner
        self._checkpointer = checkpointer
        self._measured: dict[str, MeasuredLink] = {}
        self._unmeasured: set[str] = set()  # devices of the round whose links are not measured yet
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._membership = Membership(
            enrolment,
            results,
            network=training.profile,
            resume_window_s=training.resume_window_s,
            numbers=session_numbers,
            real_links=real_links,
            keep_spans=keep_spans,
            accountant=self._accountant,
            observe=observe,
        )
        self._turn_order: TurnOrder | None = None
        self._taught: dict[str, int] = {}  # samples of whole batches in a shared model, by device, in this round
        self._taking_part: set[str] = set()  # who has a replica, and plans are made for
        self._deadline_s = training.round_deadline_s
        self._was_late = False  # somebody, in this round
        self._validation = Validation(learner.evaluator, training.validation, background=background, results=results)
        self._wanted = 0  # devices, if there were too few for the aggregation
        self._last_round_s = 0.0
        self.done = 0  # the last round that is complete
        self._samples = 0
        self._iterations = 0

    # --- who takes part

    async def admit(self, transport: Transport, peer: str | None = None) -> None:
        """Let a device in, or back in; one call a connection. `peer` is the name in its credential."""
        await self._membership.admit(transport, peer)

    @property
    def sessions(self) -> Sequence[Session]:
        """The sessions of all who are here, or may come back."""
        return self._membership.present()

    def plan_of(self, device: str) -> Plan:
        """Return the plan that is in force for a device."""
        return self._orders[device].plan

    def fleet(self) -> Fleet | None:
        """Return the fleet as the training has shown it; None where nothing is foreseen."""
        return self._results.fleet()

    def close(self) -> None:
        """Let running work end, so that nobody changes the model any more."""
        self._membership.close()
        self._pool.close()
        self._background.close()

    async def wait_until_left(self) -> None:
        """Return when every device has left, after 'stop training'."""
        await self._membership.wait_until_left()

    async def dismiss(self, reason: str) -> None:
        """Tell all devices, which may come again, why the training does not go on for now, and save it as it is."""
        await asyncio.gather(*(self._membership.let_go(session, reason) for session in self._membership.present()))
        # In the middle of a round the replicas have moved on, and with them what is kept of them.
        keeps_replicas = any(orders.keep_momentum for orders in self._orders.values())
        if self._checkpointer is not None and not keeps_replicas and not self._training.method.shares_server_model:
            await self._checkpointer.save_if_due(self.done, last=True)

    # --- the training

    async def train(self, done: int = 0) -> None:
        """Train for all epochs behind those that are done, or until validation has not improved for `patience`."""
        self.done = done
        try:
            await self._begin(done)
            await self._train(done)
        except PiparError as error:
            for session in self._membership.present():
                session.refuse(error)
            raise
        finally:
            if self._replanner is not None:
                self._replanner.close()

    async def _begin(self, done: int) -> None:
        """Take the first plans: those of before, or others for what the devices say of themselves."""
        orders = await self._first_orders()
        self._orders = dict(orders)
        if self._replanner is not None:
            self._replanner.begin({name: self._enrolment.link(name) for name in sorted(self._taking_part)})
        before = self._training.plans
        plans = {name: order.plan for name, order in sorted(orders.items())}
        changed = {name: plan for name, plan in plans.items() if plan != before.get(name)}
        if changed:
            self._learner.move_cuts({name: plan.split_point for name, plan in changed.items()})
            self._put_into_force(done + 1, changed)

    async def _first_orders(self) -> Mapping[str, Orders]:
        """Return the orders of all who are there, without those for whom nothing can be planned."""
        while True:
            await self._membership.joined(self._training.min_devices)
            everybody = [session.who for session in self._membership.present()]
            self._taking_part = {who.name for who in everybody}
            try:
                return await self._enrolment.begin(everybody)
            except UnusableProfileError as error:
                session = self._membership.sessions.get(error.device)
                if session is not None and session.who in everybody:  # it may have come anew, as another machine
                    await self._membership.dismiss(session, error)

    async def _train(self, done: int) -> None:
        epoch = done
        while epoch < self._training.epochs and not await self._should_stop(epoch):
            group = await self._assemble_group(epoch)
            if self._would_exceed_budget(group, epoch):
                break
            if not group or not await self._round(epoch + 1, group):
                continue  # everybody was lost: the same round again, with who comes
            epoch += 1
        if self._checkpointer is not None:
            # Before the devices leave: after a crash nobody could train the last rounds again.
            await self._checkpointer.save_if_due(epoch, last=True)
            await self._checkpointer.finish()
        self._membership.stop(epoch)
        await self._wait_for_results(epoch)

    def _would_exceed_budget(self, group: list[Session], done: int) -> bool:
        """Return whether somebody has no release left for the next round; whoever watches is told who."""
        over = self._accountant.would_exceed(session.device for session in group)
        if over is None:
            return False
        assert self._accountant.noise is not None
        assert self._accountant.noise.target_epsilon is not None
        self._observe(BudgetSpent(done, *over, self._accountant.noise.target_epsilon))
        return True

    async def _wait_for_results(self, epoch: int) -> None:
        """Return when all results are out; who keeps its last trace to itself is not waited for."""
        try:
            async with asyncio.timeout(_LAST_TRACES_S + 5 * self._last_round_s):  # behind the models, on slow links
                await self._results.complete(epoch)
        except TimeoutError:
            for session in self._membership.present():
                self._results.lose(session.device)
            await self._results.complete(epoch)

    async def _assemble_group(self, done: int) -> list[Session]:
        """Return who takes part in the next round, when there are enough: all that are there, with the latest model."""
        await self._membership.joined(max(self._training.min_devices, self._wanted))
        self._wanted = 0
        self._let_go()
        for session in self._membership.present():
            if session.owes_acknowledgements:  # it has taken nothing for rounds: what is kept for it must not grow
                self._membership.end(session, LinkError("it has not taken the messages of several rounds"))
            elif session.abandoned > done:  # the round that it was too late for is trained again
                await self._membership.dismiss(session, f"round {done + 1} begins anew", again=True)
            elif not session.is_welcome:
                await self._try_to_welcome(session, done)
        # Who has joined in the meantime waits for the next round.
        first = [session for session in self._membership.present() if session.is_welcome]
        if self._training.method.one_device_at_a_time:
            first = first[:1]
        await self._distribute([session for session in first if session.has_model_of != done], done)
        return [session for session in self._membership.present() if session.is_welcome]

    async def _try_to_welcome(self, session: Session, done: int) -> None:
        try:
            await self._welcome(session, done)
        except ProtocolError as error:  # nothing can be planned for it: that is no reason to stop for the others
            await self._membership.dismiss(session, error)

    async def _welcome(self, session: Session, done: int) -> None:
        """Give a device its orders and make its replica."""
        name = session.device
        if name not in self._orders:
            self._orders[name] = self._enrolment.join(session.who)
            self._learner.move_cuts({name: self._orders[name].plan.split_point})
            self._put_into_force(done + 1, {name: self._orders[name].plan}, f"{name} joined")
        if name not in self._taking_part and self._replanner is not None:  # others were planned for without it
            self._replanner.join(name, self._enrolment.link(name))
        self._taking_part.add(name)
        self._limit(session)
        self._membership.welcome(session, self._orders[name])
        self._learner.discard_progress(name)  # it may have been here before, and the others have trained on since
        # Copying the layers behind the cut takes a while: before the round's clock starts.
        await self._pool.run((Work("install", device=name), partial(self._learner.replica, name)))

    def _let_go(self) -> None:
        """Free the replicas of those who are gone, and plan for the others: who comes anew gets another one."""
        gone = self._taking_part - self._membership.sessions.keys()
        if self._replanner is not None:
            for device in sorted(gone):
                self._replanner.leave(device)
        # Also those that a checkpoint had of devices which have not come back.
        self._learner.keep_replicas_of(self._membership.sessions.keys())
        self._taking_part -= gone

    async def _round(self, epoch: int, group: list[Session]) -> bool:
        """One round: from the devices' first loads to their new models; return whether anybody brought one back."""
        began = self._loop.time()
        self._taught, self._was_late = {}, False
        turns = [[session] for session in group] if self._training.method.one_device_at_a_time else [group]
        put_back = self._learner.restore_point() if len(turns) > 1 else None
        counted: list[_Counted] = []
        served: list[_Served] = []
        try:
            for number, sessions in enumerate(turns):
                if number > 0:  # split learning hands the weights on
                    counted += await _to_the_end(self._aggregate(epoch, served))
                here = [session for session in sessions if not session.is_over]
                # Who was to be the first may have been lost meanwhile.
                behind = [session for session in here if number > 0 or session.has_model_of != epoch - 1]
                await self._distribute(behind, epoch if number > 0 else epoch - 1)
                served = await self._serve_all(here, epoch)
        except BaseException:
            if put_back is not None:
                put_back()  # no log tells of a part of a round
            raise
        # The new model, what is said of it and what is saved of it belong together.
        return await _to_the_end(self._end_round(epoch, counted, served, began))

    async def _end_round(self, epoch: int, counted: list[_Counted], served: list[_Served], began: float) -> bool:
        """Make the new model, tell everybody and save it; return whether there is one."""
        counted += await self._aggregate(epoch, served)
        if not await self._close_round(epoch, counted, began):
            return False
        self._results.check()
        if self._checkpointer is not None:
            await self._checkpointer.save_if_due(epoch, last=False)
        return True

    async def _close_round(self, epoch: int, in_model: list[_Counted], began: float) -> bool:
        """Send everybody the new model and write the round down; return whether there is one."""
        if not in_model:
            await self._begin_anew(epoch)
            return False
        one_by_one = self._training.method.one_device_at_a_time
        self._let_go()
        if epoch < self._training.epochs:
            await self._adopt_new_plans(epoch)
        counted = {one.device: one.samples for one in in_model}
        present = [session for session in self._membership.present() if session.is_welcome]
        await self._distribute(present[:1] if one_by_one else present, epoch)
        # The trace of this epoch travels while the next one's first batch is computed.
        reporting = [session for session in present if session.device in counted and not session.is_over]
        for session in reporting:
            session.ask_for_trace(epoch)
        losses = [one.loss_sum for one in in_model if one.loss_sum is not None]
        samples, seconds = sum(counted.values()), self._loop.time() - began
        self._results.add_round(
            epoch,
            counted,
            sum(losses) / samples if losses else None,
            reporting=[session.device for session in reporting],
            seconds=seconds,
            errors=(_relative(one.errors[0] for one in in_model), _relative(one.errors[1] for one in in_model)),
            epsilon=self._accountant.largest_epsilon(),
        )
        self.done, self._last_round_s = epoch, seconds
        partly = {} if one_by_one else self._partly(counted)
        self._observe(RoundOver(epoch, counted, partly, self._accountant.epsilons()))
        self._validation.start(epoch)  # beside the next round, at the lowest priority
        return True

    async def _begin_anew(self, epoch: int) -> None:
        """Leave a round in which nobody counts as if it had not been."""
        if self._training.method.shares_server_model:
            await self._pool.run(
                (Work("install", epoch, size_bytes=self._learner.model_bytes()), self._learner.rewind_shared_model)
            )
        if self._training.method.one_device_at_a_time and self._was_late and self._deadline_s is not None:
            self._deadline_s *= 2  # all were too late, and would be again
        self._observe(BegunAnew(epoch, self._deadline_s))

    def _partly(self, counted: Mapping[str, int]) -> dict[str, int]:
        """Return whose batches stay in a model that all share, although they do not count: they cannot be taken out."""
        return {name: samples for name, samples in sorted(self._taught.items()) if name not in counted}

    # --- one round of several devices

    async def _serve_all(self, group: list[Session], epoch: int) -> list[_Served]:
        """Serve all devices of a round; return what those brought back that were not lost and not too late."""
        if self._training.method.shares_server_model:
            self._turn_order = TurnOrder(session.device for session in group)
        self._measured, self._unmeasured = {}, {session.device for session in group}
        ends_at = self._next_deadline()
        for session in group:
            session.has_model_of = None  # it trains on what it has
            session.begin(epoch)
        serving = {self._loop.create_task(self._serve(session, epoch)): session for session in group}
        brought: list[_Served] = []
        try:
            waiting = set(serving)
            while waiting:
                # Where each has a replica, somebody is to have ended before a round is.
                is_timed = ends_at is not None and (self._turn_order is not None or bool(brought))
                left_s = max(0.0, ends_at - self._loop.time()) if ends_at is not None and is_timed else None
                done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                brought += [served for task in done if (served := task.result()) is not None]
                if not done:  # the deadline has passed
                    late = [task for task in waiting if self._is_too_late(serving[task], has_ended=bool(brought))]
                    for task in late:
                        await self._abandon(task, serving[task], epoch)
                    waiting -= set(late)
                    ends_at = self._next_deadline()
        finally:
            for task in serving:
                task.cancel()
        return sorted(brought, key=lambda one: one.returned.device)

    def _next_deadline(self) -> float | None:
        """Return when a round that goes on now has to be over."""
        if self._deadline_s is None:
            return None
        self._membership.waits_until = ends_at = self._loop.time() + self._deadline_s
        return ends_at

    def _is_too_late(self, session: Session, *, has_ended: bool) -> bool:
        """Return whether a round does without a device that has not ended it at the deadline.

        It does when somebody has ended it, and in split learning, where others have their turn. Where devices take
        turns batch by batch, who holds up the others is too late, and they are not.
        """
        if self._turn_order is None or self._training.method.one_device_at_a_time:
            return True
        holder = self._turn_order.held_up_by()
        return has_ended if holder is None else session.device == holder and session.is_awaited

    async def _serve(self, session: Session, epoch: int) -> _Served | None:
        """Serve one device's epoch; None if it was lost on the way. What it does wrong ends its session only."""
        try:
            return await self._serve_epoch(session, epoch)
        except LinkError as error:
            await self._drop(session, epoch, str(error))
            forget_frames(error)  # the session keeps it for who asks again
        except ProtocolError as error:
            await self._dismiss(session, epoch, error)
            forget_frames(error)
        return None

    async def _dismiss(self, session: Session, epoch: int, error: ProtocolError) -> None:
        await self._drop(session, epoch, f"it broke the protocol: {error}")
        await self._membership.dismiss(session, error)

    async def _abandon(self, task: asyncio.Task[Any], session: Session, epoch: int) -> None:
        """End the round without a device that is too late; it takes part in the next one."""
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._was_late = True
        await self._drop(session, epoch, f"it was not ready within {self._deadline_s:g} s")
        session.abandon(epoch)

    async def _drop(self, session: Session, epoch: int, reason: str) -> None:
        """Discard all that a device has done in this round."""
        if session.computing is not None:  # compute is never cancelled
            await asyncio.gather(session.computing, return_exceptions=True)
        if self._training.method.one_device_at_a_time:  # nobody else has changed the model since its turn began
            install = Work("install", epoch, size_bytes=self._learner.model_bytes(), device=session.device)
            await self._compute(session, (install, self._learner.rewind_shared_model))
        elif self._turn_order is None or self._turn_order.is_with(
            session.device
        ):  # or no half batch of it is in a shared model
            self._learner.discard_progress(session.device)
        session.awaits_momentum = False
        if self._turn_order is not None:
            self._turn_order.finish(session.device)
        self._measured_or_gone(session.device, epoch)
        self._observe(Dropped(session.device, epoch, reason))

    async def _serve_epoch(self, session: Session, epoch: int) -> _Served:
        """Serve one device until 'stop epoch'; return its trained part and its summed loss."""
        replica, orders = self._learner.replica(session.device), self._orders[session.device]
        if session.awaits_momentum:
            await self._take_momentum(session, replica, epoch)
        splits = orders.plan.split_point < orders.layers
        pieces, losses, errors = Pieces(epoch, orders.plan.micro_batches if splits else 0), [], []
        while (message := await self._next(session)).kind is Kind.ACTIVATION:
            pieces.take(message)
            if pieces.samples > session.who.samples:
                raise ProtocolError(f"{message} is more than the {session.who.samples} samples that it has.")
            await self._serve_micro_batch(session, replica, message)
            if pieces.whole:
                loss, error = await self._finish_iteration(session, replica, message)
                losses.append(loss)
                errors.append(error)
        if self._turn_order is not None:
            self._turn_order.finish(session.device)
        end = read_end(message, epoch)
        if splits and (not pieces.whole or end.samples != pieces.samples):
            raise ProtocolError(f"{message} says {end.samples} samples, but {pieces.samples} came in whole batches.")
        if end.samples != session.who.samples:
            raise ProtocolError(f"{message} says {end.samples} samples, but the device has {session.who.samples}.")
        if session.asked_for:
            raise ProtocolError(f"{message} came before the trace of epoch {session.asked_for[0]}.")
        self._measured[session.device] = session.measure(end, epoch)
        self._measured_or_gone(session.device, epoch)
        model = await session.next()
        expect(model, Kind.MODEL, epoch)
        session.is_training = False
        returned = await self._take_model(session, model, end.samples)
        known = [batch for batch in losses if batch is not None]
        return _Served(session, returned, sum(known) if known else end.loss_sum, (end.error, added_errors(errors)))

    async def _take_model(self, session: Session, message: Message, samples: int) -> TrainedPart:
        """Return what a device brings back; changes are decoded when they come, on any core, while others train on."""
        device, body = session.device, message.body
        if body.encoding != "changes":
            return TrainedPart(device, body, samples)  # its tensors lie in it
        size = self._learner.part_bytes(device)
        decode = Work("decode", message.epoch, size_bytes=size, device=device, encoding="changes")
        state = await self._pool.run((decode, partial(self._learner.decode, device, body)))
        return TrainedPart(device, EMPTY, samples, state)

    async def _next(self, session: Session) -> Message:
        """Return what a device says next; behind it nothing comes any more of a round that it was too late for."""
        message = await session.next()
        if session.is_late and message.epoch > session.abandoned:
            session.is_late = False
            self._limit(session)
        return message

    async def _serve_micro_batch(self, session: Session, replica: ServerPart, message: Message) -> None:
        if self._turn_order is not None:
            await self._turn_order.mine(session.device)
        plan = self._orders[session.device].plan
        work = self._work(session.device, message)
        first, *others = (
            replace(work("encode"), size_bytes=size, encoding=plan.down)
            for size in replica.chunk_bytes(message, plan.down)
        )
        answer = Answer(session, message)
        decode = replace(work("decode"), encoding=plan.up, chunks=chunk_count(message.body))
        job = (
            (decode, partial(replica.decode, message, encoding=plan.up)),
            (work("fs"), replica.forward),
            (work("bs"), replica.backward),
            (first, partial(replica.encode, encoding=plan.down, place=(*answer.place, session.device))),
        )
        if others:  # the first chunk leaves while they are encoded
            follow = tuple((chunk, answer.encode_next) for chunk in others)
            await self._compute(session, *job, *follow, ended=answer.ended_behind(len(job)))
        else:
            answer.begin(await self._compute(session, *job))

    async def _compute(self, session: Session, *steps: Step, ended: Ended | None = None) -> Any:
        if self._turn_order is None:
            return await self._pool.run(*steps, ended=ended)
        # A model that is shared may not be handed on while somebody still computes on it, wanted or not.
        session.computing = self._loop.create_task(self._pool.run(*steps, ended=ended))
        return await asyncio.shield(session.computing)

    async def _finish_iteration(
        self, session: Session, replica: ServerPart, message: Message
    ) -> tuple[float | None, SquaredError]:
        """Apply the gradients of a batch; return its summed loss, and what a lossy encoding has lost of it."""
        step = self._work(session.device, message)("step")
        if self._turn_order is not None:  # before it is done: from here on nothing keeps it from being done
            self._taught[session.device] = self._taught.get(session.device, 0) + message.batch_samples
        await self._compute(session, (step, replica.step))
        # While nobody else's forward, in another thread, adds to those of a shared model.
        loss, error = replica.take_loss(), replica.take_encoding_error()
        if self._turn_order is not None:
            self._turn_order.done(session.device)
        self._report_progress(session, message, loss)
        return loss, error

    async def _aggregate(self, epoch: int, served: list[_Served]) -> list[_Counted]:
        """Make the new global model; return who counts in it: a device whose model cannot be used is dismissed.

        What they brought back is in that model then, and `served` holds it no longer.
        """
        await self._validation.copied()  # before the global model changes
        while served:
            work = Work("aggregate", epoch, size_bytes=self._learner.model_bytes() * len(served))
            keep_before = any(self._sends_changes(one.session, epoch) for one in served)
            aggregate = partial(self._learner.aggregate, [one.returned for one in served], keep_before=keep_before)
            try:
                await self._pool.run((work, aggregate))
            except TooFewDevicesError as error:
                await self._start_over(epoch, served, error)
                served.clear()
            except UnusableModelError as error:
                for one in served:
                    if one.returned.device == error.device:
                        await self._dismiss(one.session, epoch, error)
                served[:] = [one for one in served if one.returned.device != error.device]
            else:
                break
        counted = [_Counted(one.returned.device, one.returned.samples, one.loss_sum, one.errors) for one in served]
        served.clear()
        return counted

    async def _start_over(self, epoch: int, served: list[_Served], error: TooFewDevicesError) -> None:
        """Discard a round that too few have ended for the aggregation; it begins anew when one more is there."""
        self._wanted = len(served) + 1
        for one in served:
            await self._drop(one.session, epoch, str(error))

    async def _distribute(self, group: list[Session], epoch: int) -> None:
        """Send each device of a group its part of the global model; one split point is packed once."""
        packed: dict[tuple[int, bool], Body] = {}
        for session in group:
            device, orders = session.device, self._orders[session.device]
            version = (epoch, orders.plan.split_point)
            # Who has the model before this one, cut in the same place, needs to know its changes only.
            changes = session.installed == (epoch - 1, version[1]) and self._sends_changes(session, epoch)
            key = (version[1], changes)
            if key not in packed:
                form = "changes" if changes else "raw"
                work = Work("pack", epoch, size_bytes=self._learner.part_bytes(device), encoding=form)
                packed[key] = await self._pool.run((work, partial(self._learner.pack, device, changes=changes)))
            session.channel.post(Message(Kind.MODEL, epoch, body=packed[key]))
            session.has_model_of, session.installed = epoch, version

    def _sends_changes(self, session: Session, epoch: int) -> bool:
        return self._orders[session.device].sends_changes(session.channel.rate_bps(epoch))

    # --- other plans between two rounds

    def _measured_or_gone(self, device: str, epoch: int) -> None:
        """When nobody's traffic is missing any more, see what it says of the links."""
        self._unmeasured.discard(device)
        if self._unmeasured or not self._measured:
            return
        measured, self._measured = self._measured, {}
        self._results.measure_links(epoch, measured)
        if self._replanner is not None:
            # Before the models travel: a choice that needs no time is made when they have come.
            self._replanner.observe_round(measured)

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
        leaving = await self._pool.run((move, partial(self._learner.move_cuts, moved))) if moved else {}
        self._put_into_force(epoch + 1, changed, self._replanner.why if self._replanner is not None else "")
        for name, plan in changed.items():
            session = self._membership.sessions.get(name)
            if session is None or not session.is_welcome:
                continue  # who comes later is told then
            self._limit(session)
            session.channel.post(Message(Kind.PLAN, epoch, body=plan_body(plan)))
            if name in moved and self._orders[name].keep_momentum:
                session.channel.post(Message(Kind.STATE, epoch, body=leaving[name]))
                session.awaits_momentum = True

    def _changed(self, plans: Mapping[str, Plan]) -> dict[str, Plan]:
        known = {name: plan for name, plan in sorted(plans.items()) if name in self._orders}
        return {name: plan for name, plan in known.items() if plan != self._orders[name].plan}

    def _put_into_force(self, first_epoch: int, changed: Mapping[str, Plan], why: str = "") -> None:
        for name, plan in changed.items():
            self._orders[name] = replace(self._orders[name], plan=plan)
        plans = {name: orders.plan for name, orders in sorted(self._orders.items())}
        self._results.replan(first_epoch, plans)
        self._observe(Replanned(first_epoch, {name: asdict(plan) for name, plan in plans.items()}, why))

    async def _take_momentum(self, session: Session, replica: ServerPart, epoch: int) -> None:
        """Take the momentum of the layers that a device has handed over, before it trains on without them."""
        message = await session.next()
        expect(message, Kind.STATE, epoch - 1)
        session.awaits_momentum = False
        install = Work("install", epoch, size_bytes=message.body.size_bytes, device=session.device)
        await self._pool.run((install, partial(replica.receive_momentum, message.body)))

    # --- small things

    def _limit(self, session: Session) -> None:
        """Let a device send no more than its plan needs."""
        orders, profile = self._orders[session.device], self._training.profile
        plan = orders.plan
        session.allowed = plan.micro_batches
        if profile is None:
            return
        # A left-over sample may join the last batch; with batch statistics a short batch is cut into two and three.
        piece = max(-(-(orders.batch_size + 1) // plan.micro_batches), 3 if orders.batch_statistics else 1)
        momentum = self._learner.model_bytes() if orders.keep_momentum else 0
        session.model_bytes = max(
            self._learner.part_bytes(session.device), session.model_bytes if session.is_late else 0
        )
        iterations = session.who.samples // orders.batch_size + 2
        activation = piece * (profile.output_bytes(plan.split_point) + LABEL_BYTES)
        # What still comes of a round that was abandoned is as large as the plan of that round let it be.
        session.activation_bytes = max(activation, session.activation_bytes if session.is_late else 0)
        limits = {
            Kind.ACTIVATION: session.activation_bytes,
            Kind.MODEL: session.model_bytes + SMALL_BODY_BYTES,
            Kind.STATE: momentum + SMALL_BODY_BYTES,
            Kind.TRACE: min(_LARGEST_TRACE, SMALL_BODY_BYTES + _SPAN_BYTES * iterations * (plan.micro_batches + 1)),
        }
        session.channel.limit(body_limit(limits))

    async def _should_stop(self, epoch: int) -> bool:
        """Decide with the validation losses up to the epoch before: this epoch's is computed beside the next."""
        if self._training.patience is None:
            return False
        return await self._results.stale_epochs(max(0, epoch - 1)) >= self._training.patience

    def _work(self, device: str, message: Message) -> Callable[[str], Work]:
        orders = self._orders[device]
        place = (message.epoch, message.iteration, message.micro_batch)
        first, last = orders.plan.split_point + 1, orders.layers
        size = message.body.size_bytes
        return lambda kind: Work(kind, *place, first, last, message.samples, size, device)

    def _report_progress(self, session: Session, message: Message, loss_sum: float | None) -> None:
        session.served = (message.epoch, message.iteration)
        self._samples += message.batch_samples
        self._iterations += 1
        # Once for all devices: a report goes through them, which would cost K * K for an iteration of each.
        sessions = self._membership.sessions.values()
        if self._observe is not ignore and sessions and self._iterations % len(sessions) == 0:
            place = (SERVER, message.epoch, message.iteration, self._samples)
            downlinks = [session.recorder.busy_s.get(DOWNLINK, 0.0) for session in sessions]
            busy = {**self._recorder.busy_s, DOWNLINK: sum(downlinks) / len(downlinks)}
            loss = None if loss_sum is None else loss_sum / message.batch_samples
            served = {session.device: session.served for session in sessions}
            self._observe(Progress(*place, loss, self._loop.time(), busy, served))


def _relative(errors: Iterable[SquaredError]) -> float | None:
    """Return the norm of all errors over that of all values; None if nothing was coded lossily."""
    lost, values = added_errors(errors) or (0.0, 0.0)
    return math.sqrt(lost / values) if values else None


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of what may not be left half done: who cancels it waits for its end."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise
