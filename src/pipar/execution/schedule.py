"""How an epoch is cut into iterations and a batch into micro-batches, and the order in which the device works.

All of it is data that is computed before training, so that it can be printed and tested.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice, repeat

from pipar.execution.stage_graph import Stage


def cut_epoch(
    samples: int, batch_size: int, *, batch_statistics: bool = False, passes: int = 1, most: int | None = None
) -> list[int]:
    """Return the number of samples of each iteration of an epoch, or of its first `most` ones; no sample is dropped.

    An epoch has one or more passes over the samples. With batch normalisation a single left-over sample has no
    statistics, so it joins the previous iteration.
    """
    counts = count_batches(samples, batch_size, batch_statistics=batch_statistics)
    sizes = (repeat(size, count) for _ in range(passes) for size, count in counts.items())
    return list(islice(chain.from_iterable(sizes), most))


def count_batches(samples: int, batch_size: int, *, batch_statistics: bool = False, passes: int = 1) -> dict[int, int]:
    """Return the number of iterations of an epoch by their number of samples, in the order of a pass.

    It takes constant time, because the number of samples comes from a device and may be any number.
    """
    full, tail = divmod(samples, batch_size)
    counts = {batch_size: full, tail: 1 if tail else 0}
    if batch_statistics and tail == 1 and full:
        counts = {batch_size: full - 1, batch_size + 1: 1}
    return {size: count * passes for size, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class StepCount:
    """The number of a step of the optimiser in one device's training, counted from 0, and how many it has in all."""

    number: int = 0
    total: int = 1


def count_steps(
    epoch: int,
    iteration: int,
    *,
    epochs: int,
    samples: int,
    batch_size: int,
    batch_statistics: bool = False,
    passes: int = 1,
) -> StepCount:
    """Return which step an iteration of an epoch is.

    It is computed from the place alone, not counted: a device that has missed rounds, or has joined again, and its
    replica on the server have the same number.
    """
    each = sum(count_batches(samples, batch_size, batch_statistics=batch_statistics, passes=passes).values())
    return StepCount((epoch - 1) * each + iteration - 1, epochs * each)


def count_pieces(samples: int, micro_batches: int, *, batch_statistics: bool = False) -> dict[int, int]:
    """Return the number of micro-batches of a batch by their number of samples."""
    return dict(Counter(cut_batch(samples, micro_batches, batch_statistics=batch_statistics)))


def cut_batch(samples: int, micro_batches: int, *, batch_statistics: bool = False) -> list[int]:
    """Return micro-batch sizes that add up to the batch and differ by at most one; the larger come first.

    The paper takes floor(B / N) and drops the rest, which changes the gradient. A batch with fewer samples
    than N is cut into as many pieces as it has samples; with batch normalisation each piece has at least two.
    """
    most = max(1, samples // 2) if batch_statistics else samples
    pieces = min(micro_batches, most)
    small, larger = divmod(samples, pieces)
    return [small + 1] * larger + [small] * (pieces - larger)


@lru_cache(maxsize=1024)
def device_order(micro_batches: int, window: int = 0) -> tuple[Stage, ...]:
    """Return the order in which the device's compute lane runs its forwards and backwards.

    Without a window all forwards come first, as in the paper. With one (1F1B), the activations of at most `window`
    micro-batches are in memory.
    """
    ahead = min(window, micro_batches) if window else micro_batches
    order = [Stage("fc", n) for n in range(1, ahead + 1)]
    for n in range(1, micro_batches + 1):
        order.append(Stage("bc", n))
        if n + ahead <= micro_batches:
            order.append(Stage("fc", n + ahead))
    return tuple(order)
