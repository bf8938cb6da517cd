"""float32 in two bytes: IEEE's half precision and bfloat16, rounded to nearest, ties to even.

A finite value that is too large becomes the largest finite one instead of infinite: receivers refuse infinite values,
and one outlier is not to end a training. Infinities stay, NaNs stay NaNs. A float64 is rounded to float32 first.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

Halves = NDArray[np.uint16]
Singles = NDArray[np.float32]

_MAGNITUDE, _INFINITE, _SIGN = np.uint32(0x7FFF_FFFF), np.uint32(0x7F80_0000), np.uint16(0x8000)


def to_fp16(values: NDArray[Any]) -> Halves:
    """Return the bits of each value in half precision, as numpy's astype does in twice the time."""
    bits, magnitude = _bits(values)
    # A power of two 13 places above a value's own (or above 2**-14, below which halves are subnormal) pushes the 13
    # bits that a half does not have out of the sum: the processor's addition rounds.
    anchor = np.maximum(magnitude & _INFINITE, np.uint32(113 << 23))
    anchor += np.uint32(13 << 23)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = (magnitude.view(np.float32) + anchor.view(np.float32)).view(np.uint32)
    rounded -= anchor
    anchor -= np.uint32((13 + 113) << 23)
    anchor >>= np.uint32(13)
    rounded += anchor
    halves = rounded.astype(np.uint16)
    # 65520 is halfway between the largest half and the next, which is infinite.
    return _with_extremes(halves, bits, magnitude, too_large=0x477F_F000, infinite=0x7C00, nan=0x7E00)


def to_bf16(values: NDArray[Any]) -> Halves:
    """Return the upper halves of each value's bits, rounded."""
    bits, magnitude = _bits(values)
    rounded = magnitude >> np.uint32(16)
    rounded &= np.uint32(1)  # ties go to where this bit is zero
    rounded += np.uint32(0x7FFF)
    rounded += magnitude
    rounded >>= np.uint32(16)
    return _with_extremes(
        rounded.astype(np.uint16), bits, magnitude, too_large=0x7F7F_8000, infinite=0x7F80, nan=0x7FC0
    )


def from_fp16(halves: Halves) -> Singles:
    return _every_half().take(halves)


def from_bf16(halves: Halves) -> Singles:
    bits = halves.astype(np.uint32)
    bits <<= np.uint32(16)
    return bits.view(np.float32)


@functools.cache
def _every_half() -> Singles:
    """Return the value of each half by its bits: looking them up is four times as fast as converting."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def _bits(values: NDArray[Any]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return the bits of values as float32, with and without their signs."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return bits, bits & _MAGNITUDE


def _with_extremes(
    halves: Halves, bits: NDArray[np.uint32], magnitude: NDArray[np.uint32], *, too_large: int, infinite: int, nan: int
) -> Halves:
    """Return the halves with their signs, and with what arithmetic does not give where a value is too large."""
    if magnitude.size and magnitude.max() >= too_large:
        halves[magnitude >= too_large] = infinite - 1
        halves[magnitude == _INFINITE] = infinite
        halves[magnitude > _INFINITE] = nan
    halves |= (bits >> np.uint32(16)).astype(np.uint16) & _SIGN
    return halves
