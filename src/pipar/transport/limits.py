"""How much one peer may take of a server before it is known, and how soon a dead peer is noticed."""

from __future__ import annotations

from dataclasses import dataclass

#: A device has said HELLO, all of it, so long after its stream was taken, or is sent away.
HELLO_TIMEOUT_S = 20.0
#: What a message takes beside its body: a peer may send empty ones.
MESSAGE_BYTES = 256


@dataclass(frozen=True)
class Keepalive:
    """A silent peer is asked whether it lives after `every_s`, and is gone if it does not answer within `timeout_s`.

    The answer waits behind up to 2.4 MB that are under way: with 20 s a link of 1 Mbit/s is slow, and not dead.
    """

    every_s: float = 30.0
    timeout_s: float = 20.0

    @classmethod
    def every(cls, every_s: float) -> Keepalive:
        """Return a keepalive that waits two thirds of its interval for the answer, but twenty seconds at most."""
        return cls(every_s, min(20.0, every_s * 2 / 3))


@dataclass(frozen=True)
class RateLimit:
    """So many at once, and so many a second in the long run."""

    burst: int
    per_second: float


class TokenBucket:
    """What is left of a rate: full at first, less by one each time, and full again in time."""

    def __init__(self, rate: RateLimit) -> None:
        self._rate = rate
        self._left = float(rate.burst)
        self._seen_at: float | None = None

    def take(self, now: float) -> bool:
        """Take one and return True, or return False if none is left at this moment."""
        since_s = 0.0 if self._seen_at is None else now - self._seen_at
        self._left = min(self._rate.burst, self._left + since_s * self._rate.per_second)
        self._seen_at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


@dataclass(frozen=True)
class Limits:
    """What a server grants.

    A device that comes back holds a stream that it has lost and a new one, so one credential has two. `connections` is
    how many there are in all, and `newcomers` how many streams may not have said anything yet.

    A device whose link breaks as soon as it is made tries four times a second in the mean (see `backoff.py`): that is
    less than `streams` of one credential. Where devices have none they share `open_streams`. Refusals beyond
    `refusals` are given after `refusal_s` only.
    """

    streams_per_credential: int = 2
    connections: int = 4096
    newcomers: int = 512
    read_ahead_bytes: int = 4_000_000
    first_frame_s: float = HELLO_TIMEOUT_S
    handshake_s: float = 20.0
    idle_s: float = 60.0  # a connection without a stream
    watchers: int = 16  # of the server's health
    streams: RateLimit = RateLimit(burst=30, per_second=5.0)
    open_streams: RateLimit = RateLimit(burst=512, per_second=100.0)
    refusals: RateLimit = RateLimit(burst=50, per_second=20.0)
    refusal_s: float = 1.0
