"""How long to wait before the next attempt to reach a server: longer each time, and never in step with others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pipar import keyed


class Pause(NamedTuple):
    """Wait so long, then make this attempt; attempts count from 1."""

    attempt: int
    wait_s: float


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
        return cls(keyed.generator(seed, "backoff", name).random, clock, give_up_after_s)

    def pauses(self) -> Iterator[Pause]:
        """Give the pause before each attempt, until the time for giving up has come.

        Each call begins anew with the shortest pause. Call it when a link is lost, and not again before the server has
        answered: a server that accepts and hangs up at once must not be hammered. The last attempt is made at the
        moment of giving up, not before it.
        """
        began_s = self.clock()
        ceiling_s = min(self.first_s, self.most_s)
        attempt = 0
        while (left_s := self._left_s(began_s)) is None or left_s > 0:
            attempt += 1
            wait_s = self.draw() * ceiling_s
            yield Pause(attempt, wait_s if left_s is None else min(wait_s, left_s))
            ceiling_s = min(2 * ceiling_s, self.most_s)

    def _left_s(self, began_s: float) -> float | None:
        return None if self.give_up_after_s is None else began_s + self.give_up_after_s - self.clock()
