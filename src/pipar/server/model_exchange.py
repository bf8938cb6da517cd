"""Device-side models on their way: received from devices, aggregated, and sent as parts of the new global model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pipar.execution.lanes import Lanes
from pipar.execution.work import Work
from pipar.server.interfaces import Learner, ServerPart
from pipar.server.plan_updates import PlanUpdates
from pipar.server.session import Session
from pipar.server.validation import Validation
from pipar.wire.messages import EMPTY, Body, Kind, Message
from pipar.wire.orders import TrainedPart


class ModelExchange:
    """Moves models between the learner and the devices, whole or as changes, on the server's lanes."""

    def __init__(self, learner: Learner, pool: Lanes, plans: PlanUpdates, validation: Validation) -> None:
        self._learner = learner
        self._pool = pool
        self._plans = plans
        self._validation = validation

    async def receive(self, session: Session, message: Message, samples: int) -> TrainedPart:
        """Return the part in MODEL; changes are decoded when they arrive, on any core, while others train."""
        device, body = session.device, message.body
        if body.encoding != "changes":
            return TrainedPart(device, body, samples)  # its tensors lie in the body
        size = self._learner.part_bytes(device, frozen=False)
        decode = Work("decode", message.epoch, size_bytes=size, device=device, encoding="changes")
        state = await self._pool.run((decode, partial(self._learner.decode, device, body)))
        return TrainedPart(device, EMPTY, samples, state)

    async def receive_state(self, session: Session, replica: ServerPart, message: Message, epoch: int) -> None:
        """Install the optimiser state of layers that a device has handed over."""
        install = Work("install", epoch, size_bytes=message.body.size_bytes, device=session.device)
        await self._pool.run((install, partial(replica.receive_state, message.body)))

    async def model_is_free(self) -> None:
        """Return when the last validation has its copy of the global model, which may then change."""
        await self._validation.copied()

    async def aggregate(self, epoch: int, sessions: Sequence[Session], returned: Sequence[TrainedPart]) -> None:
        """Make the new global model: M = sum over k of D^k / sum(D) M^k, or as the configured aggregation says."""
        work = Work("aggregate", epoch, size_bytes=self._learner.model_bytes(frozen=False) * len(returned))
        keep_before = any(self._sends_changes(session, epoch) for session in sessions)
        await self._pool.run((work, partial(self._learner.aggregate, returned, keep_before=keep_before)))

    async def distribute(self, group: Sequence[Session], epoch: int) -> None:
        """Send each device of a group its part of the global model; each split point is packed once."""
        packed: dict[tuple[int, bool, bool], Body] = {}
        for session in group:
            split_point = self._plans.orders(session.device).plan.split_point
            # A device that has the previous model, cut in the same place, needs only the changes.
            changes = session.installed == (epoch - 1, split_point) and self._sends_changes(session, epoch)
            # One that has had any model of this part has its frozen parameters.
            frozen = session.installed is None or session.installed[1] != split_point
            key = (split_point, changes, frozen)
            if key not in packed:
                packed[key] = await self._pack(session.device, epoch, changes=changes, frozen=frozen)
            session.send_model(Message(Kind.MODEL, epoch, body=packed[key]), split_point)

    async def _pack(self, device: str, epoch: int, *, changes: bool, frozen: bool) -> Body:
        form = "changes" if changes else "raw"
        work = Work("pack", epoch, size_bytes=self._learner.part_bytes(device, frozen=frozen), encoding=form)
        pack = partial(self._learner.pack, device, changes=changes, frozen=frozen)
        body: Body = await self._pool.run((work, pack))
        return body

    def _sends_changes(self, session: Session, epoch: int) -> bool:
        return self._plans.orders(session.device).sends_changes(session.channel.rate_bps(epoch))

    def hold(self) -> Callable[[], None]:
        """Return a function that restores the global model as it is now."""
        return self._learner.restore_point()
