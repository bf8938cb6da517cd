"""Contention: how much longer a training pass takes while other cores of the machine compute.

Cores share memory, caches and, in one process, the interpreter: two cores of a server are not twice as fast as one.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from torch import nn

_FEWEST, _MOST = 5, 40

#: Runs one pass of a network on the batch of this number.
Pass = Callable[[nn.Sequential, int], object]


def measure_contention(
    model: nn.Sequential, batches: int, run: Pass, *, others: int, budget_s: float
) -> tuple[float, ...]:
    """Return for each batch, from the smallest to the largest, the time while `others` compute over the time alone.

    A batch that takes too long for the budget gets the ratio of the previous one.
    """
    ratios: list[float] = []
    copies = [copy.deepcopy(model) for _ in range(others)]
    for number in range(batches):
        seconds = _walls(model, number, run, budget_s=0.0, fewest=1)[0]
        if ratios and seconds * _FEWEST * 2 > budget_s:
            ratios += [ratios[-1]] * (batches - number)
            break
        share_s = budget_s / (2 * batches)
        alone = median(_walls(model, number, run, budget_s=share_s))
        with _at_work(copies, number, run):
            crowded = median(_walls(model, number, run, budget_s=share_s))
        ratios.append(max(1.0, crowded / alone))
    return tuple(ratios)


def _walls(model: nn.Sequential, number: int, run: Pass, *, budget_s: float, fewest: int = _FEWEST) -> Sequence[float]:
    """Return how long some passes took, with the time that they waited for the interpreter."""
    end, walls = time.perf_counter() + budget_s, list[float]()
    while len(walls) < fewest or (len(walls) < _MOST and time.perf_counter() < end):
        start = time.perf_counter()
        run(model, number)
        walls.append(time.perf_counter() - start)
    return walls


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
