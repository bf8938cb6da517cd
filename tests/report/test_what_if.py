"""The planner's predictions of what would make a training faster."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fleets import measured
from support.small_runs import SETTINGS

from pipar.job.explain import explain
from pipar.job.job import Job
from pipar.job.plans import with_plans
from pipar.job.prepare import unplanned_timing_only_job
from pipar.launch.rehearsal import rehearse
from pipar.planner.learned_costs import Predictor
from pipar.report.what_if import what_if
from pipar.settings.config_file import load_config


def job(*settings: str) -> Job:
    made = unplanned_timing_only_job(load_config(None, [*SETTINGS, *settings]))
    assert made is not None
    return with_plans(made, rehearse)


@pytest.mark.slow
def test_faster_hardware_is_never_slower_and_the_bottleneck_is_the_planners() -> None:
    made = job()
    found, explained = what_if(made), explain(made, rehearse)
    assert found["bottleneck"] == explained.timing.bottleneck
    assert found["epoch_s"] == pytest.approx(explained.chosen.epoch_s, rel=0.05)
    assert found["paper"]["epoch_s"] == pytest.approx(explained.other.epoch_s, rel=0.05)
    assert [one["change"] for one in found["changes"]] == [
        "twice the bandwidth", "the server twice as fast", "devices twice as fast",
    ]  # fmt: skip
    assert all(one["epoch_s"] <= found["epoch_s"] * 1.002 for one in found["changes"])
    assert min(one["epoch_s"] for one in found["changes"]) < found["epoch_s"] * 0.95
    here = next(iter(made.plans.values())).split_point
    cuts = [int(one["change"].removeprefix("P=")) for one in found["split_points"]]
    assert cuts
    assert here not in cuts
    assert all(one["epoch_s"] >= found["epoch_s"] * 0.99 for one in found["split_points"]), "another P is better"


@pytest.mark.slow
def test_a_given_plan_is_compared_with_the_plan_that_would_be_chosen() -> None:
    found = what_if(job("plan.split_point=4", "plan.micro_batches=1"))
    assert found["plan"].startswith("P=4 N=1")
    assert min(one["epoch_s"] for one in found["split_points"]) < found["epoch_s"] * 0.9


@pytest.mark.slow
def test_other_methods_are_predicted_as_they_train(runs: dict[str, Path]) -> None:
    found = json.loads((runs["pipar"] / "outlook.json").read_text())["methods"]
    assert found.keys() == {"fl", "sfl"}
    for method, predicted_s in found.items():
        epochs = json.loads((runs[method] / "result.json").read_text())["epochs"]
        assert predicted_s == pytest.approx(epochs[-1]["seconds"], rel=0.05)
    assert json.loads((runs["fl"] / "outlook.json").read_text())["methods"].keys() == {"sfl"}


@pytest.mark.slow
def test_methods_with_a_shared_server_model_have_a_note_instead_of_predictions() -> None:
    found = what_if(job('run.method="sl"'))
    assert "sl" in found["note"]
    assert "epoch_s" not in found


@pytest.mark.slow
def test_unlimited_links_have_no_case_of_twice_the_bandwidth() -> None:
    found = what_if(job('devices.link="unlimited"'))
    assert "twice the bandwidth" not in [one["change"] for one in found["changes"]]


@pytest.mark.slow
def test_without_time_bandwidth_server_and_another_p_are_predicted_and_the_rest_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipar.report.what_if._PATIENCE_S", 0.0)
    found = what_if(job("plan.split_point=2", "plan.micro_batches=4"))
    assert [one["change"] for one in found["changes"]] == ["twice the bandwidth", "the server twice as fast"]
    assert [one["change"] for one in found["split_points"]] == ["P=1"]
    assert found["note"] == "3 of 6 cases were skipped: planning took too long."


@pytest.mark.slow
def test_a_deployment_uses_measured_links_and_has_a_note_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipar.report.what_if._PATIENCE_S", 0.0)
    made = replace(job('devices.link="unlimited"', "plan.split_point=2", "plan.micro_batches=4"), real_links=True)
    unknown = what_if(made)
    assert "to measure the links" in unknown["note"]
    predictor = Predictor(made.fleet(), made.plans)
    slow = {name: measured(1e6, 2e6) for name in made.sizes}
    predictor.measure_links(1, slow)
    found = what_if(made, fleet=predictor.now())
    assert "to measure the links" not in found["note"]
    assert found["changes"][0]["change"] == "twice the bandwidth"
    assert found["epoch_s"] > 2 * unknown["epoch_s"]


@pytest.mark.slow
def test_ten_thousand_devices_with_much_data_take_seconds() -> None:
    much = ("devices.count=10000", "data.name=synthetic", "data.shape=[3, 32, 32]", "data.samples_per_device=20000")
    made = job(*much, "plan.split_point=2", "plan.micro_batches=4")
    started = time.process_time()
    what_if(made)
    assert time.process_time() - started < 6.0  # about 2 of patience, and one question more


@pytest.mark.slow
def test_predictions_are_written_at_the_end_of_a_run(runs: dict[str, Path]) -> None:
    written: dict[str, Any] = json.loads((runs["pipar"] / "outlook.json").read_text())
    assert written["changes"]
    assert "note" in json.loads((runs["sl"] / "outlook.json").read_text())
