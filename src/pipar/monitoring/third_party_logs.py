"""Lines that other code of the process writes to standard error, such as gRPC's own about a failed TLS handshake."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

_STANDARD_ERROR = 2
_LONGEST_LINE = 10_000
#: A child process that still has the pipe open must not delay the end of the program.
_END_S = 1.0


@contextmanager
def real_standard_error() -> Iterator[TextIO]:
    """Yield a stream to what is standard error now, also while `foreign_lines` takes what is written there."""
    sys.stderr.flush()
    copy = os.dup(_STANDARD_ERROR)
    stream = os.fdopen(copy, "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    try:
        yield stream
    finally:
        with suppress(OSError):  # no process reads it any more
            stream.close()


@contextmanager
def foreign_lines(take: Callable[[str], None]) -> Iterator[None]:
    """Pass every line that is written to standard error to `take` instead, in another thread, until the block ends.

    This includes lines of libraries that are not written in Python, and of child processes. `take` must not write
    there.
    """
    sys.stderr.flush()
    before = os.dup(_STANDARD_ERROR)
    reading, writing = os.pipe()
    os.dup2(writing, _STANDARD_ERROR)
    os.close(writing)
    reader = threading.Thread(target=_read, args=(reading, take), name="standard error", daemon=True)
    reader.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, _STANDARD_ERROR)  # closes the last end of the pipe for writing, so that the reader ends
        os.close(before)
        reader.join(_END_S)


def _read(reading: int, take: Callable[[str], None]) -> None:
    with os.fdopen(reading, "rb") as lines:
        while line := lines.readline(_LONGEST_LINE):
            if text := line.decode("utf-8", "backslashreplace").strip():
                take(text)
