"""The evaluation of a new global model on the devices, between two rounds.

No round is lost: a device that does not answer in time has no values, and is not asked again before it has answered.
All others wait for it, so each time it is late, twice as many rounds pass before it is asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from pipar.errors import LinkError
from pipar.events import DeviceScores
from pipar.execution.lanes import Lanes
from pipar.execution.work import Work
from pipar.server.device_messages import EvaluationAnswer
from pipar.server.device_scores import mean_over_devices, worst_decile
from pipar.server.interfaces import Learner, Training
from pipar.server.plan_updates import PlanUpdates
from pipar.server.session import Session
from pipar.server.timeouts import SLOWEST_BPS
from pipar.units import format_seconds
from pipar.wire.messages import Body, Kind, Message

#: How long the server waits for scores, apart from the times that a model needs on a slow link.
_LEAST_TIMEOUT_S, _ROUNDS = 60.0, 5.0
_TRANSFERS = 2.0

_Asked = dict[Session, "asyncio.Future[EvaluationAnswer]"]


class DeviceEvaluation:
    """Sends models to evaluate, and collects the scores."""

    def __init__(self, learner: Learner, lanes: Lanes, plans: PlanUpdates, training: Training) -> None:
        self._learner = learner
        self._lanes = lanes
        self._plans = plans
        self._deadline_s, self._last_epoch = training.round_deadline_s, training.epochs
        self._loop = asyncio.get_running_loop()
        self._running: asyncio.Task[DeviceScores] | None = None
        self._late: dict[str, int] = {}  # by device, in all its sessions: how often it did not answer in time
        self._asked_from: dict[str, int] = {}  # the epoch of the next model that such a device is sent

    async def start(self, epoch: int, group: Sequence[Session], round_s: float) -> asyncio.Task[DeviceScores] | None:
        """Ask these devices to evaluate the current model, if any of them can; return the task that collects scores.

        `round_s` is how long the round took: an evaluation may take several times that.
        """
        self._running = None
        if not any(session.evaluation.is_meant for session in group):
            return None
        began_at, missing = self._loop.time(), {}
        asked: _Asked = {}
        for session in group:
            refusal = self._refusal(session, epoch)
            if refusal is None:
                asked[session] = await self._ask(session, epoch)
            else:
                missing[session.device] = refusal
        limit_s = self._limit_s(asked, epoch, round_s)
        self._running = self._loop.create_task(self._collect(epoch, asked, missing, began_at, limit_s))
        return self._running

    async def finish(self) -> None:
        """Return when the running evaluation, if any, is over."""
        if self._running is not None:
            await asyncio.wait([self._running])

    def _refusal(self, session: Session, epoch: int) -> str | None:
        if session.is_over:
            return "it was lost"
        if epoch < min(first := self._asked_from.get(session.device, 0), self._last_epoch):
            return f"it was too late before: it is asked again for epoch {first}"
        if self._plans.orders(session.device).protects:
            return "updates get noise, and scores would be sent without it"
        return session.evaluation.refusal

    async def _ask(self, session: Session, epoch: int) -> asyncio.Future[EvaluationAnswer]:
        """Send a device the layers that it does not have."""
        has_part, frozen = session.has_model_of == epoch, not session.evaluation.has_frozen
        body = await self._pack(session.device, epoch, has_part=has_part, frozen=frozen)
        session.channel.counts.take_evaluation()  # what came late of the one before
        return session.evaluate(Message(Kind.EVALUATE, epoch, body=body))

    async def _pack(self, device: str, epoch: int, *, has_part: bool, frozen: bool) -> Body:
        size = self._learner.model_bytes(frozen=frozen)
        size -= self._learner.part_bytes(device, frozen=frozen) if has_part else 0
        pack = partial(self._learner.pack_to_evaluate, device, has_part=has_part, frozen=frozen)
        body: Body = await self._lanes.run((Work("pack", epoch, size_bytes=size, device=device), pack))
        return body

    def _limit_s(self, asked: _Asked, epoch: int, round_s: float) -> float:
        if self._deadline_s is not None:
            return self._deadline_s
        rates = (session.channel.rate_bps(epoch) for session in asked)
        slowest = min((rate for rate in rates if rate), default=None)
        # A device that takes its data more slowly does not keep the others waiting.
        travels_s = 0.0 if slowest is None else 8 * self._learner.model_bytes() / max(slowest, SLOWEST_BPS)
        return _LEAST_TIMEOUT_S + _ROUNDS * round_s + _TRANSFERS * travels_s

    async def _collect(
        self, epoch: int, asked: _Asked, missing: dict[str, str], began_at: float, limit_s: float
    ) -> DeviceScores:
        if asked:
            await asyncio.wait(asked.values(), timeout=limit_s)
        names, values, up, down = self._learner.higher_is_better, {}, 0, 0
        for session, answer in asked.items():
            if answer.done():
                found = _read(answer, names)
            else:
                session.evaluation.give_up()
                self._postpone(session.device, epoch)
                found = f"it did not answer within {format_seconds(limit_s)}"
            if isinstance(found, str):
                missing[session.device] = found
            else:
                values[session.device] = found
            received, sent = session.channel.counts.take_evaluation()
            up, down = up + received, down + sent
        return DeviceScores(
            epoch,
            dict(sorted(values.items())),
            mean_over_devices(values, names),
            worst_decile(values, names),
            dict(sorted(missing.items())),
            {name: higher for name, higher in names.items() if any(name in of for of in values.values())},
            self._loop.time() - began_at,
            up,
            down,
        )

    def _postpone(self, device: str, epoch: int) -> None:
        self._late[device] = self._late.get(device, 0) + 1
        self._asked_from[device] = epoch + 1 + 2 ** self._late[device]


def _read(answer: asyncio.Future[EvaluationAnswer], names: Mapping[str, bool]) -> dict[str, float] | str:
    """Return a device's values, or why it has none."""
    error = answer.exception()
    if error is not None:
        return str(error) if isinstance(error, LinkError) else f"it broke the protocol: {error}"
    found = answer.result()
    if found.refusal:
        return found.refusal
    return {"samples": found.samples, **{name: found.values[name] for name in names if name in found.values}}
