"""What the page shows is what the run's files say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipar.report.content import content
from pipar.report.record import RunRecord
from pipar.results import strict_json
from pipar.trace import Span


def events_of(folder: Path) -> set[tuple[Any, ...]]:
    """Return every span of trace.json as the page has them: owner, lane, name, iteration, start and length in us."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    owners = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return {
        (
            owners[e["pid"]], lanes[e["pid"], e["tid"]], e["name"], e["args"]["iteration"], round(e["ts"], 1),
            round(e["dur"], 1),
        )
        for e in events
        if e["ph"] == "X"
    }  # fmt: skip


def spans_of(timeline: dict[str, Any]) -> list[tuple[Any, ...]]:
    found = []
    for lane, kind, micro_batch, iteration, start, length, waiting, *_ in timeline["spans"]:
        where = timeline["lanes"][lane]
        name = f"{'wait ' if waiting else ''}{kind}{micro_batch or ''}"
        found.append((where["owner"], where["lane"], name, iteration, round(start, 1), round(length, 1)))
    return found


@pytest.mark.parametrize("view", ["iteration", "epoch"])
@pytest.mark.parametrize("method", ["fl", "sl", "sfl", "pipar"])
def test_the_timeline_is_what_trace_json_has_between_its_start_and_its_end(
    runs: dict[str, Path], method: str, view: str
) -> None:
    (run,) = content([RunRecord.read(runs[method])])["runs"]
    timeline = run["timeline"][view]
    shown, known = spans_of(timeline), events_of(runs[method])
    assert shown
    assert set(shown) <= known
    assert timeline["left_out"] == 0
    lanes = {(lane["owner"], lane["lane"]) for lane in timeline["lanes"]}
    start, end = timeline["start_us"], timeline["end_us"]
    inside = {e for e in known if e[:2] in lanes and e[4] >= start + 2 and e[5] > 2 and e[4] + e[5] <= end - 2}
    assert inside <= set(shown), "the page leaves out what is between its start and its end"


def test_everything_is_json_and_said_of_each_run(runs: dict[str, Path]) -> None:
    page = content([RunRecord.read(folder) for folder in runs.values()])
    assert json.loads(json.dumps(page, allow_nan=False)) == page
    assert [run["name"] for run in page["runs"]] == ["fl", "sl", "sfl", "pipar"]
    assert page["title"] == "vgg5 on digits: fl, sl, sfl, pipar"
    by_name = {run["name"]: run for run in page["runs"]}
    results = {name: json.loads((folder / "result.json").read_text()) for name, folder in runs.items()}
    for name, run in by_name.items():
        seconds = [epoch["seconds"] for epoch in results[name]["epochs"]]
        assert run["seconds"] == pytest.approx(sum(seconds) / 2)
        assert [epoch["seconds"] for epoch in run["epochs"]] == seconds
        assert [row["device"] for row in run["devices"]["rows"]] == ["device-1", "device-2", "device-3"]
        assert all(row["samples"] == 350 for row in run["devices"]["rows"])
        assert all(0 < row["busy"]["device"] <= 1 for row in run["devices"]["rows"])
    pipar, fl = by_name["pipar"], by_name["fl"]
    assert pipar["speedups"] == pytest.approx(
        {"fl": fl["seconds"] / pipar["seconds"], "sfl": by_name["sfl"]["seconds"] / pipar["seconds"]}
    )
    assert pipar["speedups"]["fl"] > 1
    assert "fl" not in fl["speedups"]


def test_compared_runs_show_the_same_iteration_of_the_same_device(runs: dict[str, Path]) -> None:
    page = content([RunRecord.read(runs[name]) for name in ("sfl", "pipar")])
    first, second = (run["timeline"]["iteration"] for run in page["runs"])
    assert (first["device"], first["iteration"]) == (second["device"], second["iteration"])
    assert len({lane["owner"] for lane in second["lanes"]} - {"server"}) == 2


def test_the_same_method_twice_is_told_apart_by_its_folder(runs: dict[str, Path]) -> None:
    record = RunRecord.read(runs["pipar"])
    page = content([record, replace(record, folder="elsewhere/other")])
    assert [run["name"] for run in page["runs"]] == ["vgg5-digits-pipar", "other"]


def test_a_large_fleet_is_cut_to_what_a_page_can_show(runs: dict[str, Path]) -> None:
    record = RunRecord.read(runs["pipar"])
    count = 10_000
    plans = [{"device": f"d{n:05}", "split_point": 1, "micro_batches": 2} for n in range(count)]
    many = [replace(span, owner=f"d{n:05}", device="") for n in range(0, count, 500) for span in _own(record.spans)]
    busy = [replace(span, start=span.start / 100, end=span.end / 100) for span in record.spans if span.device] * 100
    (run,) = content([replace(record, result={**record.result, "plans": plans}, spans=many + busy)])["runs"]
    assert (len(run["devices"]["rows"]), run["devices"]["count"]) == (60, count + 3)
    assert {row["device"] for row in run["devices"]["rows"]} > {"d00000", "d09500"}, "traced ones come first"
    timeline = run["timeline"]["iteration"]
    assert len({lane["owner"] for lane in timeline["lanes"]} - {"server"}) == 4
    assert len(timeline["spans"]) <= 1500
    assert len(json.dumps(run)) < 500_000


def _own(spans: Any) -> list[Span]:
    return [span for span in spans if span.owner == "device-1"]


def test_a_run_that_has_not_finished_an_epoch_has_a_page(runs: dict[str, Path]) -> None:
    record = RunRecord.read(runs["pipar"])
    bare = RunRecord({"method": "pipar", "model": "vgg5", "dataset": "digits"}, running=True)
    early = replace(record, result={**record.result, "epochs": []}, spans=(), outlook=None, running=True)
    for one in (bare, early):
        page = content([one])
        assert page["running"]
        assert page["runs"][0]["seconds"] is None
        assert page["runs"][0]["timeline"]["iteration"] is None


def test_numbers_that_json_does_not_have_are_null(runs: dict[str, Path]) -> None:
    record = RunRecord.read(runs["pipar"])
    epochs = [{**record.result["epochs"][0], "train_loss": float("inf"), "seconds": float("nan")}]
    page = strict_json(content([replace(record, result={**record.result, "epochs": epochs})]))
    assert json.loads(json.dumps(page, allow_nan=False))["runs"][0]["epochs"][0]["train_loss"] is None
