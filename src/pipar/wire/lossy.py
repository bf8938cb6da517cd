"""The lossy encodings. Their error is measured, and that of int8 and topk is fed back into the next micro-batch.

fp16, bf16   IEEE half precision and bfloat16, rounded to nearest, ties to even. No feedback: the error is small.
int8         An integer number of steps, -127..127; a step is a 127th of the largest magnitude of the row. It is rounded
             up or down at random, so that it is right on average. With error feedback.
topk         The tenth of a chunk's values with the largest magnitudes, unchanged; the others become zero. With error
             feedback.

In fp16 and bf16 a finite value that is too large becomes the largest finite one, not infinity: receivers refuse
infinite values, and one outlier should not end a training. Infinities and NaNs are kept. A float64 is rounded to
float32 first.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipar.wire.bitpacking import (
    CODED,
    VERBATIM,
    Buffer,
    Mask,
    Reader,
    buffer,
    gather,
    kept_count,
    mask_section,
    not_zero,
    read_mask,
    scatter,
    section,
    total_bytes,
)

Halves = NDArray[np.uint16]
Singles = NDArray[np.float32]

_WITH_FEEDBACK = ("int8", "topk")
#: Rows shorter than this share a scale: four bytes for each would cost more than int8 saves.
_LEAST_VALUES_A_SCALE = 64
_LARGEST_SHARE = 10  # topk keeps one value in ten
_STEPS = 127
_MAGNITUDE, _INFINITE, _SIGN = np.uint32(0x7FFF_FFFF), np.uint32(0x7F80_0000), np.uint16(0x8000)


class Residual:
    """Error feedback: the loss of one micro-batch, which is added to the values of the next one before encoding.

    The next micro-batch has other samples, so a single value's loss cannot be returned to it. What can be returned is
    the mean loss at each feature position: `carried[i]` is the mean, over the samples of a micro-batch, of the value at
    position i minus the value that the receiver got. A position that is always too small to be sent accumulates until
    it is sent. It needs the memory of two samples (the collected and the added loss), for any batch size. `begin`
    is called before the first chunk of each tensor; the chunks then come in order.
    """

    def __init__(self, features: int) -> None:
        self.carried = np.zeros(features)
        self._lost = np.zeros(features)
        self._values = 0  # of this tensor, so far

    def begin(self) -> None:
        """Start the next tensor: from now on the loss of the last one is added."""
        if self._values:
            self.carried = self._lost / max(1.0, self._values / self.carried.size)
            self._lost = np.zeros_like(self.carried)
            self._values = 0

    def add_to(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the values of the next chunk plus the carried loss of their positions."""
        added = self.carried.take(self._positions(values.size), mode="wrap").astype(values.dtype)
        added += values
        return added

    def collect(self, lost: NDArray[Any]) -> None:
        """Collect the loss of a chunk, and move on to the next one; a loss that is not finite is left out."""
        features, finite = self.carried.size, np.where(np.isfinite(lost), lost, 0)
        self._lost += np.bincount(self._positions(lost.size) % features, finite, minlength=features)
        self._values += lost.size

    def _positions(self, count: int) -> NDArray[np.intp]:
        return np.arange(self._values, self._values + count)


@dataclass
class Lossy:
    """State of a sender of lossily encoded tensors: random numbers, the residual, and the error so far.

    Without `rng`, int8 rounds to the nearest; without `residual`, there is no error feedback. Each belongs to one
    sender of one device's tensors, and is used by one thread at a time.
    """

    rng: np.random.Generator | None = None
    residual: Residual | None = None
    squared_error: float = field(default=0.0, init=False)
    squared_norm: float = field(default=0.0, init=False)

    def begin(self) -> None:
        """Start a tensor: its first chunk is encoded next."""
        if self.residual is not None:
            self.residual.begin()

    def count(self, values: NDArray[Any], received: NDArray[Any]) -> None:
        """Add the difference of these values and those that the receiver gets to the error."""
        self.squared_error += _squared_norm(received - values)
        self.squared_norm += _squared_norm(values)


def _squared_norm(values: NDArray[Any]) -> float:
    # Not a dot product: for that, numpy starts threads that cost more than they save.
    return float(np.square(values, dtype=np.float64).sum())


def encode_lossy(
    values: NDArray[Any], encoding: str, *, kept: Mask | None, row: int, lossy: Lossy | None
) -> tuple[Buffer, ...]:
    """Return the buffers of one chunk's payload."""
    wanted = values if kept is None else np.where(kept, values, values.dtype.type(0))
    residual = lossy.residual if lossy is not None and encoding in _WITH_FEEDBACK else None
    corrected = wanted if residual is None else residual.add_to(wanted)
    if residual is not None and kept is not None:
        corrected[~kept] = 0  # it is not sent
    buffers = _encode(corrected, encoding, kept, row, lossy)
    if lossy is not None:
        received = np.empty_like(values)
        decode_lossy(Reader(memoryview(b"".join(buffers))), encoding, received, kept=kept, row=row)
        lossy.count(wanted, received)
        if residual is not None:
            residual.collect(corrected - received)
    return buffers


def decode_lossy(reader: Reader, encoding: str, out: NDArray[Any], *, kept: Mask | None, row: int) -> None:
    """Write all of `out` from the payload of one chunk."""
    if encoding == "int8":
        _read_int8(reader, out, kept, row)
    elif encoding == "topk":
        _read_largest(reader, out)
    else:
        _read_halves(reader, encoding, out, kept)


def _encode(
    values: NDArray[Any], encoding: str, kept: Mask | None, row: int, lossy: Lossy | None
) -> tuple[Buffer, ...]:
    if encoding == "int8":
        return _int8_buffers(values, kept, row, None if lossy is None else lossy.rng)
    if encoding == "topk":
        return _largest_buffers(values)
    return _half_buffers(values, encoding, kept)


# --- fp16 and bf16


def _half_buffers(values: NDArray[Any], encoding: str, kept: Mask | None) -> tuple[Buffer, ...]:
    """Return a form byte and the halves; if the receiver has no mask, a mask and the nonzero halves if shorter."""
    convert = to_fp16 if encoding == "fp16" else to_bf16
    plain = convert(gather(values, kept))
    if kept is None:
        nonzero = not_zero(plain)
        coded = *mask_section(nonzero), *buffer(gather(plain, nonzero))
        if total_bytes(coded) < plain.nbytes:
            return bytes((CODED,)), *coded
    return bytes((VERBATIM,)), *buffer(plain)


def _read_halves(reader: Reader, encoding: str, out: NDArray[Any], kept: Mask | None) -> None:
    if reader.form() == CODED:
        kept = read_mask(reader, out.size)
    plain = reader.array(kept_count(out.size, kept), "<u2")
    reader.end()
    with np.errstate(invalid="ignore"):  # a signalling NaN is still a NaN
        scatter(out, kept, from_fp16(plain) if encoding == "fp16" else from_bf16(plain))


# --- int8


def _rows(count: int, row: int) -> tuple[int, int]:
    """Return the number of scales of a chunk, and how many values share one (the last may have fewer)."""
    together = row * -(-_LEAST_VALUES_A_SCALE // row) if row else max(1, count)
    return -(-count // together), together


def _steps(scales: NDArray[np.float32], count: int, together: int) -> NDArray[np.float32]:
    """Return the step of each value."""
    return np.repeat(scales, together)[:count]


def _int8_buffers(
    values: NDArray[Any], kept: Mask | None, row: int, rng: np.random.Generator | None
) -> tuple[Buffer, ...]:
    """Return the step of each row as a float32, and a section with the kept values in steps.

    A row with a value that is not finite has a step of NaN: all of it is decoded as NaN, so that it is noticed.
    """
    count, together = _rows(values.size, row)
    with np.errstate(over="ignore", invalid="ignore"):
        largest = np.maximum.reduceat(np.abs(values), np.arange(0, values.size, together)) if count else values
        scales = (largest / _STEPS).astype(np.float32)
        scales[~np.isfinite(scales)] = np.nan
        steps = _steps(scales, values.size, together)
        steps[~(steps > 0)] = 1  # the row is all zeros, or is decoded as NaN
        scaled = values / steps
        scaled += 0.5 if rng is None else rng.random(values.size, np.float32)
        whole = np.clip(np.floor(scaled, out=scaled), -_STEPS, _STEPS)
    return *buffer(scales), *section(gather(np.nan_to_num(whole).astype(np.int8), kept).view(np.uint8))


def _read_int8(reader: Reader, out: NDArray[Any], kept: Mask | None, row: int) -> None:
    count, together = _rows(out.size, row)
    scales = reader.array(count, "<f4")
    whole = reader.section(kept_count(out.size, kept)).view(np.int8)
    reader.end()
    with np.errstate(over="ignore", invalid="ignore"):
        scatter(out, kept, whole * gather(_steps(scales, out.size, together), kept))


# --- topk


def _largest_buffers(values: NDArray[Any]) -> tuple[Buffer, ...]:
    """Return a section with the mask of the values of largest magnitude, and these values unchanged."""
    magnitude = values.view(f"<u{values.itemsize}") << 1  # without the sign
    keep = -(-values.size // _LARGEST_SHARE)
    kept = np.zeros(values.size, np.bool_)
    if keep:
        # As integers, bit patterns sort by magnitude, and a NaN is larger than all others: it is always sent.
        kept[np.argpartition(magnitude, values.size - keep)[values.size - keep :]] = True
        kept &= magnitude != 0
    return *mask_section(kept), *buffer(gather(values, kept))


def _read_largest(reader: Reader, out: NDArray[Any]) -> None:
    kept = read_mask(reader, out.size)
    values = reader.array(kept_count(out.size, kept), out.dtype.str)
    reader.end()
    scatter(out, kept, values)


# --- float32 to two bytes and back


def to_fp16(values: NDArray[Any]) -> Halves:
    """Return the bits of each value in half precision, in half the time of numpy's astype."""
    bits, magnitude = _bits(values)
    # Adding a power of two that is 2**13 times the value's own (or 2**-14, below which halves are subnormal) pushes the
    # 13 bits that a half does not have out of the sum, so the processor's addition does the rounding.
    anchor = np.maximum(magnitude & _INFINITE, np.uint32(113 << 23))
    anchor += np.uint32(13 << 23)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = (magnitude.view(np.float32) + anchor.view(np.float32)).view(np.uint32)
    rounded -= anchor
    anchor -= np.uint32((13 + 113) << 23)
    anchor >>= np.uint32(13)
    rounded += anchor
    halves = rounded.astype(np.uint16)
    # 65520 is halfway between the largest half and the next number, which would be infinite.
    return _with_extremes(halves, bits, magnitude, too_large=0x477F_F000, infinite=0x7C00, nan=0x7E00)


def to_bf16(values: NDArray[Any]) -> Halves:
    """Return the upper half of each value's bits, rounded."""
    bits, magnitude = _bits(values)
    rounded = magnitude >> np.uint32(16)
    rounded &= np.uint32(1)  # ties to even
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
    """Return the value of each half by its bits: a lookup is four times as fast as a conversion."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def _bits(values: NDArray[Any]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return the bits of values as float32, with and without the sign."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return bits, bits & _MAGNITUDE


def _with_extremes(
    halves: Halves, bits: NDArray[np.uint32], magnitude: NDArray[np.uint32], *, too_large: int, infinite: int, nan: int
) -> Halves:
    """Return the halves with their signs, and set those that are too large, infinite or NaN."""
    if magnitude.size and magnitude.max() >= too_large:
        halves[magnitude >= too_large] = infinite - 1
        halves[magnitude == _INFINITE] = infinite
        halves[magnitude > _INFINITE] = nan
    halves |= (bits >> np.uint32(16)).astype(np.uint16) & _SIGN
    return halves
