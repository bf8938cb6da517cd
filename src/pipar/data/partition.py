"""Which training samples each device holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipar import random_streams
from pipar.errors import ConfigError, DataError
from pipar.settings.config import Config, device_names, device_specs

Indices = NDArray[np.int64]
Scheme = Literal["iid", "dirichlet", "shards"]


def even_sizes(total: int, devices: int) -> list[int]:
    """Return `devices` sizes that add up to `total` and differ by at most one, the larger ones first."""
    if devices < 1 or total < 0:
        raise ConfigError(
            f"{total} samples cannot be divided among {devices} devices: there must be at least one device."
        )
    share, left = divmod(total, devices)
    return [share + (device < left) for device in range(devices)]


def device_sizes(config: Config, available: int) -> dict[str, int]:
    """Return the number of samples of each device, in name order.

    A list in the configuration follows the order of its devices.
    """
    given, devices = config.data.samples_per_device, sum(group.count for group in config.devices)
    if given is None and available < devices:  # before work that takes seconds for many devices
        raise DataError(
            f"{devices} devices share {available} training samples, but each needs at least 1: use fewer devices, or "
            "give more data."
        )
    names = [spec.name for spec in device_specs(config)]
    if isinstance(given, list):
        listed = dict(zip(device_names(config), given, strict=True))
        return {name: listed[name] for name in names}
    sizes = even_sizes(available, len(names)) if given is None else [given] * len(names)
    return dict(zip(names, sizes, strict=True))


def held_out_count(device: str, samples: int, share: float) -> int:
    """Return how many of a device's samples are held out for evaluation: at least one, and never all of them."""
    count = max(1, int(share * samples + 0.5)) if share else 0
    if count and count >= samples:
        raise DataError(
            f"{device} has {samples} samples, and data.evaluate_on_devices = {share:g} leaves none to train on: give "
            "it more data, or a smaller share."
        )
    return count


def held_out_rows(device: str, rows: Indices, share: float, seed: int) -> tuple[Indices, Indices]:
    """Return the rows that a device trains on and those that it evaluates on, drawn by the seed, each in its order."""
    count = held_out_count(device, len(rows), share)
    drawn = random_streams.generator(seed, "evaluation", device).permutation(len(rows)) if count else np.arange(0)
    is_held_out = np.zeros(len(rows), bool)
    is_held_out[drawn[:count]] = True
    return rows[~is_held_out], rows[is_held_out]


def partition(
    labels: NDArray[np.integer],
    sizes: Sequence[int],
    *,
    scheme: Scheme,
    seed: int,
    alpha: float = 0.5,
    shards_per_device: int = 2,
) -> list[Indices]:
    """Return one index array per device: disjoint, of exactly the given sizes, deterministic in the arguments.

    iid        at random
    dirichlet  each device's label proportions are drawn from Dir(alpha); when a class runs out, its share goes to
               the device's other classes, so sizes are exact and the last devices are less skewed than the first
    shards     samples are sorted by label, cut into `shards_per_device` runs per device, and assigned at random
    """
    _check(len(labels), sizes, alpha, shards_per_device)
    rng = random_streams.generator(seed, "partition", scheme)
    schemes: dict[str, Callable[[], list[Indices]]] = {
        "iid": lambda: _cut(rng.permutation(len(labels)), sizes),
        "dirichlet": lambda: _dirichlet(labels, sizes, alpha, rng),
        "shards": lambda: _shards(labels, sizes, shards_per_device, rng),
    }
    if scheme not in schemes:
        raise ConfigError(f"there is no partition {scheme!r}: choose {', '.join(schemes)}.")
    return schemes[scheme]()


def _check(available: int, sizes: Sequence[int], alpha: float, shards_per_device: int) -> None:
    if min(sizes, default=0) < 0:
        raise ConfigError(f"a device cannot hold {min(sizes)} samples: sizes start at 0.")
    if sum(sizes) > available:
        raise DataError(
            f"there are {available} training samples, but {len(sizes)} devices need {sum(sizes)}: "
            "lower samples_per_device or the number of devices."
        )
    if not (np.isfinite(alpha) and alpha > 0):
        raise ConfigError(f"alpha = {alpha} is not allowed: it must be a positive number.")
    if shards_per_device < 1:
        raise ConfigError(f"shards_per_device = {shards_per_device} is not allowed: it must be at least 1.")


def _cut(order: Indices, sizes: Sequence[int]) -> list[Indices]:
    """Return consecutive pieces of `order` of these sizes; the rest is dropped."""
    return np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1]) if sizes else []


def _dirichlet(
    labels: NDArray[np.integer], sizes: Sequence[int], alpha: float, rng: np.random.Generator
) -> list[Indices]:
    names, marks = np.unique(labels, return_inverse=True)
    pools = [rng.permutation(np.flatnonzero(marks == label)) for label in range(len(names))]
    taken = np.zeros(len(pools), np.int64)
    held = np.array([len(pool) for pool in pools], np.int64)
    parts = []
    for size in sizes:
        counts = _label_counts(size, held - taken, alpha, rng)
        pieces = [pool[at : at + n] for pool, at, n in zip(pools, taken, counts, strict=True)]
        taken += counts
        parts.append(np.concatenate(pieces) if pieces else np.empty(0, np.int64))
    return parts


def _label_counts(size: int, left: Indices, alpha: float, rng: np.random.Generator) -> Indices:
    """Return how many samples of each label a device of this size gets, at most the number left of each."""
    wanted = rng.dirichlet(np.full(len(left), alpha)) if len(left) else np.empty(0)
    counts = np.zeros_like(left)
    # Each pass fills the device or uses up a class, so there are at most as many passes as classes.
    while (missing := size - int(counts.sum())) > 0:
        open_classes = counts < left
        weights = np.where(open_classes, wanted, 0.0)
        if weights.sum() < 1e-9:
            weights = (left - counts).astype(np.float64)
        counts = np.minimum(counts + rng.multinomial(missing, weights / weights.sum()), left)
    return counts


def _shards(
    labels: NDArray[np.integer], sizes: Sequence[int], shards_per_device: int, rng: np.random.Generator
) -> list[Indices]:
    used = rng.permutation(len(labels))[: sum(sizes)]
    by_label = used[np.argsort(np.asarray(labels)[used], kind="stable")]
    lengths = [n for size in sizes for n in even_sizes(size, shards_per_device)]
    order = rng.permutation(len(lengths))
    shards = dict(zip(order.tolist(), _cut(by_label, [lengths[at] for at in order]), strict=True))
    first = range(0, len(lengths), shards_per_device)
    return [np.concatenate([shards[at + i] for i in range(shards_per_device)]) for at in first]
