"""Files with secrets: written atomically, readable by their owner only, never overwritten by mistake."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from pipar.errors import InputError


def write_private(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Write a file atomically; only its owner may read it, unless `mode` allows more."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # readable by its owner only
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(mode)
            Path(temporary).replace(path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"Cannot write {path}: {os.strerror(error.errno or 0).lower()}.") from None


def refuse_existing(paths: Iterable[Path], *, force: bool) -> None:
    """Raise if one of the files exists, unless `force` allows replacing it."""
    found = [str(path) for path in paths if path.exists()]
    if found and not force:
        raise InputError(f"There is already {', '.join(found)}; --force replaces what is there.")


def read_bytes(path: Path, what: str) -> bytes:
    """Return a file's content; errors name it as `what`."""
    try:
        return path.read_bytes()
    except OSError as error:
        why = os.strerror(error.errno or 0).lower()
        raise InputError(f"Cannot read {what} from {path}: {why}.") from None
