"""The rate of one direction of a link, in bits per second over all bytes sent: emulated, and measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from pipar.units import LIMITLESS_BPS

#: With less, a measured rate is unreliable: the gaps between frames matter too much.
ENOUGH_BYTES = 64_000
#: A measured rate covers the latest seconds of traffic, because a link may change during a long epoch.
_RECENT_S = 5.0


class RateOverTime(Protocol):
    """A rate that may change."""

    def end(self, start: float, bits: float) -> float:
        """Return when `bits` that start at `start` are sent: the integral of the rate from start to end is `bits`."""

    def at(self, time: float) -> float | None:
        """Return the rate at this time; None means no limit."""


@dataclass(frozen=True, slots=True)
class Rates:
    """A rate over time: each of `cycle` for `every_s` seconds, repeated from `since` on. None means no limit."""

    cycle: tuple[float | None, ...] = (None,)
    every_s: float = math.inf
    since: float = 0.0

    def end(self, start: float, bits: float) -> float:
        """Return when `bits` that start at `start` are sent: the integral of the rate from start to end is `bits`."""
        rate = self.cycle[0]
        if len(self.cycle) == 1:
            return start + (bits / rate if rate else 0.0)
        number = self._number(start)
        while (rate := self.cycle[number % len(self.cycle)]) is not None:
            number += 1
            changes_at = self.since + number * self.every_s
            fits = max(0.0, changes_at - start) * rate
            if bits <= fits:
                return start + bits / rate
            bits, start = bits - fits, max(start, changes_at)
        return start

    def at(self, time: float) -> float | None:
        """Return the rate at this time."""
        return self.cycle[self._number(time) % len(self.cycle)]

    def bits(self, start: float, end: float) -> float:
        """Return how many bits are sent from start to end; 0 at times without a limit."""
        rates = [rate or 0.0 for rate in self.cycle]
        if len(rates) == 1:
            return rates[0] * max(0.0, end - start)
        total, number = 0.0, self._number(start)
        while start < end:
            changes_at = min(end, self.since + (number + 1) * self.every_s)
            total += rates[number % len(rates)] * max(0.0, changes_at - start)
            start, number = max(start, changes_at), number + 1
            # Many whole cycles at once: a device may claim that a message took years.
            cycles = max(0, math.floor((end - start) / (self.every_s * len(rates))) - 1)
            total += cycles * self.every_s * math.fsum(rates)
            start, number = start + cycles * self.every_s * len(rates), number + cycles * len(rates)
        return total

    def _number(self, time: float) -> int:
        return max(0, math.floor((time - self.since) / self.every_s))


@dataclass(slots=True)
class Pacer:
    """Computes when the transmission of each frame starts and ends on a lane that sends one frame at a time.

    It uses planned times, not the times at which late timers fired, so the average rate is the configured one even
    with coarse timers. A frame that is in flight when the rate changes is sent partly at each rate.
    """

    rates: RateOverTime = field(default_factory=Rates)
    free_at: float = 0.0

    def reserve(self, ready_at: float, size_bytes: int) -> tuple[float, float]:
        """Return start and end of sending `size_bytes` that are ready at `ready_at`; the lane is busy until the end."""
        start = max(ready_at, self.free_at)
        self.free_at = self.rates.end(start, size_bytes * 8)
        return start, self.free_at


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes sent over one direction of a link, and the seconds that this took."""

    size_bytes: int = 0
    seconds: float = 0.0

    @property
    def is_enough(self) -> bool:
        return self.size_bytes >= ENOUGH_BYTES

    @property
    def rate_bps(self) -> float | None:
        """The measured rate; None if it is so high that the machines, not the link, limit it."""
        rate_bps = self.size_bytes * 8 / self.seconds if self.seconds else math.inf
        return rate_bps if rate_bps < LIMITLESS_BPS else None

    def recent(self) -> Traffic:
        """Return traffic of the same rate that is not longer than the latest seconds, so that old traffic fades."""
        if self.seconds <= _RECENT_S or not self.is_enough:
            return self
        share = max(_RECENT_S / self.seconds, ENOUGH_BYTES / self.size_bytes)
        return Traffic(math.ceil(self.size_bytes * share), self.seconds * share)


class Meter:
    """Measures one direction of a link by its ordinary traffic."""

    def __init__(self) -> None:
        self._epochs: dict[int, Traffic] = {}

    def count(self, epoch: int, size_bytes: int, seconds: float) -> None:
        """Count a frame that was on the link for this number of seconds."""
        before = self._epochs.get(epoch, Traffic())
        self._epochs[epoch] = Traffic(before.size_bytes + size_bytes, before.seconds + seconds).recent()

    def take(self, epoch: int, traffic: Traffic) -> None:
        """Set the traffic of an epoch, if it is enough for a rate."""
        if traffic.is_enough:
            self._epochs[epoch] = traffic.recent()

    def read(self, epoch: int) -> Traffic:
        """Return the traffic of an epoch so far, or of the previous one if that is too little; forget older ones.

        A device that holds the whole network sends nothing but a model at the end of each epoch.
        """
        for old in [number for number in self._epochs if number < epoch - 1]:
            del self._epochs[old]
        now, before = (self._epochs.get(number, Traffic()) for number in (epoch, epoch - 1))
        return before if before.is_enough and not now.is_enough else now
