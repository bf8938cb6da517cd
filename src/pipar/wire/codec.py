"""Encodes activations and gradients in fewer bytes, and decodes them; `docs/reference/wire-tensors.md` has the format.

A tensor is encoded in chunks, so that the first ones are sent while the last ones are encoded. The exact encodings
leave out zeros after a ReLU and entropy-code exponents; every bit of every value is restored. For the others see
`lossy`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipar.errors import ProtocolError
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
from pipar.wire.encodings import LOSSY, OVERHEAD_BYTES, is_sparse
from pipar.wire.lossy import Lossy, decode_lossy, encode_lossy


def encode(
    values: NDArray[Any], encoding: str, *, kept: Mask | None = None, row: int = 0, lossy: Lossy | None = None
) -> tuple[Buffer, ...]:
    """Return buffers that, joined, are the payload of one chunk: 1-D, contiguous, float32 or float64.

    `kept` gives the values to send, if the receiver knows it as well; the others are decoded as zero. Without it the
    sparse encodings leave out the values whose bits are all zero, and send a mask: negative zeros and NaNs are kept.
    `row` and `lossy` are for the lossy encodings only. The buffers are views of new memory or of `values`.
    """
    assert values.ndim == 1
    assert values.flags.c_contiguous
    assert values.dtype in (np.dtype("<f4"), np.dtype("<f8"))
    assert encoding != "raw", "raw values are not encoded"
    assert kept is None or (kept.shape == values.shape and kept.dtype == np.bool_)
    if encoding in LOSSY:
        return encode_lossy(values, encoding, kept=kept, row=row, lossy=lossy)
    return _encode_exactly(values.view(_bits_dtype(values)), encoding, kept)


def decode(payload: memoryview, encoding: str, out: NDArray[Any], *, kept: Mask | None = None, row: int = 0) -> None:
    """Write all of `out` from the payload of one chunk, zeros where no value was kept.

    A payload that does not fit raises ProtocolError. Until it is known to fit, no memory is allocated for its content,
    and never more than a small multiple of `out`.
    """
    assert out.ndim == 1
    assert encoding != "raw", "raw values are not decoded"
    if payload.nbytes > out.nbytes + OVERHEAD_BYTES:
        raise ProtocolError(
            f"The peer sent a coded tensor of {payload.nbytes} bytes; uncoded it has only {out.nbytes}."
        )
    reader = Reader(payload)
    if encoding in LOSSY:
        decode_lossy(reader, encoding, out, kept=kept, row=row)
    else:
        _decode_exactly(reader, encoding, out.view(_bits_dtype(out)), kept)


def _bits_dtype(values: NDArray[Any]) -> str:
    return f"<u{values.itemsize}"


def _sends_mask(encoding: str, kept: Mask | None) -> bool:
    return kept is None and is_sparse(encoding)


def _encode_exactly(bits: NDArray[Any], encoding: str, kept: Mask | None) -> tuple[Buffer, ...]:
    """Return the buffers of a chunk: encoded, or the values verbatim if that is not longer."""
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


def _decode_exactly(reader: Reader, encoding: str, out: NDArray[Any], kept: Mask | None) -> None:
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
