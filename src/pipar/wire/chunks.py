"""Where a tensor is cut before it is encoded: from its shape alone, so that both sides know."""

from __future__ import annotations

import math

#: A chunk's payload is never longer than its raw bytes and this.
OVERHEAD_BYTES = 64
#: Large enough that a call's fixed costs do not count, small enough for a core's own cache and to be sent one by one.
_CHUNK_BYTES = 256 * 1024


def row_values(shape: tuple[int, ...]) -> int:
    """Return how many values belong together: those of one channel of one sample, or of one sample without channels."""
    return math.prod(shape[2:]) if len(shape) > 2 else math.prod(shape[1:])


def chunk_sizes(shape: tuple[int, ...], item_bytes: int) -> list[int]:
    """Return into how many values each a tensor is cut: nearly equal chunks of whole samples, of 256 KiB at most.

    A sample that is larger than a chunk is cut between its rows, and anywhere only if a row is larger, too. Both sides
    compute it, from sizes alone where there is no tensor; one without values has no chunks.
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
    """Return the bytes of each chunk that a tensor is encoded in, before encoding; raw ones are in one piece."""
    if encoding == "raw":
        return [math.prod(shape) * item_bytes]
    return [values * item_bytes for values in chunk_sizes(shape, item_bytes)]
