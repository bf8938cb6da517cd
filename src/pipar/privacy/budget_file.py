"""A device's privacy budget over restarts, in a private file of the device (`--privacy-file`).

It holds the budget that the device has used, and the key with which its labels were randomised: with another key they
would be randomised a second time. It does not hold the key of the noise on updates, which is drawn at each start so
that noise is never repeated.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipar.errors import InputError, PrivacyError
from pipar.privacy.budget import BudgetUse
from pipar.private_files import write_private

FORMAT = 1
_FIELDS = {"format": int, "device": str, "label_key": str, "releases": int, "mu_squared": float}


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the file for this program: two programs that count in it would each use the other's budget.

    The lock is on a second file next to it, because each write replaces the file itself.
    """
    lock = path.parent / f".{path.name}.lock"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise InputError(f"Cannot write {lock}, which locks --privacy-file {path.name}: {error.strerror}.") from None
    try:
        _lock(handle, path)
        yield
    finally:
        os.close(handle)  # which releases the lock, as does the end of the program


def _lock(handle: int, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            f"--privacy-file {path} is in use by another `pipar device`: stop that one, or give this device its own "
            "file."
        ) from None
    except OSError as error:
        raise InputError(f"Cannot lock --privacy-file {path}: {error.strerror}.") from None


class BudgetFile:
    """The file of one device; it is on the disk before a method returns."""

    def __init__(self, path: Path, device: str, label_seed: int, used: BudgetUse) -> None:
        self.label_seed = label_seed
        self.used = used
        self._path = path
        self._device = device

    @classmethod
    def open(cls, path: Path, device: str) -> BudgetFile:
        """Return the file of a device; a missing file is created."""
        try:
            text = path.read_text("utf-8")
        except FileNotFoundError:
            new = cls(path, device, secrets.randbits(128), BudgetUse())
            new.save(new.used)
            return new
        except OSError as error:
            raise InputError(f"Cannot read --privacy-file {path}: {error.strerror}.") from None
        except ValueError:
            text = ""
        content = _read(text)
        if content is None:
            raise InputError(
                f"--privacy-file {path} is damaged, or was not written by `pipar device`: restore it, or give another "
                "path, with which this device counts from 0 again."
            )
        if content["device"] != device:
            raise InputError(f"--privacy-file {path} belongs to '{content['device']}': give '{device}' its own file.")
        return cls(path, device, int(content["label_key"], 16), BudgetUse(content["releases"], content["mu_squared"]))

    def save(self, used: BudgetUse) -> None:
        """Save the count, including the update that is about to be sent; if this raises, it is not sent."""
        content = {
            "format": FORMAT,
            "device": self._device,
            "label_key": f"{self.label_seed:032x}",
            "releases": used.releases,
            "mu_squared": float(used.mu_squared),
        }
        try:
            write_private(self._path, json.dumps(content).encode() + b"\n")
        except InputError as error:
            raise PrivacyError(
                f"{error} It is the --privacy-file: an update that cannot be counted is not sent."
            ) from None
        self.used = used


def _read(text: str) -> dict[str, Any] | None:
    """Return the content of a file; None if it is not a budget file."""
    try:
        content = json.loads(text)
        is_one = {key: type(value) for key, value in content.items()} == _FIELDS and content["format"] == FORMAT
        is_one = is_one and content["releases"] >= 0 and 0 <= content["mu_squared"] < math.inf
        return content if is_one and int(content["label_key"], 16) >= 0 else None
    except (ValueError, AttributeError, RecursionError):
        return None
