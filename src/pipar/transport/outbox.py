"""The messages of one side of a channel that wait to be sent, or for the peer's acknowledgement."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from pipar.errors import ProtocolError
from pipar.transport.limits import MESSAGE_BYTES
from pipar.wire.frames import Frame, cut_message
from pipar.wire.messages import UNNUMBERED, Message


class _Posted:
    """A message, and how many of its frames have been sent."""

    __slots__ = ("_frames", "_posted_at", "_sent", "message", "sequence")

    def __init__(self, message: Message, sequence: int, posted_at: float) -> None:
        self.message = message
        self.sequence = sequence
        self._posted_at = posted_at
        self._sent = 0  # frames
        self._frames: Iterator[Frame] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether its next frame is encoded."""
        chunks = self.message.body.chunks
        return chunks is None or self._sent < len(chunks.ready)

    def next_frame(self, session: int, acknowledged: int) -> tuple[Frame, float]:
        """Return the next frame and the time from which it could have been sent."""
        if self._frames is None:
            self._frames = cut_message(self.message, session, self.sequence, acknowledged)
        chunks = self.message.body.chunks
        ready_at = self._posted_at if chunks is None else max(self._posted_at, chunks.ready[self._sent].at)
        self._sent += 1
        return next(self._frames), ready_at


class Outbox:
    """Messages in the order in which they are sent.

    Numbered messages are kept until the peer has acknowledged them, so that they can be sent again over another
    transport. Unnumbered ones, which open or end a connection, overtake them and are sent once.
    """

    def __init__(self) -> None:
        self.last_number = 0  # of the last message that was added
        self._unnumbered: deque[_Posted] = deque()
        self._numbered: deque[_Posted] = deque()
        self._unacknowledged: deque[_Posted] = deque()

    def add(self, message: Message, now: float) -> None:
        if message.kind in UNNUMBERED:
            self._unnumbered.append(_Posted(message, 0, now))
        else:
            self.last_number += 1
            posted = _Posted(message, self.last_number, now)
            self._unacknowledged.append(posted)
            self._numbered.append(posted)

    def next_frame(self, session: int, acknowledged: int) -> tuple[Frame, float] | None:
        """Return the next frame and the time from which it could have been sent; None if no frame is ready."""
        # The queue of messages that overtake is looked at between any two chunks of a large message.
        for queue in (self._unnumbered, self._numbered):
            if queue and queue[0].is_ready:
                frame, ready_at = queue[0].next_frame(session, acknowledged)
                if frame.chunk == frame.chunks - 1:
                    queue.popleft()
                return frame, ready_at
        return None

    @property
    def has_ready_frame(self) -> bool:
        return any(queue[0].is_ready for queue in (self._unnumbered, self._numbered) if queue)

    @property
    def has_unnumbered(self) -> bool:
        """Whether a message waits that overtakes the numbered ones."""
        return bool(self._unnumbered)

    def acknowledge(self, number: int) -> None:
        """Forget the messages up to this number: the peer has them."""
        if number > self.last_number:
            raise ProtocolError(
                f"The peer acknowledges message {number}, but only {self.last_number} messages were sent."
            )
        while self._unacknowledged and self._unacknowledged[0].sequence <= number:
            self._unacknowledged.popleft()

    def start_again(self, greeting: Message | None, now: float) -> None:
        """Send the greeting first, then all unacknowledged messages from their beginning."""
        self._unnumbered = deque([_Posted(greeting, 0, now)] if greeting is not None else [])
        self._numbered = deque(_Posted(posted.message, posted.sequence, now) for posted in self._unacknowledged)
        self._unacknowledged = deque(self._numbered)

    @property
    def unacknowledged(self) -> int:
        """How many messages are kept because the peer may not have them."""
        return len(self._unacknowledged)

    @property
    def held_bytes(self) -> int:
        """How many bytes are kept of them."""
        return sum(posted.message.body.size_bytes + MESSAGE_BYTES for posted in self._unacknowledged)

    def clear(self) -> None:
        for kept in (self._unnumbered, self._numbered, self._unacknowledged):
            kept.clear()
