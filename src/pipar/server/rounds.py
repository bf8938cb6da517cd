"""One round after another: all devices are served at the same time or in turn, up to the deadline, and aggregated."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pipar.errors import TooFewDevicesError, UnusableModelError
from pipar.events import Observer, RoundRestarted
from pipar.server.deadlines import FixedDeadline, LearnedDeadline
from pipar.server.device_messages import SquaredError, added_errors
from pipar.server.interfaces import Deadline, Training
from pipar.server.membership import Membership
from pipar.server.model_exchange import ModelExchange
from pipar.server.replicas import Replicas
from pipar.server.serving import DeviceUpdate, Serving
from pipar.server.session import Session

T = TypeVar("T")
_Task = asyncio.Task[DeviceUpdate | None]
_Tasks = dict[_Task, Session]


@dataclass(frozen=True)
class Contribution:
    """What remains of a device's update when it is part of the new global model."""

    device: str
    samples: int
    loss_sum: float | None
    errors: tuple[SquaredError, SquaredError] = (None, None)


@dataclass
class Round:
    """The record of one round: from the devices' first loads to the new global model."""

    epoch: int
    began_at: float  # on the server's clock
    passes: int = 1  # over each device's samples
    updates: list[DeviceUpdate] = field(default_factory=list)  # not aggregated yet
    contributions: list[Contribution] = field(default_factory=list)  # in the new global model
    any_late: bool = False

    @property
    def samples(self) -> dict[str, int]:
        """Samples of the devices that count, by name."""
        return {one.device: one.samples for one in self.contributions}

    @property
    def seconds(self) -> float:
        """How long the round has taken so far."""
        return asyncio.get_running_loop().time() - self.began_at

    @property
    def train_loss(self) -> float | None:
        losses = [one.loss_sum for one in self.contributions if one.loss_sum is not None]
        return sum(losses) / (self.passes * sum(self.samples.values())) if losses else None

    @property
    def errors(self) -> tuple[float | None, float | None]:
        """Relative errors of lossy encodings, up and down."""
        up, down = (_relative(one.errors[way] for one in self.contributions) for way in (0, 1))
        return up, down


def _relative(errors: Iterable[SquaredError]) -> float | None:
    """Return the norm of all errors over that of all values; None if nothing was encoded lossily."""
    lost, values = added_errors(errors) or (0.0, 0.0)
    return math.sqrt(lost / values) if values else None


class Rounds:
    """Serves and aggregates the devices of each round; a device that is lost or too late is left out."""

    def __init__(
        self,
        training: Training,
        membership: Membership,
        replicas: Replicas,
        serving: Serving,
        exchange: ModelExchange,
        observe: Observer,
    ) -> None:
        self._passes = training.local_epochs
        self._one_device_at_a_time = training.method.one_device_at_a_time
        self._timeouts = timeouts = membership.timeouts
        self._deadline: Deadline = training.deadline or (
            LearnedDeadline(timeouts, replicas)
            if timeouts.chooses_deadline
            else FixedDeadline(training.round_deadline_s, membership, replicas)
        )
        self._replicas = replicas
        self._serving = serving
        self._exchange = exchange
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._wanted = 0

    def take_wanted(self) -> int:
        """Return how many devices the next round needs if the last one had too few; 0 if it had enough."""
        wanted, self._wanted = self._wanted, 0
        return wanted

    async def serve(self, epoch: int, group: Sequence[Session], began_at: float | None = None) -> Round:
        """Serve a round, which has begun now if not before; return it with the updates of those that finished it."""
        self._replicas.begin_round()
        self._timeouts.gathered(group)
        this = Round(epoch, self._loop.time() if began_at is None else began_at, self._passes)
        turns = [[session] for session in group] if self._one_device_at_a_time else [list(group)]
        restore = self._exchange.hold() if len(turns) > 1 else None
        try:
            await self._serve_turns(this, turns)
        except BaseException:
            if restore is not None:
                restore()  # a part of a round is in no log
            raise
        return this

    async def _serve_turns(self, this: Round, turns: Sequence[Sequence[Session]]) -> None:
        for number, sessions in enumerate(turns):
            if number > 0:  # split learning hands the weights on
                await run_to_end(self.aggregate(this))
            present = [session for session in sessions if not session.is_over]
            # The device that was to be the first one, and has its model, may have been lost meanwhile.
            without = [session for session in present if number > 0 or session.has_model_of != this.epoch - 1]
            await self._exchange.distribute(without, this.epoch if number > 0 else this.epoch - 1)
            this.updates = await self._serve_all(this, present)

    async def _serve_all(self, this: Round, group: Sequence[Session]) -> list[DeviceUpdate]:
        """Serve devices at the same time; return the updates of those that were not lost and not too late."""
        self._deadline.begin(group)
        self._serving.begin(group, this.epoch, self._timeouts.signs_of_life)
        serving = {self._loop.create_task(self._serving.serve(session, this.epoch)): session for session in group}
        updates: list[DeviceUpdate] = []
        try:
            waiting = dict(serving)
            while waiting:
                timeout_s = self._deadline.timeout_s(waiting.values(), any_finished=bool(updates))
                done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                updates += [update for task in done if (update := self._result(task, waiting[task])) is not None]
                waiting = {task: session for task, session in waiting.items() if task not in done}
                if not done:  # the deadline has passed
                    waiting = await self._end_without_late(this, waiting, any_finished=bool(updates))
        finally:
            for task in serving:
                task.cancel()
        return sorted(updates, key=lambda update: update.returned.device)

    def _result(self, task: _Task, session: Session) -> DeviceUpdate | None:
        update = task.result()
        if update is not None:
            self._timeouts.finished(session, session.measured)
        else:
            self._timeouts.left_out(session)
        return update

    async def _end_without_late(self, this: Round, waiting: _Tasks, *, any_finished: bool) -> _Tasks:
        """Exclude the devices that are too late; return the others."""
        late = self._deadline.late(waiting.values(), any_finished=any_finished)
        for task, session in waiting.items():
            if session in late:
                await self._abandon(this, task, session, late[session])
        left = {task: session for task, session in waiting.items() if session not in late}
        self._deadline.restart(left.values(), any_late=bool(late))
        return left

    async def _abandon(self, this: Round, task: _Task, session: Session, why: str) -> None:
        """End the round without a device that is too late; it takes part in the next one."""
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        this.any_late = True
        self._timeouts.left_out(session)
        await self._serving.drop(session, this.epoch, why)
        session.abandon(this.epoch)

    async def aggregate(self, this: Round) -> None:
        """Make the new global model of all updates; a device whose model cannot be used is dismissed.

        The updates, which hold whole models, are released.
        """
        await self._exchange.model_is_free()
        updates = this.updates
        while updates:
            try:
                await self._exchange.aggregate(
                    this.epoch, [update.session for update in updates], [update.returned for update in updates]
                )
            except TooFewDevicesError as error:
                await self._wait_for_more(this, error)
            except UnusableModelError as error:
                await self._exclude(this, error)
            else:
                break
        this.contributions += [
            Contribution(update.returned.device, update.returned.samples, update.loss_sum, update.errors)
            for update in updates
        ]
        updates.clear()

    async def _wait_for_more(self, this: Round, error: TooFewDevicesError) -> None:
        """Discard a round with too few updates for the aggregation; it starts over when one more device is present."""
        self._wanted = len(this.updates) + 1
        for update in this.updates:
            await self._serving.drop(update.session, this.epoch, str(error))
        this.updates.clear()

    async def _exclude(self, this: Round, error: UnusableModelError) -> None:
        for update in this.updates:
            if update.returned.device == error.device:
                await self._serving.dismiss(update.session, this.epoch, error)
        this.updates[:] = [update for update in this.updates if update.returned.device != error.device]

    async def discard(self, this: Round) -> None:
        """Undo a round in which no device counts; it starts over."""
        await self._replicas.discard_round(this.epoch)
        if this.any_late:
            self._deadline.lengthen(one_at_a_time=self._one_device_at_a_time)
        self._observe(RoundRestarted(this.epoch, self._deadline.seconds))


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of work that may not be left half done: a caller that is cancelled waits for its end."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise
