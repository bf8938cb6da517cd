"""The gradient of one micro-batch on its way back to the device, chunk by chunk as it is encoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipar.execution.stages import Place
from pipar.server.session import Session
from pipar.wire.messages import Body, Chunks, Kind, Message, Payload


class GradientReply:
    """Sends the gradient of one micro-batch; the first chunk leaves while the others are encoded."""

    def __init__(self, session: Session, to: Message) -> None:
        self._session = session
        self._place = (to.epoch, to.iteration, to.micro_batch, to.samples, to.batch_samples)
        self._body: Body | None = None
        self._is_wanted = True

    @property
    def place(self) -> Place:
        """Epoch, iteration and number of the micro-batch."""
        return self._place[:3]

    def send_first(self, body: Body) -> None:
        """Send the first chunk, or all if there is one, unless the device has been excluded from the round."""
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
            elif place >= steps and self._is_wanted:
                self._session.channel.add_chunk(self._chunks, value)

        return step_ended

    @property
    def _chunks(self) -> Chunks:
        assert self._body is not None
        assert self._body.chunks is not None
        return self._body.chunks
