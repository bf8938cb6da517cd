"""The content of the page agrees with the files of the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.small_runs import SETTINGS

import pipar
from pipar.execution.spans import Span
from pipar.report.content import _training_texts, content
from pipar.report.critical_path import Window, critical_path
from pipar.report.page import render
from pipar.report.record import RunRecord
from pipar.report.timeline import EpochTrace, epoch_timeline, iteration_timeline
from pipar.settings.config_file import config_from
from pipar.storage.run_json import strict_json


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


@pytest.mark.slow
@pytest.mark.parametrize("view", ["iteration", "epoch"])
@pytest.mark.parametrize("method", ["fl", "sl", "sfl", "pipar"])
def test_the_timeline_has_the_spans_of_trace_json_between_its_start_and_its_end(
    runs: dict[str, Path], method: str, view: str
) -> None:
    (run,) = content([RunRecord.read(runs[method])])["runs"]
    timeline = run["timeline"][view]
    assert timeline["left_out"] == 0
    assert drawn_as_traced(timeline, runs[method])


def drawn_as_traced(timeline: dict[str, Any], folder: Path) -> int:
    """Check that all drawn lanes have the spans of trace.json in the window; return their number."""
    known = events_of(folder)
    lanes = {(lane["owner"], lane["lane"]) for lane in timeline["lanes"]}
    start, end = timeline["start_us"], timeline["end_us"]
    inside = {e for e in known if e[:2] in lanes and e[4] < end - 2 and e[4] + e[5] > start + 2}
    assert set(spans_of(timeline)) == inside
    return len(inside)


@pytest.fixture(scope="module")
def finely_cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with fifty micro-batches per batch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPAR_RUNS", str(tmp_path_factory.mktemp("runs")))
        cut = (
            "devices.count=4",
            "data.samples_per_device=250",
            "plan.split_point=2",
            "plan.micro_batches=50",
            "run.epochs=1",
        )
        return pipar.run(settings=(*SETTINGS, *cut), world="timing-only").folder


@pytest.mark.slow
def test_an_iteration_of_fifty_micro_batches_and_four_devices_is_drawn_whole(finely_cut: Path) -> None:
    record = RunRecord.read(finely_cut)
    (run,) = content([record])["runs"]
    timeline = run["timeline"]["iteration"]
    assert (timeline["left_out"], timeline["before_us"]) == (0, 0.0)
    assert drawn_as_traced(timeline, finely_cut) > 1500
    assert len(json.dumps(content([record] * 4))) < 1_500_000, "too much for a page below 3 MB"


@pytest.mark.slow
@pytest.mark.parametrize("most", [1500, 700, 400, 50])
def test_spans_beyond_the_limit_are_left_out_but_never_the_critical_path(finely_cut: Path, most: int) -> None:
    traced = EpochTrace(RunRecord.read(finely_cut).spans, 1)
    whole, fewer = (iteration_timeline(traced, traced.devices, most=count) for count in (4000, most))
    assert whole is not None
    assert fewer is not None
    assert 0 < len(fewer["spans"]) <= most
    assert fewer["left_out"] == sum(not span[6] and span[5] > 0 for span in whole["spans"]) - sum(
        not span[6] and span[5] > 0 for span in fewer["spans"]
    )
    first = min(span[4] + span[5] for span in fewer["spans"])
    path = [span[1:] for span in whole["spans"] if span[8] and span[4] + span[5] > fewer["start_us"] + 2]
    assert sorted(path) == sorted(span[1:] for span in fewer["spans"] if span[8])
    assert fewer["start_us"] == whole["start_us"] + fewer["before_us"] <= first, "blank at the start"
    assert (fewer["before_us"] > 0) == (most < 500), "devices go first, then the beginning"
    length_s = (fewer["end_us"] - fewer["start_us"]) / 1e6
    assert sum(fewer["critical_s"].values()) == pytest.approx(length_s, abs=1e-5)


@pytest.mark.slow
def test_the_whole_critical_path_is_on_lanes_that_are_drawn(finely_cut: Path) -> None:
    traced = EpochTrace(RunRecord.read(finely_cut).spans, 1)
    for number in (0, 3):
        devices = traced.devices[number:] + traced.devices[:number]
        for draw in (iteration_timeline, epoch_timeline):
            timeline = draw(traced, devices)
            assert timeline is not None
            window = Window(devices[0], 1, 0, timeline["start_us"] / 1e6, timeline["end_us"] / 1e6)
            path = [span for span in critical_path(traced.spans, window) if window.overlaps(span)]
            assert sum(span[8] for span in timeline["spans"]) == len(path)


def test_with_many_cores_those_on_the_critical_path_are_drawn() -> None:
    spans = [Span("a", "compute", "fc", 1, 1, 1, 0.0, 1.0), Span("a", "uplink", "u", 1, 1, 1, 1.0, 2.0)]
    spans += [Span("server", f"core {core}", "fs", 1, 1, 2, 0.0, 0.5, device="a") for core in range(20)]
    spans += [
        Span("server", "core 19", kind, 1, 1, 1, at, at + 1, device="a") for at, kind in ((2.0, "fs"), (3.0, "bs"))
    ]
    spans += [Span("a", "downlink", "d", 1, 1, 1, 4.0, 5.0), Span("a", "compute", "bc", 1, 1, 1, 5.0, 6.0)]
    spans += [Span("a", "compute", "step", 1, 1, 0, 6.0, 7.0)]
    spans += [Span("server", "core of another program", "validate", 1, 1, 1, 0.0, 1.0)]
    timeline = iteration_timeline(EpochTrace(spans, 1), ["a"])
    assert timeline is not None
    cores = [lane["lane"] for lane in timeline["lanes"] if lane["owner"] == "server"]
    assert cores == [*(f"core {core}" for core in range(7)), "core 19"]


@pytest.mark.slow
def test_the_content_is_json_and_complete_for_each_run(runs: dict[str, Path]) -> None:
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
        for way in ("bytes_up", "bytes_down"):
            assert sum(row[way] for row in run["devices"]["rows"]) == pytest.approx(run[way])
    pipar, fl = by_name["pipar"], by_name["fl"]
    assert pipar["speedups"] == pytest.approx(
        {"fl": fl["seconds"] / pipar["seconds"], "sfl": by_name["sfl"]["seconds"] / pipar["seconds"]}
    )
    assert pipar["speedups"]["fl"] > 1
    assert "fl" not in fl["speedups"]


@pytest.mark.slow
@pytest.mark.parametrize("traffic", [None, {}, [1, 2], {"device-1": 7}, {"device-1": [1]}, {"device-1": ["a", "b"]}])
def test_a_result_without_bytes_of_devices_is_shown_without_them(runs: dict[str, Path], traffic: object) -> None:
    record = RunRecord.read(runs["pipar"])
    epochs = [{**epoch, "device_bytes": traffic} for epoch in record.result["epochs"]]
    (run,) = content([replace(record, result={**record.result, "epochs": epochs})])["runs"]
    assert {(row["bytes_up"], row["bytes_down"]) for row in run["devices"]["rows"]} == {(None, None)}


@pytest.mark.slow
def test_compared_runs_show_the_same_iteration_of_the_same_device(runs: dict[str, Path]) -> None:
    page = content([RunRecord.read(runs[name]) for name in ("sfl", "pipar")])
    first, second = (run["timeline"]["iteration"] for run in page["runs"])
    assert (first["device"], first["iteration"]) == (second["device"], second["iteration"])
    assert len({lane["owner"] for lane in second["lanes"]} - {"server"}) == 2


@pytest.mark.slow
def test_a_shortened_run_shows_the_same_iteration_as_those_it_is_compared_with(runs: dict[str, Path]) -> None:
    sfl, pipar = (RunRecord.read(runs[name]) for name in ("sfl", "pipar"))
    last = max(span.iteration for span in sfl.spans)
    short = replace(pipar, spans=[span for span in pipar.spans if 0 < span.iteration < last - 1])
    alone, *both = [content(records)["runs"][-1]["timeline"] for records in ([short], [sfl, short], [sfl])]
    assert both[0]["iteration"]["iteration"] == both[1]["iteration"]["iteration"] > alone["iteration"]["iteration"]


@pytest.mark.slow
def test_runs_of_the_same_method_are_named_by_their_folders(runs: dict[str, Path]) -> None:
    record = RunRecord.read(runs["pipar"])
    page = content([record, replace(record, folder="elsewhere/other")])
    assert [run["name"] for run in page["runs"]] == ["vgg5-digits-pipar", "other"]


@pytest.mark.slow
def test_speed_ups_need_runs_that_differ_only_in_their_methods(runs: dict[str, Path]) -> None:
    fl, pipar = (RunRecord.read(runs[name]) for name in ("fl", "pipar"))

    def speedups(base: RunRecord) -> dict[str, float]:
        found: dict[str, float] = content([base, pipar])["runs"][1]["speedups"]
        return found

    assert speedups(fl).keys() == {"fl"}
    assert speedups(replace(fl, result={**fl.result, "model": "vgg16"})) == {}
    assert speedups(replace(fl, result={**fl.result, "world": "real"})) == {}
    slower = {**fl.config, "devices": [{**group, "link": "wifi"} for group in fl.config["devices"]]}
    assert speedups(replace(fl, config=slower)) == {}
    assert speedups(replace(fl, config={})).keys() == {"fl"}, "what is not known is not held against it"


@pytest.mark.slow
def test_devices_with_their_own_plans_are_described_as_one_group(runs: dict[str, Path]) -> None:
    record = RunRecord.read(runs["pipar"])
    (group,) = record.config["devices"]
    apart = [{**group, "name": f"device-{n}", "count": 1, "split_point": n} for n in (1, 2, 3)]
    whole, split = (replace(record, config={**record.config, "devices": groups}) for groups in ([group], apart))
    assert content([whole])["runs"][0]["setting"] == content([split])["runs"][0]["setting"]
    other = replace(record, config={**record.config, "devices": [{**group, "name": "pi-7", "count": 1}]})
    assert content([other])["runs"][0]["setting"].startswith("pi-7: 1 device")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "machine"),
    [
        ({"speed": 1.0}, "raspberry-pi-3b"),
        ({"speed": 0.5}, "0.5 of raspberry-pi-3b"),
        ({"speed": 0.05, "profile": None}, "0.05 of this machine"),
    ],
)
def test_a_devices_machine_is_described_in_words(runs: dict[str, Path], given: dict[str, Any], machine: str) -> None:
    record = RunRecord.read(runs["pipar"])
    (group,) = record.config["devices"]
    changed = {key: value for key, value in {**group, **given}.items() if value is not None}
    (run,) = content([replace(record, config={**record.config, "devices": [changed]})])["runs"]
    assert {row["machine"] for row in run["devices"]["rows"]} == {machine}


@pytest.mark.slow
def test_the_plans_are_those_of_the_displayed_epoch(runs: dict[str, Path]) -> None:
    record = RunRecord.read(runs["pipar"])  # its second epoch is shown

    def planned(*epochs: int) -> dict[str, Any]:
        again = [{"epoch": n, "plans": [{"device": "device-1", "split_point": n, "micro_batches": 1}]} for n in epochs]
        (run,) = content([replace(record, result={**record.result, "replans": again})])["runs"]
        return {"first": run["plan"], "shown": run["timeline"]["plan"], "again": [r["epoch"] for r in run["replans"]]}

    chosen = content([record])["runs"][0]["plan"]
    assert planned() == {"first": chosen, "shown": chosen, "again": []}
    assert planned(2, 3) == {"first": chosen, "shown": "P=2 N=1", "again": [2, 3]}
    assert planned(1) == {"first": "P=1 N=1", "shown": "P=1 N=1", "again": []}, "in a deployment, when all have come"


@pytest.mark.slow
def test_a_page_of_many_long_runs_is_below_3_mb(finely_cut: Path) -> None:
    record = RunRecord.read(finely_cut)
    (epoch,) = record.result["epochs"]
    epochs = [{**epoch, "epoch": number, "train_loss": 1 / number, "val_loss": 2 / number} for number in range(1, 2001)]
    page = content([replace(record, result={**record.result, "epochs": epochs})] * 8)
    assert len(render(page)) < 3_000_000
    for run in page["runs"]:
        assert len(run["epochs"]) + run["epochs_left_out"] == 2000
        assert run["seconds_left_out"] == pytest.approx(run["epochs_left_out"] * epoch["seconds"])


@pytest.mark.slow
def test_a_large_fleet_is_limited_to_what_a_page_can_show(runs: dict[str, Path]) -> None:
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
    assert len(timeline["spans"]) <= 4000
    assert len(json.dumps(run)) < 700_000


def _own(spans: Any) -> list[Span]:
    return [span for span in spans if span.owner == "device-1"]


@pytest.mark.slow
def test_a_run_that_has_not_finished_an_epoch_has_a_page(runs: dict[str, Path]) -> None:
    record = RunRecord.read(runs["pipar"])
    bare = RunRecord({"method": "pipar", "model": "vgg5", "dataset": "digits"}, running=True)
    early = replace(record, result={**record.result, "epochs": []}, spans=(), outlook=None, running=True)
    for one in (bare, early):
        page = content([one])
        assert page["running"]
        assert page["runs"][0]["seconds"] is None
        assert page["runs"][0]["timeline"]["iteration"] is None


@pytest.mark.slow
def test_nan_and_infinities_are_null(runs: dict[str, Path]) -> None:
    record = RunRecord.read(runs["pipar"])
    epochs = [{**record.result["epochs"][0], "train_loss": float("inf"), "seconds": float("nan")}]
    page = strict_json(content([replace(record, result={**record.result, "epochs": epochs})]))
    assert json.loads(json.dumps(page, allow_nan=False))["runs"][0]["epochs"][0]["train_loss"] is None


@pytest.mark.slow
def test_a_private_run_has_its_epsilon_also_during_the_run(runs: dict[str, Path]) -> None:
    record = RunRecord.read(runs["fl"])
    assert content([record])["runs"][0]["epsilon"] is None
    epochs = [{**epoch, "epsilon": float(number)} for number, epoch in enumerate(record.result["epochs"], start=1)]
    going_on = {**record.result, "epochs": epochs, "epsilon": None}
    over = {**going_on, "epsilon": 2.5}
    found = [content([replace(record, result=one)])["runs"][0]["epsilon"] for one in (going_on, over)]
    assert found == [float(len(epochs)), 2.5]


def test_what_is_trained_and_which_devices_take_part_is_told_in_words() -> None:
    tree: dict[str, Any] = {
        "optimizer": {"name": "adamw", "learning_rate": 0.002, "schedule": "cosine", "clip_norm": 0.5},
        "run": {"devices_per_round": 2, "local_epochs": 3},
    }
    assert _training_texts(config_from(tree)) == {
        "loss": "cross_entropy",
        "optimizer": "adamw, learning rate 0.002, schedule cosine, gradients clipped to a norm of 0.5",
        "round": "2 devices, drawn by the seed, 3 passes over its samples",
    }
    assert _training_texts(config_from({}))["round"] == ""
    assert _training_texts(config_from({"run": {"devices_per_round": 0.5}}))["round"].startswith("50 % of the devices")


def test_numbers_of_a_statistical_run_are_marked_and_uncut_networks_are_named() -> None:
    plan = {"device": "pi-1", "split_point": 1, "micro_batches": 1}
    fl = {"method": "fl", "equivalence": "exact", "layers": 1, "plans": [plan], "test_accuracy": 0.1}
    cut = {**fl, "method": "pipar", "layers": 5, "equivalence": "statistical"}
    cut["equivalence_reasons"] = ["batch statistics"]
    whole = {**fl, "method": "sfl", "layers": 5, "plans": [{**plan, "split_point": 5}]}
    runs = content([RunRecord(result=result) for result in (fl, cut, whole)])["runs"]
    assert [run["mark"] for run in runs] == ["", " †", ""]
    assert [run["plan"] for run in runs] == ["whole network N=1", "P=1 N=1", "P=5 N=1"]
    assert [run["devices"]["rows"][0]["plan"] for run in runs] == ["whole network N=1", "P=1 N=1", "P=5 N=1"]
    assert [run["whole"] for run in runs] == [None, None, "the whole network on the device: federated learning"]
