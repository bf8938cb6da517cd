"""How devices use the server-side models M^s_k: each its own replica, or all of them one model in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from pipar.errors import UnusableStepError
from pipar.execution.lanes import Ended, Lanes, Step
from pipar.execution.work import Work
from pipar.methods import Method
from pipar.server.interfaces import Kept, Learner, ServerPart
from pipar.server.session import Session
from pipar.server.shared_model_turns import TurnOrder
from pipar.wire.messages import Message


class Replicas:
    """One replica for each device: devices neither wait for each other nor change each other's model."""

    is_shared = False

    def __init__(self, learner: Learner, pool: Lanes) -> None:
        self._learner = learner
        self._pool = pool

    def of(self, device: str) -> ServerPart:
        """Return the server-side model of a device."""
        return self._learner.replica(device)

    @property
    def kept(self) -> Kept:
        """The activations that devices need not send again."""
        return self._learner.kept

    def begin_round(self) -> None:
        """A new round begins."""

    def begin_turns(self, devices: Iterable[str]) -> None:
        """These devices train now, at the same time."""

    async def wait_for_turn(self, device: str) -> None:
        """Return when a device may use its model."""

    async def compute(self, session: Session, *steps: Step, ended: Ended | None = None) -> Any:  # noqa: ARG002
        """Run steps on a device's model and return the last one's result."""
        return await self._pool.run(*steps, ended=ended)

    def note_step(self, device: str, message: Message) -> None:
        """The step that applies a whole batch of a device begins."""

    def end_turn(self, device: str) -> None:
        """A whole batch of a device is applied."""

    def finish(self, device: str) -> None:
        """A device has no more batches in this round."""

    async def discard(self, session: Session, epoch: int) -> None:  # noqa: ARG002
        """Undo what a device has trained in this round, as far as possible."""
        self._learner.discard_progress(session.device)

    async def discard_round(self, epoch: int) -> None:
        """Undo a round that no device has finished; each device's own work is discarded already."""

    def is_too_late(self, session: Session, *, any_finished: bool) -> bool:  # noqa: ARG002
        """Return whether the round ends without a device that has not finished at the deadline."""
        return True

    def partly_trained(self, counted: Mapping[str, int]) -> dict[str, int]:  # noqa: ARG002
        """Return the samples of devices that do not count and yet are in the model, because they cannot be undone."""
        return {}


class SharedReplica(Replicas):
    """One server-side model for all devices, which use it in turn."""

    is_shared = True

    def __init__(self, learner: Learner, pool: Lanes, method: Method) -> None:
        super().__init__(learner, pool)
        self._one_device_at_a_time = method.one_device_at_a_time
        self._turns = TurnOrder(())
        self._trained: dict[str, int] = {}  # samples of whole batches in the model, by device, in this round
        self._step_begun: tuple[str, int] | None = None  # the device and samples of a step that may still fail

    def begin_round(self) -> None:
        self._trained = {}
        self._step_begun = None

    def begin_turns(self, devices: Iterable[str]) -> None:
        self._turns = TurnOrder(devices)

    async def wait_for_turn(self, device: str) -> None:
        await self._turns.wait_for(device)

    async def compute(self, session: Session, *steps: Step, ended: Ended | None = None) -> Any:
        # To the end, even if the caller is cancelled: until then no other device may use the model.
        work = asyncio.get_running_loop().create_task(self._pool.run(*steps, ended=ended))
        session.compute(work)
        return await asyncio.shield(work)

    def note_step(self, device: str, message: Message) -> None:
        # Before the step ends: once it has begun, nothing stops it.
        self._trained[device] = self._trained.get(device, 0) + message.batch_samples
        self._step_begun = (device, message.batch_samples)

    def end_turn(self, device: str) -> None:
        self._step_begun = None
        self._turns.end_turn(device)

    def finish(self, device: str) -> None:
        self._turns.finish(device)

    async def discard(self, session: Session, epoch: int) -> None:
        half_done = self._failed_step(session.device, await session.computed())
        # One at a time: no other device has changed the model since this one's turn began.
        if self._one_device_at_a_time or half_done:
            size = self._learner.model_bytes()
            install = Work("install", epoch, size_bytes=size, device=session.device)
            await self.compute(session, (install, self._learner.rewind_shared_model))
        elif self._turns.is_turn_of(session.device):  # otherwise no unfinished batch of it is in the model
            self._learner.discard_progress(session.device)

    def _failed_step(self, device: str, failure: BaseException | None) -> bool:
        """Take back the samples of a step that failed; return whether it may have changed a part of the weights."""
        if failure is None or self._step_begun is None or self._step_begun[0] != device:
            return False
        (_, samples), self._step_begun = self._step_begun, None
        if isinstance(failure, UnusableStepError):
            self._trained[device] -= samples
            return False
        self._trained = {}  # the whole round is taken back: only its start is known to be consistent
        return True

    async def discard_round(self, epoch: int) -> None:
        await self._pool.run(
            (Work("install", epoch, size_bytes=self._learner.model_bytes()), self._learner.rewind_shared_model)
        )

    def is_too_late(self, session: Session, *, any_finished: bool) -> bool:
        """Return whether the round ends without a device that has not finished at the deadline.

        In split learning it does, because others wait for their turn. Where devices take turns batch by batch, only a
        device that holds up the others is too late. If none does, all of them are, once any device has finished.
        """
        if self._one_device_at_a_time:
            return True
        holder = self._turns.held_up_by()
        return any_finished if holder is None else session.device == holder and session.is_awaited

    def partly_trained(self, counted: Mapping[str, int]) -> dict[str, int]:
        if self._one_device_at_a_time:  # the model was rewound
            return {}
        return {name: samples for name, samples in sorted(self._trained.items()) if samples and name not in counted}
