"""What a device remembers of its privacy when it is started again, in a file that is its own.

That is what it has used, and the key by which its labels were told: with another one they would be told a second time.
The key of the noise on updates is not in it. It is drawn anew at each start, so that no noise can come twice.
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
    """Keep the file for this program: two that count in it would each spend what the other one has left.

    What is locked is a file beside it, which stays: the file itself is another one each time that it is written.
    """
    lock = path.parent / f".{path.name}.lock"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise InputError(f"Cannot write {lock}, which keeps --privacy-file for one device: {error.strerror}.") from None
    try:
        _lock(handle, path)
        yield
    finally:
        os.close(handle)  # and the lock is gone, as it is when a program is killed


def _lock(handle: int, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            f"--privacy-file {path} is in use by another `pipar device`: end that one, or give this device a file of "
            "its own."
        ) from None
    except OSError as error:
        raise InputError(f"Cannot keep --privacy-file {path} for one device: {error.strerror}.") from None


class BudgetFile:
    """The file of one device; what it says is on the disk before a method returns."""

    def __init__(self, path: Path, device: str, label_seed: int, used: BudgetUse) -> None:
        self.label_seed = label_seed
        self.used = used
        self._path = path
        self._device = device

    @classmethod
    def open(cls, path: Path, device: str) -> BudgetFile:
        """Return what a file says of a device; one that is not there is begun."""
        try:
            text = path.read_text("utf-8")
        except FileNotFoundError:
            begun = cls(path, device, secrets.randbits(128), BudgetUse())
            begun.save(begun.used)
            return begun
        except OSError as error:
            raise InputError(f"Cannot read --privacy-file {path}: {error.strerror}.") from None
        except ValueError:
            text = ""
        content = _read(text)
        if content is None:
            raise InputError(
                f"--privacy-file {path} is not what `pipar device` wrote: bring it back, or give another one, by which "
                "this device begins to count anew."
            )
        if content["device"] != device:
            raise InputError(f"--privacy-file {path} is that of '{content['device']}': give '{device}' its own.")
        return cls(path, device, int(content["label_key"], 16), BudgetUse(content["releases"], content["mu_squared"]))

    def save(self, used: BudgetUse) -> None:
        """Write down what the device has used, with what is about to be sent; if that fails it may not be."""
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
            raise PrivacyError(f"{error} It is the --privacy-file: what is not counted is not sent.") from None
        self.used = used


def _read(text: str) -> dict[str, Any] | None:
    """Return the content of a file; None if it is not one."""
    try:
        content = json.loads(text)
        is_one = {key: type(value) for key, value in content.items()} == _FIELDS and content["format"] == FORMAT
        is_one = is_one and content["releases"] >= 0 and 0 <= content["mu_squared"] < math.inf
        return content if is_one and int(content["label_key"], 16) >= 0 else None
    except (ValueError, AttributeError, RecursionError):
        return None
