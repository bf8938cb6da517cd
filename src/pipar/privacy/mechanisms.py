"""The mechanisms: what a device does to an update, an input or a label before anybody else sees it.

Arrays and a generator in, arrays out. Who knows the generator's key knows the noise. It is drawn and added in float64,
whatever the arrays are in: rounding the sum is something that anybody could do to it, and costs no privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
#: Gives the generator that belongs to a tensor's name.
NoiseSource = Callable[[str], np.random.Generator]

#: So many values are worked on at a time: a model of hundreds of megabytes needs no second one beside it.
_CHUNK = 2**16


# --- the update of a round


def clip_and_noise(
    trained: Mapping[str, Array], received: Mapping[str, Array], *, clip: float, multiplier: float, noise: NoiseSource
) -> float:
    """Put W0 + min(1, C / |W - W0|) (W - W0) + N(0, sigma^2 C^2) where W is; return |W - W0| as it was.

    W are all `trained` arrays, W0 those of the same names that were `received`; the norm is one over all of them. An
    update that is no number, of a training that has diverged, counts as none: whatever the data are, what is sent of
    them lies within C.
    """
    norm = update_norm(trained, received)
    factor, scale = clip_factor(norm, clip), multiplier * clip
    for name in sorted(trained):
        rng = noise(name)
        flat = np.ascontiguousarray(trained[name]).reshape(-1)
        for part, before in zip(_chunks(flat), _chunks(_flat(received[name])), strict=True):
            # Change and noise first: behind W0, which a server may choose as large as it likes, they would be rounded
            # one by one, and the change to something larger than C.
            change = _clipped(part, before, factor)
            change += scale * rng.standard_normal(part.size)
            part[:] = before + change
        if not np.shares_memory(flat, trained[name]):  # it does not lie in one piece
            trained[name][...] = flat.reshape(trained[name].shape)
    return norm


def update_norm(trained: Mapping[str, Array], received: Mapping[str, Array]) -> float:
    """Return |W - W0|, the 2-norm over all values of all arrays; not finite if one of them is not."""
    squares = []
    with np.errstate(over="ignore", invalid="ignore"):
        for name, values in trained.items():
            for part, before in zip(_chunks(_flat(values)), _chunks(_flat(received[name])), strict=True):
                change = np.subtract(part, before, dtype=np.float64)
                squares.append(float(np.dot(change, change)))
    try:
        norm = math.sqrt(math.fsum(squares))
    except OverflowError:  # each is a number, and their sum is none
        return math.nan
    return norm if math.isfinite(norm) else math.nan


def clip_factor(norm: float, clip: float) -> float:
    """Return min(1, C / norm): what an update is multiplied by; 0 if its norm is no number."""
    if not math.isfinite(norm):
        return 0.0
    return 1.0 if norm <= clip else clip / norm


def _clipped(part: Array, before: Array, factor: float) -> Array:
    if factor == 0.0:  # of what is no number, nothing is to be left
        return np.zeros(part.size)
    return factor * np.subtract(part, before, dtype=np.float64)


def _flat(values: Array) -> Array:
    return np.ascontiguousarray(values).reshape(-1)


def _chunks(flat: Array) -> Iterator[Array]:
    return (flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK))


# --- inputs


def noisy(values: Array, scale: float, rng: np.random.Generator) -> Array:
    """Return the values with independent noise N(0, scale^2) on each, in their own dtype: PixelDP's noise layer.

    With scale = sqrt(2 ln(1.25 / delta)) Delta L / epsilon and epsilon <= 1, what is computed from it is (epsilon,
    delta)-private with respect to inputs that differ by a 2-norm of at most L (Lecuyer et al., 2019, Gaussian
    mechanism); Delta is the sensitivity of what lies before the noise, 1 at the input itself.
    """
    with_noise = rng.standard_normal(values.shape)
    with_noise *= scale
    with_noise += values
    return with_noise.astype(values.dtype, copy=False)


# --- labels


def keep_probability(epsilon: float, classes: int) -> float:
    """Return e^epsilon / (e^epsilon + k - 1): how often k-ary randomised response tells the truth."""
    return 1.0 / (1.0 + (classes - 1) * math.exp(-epsilon))


def randomised_labels(
    labels: NDArray[np.int64], *, classes: int, epsilon: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return each label as it is with the probability above, else one of the others, each as likely as another.

    Whatever the true label is, every answer is at most e^epsilon times as likely as with any other true label.
    """
    kept = rng.random(len(labels)) < keep_probability(epsilon, classes)
    others = (labels + rng.integers(1, max(2, classes), len(labels))) % classes
    return np.where(kept, labels, others)
