"""A run's folder read back, whatever state it is in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipar.errors import InputError
from pipar.execution.spans import ChromeEvents, Span
from pipar.report.record import RunRecord, shown_epoch
from pipar.storage.trace_file import TraceFile


@pytest.fixture
def folder(runs: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs["pipar"], tmp_path / "run"))


@pytest.mark.slow
def test_spans_are_read_back_unchanged(folder: Path) -> None:
    spans = [
        Span("device-1", "compute", "fc", 1, 2, 3, 1.25, 2.5),
        Span("device-1", "compute", "d", 1, 2, 3, 2.5, 3.0, waiting=True),
        Span("server", "core 1", "fs", 1, 2, 3, 3.0, 4.0, device="device-1"),
        Span("server", "core 1", "aggregate", 1, 0, 0, 4.0, 4.125),
    ]
    (folder / "trace.json").write_text(json.dumps({"traceEvents": list(ChromeEvents().events(spans, 0.0))}))
    assert sorted(RunRecord.read(folder).spans, key=lambda span: span.start) == spans


@pytest.mark.slow
def test_only_the_displayed_epoch_is_kept(folder: Path) -> None:
    assert {span.epoch for span in RunRecord.read(folder).spans} == {2}
    assert (shown_epoch([1]), shown_epoch([1, 2, 3]), shown_epoch([7, 8, 9]), shown_epoch([])) == (1, 2, 8, None)


@pytest.mark.slow
def test_a_run_without_a_trace_has_no_spans(folder: Path) -> None:
    (folder / "trace.json").unlink()
    assert RunRecord.read(folder).spans == []


@pytest.mark.slow
def test_only_the_page_of_a_run_is_readable_by_other_users(folder: Path) -> None:
    assert {path.name for path in folder.iterdir() if path.stat().st_mode & 0o077} == {"report.html"}


@pytest.mark.slow
def test_an_unfinished_run_is_read_from_its_lines(folder: Path) -> None:
    for name in ("result.json", "trace.json", "outlook.json", "report.html"):
        (folder / name).unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "seco')  # the line that it was writing
    record = RunRecord.read(folder)
    assert record.running
    assert [epoch["epoch"] for epoch in record.result["epochs"]] == [1, 2]
    assert record.result["method"] == "pipar"
    assert {plan["device"] for plan in record.result["plans"]} == {"device-1", "device-2", "device-3"}


def _remove(folder: Path) -> Path:
    return folder / "nowhere"


def _empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def _a_file(folder: Path) -> Path:
    return folder / "result.json"


def _broken_result(folder: Path) -> Path:
    (folder / "result.json").write_text('{"method": "pipar", ')
    return folder


def _result_of_another_kind(folder: Path) -> Path:
    (folder / "result.json").write_text("[1, 2]")
    return folder


def _plan_without_numbers(folder: Path) -> Path:
    (folder / "result.json").write_text('{"plans": [{"device": "a"}]}')
    return folder


def _new_plans_of_no_epoch(folder: Path) -> Path:
    (folder / "result.json").write_text('{"replans": [{}]}')
    return folder


def _no_list_of_rounds(folder: Path) -> Path:
    (folder / "result.json").write_text('{"epochs": [], "rounds": 7}')
    return folder


def _cut_trace(folder: Path) -> Path:
    trace = (folder / "trace.json").read_text()
    (folder / "trace.json").write_text(trace[: len(trace) // 2])
    return folder


def _foreign_trace(folder: Path) -> Path:
    (folder / "trace.json").write_text('{"traceEvents": [{"name": "x", "ph": "X", "args": {"epoch": 1}}]}')
    return folder


@pytest.mark.slow
def test_of_a_long_trace_only_the_epoch_that_is_shown_is_kept(folder: Path) -> None:
    trace = TraceFile(folder / "trace.json")
    for epoch in range(1, 51):
        trace.add([Span("pi-1", "compute", "fc", epoch, 1, n, 10.0 * epoch, 10.0 * epoch + 1) for n in (1, 2)])
    trace.finish()
    assert [(span.epoch, span.micro_batch, span.start) for span in RunRecord.read(folder).spans] == [
        (2, 1, 10.0), (2, 2, 10.0)
    ]  # fmt: skip


def _broken_config(folder: Path) -> Path:
    (folder / "config.toml").write_text("[run\n")
    return folder


def _broken_outlook(folder: Path) -> Path:
    (folder / "outlook.json").write_bytes(b"\xff\xfe")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_remove, "does not exist"), (_empty, "is not the folder of a run"), (_a_file, "is a file"),
        (_broken_result, "result.json is damaged"), (_result_of_another_kind, "is not a JSON object"),
        (_plan_without_numbers, "a plan has no split_point"),
        (_new_plans_of_no_epoch, "an entry of replans has no epoch"),
        (_no_list_of_rounds, "not lists of objects"),
        (_cut_trace, "trace.json is damaged"), (_foreign_trace, "trace.json is damaged"),
        (_broken_config, "config.toml is not valid TOML"), (_broken_outlook, "outlook.json is damaged"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_a_folder_without_a_valid_run_is_one_sentence(folder: Path, damage: object, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as raised:
        RunRecord.read(damage(folder))  # type: ignore[operator]
    assert "\n" not in str(raised.value)
