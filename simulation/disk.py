"""A disk that faults can fill, or make lose data that was not synced."""

from __future__ import annotations

import errno
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from pipar.storage.checkpoint import Disk


class PowerLossError(BaseException):
    """The machine is off: no code may handle this, and none after it runs."""


class UnreliableDisk(Disk):
    """Writes real files; syncing costs nothing, but data that was not synced does not survive a loss of power."""

    def __init__(self, lose_power: Callable[[], None]) -> None:
        self.full_for = 0  # saves that fail
        self.power_fails_in: int | None = None  # operations from now
        self._lose_power = lose_power
        self._unsynced: dict[str, Path] = {}

    def sync_folder(self, folder: Path) -> None:
        self._step(folder)

    def create(self, path: Path) -> FileIO:
        self._step(path)
        self._unsynced[str(path)] = path
        return super().create(path)

    def write(self, file: FileIO, data: memoryview) -> None:
        if self.full_for:
            self.full_for -= 1
            super().write(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
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
        if self._unsynced.pop(str(source), None) is not None:
            self._unsynced[str(target)] = target

    def remove(self, path: Path) -> None:
        self._step(path)
        super().remove(path)
        self._unsynced.pop(str(path), None)

    def _step(self, path: Path) -> None:  # noqa: ARG002
        if self.power_fails_in is None:
            return
        self.power_fails_in -= 1
        if self.power_fails_in < 0:
            self.power_fails_in = None
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
