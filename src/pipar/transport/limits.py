"""The resources that a server grants a peer, and how soon a dead peer is noticed."""

from __future__ import annotations

from dataclasses import dataclass

#: A device has to send a complete HELLO within this time after its stream was accepted.
HELLO_TIMEOUT_S = 20.0
#: Memory of a message in addition to its body, counted because a peer may send empty messages.
MESSAGE_BYTES = 256


@dataclass(frozen=True)
class Keepalive:
    """A silent peer is pinged after `every_s`, and counts as lost if it does not answer within `timeout_s`.

    The answer may wait for data that the systems hold. With 20 s a link of 0.5 Mbit/s did not count as lost, and by
    default one of 0.1 Mbit/s did not, either (decision 036): devices show signs of life of their own (`heartbeat.py`),
    and these pings are the last resort.
    """

    every_s: float = 30.0
    timeout_s: float = 20.0

    @classmethod
    def every(cls, every_s: float) -> Keepalive:
        """Return a keepalive whose timeout is two thirds of its interval, but at most twenty seconds."""
        return cls(every_s, min(20.0, every_s * 2 / 3))

    @classmethod
    def of(cls, configured: float | str) -> Keepalive:
        """Return the keepalive of a configuration; "auto" tolerates the slowest links."""
        return cls(timeout_s=200.0) if isinstance(configured, str) else cls.every(configured)


@dataclass(frozen=True)
class RateLimit:
    """At most `burst` in a short time, and `per_second` on average."""

    burst: int
    per_second: float


class TokenBucket:
    """Enforces a rate limit: starts with `burst` tokens, and gains `per_second` tokens per second, up to `burst`."""

    def __init__(self, rate: RateLimit) -> None:
        self._rate = rate
        self._left = float(rate.burst)
        self._seen_at: float | None = None

    def take(self, now: float) -> bool:
        """Take a token and return True, or return False if none is left."""
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

    A device that reconnects has the lost stream and a new one, so a credential has two. `connections` limits all
    connections (see also `open_files.py`), and `newcomers` the streams that have not sent anything yet.

    A device whose link breaks as soon as it is made tries four times a second on average (see `backoff.py`), which is
    less than `streams` of one credential. Devices without credentials share `open_streams`. Refusals beyond `refusals`
    are delayed by `refusal_s`.

    A silent peer may ping every `ping_s`; one that pings more often is disconnected. It is half of the shortest
    keepalive that can be configured, so that a device may ping more often than its server does.
    """

    streams_per_credential: int = 2
    connections: int = 4096
    newcomers: int = 512
    read_ahead_bytes: int = 4_000_000
    window_bytes: int = 1 << 20  # of HTTP/2: what a peer may send on top before it is stopped
    first_frame_s: float = HELLO_TIMEOUT_S
    handshake_s: float = 20.0
    idle_s: float = 60.0  # a connection without a stream
    ping_s: float = 0.5
    watchers: int = 16  # of the server's health
    streams: RateLimit = RateLimit(burst=30, per_second=5.0)
    open_streams: RateLimit = RateLimit(burst=512, per_second=100.0)
    refusals: RateLimit = RateLimit(burst=50, per_second=20.0)
    refusal_s: float = 1.0
