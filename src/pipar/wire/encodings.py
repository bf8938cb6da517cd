"""The encodings of activations and gradients: their names, and the chunks in which a tensor is encoded.

Exact encodings give back the same bits: `sparse` leaves out zeros, `planes` entropy-codes the exponents. Lossy ones are
used only if the configuration asks for them.
"""

from __future__ import annotations

import math

EXACT = ("raw", "sparse", "planes", "sparse-planes")
LOSSY = ("fp16", "bf16", "int8", "topk")
ALL = (*EXACT, *LOSSY)
#: Those that encode a tensor chunk by chunk.
CODED = ALL[1:]
#: A chunk's payload is never longer than its raw bytes and this.
OVERHEAD_BYTES = 64

_DENSE = {"sparse": "raw", "sparse-planes": "planes"}
#: Large enough that a call's fixed costs do not matter; small enough for a core's own cache, and to be sent one by one.
_CHUNK_BYTES = 256 * 1024


def is_sparse(encoding: str) -> bool:
    """Return whether only values that are not zero are sent; that is exact only after a ReLU."""
    return encoding in _DENSE


def dense(encoding: str) -> str:
    """Return the encoding to use instead at a cut that has no exact zeros."""
    return _DENSE.get(encoding, encoding)


def row_values(shape: tuple[int, ...]) -> int:
    """Return how many values belong together: one channel of a sample, or a whole sample if it has no channels."""
    return math.prod(shape[2:]) if len(shape) > 2 else math.prod(shape[1:])


def chunk_sizes(shape: tuple[int, ...], item_bytes: int) -> list[int]:
    """Return the number of values of each chunk of a tensor: nearly equal chunks of whole samples, of 256 KiB at most.

    A sample that is larger than a chunk is cut between its rows, and within a row only if the row is larger too. Both
    sides compute this from the shape alone. A tensor without values has no chunks.
    """
    total, most = math.prod(shape), _CHUNK_BYTES // item_bytes
    if total == 0:
        return []
    unit = next((unit for unit in (math.prod(shape[1:]), row_values(shape)) if unit <= most), 1)
    units = total // unit
    chunks = -(-units // (most // unit))
    each, more = divmod(units, chunks)
    return [(each + 1) * unit] * more + [each * unit] * (chunks - more)


def chunk_bytes(shape: tuple[int, ...], item_bytes: int, encoding: str) -> list[int]:
    """Return the bytes of each chunk of a tensor before encoding; a raw tensor is one chunk."""
    if encoding == "raw":
        return [math.prod(shape) * item_bytes]
    return [values * item_bytes for values in chunk_sizes(shape, item_bytes)]
