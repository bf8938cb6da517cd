"""Signs of life: a device that has nothing to send says that it is alive, and is known to be gone if it does not.

gRPC has pings of its own, but their times are fixed when a connection is made, before anything is known of its link and
of the rounds. They are the last resort.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pipar.errors import LinkError
from pipar.json_records import is_number
from pipar.wire.messages import Kind, Message

#: What a server may ask for; a device would spend its time on signs of life, or never send one.
_LEAST_EVERY_S, _LONGEST_S = 0.05, 86_400.0


class Silence:
    """For how long one side has waited for a frame, and the longest that it had to since it was last asked."""

    def __init__(self) -> None:
        self.peer_shows_life = False  # it sends ALIVE when it has nothing else to send
        self._since: float | None = None  # None: this side does not wait
        self._longest_s = 0.0

    def begin(self, now: float) -> None:
        self._since = now

    def end(self, now: float) -> None:
        if self._since is not None:
            self._longest_s = max(self._longest_s, now - self._since)
        self._since = None

    def cancel(self) -> None:
        """Stop waiting: the connection is lost."""
        self._since = None

    def note_alive(self) -> None:
        """The peer has shown a sign of life; its silences before the first one say nothing."""
        if not self.peer_shows_life:
            self.peer_shows_life, self._longest_s = True, 0.0

    def seconds(self, now: float, not_before: float = 0.0) -> float:
        """Return for how long this side has waited for a frame, counted from `not_before` at the earliest."""
        return 0.0 if self._since is None else max(0.0, now - max(self._since, not_before))

    def take_longest_s(self) -> float:
        """Return the longest silence since the last call."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s


class Connection(Protocol):
    """The parts of a channel that signs of life need."""

    sent_at: float
    silence: Silence

    @property
    def is_attached(self) -> bool: ...
    @property
    def has_something_to_send(self) -> bool: ...
    def post(self, message: Message) -> None: ...
    def lose(self, reason: LinkError) -> None: ...


class Heartbeat:
    """A device's signs of life, as often as its server asks; it gives up a connection on which nothing arrives."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._every_s = self._silent_after_s = 0.0
        self._patience = 1.0
        self._beating: asyncio.Task[None] | None = None

    def follow(self, told: Mapping[str, Any]) -> None:
        """Show signs of life as the server asks, if it does."""
        every_s, silent_after_s = told.get("alive_every_s"), told.get("silent_after_s")
        if not is_number(every_s, _LEAST_EVERY_S, _LONGEST_S) or not is_number(silent_after_s, 1.0, _LONGEST_S):
            return
        self._every_s, self._silent_after_s = float(every_s), float(silent_after_s)
        self._patience = max(1.0, self._patience / 2)
        if self._beating is None:
            self._channel.post(Message(Kind.ALIVE))  # at once: the server counts silences from here on
            self._beating = self._loop.create_task(self._beat())

    async def _beat(self) -> None:
        waking = Waking(self._loop.time)
        while True:
            await waking.sleep(self._every_s / 2)
            now, channel = self._loop.time(), self._channel
            if not channel.is_attached:
                continue
            if now - channel.sent_at >= self._every_s and not channel.has_something_to_send:
                channel.post(Message(Kind.ALIVE))
            silent_s = channel.silence.seconds(now, waking.late_at)
            if silent_s > self._silent_after_s * self._patience:
                self._patience *= 2  # it may be a link that needs this long for one frame
                channel.lose(LinkError(f"Nothing arrived from the server for {silent_s:.1f} s."))

    async def end(self) -> None:
        """Show no more signs of life."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)


class Waking:
    """Sleeps, and remembers when it last woke late: then this process was busy, and frames may have arrived unread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.late_at = 0.0
        self._clock = clock

    async def sleep(self, seconds: float) -> float:
        """Return how much too late it woke."""
        due_at = self._clock() + seconds
        await asyncio.sleep(seconds)
        late_s = max(0.0, self._clock() - due_at)
        if late_s > max(0.1, seconds / 2):
            self.late_at = self._clock()
        return late_s
