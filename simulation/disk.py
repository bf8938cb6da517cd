"""A disk that faults can fill, slow down, make unreadable, or make lose or overwrite data."""

from __future__ import annotations

import errno
import os
import struct
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import BufferedReader, FileIO
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from pipar.storage import trace_file, whole_files
from pipar.storage.checkpoint import MAGIC, VERSION, Disk

_LOGS = ("rounds.jsonl", "metrics.jsonl")
#: How the newest checkpoint cannot be read: two errors of the disk, or another version of its format.
READ_ERRORS = (errno.EIO, errno.EACCES, None)


class PowerLossError(BaseException):
    """The machine is off: no code may handle this, and none after it runs."""


@dataclass
class DiskTroubles:
    """The faults that the server's disk has now; they outlive the server's processes."""

    full_for: int = 0  # saves of checkpoints that fail
    results_full_for: int = 0  # writes of all other files that fail
    power_fails_in: int | None = None  # operations from now
    save_s: deque[float] = field(default_factory=deque)  # durations of the next saves
    is_unreadable: Callable[[], bool] = lambda: False  # the newest checkpoint
    read_error: int | None = errno.EIO
    has_lost_power: bool = False  # since the last start: rows of the logs may be torn
    failed_writes: int = 0
    overwritten: set[int] = field(default_factory=set)  # rounds of checkpoints that a misdirected write has damaged

    def fail_write(self) -> OSError:
        """Return the error of a write to a full disk."""
        self.failed_writes += 1
        return OSError(errno.ENOSPC, "No space left on device")


class UnreliableDisk(Disk):
    """Writes real files; syncing costs nothing, but data that was not synced does not survive a loss of power."""

    def __init__(self, lose_power: Callable[[], None], troubles: DiskTroubles | None = None) -> None:
        self._troubles = troubles or DiskTroubles()
        self._lose_power = lose_power
        self._unsynced: dict[str, Path] = {}

    def open(self, path: Path) -> BufferedReader:
        troubles = self._troubles
        if not troubles.is_unreadable() or path != max(path.parent.glob("round-*.pipar")):
            return super().open(path)
        if troubles.read_error is not None:
            raise OSError(troubles.read_error, os.strerror(troubles.read_error))
        return _of_another_version(path)

    def sync_folder(self, folder: Path) -> None:
        self._step(folder)

    def create(self, path: Path) -> FileIO:
        self._step(path)
        self._unsynced[str(path)] = path
        return super().create(path)

    def write(self, file: FileIO, data: memoryview) -> None:
        if self._troubles.full_for:
            self._troubles.full_for -= 1
            super().write(file, data[: len(data) // 2])
            raise self._troubles.fail_write()
        try:
            self._step(Path(str(file.name)))
        except PowerLossError:
            super().write(file, data[: len(data) // 2])
            raise
        super().write(file, data)

    def sync(self, file: FileIO) -> None:
        self._step(Path(str(file.name)))
        self._unsynced.pop(str(file.name), None)

    def rename(self, source: Path, target: Path) -> None:
        self._step(source)
        super().rename(source, target)
        self._troubles.overwritten.discard(round_of(target))
        if self._unsynced.pop(str(source), None) is not None:
            self._unsynced[str(target)] = target

    def remove(self, path: Path) -> None:
        self._step(path)
        super().remove(path)
        self._unsynced.pop(str(path), None)

    def _step(self, path: Path) -> None:  # noqa: ARG002
        troubles = self._troubles
        if troubles.power_fails_in is None:
            return
        troubles.power_fails_in -= 1
        if troubles.power_fails_in < 0:
            troubles.power_fails_in = None
            troubles.has_lost_power = True
            self.lose_unsynced()
            self._lose_power()
            raise PowerLossError

    def lose_unsynced(self) -> None:
        """Truncate every file that was not synced."""
        for path in self._unsynced.values():
            if path.exists():
                with path.open("r+b") as file:
                    file.truncate(path.stat().st_size // 2)
        self._unsynced.clear()


def _of_another_version(path: Path) -> BufferedReader:
    """Return the file as a later version of pipar would have written it."""
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, len(MAGIC), VERSION + 1)
    changed = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    changed.write(content)
    changed.seek(0)
    return cast(BufferedReader, changed)


def prepare_start(folder: Path, troubles: DiskTroubles) -> None:
    """Leave the files of a run as a new process finds them: without those that the last one was writing.

    After a loss of power, the last row of each log is torn.
    """
    for partial in folder.glob(
        ".*.partial"
    ):  # of an ended process, although all processes of the world have one number
        partial.unlink()
    if troubles.has_lost_power:
        troubles.has_lost_power = False
        for path in (folder / name for name in _LOGS):
            if path.exists() and path.stat().st_size:
                os.truncate(path, path.stat().st_size - 3)


def round_of(path: Path) -> int:
    """Return the round of a checkpoint's file; 0 for another file."""
    number = path.name.removeprefix("round-").removesuffix(".pipar")
    return int(number) if number.isdecimal() else 0


def overwrite_newest_checkpoint(folder: Path, troubles: DiskTroubles) -> None:
    """Overwrite a part of the newest checkpoint, as a misdirected write does, if another one is whole."""
    paths = sorted(folder.glob("round-*.pipar"))
    if len(paths) < 2 or troubles.overwritten & set(map(round_of, paths)):
        return
    with paths[-1].open("r+b") as file:
        file.seek(paths[-1].stat().st_size // 2)
        file.write(b"a block of another file")
    troubles.overwritten.add(round_of(paths[-1]))


class _FullSystem:
    """Stands in for `os` in the modules that write the files of a run: their writes fail while the disk is full."""

    def __init__(self, troubles: DiskTroubles) -> None:
        self._troubles = troubles

    def write(self, descriptor: int, data: memoryview) -> int:
        if self._is_full():
            os.write(descriptor, data[: len(data) // 2])
            raise self._troubles.fail_write()
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:  # noqa: ARG002 - real syncing takes time, and no real power fails
        if self._is_full():
            raise self._troubles.fail_write()

    def _is_full(self) -> bool:
        if not self._troubles.results_full_for:
            return False
        self._troubles.results_full_for -= 1
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@contextmanager
def results_on(troubles: DiskTroubles) -> Iterator[None]:
    """Let the files of a run be written to this disk."""
    with ExitStack() as replaced:
        for module in (whole_files, trace_file):
            replaced.enter_context(replaced_in(module, "os", _FullSystem(troubles)))
        yield


@contextmanager
def replaced_in(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """Replace a name of a module."""
    usual = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, usual)
