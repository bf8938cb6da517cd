"""Reports of the training's progress: whole batches, samples, losses and busy lanes."""

from __future__ import annotations

import asyncio

from pipar.events import Observer, Progress, ignore
from pipar.execution.spans import DOWNLINK, SERVER, Recorder
from pipar.server.membership import Membership
from pipar.server.session import Session
from pipar.wire.messages import Message


class ProgressReporter:
    """Emits a Progress event about once in an iteration of the whole fleet."""

    def __init__(self, membership: Membership, recorder: Recorder, observe: Observer) -> None:
        self._membership = membership
        self._recorder = recorder
        self._observe = observe
        self.devices: int | None = None  # that take part in the round; None: all that are present
        self._samples = 0
        self._iterations = 0

    def note_batch(self, session: Session, message: Message, loss_sum: float | None) -> None:
        """A batch of a device has been trained."""
        session.note_batch(message)
        self._samples += message.batch_samples
        self._iterations += 1
        # Once for all devices: a report visits each of them, which would cost K * K for an iteration of each.
        devices = len(self._membership.sessions) if self.devices is None else self.devices
        if self._observe is not ignore and devices and self._iterations % devices == 0:
            self._report(message, None if loss_sum is None else loss_sum / message.batch_samples)

    def _report(self, message: Message, loss: float | None) -> None:
        sessions = self._membership.sessions.values()
        place = (SERVER, message.epoch, message.iteration, self._samples)
        downlinks = [session.recorder.busy_s.get(DOWNLINK, 0.0) for session in sessions]
        busy = {**self._recorder.busy_s, DOWNLINK: sum(downlinks) / len(downlinks)}
        served = {session.device: session.round.last_batch for session in sessions}
        self._observe(Progress(*place, loss, asyncio.get_running_loop().time(), busy, served))
