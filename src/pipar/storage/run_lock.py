"""The lock on a run's folder: one training at a time writes to it.

The system releases the lock when the process ends, however it ends, so a lock never has to be removed by hand.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from pipar.errors import InputError
from pipar.storage.run_names import cannot_make_folder

_NAME = ".lock"
_LONGEST_CONTENT = 10_000


@contextmanager
def folder_locked(folder: Path, command: str) -> Iterator[None]:
    """Hold a run's folder, made if it is missing; raise InputError with the process that holds it already.

    At the end an empty folder is removed: nothing was trained.
    """
    handle = _acquire(folder)
    try:
        _describe(handle, command)
        yield
    finally:
        with suppress(OSError):
            (folder / _NAME).unlink()  # while it is held: no other process can have locked this file
        os.close(handle)
        with suppress(OSError):
            folder.rmdir()


def _acquire(folder: Path) -> int:
    """Return the open file with the lock."""
    path = folder / _NAME
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_make_folder(folder, error) from None
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue  # the process that held it has removed its empty folder
        except OSError as error:
            raise cannot_make_folder(folder, error) from None
        try:
            _lock(handle, folder)
        except BaseException:
            os.close(handle)
            raise
        if _is_named(handle, path):
            return handle
        os.close(handle)  # the process that held it has removed the file


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            f"{folder} is in use by {_holder(handle)}: stop it first, or give this training another run.name."
        ) from None
    except OSError as error:
        raise InputError(
            f"Cannot lock {folder}: {error.strerror}. Set PIPAR_RUNS to a folder on a disk of this machine."
        ) from None


def _is_named(handle: int, path: Path) -> bool:
    """Return whether the open file is still the one with this name."""
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    opened = os.fstat(handle)
    return (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino)


def _describe(handle: int, command: str) -> None:
    """Write which process holds the lock, for messages only."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    content = {"process": os.getpid(), "machine": socket.gethostname(), "command": command[:1000], "since": now}
    with suppress(OSError):  # on a full disk, the lock holds without it
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(content).encode(), 0)


def _holder(handle: int) -> str:
    """Return a text about the process that holds the lock."""
    try:
        content: dict[str, Any] = json.loads(os.pread(handle, _LONGEST_CONTENT, 0))
        return (
            f"process {content['process']} on {content['machine']} (`{content['command']}`, since {content['since']})"
        )
    except (OSError, ValueError, LookupError, TypeError):
        return "another process"
