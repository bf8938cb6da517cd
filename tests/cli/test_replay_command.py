"""`pipar replay`: tables, JSON, and refusals in one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from support.recorded import Recorded, record, recorded_job

from pipar.cli import main
from pipar.recording.moment import utc

Pipar = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    whole = record(tmp_path_factory.mktemp("whole"), recorded_job(epochs=2))
    job = recorded_job(epochs=3, resume_window="5s")
    return record(tmp_path_factory.mktemp("killed"), job, kills={"pi-1": whole.flight.rounds[1].start + 0.3})


@pytest.fixture
def pipar(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Pipar:
    """Run `pipar replay`, and return what it wrote to standard output, or to standard error with its exit code."""
    monkeypatch.setenv("COLUMNS", "100")

    def command(*words: object, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["replay", *map(str, words)])
        captured = capfd.readouterr()
        assert ended.value.code == code, captured.err
        progress = re.compile(r"Replaying [^\n]*\n")  # on a machine that takes long for a replay
        assert (progress.sub("", captured.err) if code == 0 else captured.out) == ""
        return captured.out if code == 0 else captured.err

    return command


@pytest.mark.slow
def test_epochs_are_compared_with_those_that_were_recorded(pipar: Pipar, run: Recorded) -> None:
    document = json.loads(pipar(run.path, "--json"))
    assert [one["round"] for one in document["epochs"]] == [1, 2, 3]
    assert [one["recorded_s"] for one in document["epochs"]] == run.seconds
    assert [one["replayed_s"] for one in document["epochs"]] == pytest.approx(run.seconds, rel=2e-4)
    assert (document["what_if"], document["epochs"][0]["what_if_s"], document["warning"]) == (None, None, None)
    rows = [line.split() for line in pipar(run.path.parent).splitlines()]
    assert ["round", "recorded", "s", "replayed", "s", "difference"] in rows
    assert next(row for row in rows if row[:1] == ["2"])[1] == f"{run.seconds[1]:.3f}"


@pytest.mark.slow
def test_a_pipe_shows_how_far_the_replay_is(
    run: Recorded, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipar.monitoring.display._SAY_EVERY_S", 0.0)
    with pytest.raises(SystemExit):
        main(["replay", str(run.path), "--link-factor", "2"])
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines[:3]] == [
        f"Replaying the recording ({share} %" for share in (33, 67, 100)
    ]
    assert lines[-1].startswith("Replaying with links x 2 (100 %")


@pytest.mark.slow
def test_what_if_questions_can_be_combined(pipar: Pipar, run: Recorded) -> None:
    words = ("--plan", "2,2", "--link-factor", "2", "--without", "slow")
    document = json.loads(pipar(run.path, *words, "--json"))
    assert document["what_if"] == "P=2 N=2, links x 2, without slow"
    assert all(0 < one["what_if_s"] < one["replayed_s"] for one in document["epochs"])
    assert "without slow" in pipar(run.path, *words)


@pytest.mark.slow
def test_a_round_shows_its_events_and_stages(pipar: Pipar, run: Recorded) -> None:
    text = " ".join(pipar(run.path, "--round", "2").split())
    assert "pi-1 lost its connection and has 5 s to reconnect" in text
    assert "round 2 excludes pi-1: its link was lost for more than 5 s" in text
    assert "device load fc encode u fs bs d decode bc step" in text
    document = json.loads(pipar(run.path, "--round", "2", "--json"))
    forwards = [0.06] * 4 + [0.16 / 3] * 2 + [0.08 / 3] * 2 + [0.02]
    assert document["stages"]["slow"]["fc"] == pytest.approx(sum(forwards) / 9, rel=1e-6)


@pytest.mark.slow
def test_a_moment_shows_what_every_lane_did(pipar: Pipar, run: Recorded) -> None:
    flight = run.flight
    moment = utc(flight, flight.rounds[1].start) + timedelta(seconds=3)  # the server waits for the lost device
    for given in (f"{moment:%H:%M:%S.%f}", moment.isoformat(), f"{moment:%Y-%m-%dT%H:%M:%S.%f}"):
        document = json.loads(pipar(run.path, "--at", given, "--json"))
        assert document["shown"]["round"] == 2
        assert document["shown"]["offset_s"] == pytest.approx(3, abs=0.01)
        lanes = {(one["owner"], one["lane"]): one["doing"] for one in document["lanes"]}
        assert lanes["slow", "compute"] == "waits for model"
    assert "waits for model" in pipar(run.path, "--at", moment.isoformat())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--plan", "x"], "--plan x is not a plan: write P,N with two whole numbers, as in 2,4."),
        (["--plan", "1,2,3"], "--plan 1,2,3 is not a plan: write P,N with two whole numbers, as in 2,4."),
        (["--round", "9"], "Round 9 is not in this recording, which has the rounds 1 to 3."),
        (["--at", "noon"], "--at noon is not a time: write 12:31:05 or 2026-11-18T12:31:05, in UTC."),
        (["--at", "29:99:99"], "--at 29:99:99 is outside of the recorded rounds"),
        (["--at", "2001-01-01T00:00:00"], "--at 2001-01-01T00:00:00 is outside of the recorded rounds"),
        (["--at", "1:00:00", "--round", "1"], "--at and --round exclude each other: give only one."),
    ],
)
def test_mistakes_are_one_sentence(pipar: Pipar, run: Recorded, words: list[str], sentence: str) -> None:
    text = pipar(run.path, *words, code=2)
    assert text.startswith(sentence)
    assert text.count("\n") == 1


def test_another_file_is_refused(pipar: Pipar, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert "is not a recording" in pipar(tmp_path / "notes.txt", code=2)
    assert "has no recording (flight.jsonl.zst): train with --record" in pipar(tmp_path, code=2)


def test_a_replay_that_differs_from_its_recording_says_so(
    pipar: Pipar, run: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipar.recording.deviation.MOST_SHARE", -1.0)
    words = " ".join(pipar(run.path).split())
    assert "Do not trust what-if answers from this recording: its replay differs by" in words
    assert "Do not trust" in json.loads(pipar(run.path, "--json"))["warning"]
