"""The benchmark of the planner's choices resumes after an interruption, but not with rows of another planner."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

CASES = [("Pi 3B", "vgg5", "mnist", link, 7) for link in ("4g", "4g+", "wifi")]


@pytest.fixture(scope="module")
def selection() -> Any:
    return importlib.import_module("benchmarks.selection")


class Scorer:
    """Scores without simulating, and records its arguments; is interrupted after `most` rows."""

    def __init__(self, selection: Any, most: int = 99) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self._selection = selection
        self._most = most

    def __call__(self, cases: Iterable[tuple[Any, ...]], devices: int) -> Iterator[Any]:
        for case in reversed(list(cases)):  # they arrive in any order
            if len(self.asked) == self._most:
                raise KeyboardInterrupt
            self.asked.append(case)
            numbers = {
                "chosen_s": float(devices),
                "best_s": 1.0,
                "score": 0.5,
                "learned_score": 1.0,
                "profiled_score": 1.0,
            }
            words = {"chosen": case[3], **dict.fromkeys(("best", "learned", "profiled", "paper"), "P=1 N=1")}
            costs = {"paper_score": 1.0, "planning_s": 0.0, "simulations": 1, "searched": 1, "ruled_out": 0}
            yield self._selection.Row(*case, **numbers, **words, **costs, search_s=0.0)


def test_a_second_start_scores_only_missing_rows_and_returns_all_in_order(
    selection: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, interrupted, second = tmp_path / "rows.jsonl", Scorer(selection, most=2), Scorer(selection)
    with pytest.raises(KeyboardInterrupt):
        selection.resumed(CASES, kept, scorer=interrupted)
    assert capsys.readouterr().out.count("| Pi 3B | vgg5 |") == 2
    with kept.open("a", encoding="utf-8") as file:
        file.write('{"depends": {"devi')  # cut off
    rows = selection.resumed(CASES, kept, scorer=second)
    assert [row.chosen for row in rows] == ["4g", "4g+", "wifi"]
    assert second.asked == [CASES[0]]
    assert "2 of 3 rows are in rows.jsonl" in capsys.readouterr().out
    assert selection.resumed(CASES, kept, scorer=Scorer(selection, most=0)) == rows


def test_rows_of_other_devices_another_world_or_another_planner_are_scored_again(
    selection: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "rows.jsonl"
    selection.resumed(CASES, kept, devices=10, scorer=Scorer(selection))

    def asked(devices: int = 10, world: int = 7) -> int:
        scorer = Scorer(selection)
        selection.resumed([(*case[:-1], world) for case in CASES], kept, devices=devices, scorer=scorer)
        return len(scorer.asked)

    assert asked() == 0
    assert asked(devices=20) == 3
    assert asked(world=8) == 3
    monkeypatch.setattr(selection, "sources_hash", lambda *_: "another")
    assert asked() == 3
    assert asked() == 0
    assert all(json.loads(line) for line in kept.read_text("utf-8").splitlines() if line)


@pytest.mark.usefixtures("selection")
def test_predictions_of_another_version_are_measured_again_and_no_row_is_stored_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prediction = importlib.import_module("benchmarks.prediction")
    asked: list[str] = []

    def compare(row: Any, _: Any) -> dict[str, float]:
        asked.append(str(row._emulated))
        return {"ratio": 1.0, "chosen_over_best": 1.0}

    monkeypatch.setattr(prediction, "KEPT", tmp_path / "rows.jsonl")
    monkeypatch.setattr(prediction._Row, "compare", compare)
    first = prediction.measure(tmp_path)
    kept = (tmp_path / "rows.jsonl").read_text("utf-8")
    assert prediction.measure(tmp_path) == first
    assert len(asked) == 6
    assert (tmp_path / "rows.jsonl").read_text("utf-8") == kept
    monkeypatch.setattr("pipar.__file__", str(tmp_path / "__init__.py"))
    prediction.measure(tmp_path)
    assert len(asked) == 12


def test_an_edit_of_the_planner_makes_kept_rows_invalid(
    selection: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planner").mkdir()
    for name in ("planner/search.py", *(source for source in selection.SOURCES if source.endswith(".py"))):
        (tmp_path / name).write_text("pass\n", "utf-8")
    monkeypatch.setattr("pipar.__file__", str(tmp_path / "__init__.py"))
    before = selection.sources_hash(selection.SOURCES)
    assert selection.sources_hash(selection.SOURCES) == before
    (tmp_path / "planner" / "search.py").write_text("pass  # other\n", "utf-8")
    assert selection.sources_hash(selection.SOURCES) != before


@pytest.mark.slow
@pytest.mark.usefixtures("own_fork_server")
def test_small_fleets_are_scored_in_separate_processes(selection: Any, tmp_path: Path) -> None:
    cases = [("Pi 3B", "vgg5", "mnist", "wifi", 1), ("half at half speed", "vgg5", "mnist", "4g", 2)]
    rows = selection.resumed(cases, tmp_path / "rows.jsonl", devices=4)
    assert [(row.fleet, row.link) for row in rows] == [("Pi 3B", "wifi"), ("half at half speed", "4g")]
    assert all(0.5 < row.score <= 1.02 for row in rows)


def test_a_disturbed_measurement_is_repeated_and_the_least_disturbed_one_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prediction = importlib.import_module("benchmarks.prediction")
    row = prediction._Row([], [], tmp_path)
    monkeypatch.setattr(prediction.time, "sleep", lambda _: None)

    def measured(*taken: int) -> int:
        """Measure while the host takes this many of each hundred ticks; return which measurement counts."""
        ticks = iter([at for hundredth in taken for at in ((0, 0), (100 - hundredth, hundredth))])
        monkeypatch.setattr(prediction, "_clock_ticks", lambda: next(ticks))
        numbers = iter(range(1, 1 + len(taken)))
        return row._undisturbed(lambda: next(numbers))

    assert measured(0) == 1
    assert measured(20, 3) == 2
    assert measured(20, 10, 5, 8, 9) == 3
    assert row._disturbed == 1 + 4
