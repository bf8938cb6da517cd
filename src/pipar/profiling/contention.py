"""Contention: how much longer a training pass takes while other cores of the machine compute.

Cores share memory, caches and, in one process, the interpreter: two cores of a server are not twice as fast as one.
Other programs are no part of it: the time that a pass waits for a core does not count, a measurement is repeated while
they are busy, and the result is never above the bound of `most_contention`.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from torch import nn

from pipar.profiling.machine_load import OtherPrograms, waited_for_core_s
from pipar.profiling.profile import BUSY_CORES, most_contention

_FEWEST, _MOST = 5, 40
#: While other programs are busy; the least of all results counts, because they only add to it.
_MOST_ATTEMPTS = 3

#: Runs one pass of a network on the batch of this number.
Pass = Callable[[nn.Sequential, int], object]


def measure_contention(
    model: nn.Sequential, batches: int, run: Pass, *, others: int, budget_s: float
) -> tuple[float, ...]:
    """Return for each batch, from the smallest to the largest, the time while `others` compute over the time alone.

    A batch that takes too long for the budget gets the ratio of the previous one. The budget is exceeded, at most
    twice, only while other programs use the machine.
    """
    ratios: list[float] = []
    copies = [copy.deepcopy(model) for _ in range(others)]
    repeats_until = time.perf_counter() + 2 * budget_s
    for number in range(batches):
        seconds = _times(model, number, run, budget_s=0.0, fewest=1)[0]
        if ratios and seconds * _FEWEST * 2 > budget_s:
            ratios += [ratios[-1]] * (batches - number)
            break
        share_s = budget_s / (2 * batches)

        def measure(number: int = number, share_s: float = share_s) -> float:
            alone = median(_times(model, number, run, budget_s=share_s))
            with _at_work(copies, number, run):
                return median(_times(model, number, run, budget_s=share_s)) / alone

        ratio = least_of_attempts(measure, lambda: time.perf_counter() < repeats_until)
        ratios.append(min(max(1.0, ratio), most_contention(others)))
    return tuple(ratios)


def least_of_attempts(
    measure: Callable[[], float],
    may_repeat: Callable[[], bool],
    others: Callable[[], OtherPrograms] = OtherPrograms,
) -> float:
    """Return the least of some measurements: of one, and of a few more while other programs keep the machine busy."""
    found: list[float] = []
    while True:
        load = others()
        found.append(measure())
        if load.cores() <= BUSY_CORES or len(found) == _MOST_ATTEMPTS or not may_repeat():
            return min(found)


def _times(model: nn.Sequential, number: int, run: Pass, *, budget_s: float, fewest: int = _FEWEST) -> Sequence[float]:
    """Return how long some passes took, with waiting for the interpreter, but without waiting for a core."""
    end, times = time.perf_counter() + budget_s, list[float]()
    while len(times) < fewest or (len(times) < _MOST and time.perf_counter() < end):
        start, waited_s = time.perf_counter(), waited_for_core_s()
        run(model, number)
        passed_s = time.perf_counter() - start
        times.append(max(passed_s / 1e3, passed_s - (waited_for_core_s() - waited_s)))
    return times


@contextmanager
def _at_work(copies: Sequence[nn.Sequential], number: int, run: Pass) -> Iterator[None]:
    """Run the same passes on every copy of the network, each in a separate thread."""
    stopped = threading.Event()

    def work(model: nn.Sequential) -> None:
        while not stopped.is_set():
            run(model, number)

    threads = [threading.Thread(target=work, args=(model,), daemon=True) for model in copies]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
