"""The audit log of a deployment: which devices joined, were refused, left and contributed, and what the operator did.

One JSON object a line, appended and flushed as it happens. It is not part of the training: a line that cannot be
written is written with the next one, and the training continues.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipar.events import (
    Away,
    Back,
    Barred,
    Dropped,
    Event,
    Joined,
    Left,
    Listening,
    Lost,
    Observer,
    Refused,
    Reloaded,
    ReloadFailed,
    Resumed,
    RoundOver,
    SaveFailed,
    Started,
    Stopping,
)
from pipar.storage.whole_files import append_whole, cannot_write

FILE = "audit.jsonl"
#: Lines that wait for a disk with space; older ones are dropped.
_MOST_WAITING = 10_000


class AuditLog:
    """Appends what is audited to a file that only its owner may read."""

    def __init__(self, folder: Path, command: str) -> None:
        self._path = folder / FILE
        self._waiting: deque[str] = deque(maxlen=_MOST_WAITING)
        self._failed = False
        self._add("command", {"command": command})

    def recorder(self, observe: Observer) -> Observer:
        """Return an observer that writes what is audited, and passes all events on."""

        def watch(event: Event) -> None:
            entry = _entry(event)
            if entry is not None:
                self._add(*entry)
                self._write(observe)
            observe(event)

        return watch

    def _add(self, what: str, fields: Mapping[str, Any]) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._waiting.append(json.dumps({"time": time, "what": what, **fields}))

    def _write(self, observe: Observer) -> None:
        text = "".join(f"{line}\n" for line in self._waiting)
        try:
            append_whole(self._path, text.encode())
        except OSError as error:
            if not self._failed:  # once: the next events try again
                observe(SaveFailed(0, f"{cannot_write(str(self._path), error)} pipar tries again with the next entry."))
            self._failed = True
            return
        self._waiting.clear()
        self._failed = False


def _entry(event: Event) -> tuple[str, dict[str, Any]] | None:
    """Return what an event is called in the log, and its fields; None if it is not audited."""
    match event:
        case Listening():
            return "listening", {"address": event.address}
        case Started():
            return "started", {"method": event.method, "rounds": event.epochs, "samples": event.samples}
        case Resumed():
            return "resumed", {"round": event.epoch}
        case Stopping():
            return "stopping", {"reason": event.reason}
        case Barred() | ReloadFailed():
            return "barred" if isinstance(event, Barred) else "not_reloaded", {"reason": event.reason}
        case Reloaded():
            return "reloaded", {"change": event.what}
        case RoundOver():
            return "round", {"round": event.epoch, "samples": event.counted, "partly": event.partly}
        case Dropped():
            return "excluded", {"device": event.device, "round": event.epoch, "reason": event.reason}
        case Refused():
            return "refused", {"device": event.device, "reason": event.reason, "again": event.again}
        case Joined() | Back():
            return type(event).__name__.lower(), {"device": event.device}
        case Left() | Lost():
            return type(event).__name__.lower(), {"device": event.device, "reason": event.reason}
        case Away():
            return "away", {"device": event.device}
    return None
