"""Timing work several times, each time from rest, as the stages of a training run."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

#: The median of more passes than this hardly moves.
MOST_REPETITIONS = 40
FEWEST_REPETITIONS = 3
#: Stages come one by one, each from rest: caches are cold and the clock is low when one starts. Without a pause, passes
#: of 3 samples were a fifth faster than in training; with one of 10 or 20 ms, a twentieth. Beyond 40 ms hardly anything
#: changes: passes after 80 ms took as long, and those of 3 samples 2 % longer.
PAUSE_S = 0.04

#: Prepares what some work starts with, and returns the work.
Ready = Callable[[], Callable[[], object]]


def rest(share: float = 1.0) -> None:
    """Let the machine come to rest, for a share of the usual pause."""
    time.sleep(share * PAUSE_S)


class Budget:
    """A budget of seconds, from now on, and whether it allows another repetition."""

    def __init__(self, seconds: float) -> None:
        self._start, self._seconds = time.perf_counter(), seconds

    def spent(self) -> float:
        """Return the share of the budget that is spent; above 1 if it is exceeded."""
        return (time.perf_counter() - self._start) / self._seconds if self._seconds > 0 else float("inf")

    def wants_another(self, done: int) -> bool:
        # A median of three is worth up to twice the budget; for a huge network, one pass has to suffice.
        allowed = 2.0 if done < FEWEST_REPETITIONS else 1.0
        return done == 0 or (done < MOST_REPETITIONS and self.spent() < allowed)


def median_s(ready: Ready, budget_s: float, clock: Callable[[], float] = time.thread_time) -> float:
    """Return the median time of some work around the layers, after a first time that does not count.

    It is CPU time, if no other clock is given. The work rests for half as long as between passes: there are many kinds
    of such work, and all are short.
    """
    ready()()
    budget = Budget(budget_s)
    times: list[float] = []
    while budget.wants_another(len(times)):
        work = ready()
        rest(0.5)
        start = clock()
        work()
        times.append(clock() - start)
    return median(times)
