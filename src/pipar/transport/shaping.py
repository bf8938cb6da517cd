"""The rate of one direction of one link, in bits a second of everything that is sent: as given, and as measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pipar.units import LIMITLESS_BPS

#: Less says little about a link: the moments between two frames weigh too much.
ENOUGH_BYTES = 64_000
#: Seconds on the link that a measured rate is made of: a link may change in the middle of a long epoch.
_LATELY_S = 5.0


@dataclass(frozen=True, slots=True)
class Rates:
    """A rate over time: each of `cycle` for `every_s` seconds, again and again from `since` on. None is no limit."""

    cycle: tuple[float | None, ...] = (None,)
    every_s: float = math.inf
    since: float = 0.0

    def end(self, start: float, bits: float) -> float:
        """Return when so many bits are sent that start at `start`: the integral of the rate between is `bits`."""
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
        """Return the rate at a moment."""
        return self.cycle[self._number(time) % len(self.cycle)]

    def _number(self, time: float) -> int:
        return max(0, math.floor((time - self.since) / self.every_s))


@dataclass(slots=True)
class Pacer:
    """Says when a frame's transmission starts and ends on a lane that sends one frame at a time.

    It counts in planned times, not in the times at which a late timer woke somebody up, so the long-run
    rate is the configured one however coarse the timers are. A frame that is under way when the rate
    changes is sent partly at each.
    """

    rates: Rates = field(default_factory=Rates)
    free_at: float = 0.0

    def reserve(self, ready_at: float, size_bytes: int) -> tuple[float, float]:
        """Return start and end of sending `size_bytes` that were ready at `ready_at`; the lane is taken until then."""
        start = max(ready_at, self.free_at)
        self.free_at = self.rates.end(start, size_bytes * 8)
        return start, self.free_at


@dataclass(frozen=True, slots=True)
class Traffic:
    """How many bytes went over one direction of a link, and for how many seconds they were on it."""

    size_bytes: int = 0
    seconds: float = 0.0

    @property
    def is_enough(self) -> bool:
        return self.size_bytes >= ENOUGH_BYTES

    @property
    def rate_bps(self) -> float | None:
        """The measured rate; None is no limit, or one that no link of a device has."""
        rate_bps = self.size_bytes * 8 / self.seconds if self.seconds else math.inf
        return rate_bps if rate_bps < LIMITLESS_BPS else None

    def of_late(self) -> Traffic:
        """Return traffic of the same rate that weighs no more than the latest seconds: what was long ago fades."""
        if self.seconds <= _LATELY_S or not self.is_enough:
            return self
        share = max(_LATELY_S / self.seconds, ENOUGH_BYTES / self.size_bytes)
        return Traffic(math.ceil(self.size_bytes * share), self.seconds * share)


class Meter:
    """Measures one direction of a link by what is sent anyway."""

    def __init__(self) -> None:
        self._epochs: dict[int, Traffic] = {}

    def count(self, epoch: int, size_bytes: int, seconds: float) -> None:
        """Take a frame that was on the link for so long."""
        before = self._epochs.get(epoch, Traffic())
        self._epochs[epoch] = Traffic(before.size_bytes + size_bytes, before.seconds + seconds).of_late()

    def take(self, epoch: int, traffic: Traffic) -> None:
        """Take what is known of a whole epoch, if it tells something."""
        if traffic.is_enough:
            self._epochs[epoch] = traffic.of_late()

    def read(self, epoch: int) -> Traffic:
        """Return the traffic of an epoch so far, or of the one before if it tells too little; forget older ones.

        A device that holds the whole network sends nothing but a model at each epoch's end.
        """
        for old in [number for number in self._epochs if number < epoch - 1]:
            del self._epochs[old]
        now, before = (self._epochs.get(number, Traffic()) for number in (epoch, epoch - 1))
        return before if before.is_enough and not now.is_enough else now
