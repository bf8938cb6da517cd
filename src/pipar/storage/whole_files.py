"""Files that are written completely or not at all, and tried again while the disk is full."""

from __future__ import annotations

import errno
import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pipar.errors import StorageError

#: The permissions of files that only their owner may read: models, and what devices did.
PRIVATE = 0o600
_PUBLIC = 0o666  # less what the umask takes away
_PARTIAL = ".partial"
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0
#: What traces and recordings leave free for checkpoints and results, which a training cannot do without.
SPARE_BYTES = 100_000_000

T = TypeVar("T")


def write_atomically(path: Path, *content: bytes | memoryview, mode: int = _PUBLIC) -> None:
    """Write a file completely or not at all, even if two processes write it at the same time or the power fails."""
    temporary = partial_file(path)
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            for piece in content:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)
        raise


def partial_file(path: Path) -> Path:
    """Return the path under which this process writes a file before it is complete."""
    return path.with_name(f".{path.name}.{os.getpid()}{_PARTIAL}")


def remove_partial_files(folder: Path) -> None:
    """Remove partial files that a crashed process has left; those of running processes stay."""
    for partial in folder.glob(f".*{_PARTIAL}"):
        number = partial.suffixes[-2].removeprefix(".") if len(partial.suffixes) > 1 else ""
        if not (number.isdigit() and Path("/proc", number).exists()):
            with suppress(OSError):  # a partial file that stays does no harm
                partial.unlink()


def append_whole(path: Path, content: bytes) -> None:
    """Append to a private file all of the content or, if this raises OSError, nothing."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE)
    try:
        before, left = os.fstat(descriptor).st_size, memoryview(content)
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)


def check_spare(path: Path, size_bytes: int) -> None:
    """Raise OSError if a file that a training can do without would take the last space of its disk."""
    if shutil.disk_usage(path.parent).free < SPARE_BYTES + size_bytes:
        last = f"the last {SPARE_BYTES / 1e6:g} MB of the disk are kept for checkpoints and results"
        raise OSError(errno.ENOSPC, last)


def cannot_write(what: str, error: OSError) -> str:
    """Return a sentence about a file that could not be written."""
    return f"{what} could not be written: {error.strerror or error}. Make sure that there is enough space."


def keep_trying(
    write: Callable[[], T],
    what: str,
    say: Callable[[str], None],
    *,
    patience_s: float = math.inf,
    sleep: Callable[[float], None] | None = None,
) -> T:
    """Return what `write` returns once it raises no OSError; `say` gets a sentence about each failure.

    Raises StorageError when the pauses between the attempts would exceed `patience_s`.
    """
    wait_s, waited_s = _FIRST_WAIT_S, 0.0
    while True:
        try:
            return write()
        except OSError as error:
            sentence = cannot_write(what, error)
        if waited_s + wait_s > patience_s:
            raise StorageError(sentence)
        say(f"{sentence} The next attempt is in {wait_s:g} s.")
        (sleep or time.sleep)(wait_s)
        waited_s, wait_s = waited_s + wait_s, next_wait_s(wait_s)


def next_wait_s(wait_s: float | None = None) -> float:
    """Return the pause before the next attempt to write, given the one before: from 1 s, doubled, to 30 s."""
    return _FIRST_WAIT_S if wait_s is None else min(2 * wait_s, _LONGEST_WAIT_S)
