"""The exact encodings: every bit of every value is restored.

`sparse` leaves out the zeros after a ReLU, `planes` entropy-codes the exponents, `sparse-planes` does both.
"""

from __future__ import annotations

from typing import Any

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
    plane_buffers,
    read_mask,
    read_planes,
    scatter,
    total_bytes,
)
from pipar.wire.encodings import is_sparse


def encode_exactly(values: NDArray[Any], encoding: str, kept: Mask | None) -> tuple[Buffer, ...]:
    """Return the buffers of a chunk: encoded, or the values verbatim if that is not longer."""
    bits = values.view(_bits_dtype(values))
    mask: tuple[Buffer, ...] = ()
    known = kept
    if _sends_mask(encoding, kept):
        kept = not_zero(bits)
        mask = mask_section(kept)
    chosen = gather(bits, kept)
    coded = *mask, *(buffer(chosen) if encoding == "sparse" else plane_buffers(chosen))
    plain = chosen if known is kept else bits
    if total_bytes(coded) < plain.nbytes:
        return bytes((CODED,)), *coded
    return bytes((VERBATIM,)), *buffer(plain)


def decode_exactly(reader: Reader, encoding: str, out: NDArray[Any], kept: Mask | None) -> None:
    """Write all of `out` from the payload of one chunk, zeros where no value was kept."""
    out = out.view(_bits_dtype(out))
    coded = reader.form() == CODED
    if coded and _sends_mask(encoding, kept):
        kept = read_mask(reader, out.size)
    count = kept_count(out.size, kept)
    if coded and encoding != "sparse":
        bits = read_planes(reader, count, out.itemsize)
    else:
        bits = reader.array(count, out.dtype.str)
    reader.end()
    scatter(out, kept, bits)


def _sends_mask(encoding: str, kept: Mask | None) -> bool:
    return kept is None and is_sparse(encoding)


def _bits_dtype(values: NDArray[Any]) -> str:
    return f"<u{values.itemsize}"
