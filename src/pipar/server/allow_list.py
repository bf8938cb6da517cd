"""The devices that may take part in one training, among those that have a credential."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pipar.errors import InputError, ProtocolError, TryAgainError
from pipar.private_files import read_bytes
from pipar.transport.reloading import change_text


class AllowList:
    """Names of devices, or a file with one name a line, which is read again for every device that joins.

    In the file, empty lines and lines that begin with # do not count. While it cannot be read, no device is admitted,
    and devices try again.
    """

    def __init__(self, allowed: Collection[str] | str) -> None:
        self._file = Path(allowed) if isinstance(allowed, str) else None
        self._names = frozenset() if isinstance(allowed, str) else frozenset(allowed)
        self._seen = self.names()  # a server does not start with a file that cannot be read

    def names(self) -> frozenset[str]:
        """Return the names of the devices that may take part now."""
        if self._file is None:
            return self._names
        content = read_bytes(self._file, "the names of the devices that may take part")
        try:
            lines = content.decode("utf-8").splitlines()
        except UnicodeDecodeError:
            raise InputError(f"{self._file} is not text: server.allow needs one device name per line.") from None
        return frozenset(name for line in lines if (name := line.strip()) and not name.startswith("#"))

    def take_change(self) -> str | None:
        """Return a sentence about the names that the file has gained and lost since this was last asked, if any."""
        try:
            before, self._seen = self._seen, self.names()
        except InputError:
            return None  # devices that join are told
        if self._file is None:
            return None
        return change_text(self._file, dict.fromkeys(before), dict.fromkeys(self._seen))

    def check(self, name: str) -> None:
        """Raise ProtocolError if the device may not take part; it may try again if the file cannot be read."""
        try:
            names = self.names()
        except InputError as error:
            raise TryAgainError(f"The server admits no device until its list of devices can be read: {error}") from None
        if name not in names:
            raise ProtocolError(
                f"'{name}' has a credential, but may not take part in this training: its operator can add it to "
                "server.allow."
            )
