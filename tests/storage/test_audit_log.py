"""The audit log says which devices took part and what the operator did, also after the disk was full for a while."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from pipar.events import (
    Dropped,
    Event,
    Joined,
    Left,
    Progress,
    Refused,
    Reloaded,
    ReloadFailed,
    RoundOver,
    SaveFailed,
    Stopping,
)
from pipar.storage.audit_log import FILE, AuditLog

HAPPENED: list[Event] = [
    Joined("pi-1", 1),
    Refused("pi-9", "It has another network.", again=False),
    Progress("pi-1", 1, 1, 10, 2.0, 1.0),
    RoundOver(1, {"pi-1": 100}),
    Dropped("pi-1", 2, "its link was lost"),
    Left("pi-1", "it was stopped"),
    Reloaded("tokens.json was read again: removed pi-2."),
    ReloadFailed("server.pem has no certificate."),
    Stopping("The server was asked to stop."),
]
WRITTEN = [
    {"what": "command", "command": "pipar server a.toml"},
    {"what": "joined", "device": "pi-1"},
    {"what": "refused", "device": "pi-9", "reason": "It has another network.", "again": False},
    {"what": "round", "round": 1, "samples": {"pi-1": 100}, "partly": {}},
    {"what": "excluded", "device": "pi-1", "round": 2, "reason": "its link was lost"},
    {"what": "left", "device": "pi-1", "reason": "it was stopped"},
    {"what": "reloaded", "change": "tokens.json was read again: removed pi-2."},
    {"what": "not_reloaded", "reason": "server.pem has no certificate."},
    {"what": "stopping", "reason": "The server was asked to stop."},
]


def lines(folder: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (folder / FILE).read_text("utf-8").splitlines()]
    return [{key: value for key, value in entry.items() if key != "time"} for entry in entries]


def test_what_is_audited_is_written_and_every_event_is_passed_on(tmp_path: Path) -> None:
    seen: list[Event] = []
    observe = AuditLog(tmp_path, "pipar server a.toml").recorder(seen.append)
    for event in HAPPENED:
        observe(event)
    assert lines(tmp_path) == WRITTEN
    assert seen == HAPPENED
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_a_server_that_resumes_continues_the_log(tmp_path: Path) -> None:
    for _ in range(2):
        observe = AuditLog(tmp_path, "pipar server a.toml").recorder(lambda _: None)
        for event in HAPPENED:
            observe(event)
    assert lines(tmp_path) == WRITTEN * 2


def test_a_full_disk_is_reported_once_and_loses_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Event] = []
    observe = AuditLog(tmp_path, "pipar server a.toml").recorder(seen.append)
    written, write = [0], os.write

    def full(descriptor: int, content: bytes) -> int:
        """Write a few bytes of each call, then none."""
        written[0] += 1
        if written[0] % 2 == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content[:7])

    monkeypatch.setattr(os, "write", full)
    for event in HAPPENED[:4]:
        observe(event)
    assert (tmp_path / FILE).read_bytes() == b""
    (failed,) = [event for event in seen if isinstance(event, SaveFailed)]
    assert failed.reason.startswith(f"{tmp_path / FILE} could not be written: No space left on device.")
    monkeypatch.setattr(os, "write", write)
    for event in HAPPENED[4:]:
        observe(event)
    assert lines(tmp_path) == WRITTEN
