"""Files of credentials are read again when they change: they are renewed, added and revoked without a restart."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pipar.errors import InputError
from pipar.transport.tls import Material, ServerSecurity, file_exists, server_material

Content = TypeVar("Content", bound=Mapping[str, object])
#: Is called with a sentence about a file.
Notify = Callable[[str], None]
#: Names in a sentence; more are only counted.
_MOST_NAMES = 5


def _ignore(_: str) -> None:
    pass


@dataclass(frozen=True)
class Notices:
    """Is told, in a sentence, about files of credentials: one was read again; a new one cannot be used, and the old
    one stays in use; or one cannot be read, so that no device is admitted.
    """

    reloaded: Notify = _ignore
    failed: Notify = _ignore
    barred: Notify = _ignore


class Fresh(Generic[Content]):
    """The names in a small file, read again when it has changed, which is reported; a file that existed has to stay."""

    def __init__(
        self,
        path: Path,
        read: Callable[[Path], Content],
        reloaded: Notify,
        before_it_exists: Content | None = None,
    ) -> None:
        self._path = path
        self._read = read
        self._reloaded = reloaded
        self._before_it_exists = before_it_exists
        self._known: tuple[object, Content] | None = None

    def content(self) -> Content:
        """Return what the file holds now, or raise InputError."""
        version = version_of(self._path)
        if self._known is None and self._before_it_exists is not None and not file_exists(self._path):
            return self._before_it_exists
        if self._known is None or self._known[0] != version:
            before = self._before_it_exists if self._known is None else self._known[1]
            self._known = (version, self._read(self._path))
            if before is not None and (change := change_text(self._path, before, self._known[1])):
                self._reloaded(change)
        return self._known[1]


def version_of(path: Path) -> object:
    """Return what differs when a file has changed; None if there is none, or it cannot be looked at."""
    try:
        status = path.stat()
    except OSError:
        return None  # reading it will raise the reason
    return status.st_mtime_ns, status.st_size, status.st_ino


class ChangedFiles:
    """Tells whether files have changed; those that are None are left out."""

    def __init__(self, *paths: Path | None) -> None:
        self._paths = [path for path in paths if path is not None]
        self._versions = self._look()

    def take(self) -> list[Path]:
        """Return the files that have changed since this was last asked."""
        before, self._versions = self._versions, self._look()
        return [path for path in self._paths if before[path] != self._versions[path]]

    def _look(self) -> dict[Path, object]:
        return {path: version_of(path) for path in self._paths}


def reread_text(paths: Iterable[Path]) -> str:
    """Return the sentence about certificates or a token that were read again."""
    *first, last = (str(path) for path in paths)
    files = f"{', '.join(first)} and {last} were" if first else f"{last} was"
    return f"{files} read again: new connections use {'them' if first else 'it'}."


def change_text(path: Path, before: Mapping[str, object], after: Mapping[str, object]) -> str | None:
    """Return a sentence about the names that a file has gained, lost and changed; None if there are none."""
    both = before.keys() & after.keys()
    changes = {
        "added": after.keys() - before.keys(),
        "removed": before.keys() - after.keys(),
        "changed": {name for name in both if before[name] != after[name]},
    }
    words = [f"{what} {_listed(names)}" for what, names in changes.items() if names]
    return f"{path} was read again: {'; '.join(words)}." if words else None


def _listed(names: Iterable[str]) -> str:
    some = sorted(names)
    more = f" and {len(some) - _MOST_NAMES} more" if len(some) > _MOST_NAMES else ""
    return f"{', '.join(some[:_MOST_NAMES])}{more}"


class FreshMaterial:
    """The certificate, key and authority of a server, read again when their files change. Any thread may use it.

    Files that cannot be used are reported, and leave those in use that were loaded before. They are tried again: what
    prevented it may have passed without a change of the files.
    """

    def __init__(self, security: ServerSecurity, material: Material, notices: Notices) -> None:
        self.loaded = material
        self._security = security
        self._notices = notices
        self._files = ChangedFiles(security.certificate, security.key, security.client_ca)
        self._delivered = material
        self._unread: list[Path] = []  # files that have changed, and could not be used yet
        self._why_unread = ""
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Read the files again if they have changed."""
        with self._lock:
            new = self._files.take()
            changed = sorted({*new, *self._unread})
            if not changed:
                return
            try:
                found = server_material(self._security)
            except InputError as error:
                if new or str(error) != self._why_unread:  # once for each change and reason
                    self._notices.failed(f"{error} The server continues with the certificate that it has.")
                self._unread, self._why_unread = changed, str(error)
                return
            self._unread, self._why_unread = [], ""
            if found != self.loaded:
                self.loaded = found
                self._notices.reloaded(reread_text(changed))

    def take_new(self) -> Material | None:
        """Return what is loaded if this has not returned it before, else None."""
        self.refresh()
        if self.loaded is self._delivered:
            return None
        self._delivered = self.loaded
        return self.loaded
