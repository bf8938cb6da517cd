"""The content of the report's part of the live page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipar.events import EpochResult, EquivalenceChanged, Joined, Pictured, Replanned, Started
from pipar.execution.spans import Span
from pipar.live_page.history import History
from pipar.settings.config_file import config_from, dump_config

CONFIG = config_from(
    {"devices": [{"name": "pi", "count": 2, "link": "4g", "split_point": 2, "micro_batches": 2}], "run": {"epochs": 3}}
)


def result(epoch: int, train_loss: float = 1.5) -> EpochResult:
    return EpochResult(epoch, 2.0, 40, train_loss, None, None, 100, 200, 1.0, 1.0, 1.0, 0.5, 0.0, {"device": 0.5})


def picture(epoch: int, *, is_whole: bool = True) -> Pictured:
    spans = [Span("pi-1", "compute", kind, epoch, 1, 1, at, at + 1.0) for at, kind in enumerate(("fc", "bc", "step"))]
    return Pictured(epoch, tuple(spans), is_whole)


@pytest.fixture
def run(tmp_path: Path) -> Started:
    folder = tmp_path / "it"
    folder.mkdir()
    (folder / "config.toml").write_text(dump_config(CONFIG))
    return Started(str(folder), "pipar", 3, 2, {}, {"pi-1": 20, "pi-2": 20}, {})


def shown(*events: Any) -> dict[str, Any]:
    history = History()
    for event in events:
        history.take(event)
    content = history.content()
    assert content is not None
    return content


def test_only_events_of_the_report_change_it(run: Started) -> None:
    history = History()
    news = [history.take(event) for event in (Joined("pi-1", 1), run, result(1), picture(1), Joined("pi-2", 2))]
    assert news == [False, True, True, True, False]


def test_before_a_run_has_its_folder_there_is_no_content(tmp_path: Path) -> None:
    history = History()
    assert history.content() is None
    history.take(Started(str(tmp_path / "not-yet"), "pipar", 1, 1, {}, {}, {}))
    assert history.content() is None


def test_the_current_run_has_its_epochs_and_timeline_from_events(run: Started) -> None:
    content = shown(run, result(1), picture(1), result(2, train_loss=0.5), picture(2))
    (shown_run,) = content["runs"]
    assert content["running"]
    assert shown_run["world"] == "real processes"
    assert [epoch["train_loss"] for epoch in shown_run["epochs"]] == [1.5, 0.5]
    assert shown_run["timeline"]["iteration"]["epoch"] == 2
    assert len(shown_run["timeline"]["iteration"]["spans"]) == 3


def test_plans_have_their_encodings_during_the_run(run: Started) -> None:
    plans = {"pi-1": "P=2 N=2 sparse-planes", "pi-2": "P=2 N=2 planes/raw"}
    (shown_run,) = shown(replace(run, plans=plans), result(1))["runs"]
    assert shown_run["plan"] == "1 x P=2 N=2 planes/raw, 1 x P=2 N=2 sparse-planes"
    assert {row["device"]: row["plan"] for row in shown_run["devices"]["rows"]} == plans


def test_new_plans_are_in_the_content(run: Started) -> None:
    plan = {"split_point": 3, "micro_batches": 4}
    (shown_run,) = shown(run, result(1), Replanned(2, {"pi-1": plan, "pi-2": plan}, "pi-3 left"))["runs"]
    assert shown_run["replans"] == [{"epoch": 2, "plan": "P=3 N=4", "reason": "pi-3 left"}]


def test_a_resumed_run_has_its_earlier_epochs_and_replaces_those_trained_again(run: Started) -> None:
    before = {"epochs": [result(1, 3.0).to_dict(), result(2, 3.0).to_dict()], "replans": [], "method": "pipar"}
    (Path(run.folder) / "result.json").write_text(json.dumps(before))
    content = shown(run, result(2, train_loss=1.0))
    assert content["running"]
    assert [epoch["train_loss"] for epoch in content["runs"][0]["epochs"]] == [3.0, 1.0]


def test_a_resumed_run_does_not_show_its_earlier_result(run: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: Path) -> list[Span]:
        raise AssertionError("a trace that is not shown is read, for seconds if it is long")

    monkeypatch.setattr("pipar.report.record._read_spans", read)
    before = {"epochs": [result(1).to_dict()], "replans": [], "method": "pipar", "test_accuracy": 0.75}
    (Path(run.folder) / "result.json").write_text(json.dumps(before))
    (Path(run.folder) / "outlook.json").write_text(json.dumps({"note": "of before"}))
    (shown_run,) = shown(run, result(2))["runs"]
    assert (shown_run["test_accuracy"], shown_run["outlook"]) == (None, None)


def test_a_part_of_an_epoch_gives_no_busy_shares(run: Started) -> None:
    rows = shown(run, result(1), picture(1))["runs"][0]["devices"]["rows"]
    assert rows[0]["busy"]["device"] == 1.0
    rows = shown(run, result(1), picture(1, is_whole=False))["runs"][0]["devices"]["rows"]
    assert [row["busy"] for row in rows] == [{}, {}]


def test_a_part_of_an_epoch_is_not_shown_as_a_whole_one(run: Started) -> None:
    assert shown(run, result(1), picture(1))["runs"][0]["timeline"]["epoch"] is not None
    shown_run = shown(run, result(1), picture(1, is_whole=False))["runs"][0]["timeline"]
    assert shown_run["epoch"] is None
    assert shown_run["iteration"] is not None


def test_the_page_counts_spans_that_are_left_out(run: Started) -> None:
    shown_run = shown(run, result(1), replace(picture(1, is_whole=False), left_out=7))["runs"][0]["timeline"]
    assert shown_run["iteration"]["left_out"] == 7


def test_finished_runs_are_read_from_their_files(run: Started, tmp_path: Path) -> None:
    over = {"epochs": [result(1, 0.25).to_dict()], "replans": [], "method": "fl", "test_accuracy": 0.75}
    history = History()
    history.take(run)
    (Path(run.folder) / "result.json").write_text(json.dumps(over))
    history.take(Started(str(tmp_path / "not-yet"), "pipar", 1, 1, {}, {}, {}))
    content = history.content()
    assert content is not None
    assert not content["running"]
    assert content["runs"][0]["test_accuracy"] == 0.75


def test_the_equivalence_of_the_current_run_follows_its_rounds(run: Started) -> None:
    assert shown(run)["runs"][0]["equivalence"] == "exact"
    private = replace(run, equivalence_reasons=("noise on updates",))
    assert shown(private)["runs"][0]["equivalence"] == "statistical: noise on updates"
    changed = EquivalenceChanged(2, ("batch statistics", "noise on updates"))
    assert shown(private, changed)["runs"][0]["equivalence"] == "statistical: batch statistics, noise on updates"
