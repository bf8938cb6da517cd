"""Peak memory of reading a peer's message."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import suppress

from pipar.errors import ProtocolError


def peak_bytes(read: Callable[[], object]) -> int:
    """Return the peak memory that reading takes in addition, whether the message is refused or not."""
    tracemalloc.start()
    try:
        with suppress(ProtocolError):
            read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
