"""The rows of `device_metrics` that tables show."""

from __future__ import annotations

from typing import Any

import pytest

from pipar.monitoring import tracker
from pipar.report.content import _evaluation
from pipar.storage.device_table import device_rows, value_names
from pipar.storage.result_views import devices_frame, frame


def metrics(count: int, **changes: Any) -> dict[str, Any]:
    """Return values of devices of which each is better than the one before."""
    values = {f"d{n:02}": {"samples": 5, "loss": 9.0 - n, "accuracy": n / 100} for n in range(count)}
    both = {"mean": {"loss": 4.0, "accuracy": 0.5}, "worst_decile": {"loss": 9.0, "accuracy": 0.0}}
    ways = {"loss": False, "accuracy": True}
    return {"epoch": 3, "devices": values, **both, "missing": {}, "higher_is_better": ways, "seconds": 1.5, **changes}


def test_all_devices_are_listed_by_name_if_they_fit() -> None:
    rows, left_out = device_rows(metrics(3, missing={"a": "lost"}), 4)
    assert ([row.device for row in rows], left_out) == (["a", "d00", "d01", "d02"], 0)
    assert rows[0].reason == "lost"
    assert value_names(metrics(1)) == ["loss", "accuracy"]


@pytest.mark.parametrize("name", ["accuracy", "loss", "mae"])
def test_of_many_devices_the_worst_are_listed(name: str) -> None:
    way = name == "accuracy"
    values = {f"d{n:02}": {"samples": 5, name: float(n if way else -n)} for n in range(20)}
    rows, left_out = device_rows(metrics(0, devices=values, mean={name: 1.0}, higher_is_better={name: way}), 2)
    assert ([row.device for row in rows], left_out) == (["d00", "d01"], 18)


def test_a_diverged_loss_which_json_has_no_number_for_is_the_worst() -> None:
    values = {"a": {"samples": 5, "loss": 1.0}, "b": {"samples": 5, "loss": None}, "c": {"samples": 5, "loss": 2.0}}
    rows, _ = device_rows(metrics(0, devices=values, mean={"loss": None}, missing={"d": "lost"}), 1)
    assert [row.device for row in rows] == ["b"]


def test_the_report_has_the_final_model_or_the_last_one_that_was_evaluated() -> None:
    epochs = [{"device_metrics": metrics(2, epoch=1)}, {"device_metrics": {}}]
    final = _evaluation({"device_metrics": metrics(70)}, epochs)
    assert final is not None
    assert (final["epoch"], len(final["rows"]), final["left_out"]) == (3, 60, 10)
    running = _evaluation({}, epochs)
    assert running is not None
    assert (running["epoch"], running["mean"]["loss"]) == (1, 4.0)
    assert _evaluation({}, [{}]) is None


def test_trackers_get_mean_and_worst_decile_and_no_curve_per_device() -> None:
    found = tracker.scalars({"devices": 2, "device_metrics": metrics(2)})
    assert found["device_metrics/mean/accuracy"] == 0.5
    assert found["device_metrics/worst_decile/loss"] == 9.0
    assert found["devices"] == 2
    assert not any("d00" in name for name in found)
    assert tracker.tested({"device_metrics": metrics(2)})["device_metrics"].keys() == {"mean", "worst_decile"}


def test_frames_have_the_means_by_epoch_and_the_devices_in_one_of_their_own() -> None:
    columns = frame([{"epoch": 1, "device_metrics": metrics(2)}], "epoch", "a test").columns
    assert {"device_metrics.mean.loss", "device_metrics.worst_decile.accuracy"} <= set(columns)
    assert not any("d00" in name for name in columns)
    table = devices_frame(metrics(2, missing={"z": "lost"}), "a test")
    assert table.index.tolist() == ["d00", "d01", "z"]
    assert table.loc["z", "missing"] == "lost"
