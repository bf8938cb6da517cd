"""Tensors to bytes and back, with any encoding; `docs/reference/wire-coding.md` has the format.

A tensor is encoded in chunks, so that the first ones are sent while the last ones are encoded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipar.errors import ProtocolError
from pipar.wire.bitpacking import Buffer, Mask, Reader
from pipar.wire.encodings import LOSSY, OVERHEAD_BYTES
from pipar.wire.exact import decode_exactly, encode_exactly
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
    return encode_exactly(values, encoding, kept)


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
        decode_exactly(reader, encoding, out, kept)
