"""Fingerprints of trainings: what is compared, and that a training does what its name says."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def fingerprints() -> Any:
    return importlib.import_module("benchmarks.fingerprints")


def plans(split_point: int, encoding: str = "raw") -> list[dict[str, Any]]:
    return [{"device": name, "split_point": split_point, "up": encoding} for name in ("device-1", "device-2")]


def result(*, epochs: int = 2, replans: tuple[Any, ...] = (), stopped: str | None = None) -> dict[str, Any]:
    row = {"train_loss": 2.0, "val_loss": 1.0, "bytes_up": 10, "bytes_down": 20, "seconds": 0.5, "epsilon": None}
    return {"plans": plans(2), "replans": list(replans), "epochs": [row] * epochs, "stopped": stopped}


def replan(epoch: int, split_point: int, encoding: str = "raw", reason: str = "") -> dict[str, Any]:
    return {"epoch": epoch, "plans": plans(split_point, encoding), "reason": reason}


def test_every_training_is_recorded_once_and_under_its_name(fingerprints: Any) -> None:
    recorded = [json.loads(line)["name"] for line in fingerprints.FILE.read_text().splitlines()]
    assert sorted(recorded) == sorted((*fingerprints.TRAININGS, *fingerprints.DEPLOYMENTS))


def test_recorded_trainings_do_what_their_names_say(fingerprints: Any) -> None:
    rows = [json.loads(line) for line in fingerprints.FILE.read_text().splitlines()]
    promising = [
        row for row in rows if "stops early" in row["name"] or ("replanning" in row["name"] and "replans" in row)
    ]
    assert len(promising) >= 8
    assert [fingerprints.broken_promise(row["name"], row) for row in promising] == [None] * len(promising)


def test_new_plans_and_their_epochs_are_compared_and_reasons_are_not(
    fingerprints: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(*replans: Any) -> dict[str, Any]:
        return {"a training": fingerprints.of_result(result(replans=replans))}

    before = found(replan(2, 1, reason="faster by 2.1 Mbit/s"))
    assert fingerprints.compare(before, found(replan(2, 1, reason="faster by 2.2 Mbit/s"))) == 0
    for other in (replan(3, 1), replan(2, 3), replan(2, 1, "fp16")):
        capsys.readouterr()
        assert fingerprints.compare(before, found(other)) == 1
        assert "a training: other replans\n" in capsys.readouterr().out


def test_a_key_that_an_old_row_lacks_is_not_compared_but_a_lost_one_is(fingerprints: Any) -> None:
    assert fingerprints.compare({"one": {"bytes": 1}}, {"one": {"bytes": 1, "replans": []}}) == 0
    assert fingerprints.compare({"one": {"bytes": 1, "replans": []}}, {"one": {"bytes": 1}}) == 1
    assert fingerprints.compare({}, {"one": {"bytes": 1}}) == 1
    assert fingerprints.compare({"one": {"bytes": 1}}, {}) == 1


def test_a_new_field_is_named_and_a_lost_or_changed_one_is_a_difference(
    fingerprints: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {"one": {"fields": [".a", ".b"], "plan": [{"a": 1, "b": {"c": 2}}]}}
    more = {"one": {"fields": [".a", ".b", ".d"], "plan": [{"a": 1, "b": {"c": 2, "d": 3}}]}}
    assert fingerprints.compare(before, more) == 0
    assert "one: new fields .d\n" in capsys.readouterr().out
    assert fingerprints.compare(more, before) == 1
    changed = {"one": {"fields": [".a", ".b"], "plan": [{"a": 1, "b": {"c": 4}}]}}
    assert fingerprints.compare(before, changed) == 1


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("replanning timing-only", result(), "has no entry in replans"),
        ("replanning the encodings, sl", result(replans=(replan(2, 2, "fp16"),)), None),
        ("replanning moves the cut, sfl", result(replans=(replan(2, 2, "fp16"),)), "never changes a split point"),
        ("replanning moves the cut, sfl", result(replans=(replan(2, 1),)), None),
        ("patience stops early", result(epochs=6), "trains all 6 epochs"),
        ("patience stops early", result(epochs=4), None),
        ("budget stops early", result(epochs=4), "trains all 4 epochs"),
        ("budget stops early", result(epochs=2), "does not stop because of its privacy budget"),
        ("budget stops early", result(epochs=2, stopped="The budget is spent."), None),
    ],
)
def test_a_training_must_do_what_its_name_says(fingerprints: Any, name: str, content: Any, says: str | None) -> None:
    sentence = fingerprints.broken_promise(name, fingerprints.of_result(content))
    assert sentence is None if says is None else says in sentence


def test_a_broken_promise_ends_the_command_and_records_nothing(
    fingerprints: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, file = "patience stops early", tmp_path / "fingerprints.jsonl"
    file.write_text("")
    monkeypatch.setattr(fingerprints, "FILE", file)
    monkeypatch.setattr(fingerprints, "fingerprint", lambda _: fingerprints.of_result(result(epochs=6)))
    for command in ("record", "compare"):
        assert fingerprints.main([command, name]) == 1
        assert "'patience stops early' trains all 6 epochs" in capsys.readouterr().err
    assert file.read_text() == ""
    monkeypatch.setattr(fingerprints, "fingerprint", lambda _: fingerprints.of_result(result(epochs=4)))
    assert fingerprints.main(["record", name]) == 0
    assert fingerprints.main(["compare", name]) == 0
