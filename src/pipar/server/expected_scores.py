"""What one device says about the global model: whether it can evaluate it, and its answer that is waited for."""

from __future__ import annotations

import asyncio

from pipar.errors import LinkError, ProtocolError
from pipar.server.device_messages import EvaluationAnswer, Introduction, read_scores
from pipar.wire.messages import Message

_STILL_SILENT = "it has not answered for an earlier model yet"


class ExpectedScores:
    """The evaluation of models by one device, in one session."""

    def __init__(self, introduction: Introduction) -> None:
        self.samples = introduction.evaluation_samples
        self.refusal: str | None = introduction.no_evaluation or None
        #: It has samples for this, even if it cannot use them.
        self.is_meant = bool(self.samples or self.refusal)
        if not self.samples and self.refusal is None:
            self.refusal = "it has no samples to evaluate on"
        self.has_frozen = False  # it was sent the parameters that are not trained
        self._epoch = 0
        self._answer: asyncio.Future[EvaluationAnswer] | None = None
        self._end: LinkError | None = None  # why no answer can come any more

    def expect(self, epoch: int) -> asyncio.Future[EvaluationAnswer]:
        """Return the device's answer to a model of an epoch, to come."""
        self.has_frozen = True
        self._epoch, self._answer = epoch, asyncio.get_running_loop().create_future()
        if self._end is not None:  # the device was lost while its model was packed
            self._answer.set_exception(self._end)
        return self._answer

    def give_up(self) -> None:
        """Wait no longer for an answer; the device is not asked again before it has sent it."""
        if self._answer is not None:
            self._answer.cancel()
            self.refusal = _STILL_SILENT

    def take(self, message: Message) -> bool:
        """Take an answer; return whether it is still waited for. Raise ProtocolError if it was never asked for."""
        if message.epoch > self._epoch or not self.has_frozen:
            raise ProtocolError(f"{message} arrived, but the server has sent no such model to evaluate.")
        if message.epoch < self._epoch or self._answer is None or self._answer.done():
            if message.epoch == self._epoch and self.refusal == _STILL_SILENT:
                self.refusal = None
            return False
        try:
            answer = read_scores(message, self.samples)
        except ProtocolError as error:
            self._answer.set_exception(error)
            raise
        self.refusal = answer.refusal or None
        self._answer.set_result(answer)
        return True

    def fail(self, reason: Exception) -> None:
        """The session is over: no answer will come."""
        self._end = LinkError(f"it was lost during the evaluation: {reason}")
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(self._end)
