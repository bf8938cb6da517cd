"""The recorder writes little, off the event loop, and never ends a training."""

from __future__ import annotations

import math
import random
import shutil
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.recorded import CHANGING, record, recorded_job
from support.waiting import PATIENCE_S

from pipar.errors import ConfigError
from pipar.events import Dropped, EpochResult, Event, Lost, Refused, SaveFailed, Stopping
from pipar.execution.spans import COMPUTE, CORE, DOWNLINK, IO, SERVER, UPLINK, Span
from pipar.recording import recorder
from pipar.recording.flight import RecordedEvent
from pipar.recording.frames import pack_record, read_records
from pipar.recording.micro_batch_sizes import Places
from pipar.recording.moment import _LEFT_OUT, event_text
from pipar.recording.recorder import FILE, _event_record, check_can_record, public_config, times_record
from pipar.recording.stage_times import DeviceModel, LinkModel, stage_times
from pipar.recording.writer import RecordWriter
from pipar.settings.config_file import config_from
from pipar.storage.whole_files import SPARE_BYTES, append_whole
from pipar.transport.shaping import Rates

FAST = {"up": "10000Gbit/s", "down": "10000Gbit/s"}


def noisy_round(names: list[str], draw: random.Random) -> list[Span]:
    """Return the spans of a round with 12 iterations of 4 micro-batches on each device; every time is its own."""
    spans = []
    for name in names:
        at = draw.uniform(0, 0.01)
        for iteration in range(1, 13):
            for n in range(1, 5):
                for kind, lane, seconds in (
                    ("load", IO, 0.002), ("fc", COMPUTE, 0.02), ("encode", IO, 0.001), ("u", UPLINK, 0.05),
                    ("decode", CORE, 0.001), ("fs", CORE, 0.004), ("bs", CORE, 0.007), ("encode", CORE, 0.001),
                    ("d", DOWNLINK, 0.05), ("decode", IO, 0.001), ("bc", COMPUTE, 0.04), ("step", COMPUTE, 0.002),
                ):  # fmt: skip
                    if (kind == "load" and n > 1) or (kind == "step" and n < 4):
                        continue
                    took = seconds * draw.lognormvariate(0.0, 0.15)
                    owner, of = (SERVER, name) if lane == CORE else (name, "")
                    piece = 0 if kind in ("load", "step") else n
                    on = f"{CORE} 0" if lane == CORE else lane
                    spans.append(Span(owner, on, kind, 1, iteration, piece, at, at + took, False, of))
                    at += took
    return spans


def test_a_hundred_rounds_of_twenty_devices_take_less_than_a_megabyte() -> None:
    names = [f"pi-{number:02}" for number in range(20)]
    places = Places.of(1150, 4, 100, batch_statistics=False)  # the last batch is smaller
    link = LinkModel(Rates((8e6,)))
    models = {name: DeviceModel(places, link, link, 0.0) for name in names}
    spans = noisy_round(names, random.Random(1))
    before = time.process_time()
    times = stage_times(spans, models, shares_model=False)
    frame = pack_record({"is": "round", **times_record(times)})
    assert len(spans) > 8000
    assert 100 * len(frame) < 900_000  # the rest is for events, profiles and plans
    assert time.process_time() - before < 5  # a tenth of a second, on an idle machine


def test_a_recording_needs_spans() -> None:
    with pytest.raises(ConfigError, match="--record needs"):
        check_can_record(config_from({"run": {"trace": "off"}}))


def test_the_configuration_is_recorded_without_paths_and_addresses() -> None:
    given = {
        "server": {"profile": "/srv/mine/server.json", "listen": "10.1.2.3:7700", "allow": "/etc/pipar/allow"},
        "data": {"path": "/srv/mine/data"},
        "privacy": {"leakage": "/srv/mine/leakage.json", "max_leakage": 0.5},
        "devices": [{"profile": "/srv/mine/pi.json"}, {"name": "pi", "profile": "raspberry-pi-5"}],
    }
    text = str(public_config(config_from(given)))
    assert "/srv" not in text
    assert "/etc" not in text
    assert "10.1.2.3" not in text
    assert "raspberry-pi-5" in text


@pytest.mark.parametrize(
    ("event", "about"),
    [
        (Lost("pi-1", "no /secret, 'my files/ca.pem' at fe80::1 or db.example.org"), {"device": "pi-1"}),
        (Dropped("pi-1", 3, "ipv6:%5B::1%5D:51542 is gone"), {"device": "pi-1", "epoch": 3}),
        (Refused("a device at %5B::1%5D", "its token is not known"), {"again": False}),
        (Refused("/data/me", "it is unknown", again=True), {"again": True}),
        (Refused("pi-1", "10.0.0.9 has its name"), {"device": "pi-1", "again": False}),
        (Stopping("cannot write /srv/mine"), {}),
        (
            Lost("pi-1", "its link was lost for more than 2.5 s"),
            {"device": "pi-1", "reason": "its link was lost for more than 2.5 s"},
        ),
        (
            Lost("pi-1", "it ended its session (no /secret)"),
            {"device": "pi-1", "reason": "it ended its session"},
        ),
    ],
)
def test_events_are_recorded_without_texts_that_may_name_addresses_and_paths(
    event: Event, about: dict[str, object]
) -> None:
    assert _event_record(1.0, event, {"pi-1"})["events"] == [[1.0, type(event).__name__, about]]
    sentence = event_text(RecordedEvent(1.0, type(event).__name__, about))
    assert sentence.partition("; ")[0].endswith(f": {about.get('reason', _LEFT_OUT['reason'])}")


@pytest.mark.slow
def test_each_start_has_its_own_file(tmp_path: Path) -> None:
    one, _ = (record(tmp_path, recorded_job(epochs=1)) for _ in range(2))
    assert sorted(path.name for path in tmp_path.glob("flight*")) == ["flight-2.jsonl.zst", "flight.jsonl.zst"]
    assert len(one.flight.rounds) == 1


def wait_for_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each record be written before the training continues."""
    put, put_round = RecordWriter.put, RecordWriter.put_round

    def settle(writer: RecordWriter) -> None:
        done = threading.Event()
        put(writer, lambda: done.set())  # type: ignore[func-returns-value]
        assert done.wait(PATIENCE_S)

    def put_and_wait(writer: RecordWriter, make: Any) -> None:
        put(writer, make)
        settle(writer)

    def put_round_and_wait(writer: RecordWriter, job: Any, make: Any) -> None:
        put_round(writer, job, make)
        settle(writer)

    monkeypatch.setattr(RecordWriter, "put", put_and_wait)
    monkeypatch.setattr(RecordWriter, "put_round", put_round_and_wait)


@pytest.mark.slow
def test_a_full_disk_is_said_once_and_the_rest_is_recorded_when_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, attempts = append_whole, []

    def full_at_first(path: Path, content: bytes) -> None:
        attempts.append(path)
        if len(attempts) <= 4:
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr("pipar.recording.writer.append_whole", full_at_first)
    wait_for_the_thread(monkeypatch)
    run = record(tmp_path, recorded_job(epochs=3))
    said = [event.reason for event in run.events if isinstance(event, SaveFailed)]
    assert len(said) == 1
    assert [one.number for one in run.flight.rounds] == [1, 2, 3]


def test_a_recording_leaves_the_last_space_of_a_disk_to_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=SPARE_BYTES))
    writer = RecordWriter(tmp_path / FILE)
    writer.put(lambda: {"is": "clock"})
    writer.close()
    assert "the last 100 MB of the disk are kept for checkpoints" in str(writer.failure)
    assert not (tmp_path / FILE).exists()


def test_a_mistake_of_the_recorder_does_not_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(recorder, "stage_times", fails)
    run = record(tmp_path, recorded_job(epochs=1))
    assert len(run.results) == 1
    assert any("ZeroDivisionError" in str(one) for one in read_records(run.path)[0])


def test_a_record_that_cannot_be_written_does_not_end_the_thread(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "file")
    for value in (math.nan, 1.0):
        writer.put(partial(dict, {"is": "events", "value": value}))
    writer.close()
    records, unread = read_records(tmp_path / "file")
    assert [one["is"] for one in records] == ["events", "events", "end"]
    assert ("RecorderFailed" in str(records[0]), records[1]["value"], unread) == (True, 1.0, 0)


@pytest.mark.parametrize("can_wait", [True, False], ids=["virtual time", "real time"])
def test_only_in_virtual_time_a_training_waits_for_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_wait: bool
) -> None:
    monkeypatch.setattr("pipar.recording.writer._MOST_WAITING", 50)
    writer, job = RecordWriter(tmp_path / "file", can_wait=can_wait), recorded_job()
    begun, released = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        released.wait(PATIENCE_S)

    writer.put(hang)  # as a disk that does not answer
    assert begun.wait(PATIENCE_S)
    releasing = threading.Timer(0.05 if can_wait else PATIENCE_S, released.set)
    releasing.start()
    for number in range(40):
        writer.put_round(job, partial(dict, {"is": "round", "round": number}))
    for number in range(100):
        writer.put(partial(dict, {"is": "events", "events": [[number, "Left", {}]]}))
    released.set()
    releasing.cancel()
    writer.close()
    kinds = [one["is"] for one in read_records(tmp_path / "file")[0]]
    assert kinds.count("round") == (40 if can_wait else 16)
    assert kinds.count("events") == (100 if can_wait else 34)


def test_while_the_disk_is_full_some_records_are_kept_and_the_file_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_full, write, most = [True], append_whole, []

    def append(path: Path, content: bytes) -> None:
        most.append(len(content))
        if is_full:
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr("pipar.recording.writer.append_whole", append)
    monkeypatch.setattr("pipar.recording.writer._MOST_PENDING_BYTES", 1000)
    wait_for_the_thread(monkeypatch)
    writer, job = RecordWriter(tmp_path / "file"), recorded_job()
    for number in range(40):
        writer.put_round(job, partial(dict, {"is": "round", "round": number}))
    assert max(most) <= 1000
    is_full.clear()
    writer.put_round(job, partial(dict, {"is": "round", "round": 40}))
    writer.close()
    records, _ = read_records(tmp_path / "file")
    rounds = [place for place, one in enumerate(records) if one["is"] == "round"]
    assert records[rounds[-1]]["round"] == 40
    assert sum(one["is"] == "device" for one in records[: rounds[0]]) == len(job.specs)


@pytest.mark.slow
def test_a_device_that_claims_years_does_not_make_the_recording_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_round = recorder._round_record

    def claimed(known: Any, until: Any, result: EpochResult, spans: list[Span]) -> dict[str, Any]:
        rates = result.device_rates | {"pi-1": [5e-4, 1e300]}
        years = [
            replace(span, start=0.0, end=9e9) if span.owner == "pi-1" and span.lane in (COMPUTE, UPLINK) else span
            for span in spans
        ]
        return true_round(known, until, replace(result, device_rates=rates), years)

    monkeypatch.setattr(recorder, "_round_record", claimed)
    for name, link, knows_links in (("real", CHANGING, False), ("emulated", CHANGING, True), ("fast", FAST, True)):
        run = record(tmp_path / name, recorded_job(link, epochs=1), knows_links=knows_links)
        (one,) = run.flight.rounds
        longest = max(one.times.devices["pi-1"].values(), key=lambda series: series.mean_s)
        assert longest.mean_s * longest.count == 1e9  # one of its times is too long, and cut
        assert one.rates.get("pi-1", (1.0, 1e12)) == (1.0, 1e12)
