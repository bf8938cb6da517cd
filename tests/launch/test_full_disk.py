"""A server whose disk is full at the end: the result is written when there is space, or the server stops."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipar.events import Event, SaveFailed, Scores
from pipar.launch import deployed_server
from pipar.storage import whole_files


class Folder:
    """A run's folder on a disk that is full for some attempts."""

    def __init__(self, path: Path, failures: int) -> None:
        self.path, self.failures = path, failures
        self.epochs: list[Any] = []
        self.best = None
        self.round_log = [{"pi-1": 20}] * 3

    def _write(self, content: dict[str, Any]) -> dict[str, Any]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        (self.path / "result.json").write_text(json.dumps(content))
        return content

    def finish(self, **_: Any) -> dict[str, Any]:
        return self._write({"test_accuracy": None})

    def add_test_scores(self, scores: Scores) -> dict[str, Any]:
        return self._write({"test_accuracy": scores.accuracy})


def end_of_serving(
    folder: Folder, stopped: signal.Signals | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[Event], list[float]]:
    """Return the exit code of a server after its training, the events, and the pauses between attempts to write."""
    events: list[Event] = []
    pauses: list[float] = []
    learner = SimpleNamespace(packed_state=lambda: None, sha256=lambda: "abc")
    run = deployed_server._Run(*[SimpleNamespace()] * 2, learner, folder, None)  # type: ignore[arg-type]
    program = SimpleNamespace(train=lambda: None, fleet=None)
    tracking: Any = SimpleNamespace(observe=events.append, end=lambda _: None)
    monkeypatch.setattr(deployed_server, "_open_run", lambda *_: run)
    monkeypatch.setattr(deployed_server, "_ServerProgram", lambda *_: program)
    monkeypatch.setattr(deployed_server, "run_until_signal", lambda _: stopped)
    monkeypatch.setattr(deployed_server, "known_test_scores", lambda *_: Scores(accuracy=0.5))
    monkeypatch.setattr(whole_files.time, "sleep", pauses.append)
    options: Any = SimpleNamespace(record=False)
    return deployed_server._serve_in(folder.path, options, options, tracking), events, pauses


def test_the_result_is_written_when_there_is_space_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, events, pauses = end_of_serving(Folder(tmp_path, 5), None, monkeypatch)
    assert code == 0
    assert json.loads((tmp_path / "result.json").read_text("utf-8")) == {"test_accuracy": 0.5}
    assert [event.epoch for event in events if isinstance(event, SaveFailed)] == [3] * 5
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0]


@pytest.mark.parametrize(("stopped", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_stopped_server_exits_as_documented_when_its_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: signal.Signals, code: int
) -> None:
    given, events, pauses = end_of_serving(Folder(tmp_path, 100), stopped, monkeypatch)
    assert (given, pauses) == (code, [])
    assert [event.reason for event in events if isinstance(event, SaveFailed)] == [
        f"The result in {tmp_path} could not be written: No space left on device. Make sure that there is enough space."
    ]
