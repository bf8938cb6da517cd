"""The wait before each attempt to reach a server: longer each time, and different for each device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pipar import random_streams

#: Time for the last attempt, or half of the time for giving up if that is shorter.
_LAST_ATTEMPT_S = 1.0


class Pause(NamedTuple):
    """Wait `wait_s`, then make this attempt, which may take `within_s`; attempts count from 1."""

    attempt: int
    wait_s: float
    within_s: float | None = None  # None: no limit


@dataclass(frozen=True)
class Backoff:
    """Exponential backoff with full jitter.

    The wait before attempt n is uniform from 0 to min(most_s, first_s * 2^(n-1)), so that a hundred devices do not all
    connect at the same moment when a server is back after an hour. `draw` returns numbers from 0 to 1, and `clock` the
    seconds by which `give_up_after_s` is measured; both are parameters, so that virtual runs can be repeated.
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
        """Return the backoff of one device; the same seed and name give the same waits."""
        return cls(random_streams.generator(seed, "backoff", name).random, clock, give_up_after_s)

    def pauses(self) -> Iterator[Pause]:
        """Yield the pause before each attempt, until `give_up_after_s` has passed since this call.

        Each call starts with the shortest pause. Call it when a link is lost, and not again before the server has
        answered, so that a server that accepts and then closes each connection is not flooded. A caller that ends
        each attempt after `within_s` gives up in time.
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
