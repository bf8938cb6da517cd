"""How long to wait before the next attempt to reach a server: longer each time, and never in step with others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pipar import random_streams

#: The last attempt has so long, or half of the time if that is little.
_LAST_ATTEMPT_S = 1.0


class Pause(NamedTuple):
    """Wait so long, then make this attempt, which may take so long; attempts count from 1."""

    attempt: int
    wait_s: float
    within_s: float | None = None  # None: for ever


@dataclass(frozen=True)
class Backoff:
    """Exponential backoff with full jitter.

    The wait before attempt n is drawn evenly from 0 to min(most_s, first_s * 2^(n-1)): when a server comes back after
    an hour, a hundred devices do not all knock at the same moment. `draw` returns numbers from 0 to 1, and `clock` the
    seconds that `give_up_after_s` is measured on; both come from outside, so that virtual runs repeat.
    """

    draw: Callable[[], float]
    clock: Callable[[], float]
    give_up_after_s: float | None = None  # None: never
    first_s: float = 0.5
    most_s: float = 30.0

    @classmethod
    def of_device(
        cls, seed: int, name: str, clock: Callable[[], float], give_up_after_s: float | None = None
    ) -> Backoff:
        """Return the backoff of one device: equal seeds and names wait equally long, other names do not."""
        return cls(random_streams.generator(seed, "backoff", name).random, clock, give_up_after_s)

    def pauses(self) -> Iterator[Pause]:
        """Give the pause before each attempt, until the time for giving up, which counts from this call, has come.

        Each call begins anew with the shortest pause. Call it when a link is lost, and not again before the server has
        answered: a server that accepts and hangs up at once must not be hammered. Whoever keeps to `within_s` has given
        up when the time is over, whatever an attempt waits for.
        """
        ends_s = None if self.give_up_after_s is None else self.clock() + self.give_up_after_s
        return self._pauses_until(ends_s)

    def _pauses_until(self, ends_s: float | None) -> Iterator[Pause]:
        last_s = min(_LAST_ATTEMPT_S, (self.give_up_after_s or 0.0) / 2)
        ceiling_s = min(self.first_s, self.most_s)
        attempt = 0
        while (left_s := _left_s(ends_s, self.clock())) is None or left_s > last_s:
            attempt += 1
            wait_s = self.draw() * ceiling_s
            if left_s is None:
                yield Pause(attempt, wait_s)
            else:
                wait_s = min(wait_s, left_s - last_s)
                yield Pause(attempt, wait_s, left_s - wait_s)
            ceiling_s = min(2 * ceiling_s, self.most_s)


def _left_s(ends_s: float | None, now_s: float) -> float | None:
    return None if ends_s is None else ends_s - now_s
