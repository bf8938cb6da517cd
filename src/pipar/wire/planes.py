"""Floating-point values in planes: their first bytes together, which are much alike, and the rest, which is noise.

A value's first byte is its sign and the upper seven bits of its exponent. Behind a ReLU, or in one layer's gradients,
few of them are common, and an entropy coder needs two or three bits for one. The mantissa's bytes are as good as
random: trying to code them costs time and saves nothing. A float64 has four bits of its exponent in the second byte,
which is coded, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipar.wire.sections import Buffer, Reader, buffer, section

Bits = NDArray[Any]  # uint32 or uint64: the bit patterns of values


def plane_buffers(bits: Bits) -> tuple[Buffer, ...]:
    """Return the buffers of some values: first bytes, second bytes, the rest of upper halves, lower halves."""
    double = bits.itemsize == 8
    upper = (bits >> 32).astype("<u4") if double else bits
    front = (upper >> 16).astype("<u2")
    first, second = (front >> 8).astype(np.uint8), front.astype(np.uint8)
    seconds = section(second) if double else buffer(second)
    lower = buffer(bits.astype("<u4")) if double else ()
    return *section(first), *seconds, *buffer(upper.astype("<u2")), *lower


def read_planes(reader: Reader, count: int, item_bytes: int) -> Bits:
    """Return the bit patterns of so many values."""
    double = item_bytes == 8
    front = reader.section(count).astype("<u2")
    front <<= 8
    front |= reader.section(count) if double else np.frombuffer(reader.take(count), np.uint8)
    upper = front.astype("<u4")
    upper <<= 16
    upper |= reader.array(count, "<u2")
    if not double:
        return upper
    bits = upper.astype("<u8")
    bits <<= 32
    bits |= reader.array(count, "<u4")
    return bits
