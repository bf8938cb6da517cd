"""A recording is read whole, up to where a crash has cut it off, or refused in one sentence."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import zstandard
from support.recorded import Recorded, record, recorded_job

from pipar.errors import InputError
from pipar.launch.replay import replay
from pipar.recording import frames
from pipar.recording.flight import Flight
from pipar.recording.frames import pack_record, read_records

REAL_DECOMPRESSOR = zstandard.ZstdDecompressor


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(tmp_path_factory.mktemp("flight"), recorded_job(epochs=2))


def changed(run: Recorded, place: int, change: dict[str, Any], to: Path) -> Path:
    """Write the recording with one of its records changed."""
    records, _ = read_records(run.path)
    records[place] |= change
    path = to / "changed.zst"
    path.write_bytes(b"".join(map(pack_record, records)))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        Flight.read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_recording_has_every_round_and_every_event(run: Recorded) -> None:
    flight = run.flight
    assert [one.number for one in flight.rounds] == [1, 2]
    assert [one.seconds for one in flight.rounds] == run.seconds
    assert [e.what for e in flight.events][:3] == ["Joined"] * 3
    assert sum(e.what == "RoundOver" for e in flight.events) == 2
    assert flight.job.plans == run.job.plans
    assert flight.unread_bytes == 0


def test_a_recording_has_no_paths(run: Recorded) -> None:
    text = b"".join(json.dumps(one).encode() for one in read_records(run.path)[0])
    assert b"secret" not in text
    assert str(run.path.parent).encode() not in text


def test_standard_tools_can_print_a_recording(run: Recorded) -> None:
    with run.path.open("rb") as file, zstandard.open(file, "rt", encoding="utf-8") as lines:
        assert json.loads(next(lines))["is"] == "pipar flight"


def test_a_file_that_a_crash_has_cut_off_is_read_up_to_there(run: Recorded, tmp_path: Path) -> None:
    data = run.path.read_bytes()
    path = tmp_path / "cut.zst"
    path.write_bytes(data + data[:100])
    assert (len(Flight.read(path).rounds), Flight.read(path).unread_bytes) == (2, 100)
    path.write_bytes(data[:-3] + b"\0" * 50)  # as some file systems leave it after a power failure
    assert Flight.read(path).rounds


def test_every_cut_is_read_or_refused_in_one_sentence(run: Recorded, tmp_path: Path) -> None:
    data, path = run.path.read_bytes(), tmp_path / "cut.zst"
    for length in range(0, len(data), 97):
        path.write_bytes(data[:length])
        try:
            rounds = len(Flight.read(path).rounds)
        except InputError:
            rounds = 0
        assert 0 <= rounds <= 2


def test_damaged_bytes_are_noticed(run: Recorded, tmp_path: Path) -> None:
    data, draw, path = run.path.read_bytes(), random.Random(0), tmp_path / "damaged.zst"
    whole = run.flight
    for _ in range(60):
        damaged = bytearray(data)
        damaged[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            rounds = Flight.read(path).rounds
        except InputError:
            rounds = ()
        assert rounds == whole.rounds[: len(rounds)]


@pytest.mark.parametrize(
    ("place", "change", "words"),
    [
        (0, {"is": "something"}, "is not a recording"),
        (0, {"format": 99}, "has format 99, written by pipar"),
        (0, {"format": [1] * 9999}, "has format"),
        (0, {"configuration": "[run]\nmethod = 3"}, "is not what the recorder writes"),
        (0, {"cores": -1}, "-1 is not a count"),
        (0, {"cores": 10**30}, "is not a count"),
        (1, {"profile": "{}"}, "is not what the recorder writes"),
        (1, {"number": 5}, "is not what the recorder writes"),
        (-1, {"is": "nothing"}, "unknown"),
        (-1, {"is": "round"}, "is not what the recorder writes"),
    ],
)
def test_malformed_records_are_refused(
    run: Recorded, tmp_path: Path, place: int, change: dict[str, Any], words: str
) -> None:
    assert words in refusal(changed(run, place, change, tmp_path))


@pytest.mark.slow
def test_malformed_rounds_are_refused(run: Recorded, tmp_path: Path) -> None:
    records, _ = read_records(run.path)
    place = next(number for number, one in enumerate(records) if one["is"] == "round")
    refused = functools.partial(changed, run, place, to=tmp_path)
    plans = records[place]["plans"]
    odd = {"pi-1": plans["pi-1"] | {"split_point": 9}}
    changes: list[dict[str, Any]] = [
        {"seconds": "long"}, {"seconds": -1.0}, {"start": 1e300}, {"round": 1.5}, {"plans": []}, {"plans": odd},
        {"plans": {"nobody": plans["pi-1"]}}, {"devices": {"pi-1": {"fc": [1]}}}, {"server": 3}, {"up": {"pi-1": [1]}},
    ]  # fmt: skip
    for change in changes:
        refusal(refused(change=change))


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other"
    for content in (b"", b"text", b"\x28\xb5\x2f\xfd" + b"\0" * 40, zstandard.compress(b"0" * 100)):
        path.write_bytes(content)
        assert "is not a recording" in refusal(path)
    assert "No such file" in refusal(tmp_path / "missing")
    assert "is a folder" in refusal(tmp_path)


def test_a_frame_that_claims_too_much_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(zstandard.compress(b" " * 100_000_000))
    assert "is not a recording" in refusal(path)


def test_reading_a_record_looks_at_little_of_what_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large, path = {"text": random.Random(1).randbytes(30_000).hex()}, tmp_path / "long.zst"
    path.write_bytes(pack_record({"number": 1}) * 500 + pack_record(large) + pack_record({"number": 2}) + b"rest")
    given: list[int] = []
    monkeypatch.setattr(frames.zstandard, "ZstdDecompressor", functools.partial(CountingDecompressor, given))
    records, unread = read_records(path)
    assert (len(records), records[-2], records[-1], unread) == (502, large, {"number": 2}, 4)
    assert sum(given) < 502 * 5000


class CountingDecompressor:
    """Notes how many bytes its readers are given."""

    def __init__(self, given: list[int]) -> None:
        self._given = given
        self._reader = REAL_DECOMPRESSOR().decompressobj()

    def decompressobj(self) -> CountingDecompressor:
        return self

    def decompress(self, data: bytes) -> bytes:
        self._given.append(len(data))
        return self._reader.decompress(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


def test_a_recording_without_a_round_says_so(run: Recorded, tmp_path: Path) -> None:
    path = tmp_path / "empty.zst"
    path.write_bytes(b"".join(pack_record(one) for one in read_records(run.path)[0] if one["is"] != "round"))
    assert "no complete round" in refusal(path)


@pytest.mark.slow
def test_a_cut_recording_is_replayed(run: Recorded, tmp_path: Path) -> None:
    records, _ = read_records(run.path)
    last = max(number for number, one in enumerate(records) if one["is"] == "round")
    path = tmp_path / "cut.zst"
    path.write_bytes(b"".join(map(pack_record, records[:last])))
    assert replay(Flight.read(path)).results[1].seconds == pytest.approx(run.seconds[0], rel=2e-4)
