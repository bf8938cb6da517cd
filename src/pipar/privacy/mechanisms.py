"""The mechanisms: noise on a device's updates, inputs and labels before they leave the device.

Arrays and a generator in, arrays out. Anyone who knows the generator's key can remove the noise. Noise is drawn and
added in float64, for any dtype of the arrays: rounding the sum afterwards is post-processing and costs no privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
#: Returns the generator for a tensor's name.
NoiseSource = Callable[[str], np.random.Generator]

#: Values processed at a time, so that a model of hundreds of megabytes is not copied as a whole.
_CHUNK = 2**16


# --- the update of a round


def clip_and_noise(
    trained: Mapping[str, Array], received: Mapping[str, Array], *, clip: float, multiplier: float, noise: NoiseSource
) -> float:
    """Replace W by W0 + min(1, C / |W - W0|) (W - W0) + N(0, sigma^2 C^2); return |W - W0| before clipping.

    W are all `trained` arrays, W0 the `received` ones of the same names; one norm is taken over all of them. If the
    update is not finite, because training diverged, it is replaced by zero: for any data, the update without its noise
    has a norm of at most C.
    """
    norm = update_norm(trained, received)
    factor, scale = clip_factor(norm, clip), multiplier * clip
    for name in sorted(trained):
        rng = noise(name)
        flat = np.ascontiguousarray(trained[name]).reshape(-1)
        for part, before in zip(_chunks(flat), _chunks(_flat(received[name])), strict=True):
            # Add change and noise first. If each were added to W0, which a server may choose arbitrarily large,
            # each would be rounded separately, and the change could become larger than C.
            change = _clipped(part, before, factor)
            change += scale * rng.standard_normal(part.size)
            part[:] = before + change
        if not np.shares_memory(flat, trained[name]):  # it is not contiguous
            trained[name][...] = flat.reshape(trained[name].shape)
    return norm


def update_norm(trained: Mapping[str, Array], received: Mapping[str, Array]) -> float:
    """Return |W - W0|, the 2-norm over all values of all arrays; NaN if it is not finite."""
    squares = []
    with np.errstate(over="ignore", invalid="ignore"):
        for name, values in trained.items():
            for part, before in zip(_chunks(_flat(values)), _chunks(_flat(received[name])), strict=True):
                change = np.subtract(part, before, dtype=np.float64)
                squares.append(float(np.dot(change, change)))
    try:
        norm = math.sqrt(math.fsum(squares))
    except OverflowError:  # each is finite, but their sum is not
        return math.nan
    return norm if math.isfinite(norm) else math.nan


def clip_factor(norm: float, clip: float) -> float:
    """Return min(1, C / norm), the factor of an update; 0 if its norm is not finite."""
    if not math.isfinite(norm):
        return 0.0
    return 1.0 if norm <= clip else clip / norm


def _clipped(part: Array, before: Array, factor: float) -> Array:
    if factor == 0.0:  # 0 times a value that is not finite would be NaN
        return np.zeros(part.size)
    return factor * np.subtract(part, before, dtype=np.float64)


def _flat(values: Array) -> Array:
    return np.ascontiguousarray(values).reshape(-1)


def _chunks(flat: Array) -> Iterator[Array]:
    return (flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK))


# --- inputs


def noisy(values: Array, scale: float, rng: np.random.Generator) -> Array:
    """Return the values with independent noise N(0, scale^2) on each, in their own dtype: PixelDP's noise layer.

    With scale = sqrt(2 ln(1.25 / delta)) Delta L / epsilon and epsilon <= 1, everything computed from them is (epsilon,
    delta)-private with respect to inputs that differ by a 2-norm of at most L (Lecuyer et al., 2019, Gaussian
    mechanism). Delta is the sensitivity of the layers before the noise, 1 at the input itself.
    """
    with_noise = rng.standard_normal(values.shape)
    with_noise *= scale
    with_noise += values
    return with_noise.astype(values.dtype, copy=False)


# --- labels


def keep_probability(epsilon: float, classes: int) -> float:
    """Return e^epsilon / (e^epsilon + k - 1), the probability that k-ary randomised response keeps a label."""
    return 1.0 / (1.0 + (classes - 1) * math.exp(-epsilon))


def randomised_labels(
    labels: NDArray[np.int64], *, classes: int, epsilon: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return each label unchanged with `keep_probability`, else one of the other classes, all equally likely.

    For any two true labels, the probabilities of the same answer differ by a factor of at most e^epsilon.
    """
    kept = rng.random(len(labels)) < keep_probability(epsilon, classes)
    others = (labels + rng.integers(1, max(2, classes), len(labels))) % classes
    return np.where(kept, labels, others)
