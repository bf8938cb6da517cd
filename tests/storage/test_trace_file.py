"""trace.json is written epoch by epoch, and takes neither the memory nor the disk of a long training."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import threading
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.hand_made_job import job
from support.waiting import PATIENCE_S

from pipar.events import EpochResult, Event, SaveFailed
from pipar.execution.spans import ChromeEvents, Span
from pipar.report.record import spans_of
from pipar.storage import trace_file
from pipar.storage.run_folder import RunFolder
from pipar.storage.trace_file import TraceFile
from pipar.storage.whole_files import SPARE_BYTES


def epoch(number: int, devices: int = 2) -> list[Span]:
    """Return the spans of an epoch that begins at ten times its number."""
    start = 10.0 * number
    own = [
        Span(f"pi-{k}", lane, kind, number, 1, 1, start + k, start + k + 1)
        for k in range(devices)
        for lane, kind in (("compute", "fc"), ("uplink", "u"))
    ]
    return [*own, Span("server", "core 0", "fs", number, 1, 1, start + 5, start + 6, device="pi-0")]


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


def test_one_epoch_has_the_events_of_its_spans(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json")
    trace.add(epoch(1))
    assert not (tmp_path / "trace.json").exists()
    trace.finish()
    assert read(tmp_path / "trace.json") == {"traceEvents": list(ChromeEvents().events(epoch(1), 10.0))}
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_training_without_spans_has_an_empty_trace(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json")
    trace.add([])
    trace.finish()
    assert read(tmp_path / "trace.json") == {"traceEvents": []}


def test_devices_that_join_later_have_their_own_tracks(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json")
    for number, devices in ((1, 1), (2, 3), (3, 2)):
        trace.add(epoch(number, devices))
    trace.finish()
    found = list(spans_of(iter(read(tmp_path / "trace.json")["traceEvents"])))
    wanted = [span for number, devices in ((1, 1), (2, 3), (3, 2)) for span in epoch(number, devices)]
    assert {(one.owner, one.lane, one.epoch, round(one.start, 3), one.device) for one in found} == {
        (one.owner, one.lane, one.epoch, one.start - 10.0, one.device) for one in wanted
    }
    assert len(found) == len(wanted)


def test_spans_that_do_not_fit_on_a_full_disk_are_left_out_and_the_rest_stays_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    trace = TraceFile(tmp_path / "trace.json")
    for number in (1, 2, 3):
        with monkeypatch.context() as patched:
            if number == 2:
                patched.setattr(os, "write", full)
            trace.add(epoch(number, devices=number))
            assert (trace.failure is not None) == (number == 2)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            trace.finish()
    trace.finish()
    content = read(tmp_path / "trace.json")
    assert {span.epoch for span in spans_of(iter(content["traceEvents"]))} == {1, 3}
    assert content["otherData"] == {"spans_left_out": 5}


def test_a_trace_leaves_the_last_space_of_a_disk_to_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = TraceFile(tmp_path / "trace.json")
    trace.add(epoch(1))
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=SPARE_BYTES + 100))
        trace.add(epoch(2))
    assert "the last 100 MB of the disk are kept for checkpoints" in str(trace.take_failure())
    trace.add(epoch(3))
    trace.finish()
    content = read(tmp_path / "trace.json")
    assert {span.epoch for span in spans_of(iter(content["traceEvents"]))} == {1, 3}


def test_a_trace_stops_growing_at_its_limit(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json", most_bytes=20_000)
    for number in range(1, 200):
        trace.add(epoch(number))
    trace.finish()
    assert (tmp_path / "trace.json").stat().st_size < 20_100
    content = read(tmp_path / "trace.json")
    spans = list(spans_of(iter(content["traceEvents"])))
    assert {span.epoch for span in spans} >= {1, 2, 3}
    assert len(spans) + content["otherData"]["spans_left_out"] == 199 * 5


def test_a_trace_can_be_encoded_and_written_by_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoders: set[str] = set()
    real = json.dumps

    def dumps(*arguments: Any, **options: Any) -> str:
        encoders.add(threading.current_thread().name)
        return real(*arguments, **options)

    monkeypatch.setattr(json, "dumps", dumps)
    for name, in_thread in (("one.json", False), ("other.json", True)):
        encoders.clear()
        trace = TraceFile(tmp_path / name, in_thread=in_thread)
        for number in (1, 2, 3):
            trace.add(epoch(number, devices=number))
        trace.finish()
        assert (threading.current_thread().name in encoders) != in_thread
    assert (tmp_path / "other.json").read_bytes() == (tmp_path / "one.json").read_bytes()


def test_a_disk_that_hangs_delays_no_epoch_and_fills_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works, real = threading.Event(), trace_file.append_whole

    def hang(path: Path, content: bytes) -> None:
        assert works.wait(PATIENCE_S)
        real(path, content)

    monkeypatch.setattr(trace_file, "append_whole", hang)
    monkeypatch.setattr(trace_file, "_MOST_WAITING", 3 * len(epoch(1)))
    trace = TraceFile(tmp_path / "trace.json", in_thread=True)
    for number in range(1, 11):
        trace.add(epoch(number))
    works.set()
    trace.finish()
    written = {event["args"]["epoch"] for event in read(tmp_path / "trace.json")["traceEvents"] if event["ph"] == "X"}
    assert written == {1, 2, 3}
    assert read(tmp_path / "trace.json")["otherData"] == {"spans_left_out": 7 * len(epoch(1))}


RESULT = EpochResult(1, 10.0, 40, 1.5, None, None, 100, 200, 1.0, 2.0, 5.0, 0.5, 0.25, {"device": 0.5})


@pytest.mark.slow
def test_a_run_holds_no_spans_of_the_epochs_that_are_over(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, job(), world="virtual", command="pipar run")
    emit = folder.epoch_recorder(lambda _: None)
    for number in range(1, 301):
        emit(RESULT, epoch(number))
    gc.collect()
    assert [
        one for one in gc.get_objects() if type(one) is Span and one.owner.startswith("pi-") and one.epoch > 1
    ] == []
    folder.finish()
    assert len(read(tmp_path / "trace.json")["traceEvents"]) > 300 * 5


@pytest.mark.parametrize("has_threads", [False, True])
def test_a_trace_and_rows_that_cannot_be_written_are_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_threads: bool
) -> None:
    said: list[Event] = []
    folder = RunFolder(tmp_path, job(), world="virtual", command="pipar run", has_threads=has_threads)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    emit = folder.epoch_recorder(said.append)
    for number in (1, 2, 3):
        emit(RESULT, epoch(number))
        wait([writing for writing, _ in folder._trace._waiting])  # an epoch takes longer than that
    reasons = [event.reason.partition(" in ")[0] for event in said if isinstance(event, SaveFailed)]
    assert reasons == ["Rows of rounds.jsonl and metrics.jsonl", "The trace"]
