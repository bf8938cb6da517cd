"""The bytes that a channel carries, by the epoch in which they travel."""

from __future__ import annotations

from pipar.wire.frames import Frame
from pipar.wire.messages import Kind, Message

#: They are not part of a round: their bytes and spans are counted apart.
OF_EVALUATION = frozenset({Kind.EVALUATE, Kind.SCORES})
#: Sent when their own epoch is over.
_SENT_AFTER_THEIR_EPOCH = frozenset({Kind.REPORT, Kind.TRACE, Kind.STATE})
#: Epochs whose bytes are kept. Only the server asks for them, and a peer may name any epoch.
_COUNTED_EPOCHS = 8


class ByteCounts:
    """Bytes received and sent by epoch, and those that evaluate models."""

    def __init__(self) -> None:
        self.received: dict[int, int] = {}  # by epoch
        self.sent: dict[int, int] = {}
        self._evaluation = [0, 0]  # received and sent

    def add(self, frame: Frame, *, received: bool) -> None:
        """Count a frame that was received or sent."""
        if frame.message.kind in OF_EVALUATION:
            self._evaluation[0 if received else 1] += frame.size_bytes
            return
        total, epoch = self.received if received else self.sent, travels_in(frame.message)
        total[epoch] = total.get(epoch, 0) + frame.size_bytes
        if len(total) > _COUNTED_EPOCHS:
            del total[next(iter(total))]

    def take(self, epoch: int, since: int | None = None) -> tuple[int, int]:
        """Return the bytes received and sent in an epoch, or `since` an earlier one; forget the counts up to it."""
        epochs = range(epoch if since is None else since, epoch + 1)
        received, sent = (sum(counted.get(number, 0) for number in epochs) for counted in (self.received, self.sent))
        for counted in (self.received, self.sent):
            for old in [number for number in counted if number <= epoch]:
                del counted[old]
        return received, sent

    def take_evaluation(self) -> tuple[int, int]:
        """Return the bytes received and sent to evaluate models since the last call."""
        received, sent = self._evaluation
        self._evaluation = [0, 0]
        return received, sent


def travels_in(message: Message) -> int:
    """Return the epoch in which a message is on the link."""
    return message.epoch + (message.kind in _SENT_AFTER_THEIR_EPOCH)
