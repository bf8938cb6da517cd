"""What encoded bytes consist of: entropy-coded sections, masks of the values that are sent, and byte planes.

A section starts with a byte that gives its form. A verbatim section has the length that both sides expect; a coded one
has its length as a little-endian uint32, then one zstandard frame that gives the size of its content.

A mask has one bit per value, which says whether the value is sent.

Planes group the bytes of floating-point values by their place. A value's first byte is its sign and the upper seven
bits of its exponent. After a ReLU, or in the gradients of one layer, few of these bytes are common, and an entropy
coder needs two or three bits for each. The bytes of the mantissa are close to random: coding them costs time and saves
nothing. The second byte of a float64 has four bits of its exponent, so it is coded too.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from pipar.errors import ProtocolError

Buffer = memoryview | bytes
Bytes = NDArray[np.uint8]
Mask = NDArray[np.bool_]
Bits = NDArray[Any]  # uint32 or uint64: the bit patterns of values

VERBATIM, CODED = 0, 1
#: Its form, and one byte of content.
LEAST_SECTION_BYTES = 2
_LENGTH = struct.Struct("<BI")


# --- sections


class _Coders(threading.local):
    """zstandard's objects; each may be used by one thread at a time, and is costly to make."""

    def __init__(self) -> None:
        # These bytes can be compressed because some values are rare, not because strings repeat. So hardly any strings
        # are searched for (a table of 64 strings of 7 bytes), and the Huffman code does the work: smaller and faster.
        self.compressor = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(
                window_log=18,
                chain_log=6,
                hash_log=6,
                search_log=1,
                min_match=7,
                target_length=0,
                strategy=zstandard.STRATEGY_FAST,
            )
        )
        self.decompressor = zstandard.ZstdDecompressor()


_coders = _Coders()


def section(plain: Bytes) -> tuple[Buffer, ...]:
    """Return the buffers of a section: coded if that is shorter."""
    coded = _coders.compressor.compress(plain.data)
    if _LENGTH.size + len(coded) < 1 + plain.nbytes:
        return _LENGTH.pack(CODED, len(coded)), coded
    return bytes((VERBATIM,)), *buffer(plain)


def buffer(array: NDArray[Any]) -> tuple[Buffer, ...]:
    """Return an array's bytes unchanged, or nothing if it has none."""
    return (array.data.cast("B"),) if array.nbytes else ()


def total_bytes(buffers: tuple[Buffer, ...]) -> int:
    return sum(len(part) for part in buffers)


class Reader:
    """Reads a payload from its beginning; a payload that does not fit raises ProtocolError.

    The caller gives the size of everything that is allocated, never the payload.
    """

    def __init__(self, payload: memoryview) -> None:
        self._left = payload.cast("B") if payload.nbytes else memoryview(b"")

    def take(self, count: int) -> memoryview:
        """Return the next bytes."""
        if count > self._left.nbytes:
            raise ProtocolError(
                f"The peer sent a coded tensor that ends too early: {count} bytes are needed, but {self._left.nbytes} "
                "are left."
            )
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    def form(self) -> int:
        """Return the next byte, which gives the form of the next bytes: verbatim or coded."""
        form = self.take(1)[0]
        if form not in (VERBATIM, CODED):
            raise ProtocolError(f"The peer sent a coded tensor with a part of form {form}, which is unknown.")
        return form

    def array(self, count: int, dtype: str) -> NDArray[Any]:
        """Return a copy of the next values, because numpy is slow on values at odd addresses."""
        plain = np.frombuffer(self.take(count * np.dtype(dtype).itemsize), np.uint8)
        return plain.copy().view(dtype)

    def section(self, needed: int) -> Bytes:
        """Return the content of the next section, which has to have `needed` bytes."""
        if self.form() == VERBATIM:
            return np.frombuffer(self.take(needed), np.uint8)
        (length,) = struct.unpack("<I", self.take(4))
        return np.frombuffer(_decompressed(self.take(length), needed), np.uint8)

    def end(self) -> None:
        """Raise if bytes are left."""
        if self._left.nbytes:
            raise ProtocolError(f"The peer sent a coded tensor with {self._left.nbytes} bytes after its end.")


def _decompressed(frame: memoryview, needed: int) -> bytes:
    """Return the content of a frame; memory is allocated only if the frame announces the size that is needed."""
    try:
        announced = zstandard.get_frame_parameters(frame).content_size
        if announced == needed:
            # zstandard itself checks that a frame holds as much as it announces.
            return _coders.decompressor.decompress(frame, max_output_size=needed, allow_extra_data=False)
    except zstandard.ZstdError:
        raise ProtocolError("The peer sent a coded tensor with a part that cannot be decompressed.") from None
    raise ProtocolError(f"The peer sent a coded tensor with a part of {announced} bytes; {needed} are needed.")


# --- masks


def not_zero(values: NDArray[Any]) -> Mask:
    """Return where a value's bits are not all zero: negative zeros and NaNs are kept."""
    mask: Mask = values.view(f"<u{values.itemsize}") != 0
    return mask


def mask_section(kept: Mask) -> tuple[Buffer, ...]:
    """Return the buffers of a mask: value i is bit i % 8, counted from the lowest, of byte i // 8."""
    return section(np.packbits(kept, bitorder="little"))


def read_mask(reader: Reader, count: int) -> Mask:
    """Return the mask of `count` values; the bits after the last one must be zero."""
    packed = reader.section(-(-count // 8))
    if count % 8 and packed[-1] >> count % 8:
        raise ProtocolError(f"The peer sent a coded tensor with a mask of more than {count} values.")
    return np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)


def gather(values: NDArray[Any], kept: Mask | None) -> NDArray[Any]:
    """Return the kept values, or all of them."""
    # Five times as fast as values[kept] where zeros and others alternate.
    return values if kept is None else values.compress(kept)


def scatter(out: NDArray[Any], kept: Mask | None, values: NDArray[Any]) -> None:
    """Write all of `out`: the kept values in their places, zeros elsewhere."""
    if values.size == out.size:
        out[:] = values
        return
    assert kept is not None
    out.fill(0)
    out[np.flatnonzero(kept)] = values


def kept_count(count: int, kept: Mask | None) -> int:
    return count if kept is None else int(np.count_nonzero(kept))


# --- planes


def plane_buffers(bits: Bits) -> tuple[Buffer, ...]:
    """Return the buffers of values: first bytes, second bytes, the rest of the upper halves, the lower halves."""
    double = bits.itemsize == 8
    upper = (bits >> 32).astype("<u4") if double else bits
    front = (upper >> 16).astype("<u2")
    first, second = (front >> 8).astype(np.uint8), front.astype(np.uint8)
    seconds = section(second) if double else buffer(second)
    lower = buffer(bits.astype("<u4")) if double else ()
    return *section(first), *seconds, *buffer(upper.astype("<u2")), *lower


def read_planes(reader: Reader, count: int, item_bytes: int) -> Bits:
    """Return the bit patterns of `count` values."""
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
