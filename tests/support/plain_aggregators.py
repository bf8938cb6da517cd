"""A second, plain implementation of the aggregators from their papers, in numpy: one array per device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
#: From the global weights, the devices' (one per row) and their samples to the next global weights.
Aggregate = Callable[[Array, Array, Array], Array]
ROBUST = ("median", "trimmed_mean", "krum")


def make(aggregator: str, **parameters: float) -> Aggregate:
    """Return a function that keeps the aggregator's state between rounds."""
    return {
        "fedavg": fedavg,
        "fedavgm": fedavgm,
        "fedadam": fedadam,
        "fedyogi": fedyogi,
        "median": median,
        "trimmed_mean": trimmed_mean,
    }[aggregator](**parameters)


def mean(rows: Array, samples: Array) -> Array:
    shares = samples / samples.sum()
    return sum(share * row for share, row in zip(shares, rows, strict=True))


def fedavg() -> Aggregate:
    return lambda _, rows, samples: mean(rows, samples)


def fedavgm(server_learning_rate: float = 1.0, server_momentum: float = 0.9) -> Aggregate:
    velocity: Any = 0.0

    def aggregate(x: Array, rows: Array, samples: Array) -> Array:
        nonlocal velocity
        velocity = server_momentum * velocity + (mean(rows, samples) - x)
        return x + server_learning_rate * velocity

    return aggregate


def fedadam(
    server_learning_rate: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    *,
    yogi: bool = False,
) -> Aggregate:
    m: Any = 0.0
    v: Any = tau**2

    def aggregate(x: Array, rows: Array, samples: Array) -> Array:
        nonlocal m, v
        delta = mean(rows, samples) - x
        m = beta1 * m + (1 - beta1) * delta
        square = delta**2
        v = v - (1 - beta2) * square * np.sign(v - square) if yogi else beta2 * v + (1 - beta2) * square
        return x + server_learning_rate * m / (np.sqrt(v) + tau)

    return aggregate


def fedyogi(**parameters: float) -> Aggregate:
    return fedadam(**parameters, yogi=True)


def median() -> Aggregate:
    return lambda _, rows, __: np.median(rows, axis=0)


def trimmed_mean(trim: float = 0.1) -> Aggregate:
    def aggregate(_: Array, rows: Array, __: Array) -> Array:
        left_out = int(np.ceil(np.round(trim * len(rows), 9)))
        return np.sort(rows, axis=0)[left_out : len(rows) - left_out].mean(axis=0)

    return aggregate


def krum_places(rows: Array, byzantine: int, selected: int) -> list[int]:
    """Return the rows that Krum selects, from pairwise distances as in Blanchard et al."""
    scores = []
    for i, row in enumerate(rows):
        others = sorted(float(((row - other) ** 2).sum()) for j, other in enumerate(rows) if j != i)
        scores.append(sum(others[: len(rows) - byzantine - 2]))
    return sorted(range(len(rows)), key=lambda i: (scores[i], i))[:selected]
