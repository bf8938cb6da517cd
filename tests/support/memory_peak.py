"""How much memory reading what a peer sent takes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import suppress

from pipar.errors import ProtocolError


def peak_bytes(read: Callable[[], object]) -> int:
    """Return the most memory that reading takes, refused or not, beyond what there was before."""
    tracemalloc.start()
    try:
        with suppress(ProtocolError):
            read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
