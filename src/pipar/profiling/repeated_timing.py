"""Timing work several times, each time from rest, as the stages of a training run."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

#: The median of more passes than this hardly moves.
MOST_REPETITIONS = 40
FEWEST_REPETITIONS = 3
#: Stages come one by one, each from rest: caches are cold and the clock is low when one starts. Without a pause, passes
#: were 10 to 20 % faster than in training; with one of 10 ms, still 5 to 15 %.
PAUSE_S = 0.08

#: Prepares what some work starts with, and returns the work.
Ready = Callable[[], Callable[[], object]]


def rest() -> None:
    """Let the machine come to rest."""
    time.sleep(PAUSE_S)


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


def median_s(ready: Ready, budget_s: float) -> float:
    """Return the median CPU time of the work, each time from rest, after a first time that does not count."""
    ready()()
    budget = Budget(budget_s)
    times: list[float] = []
    while budget.wants_another(len(times)):
        work = ready()
        rest()
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return median(times)
