"""Trackers: their calls, that training never waits for them or fails with them, and their files read back."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import subprocess
import sys
import threading
import time
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.interleaving import has_step
from support.waiting import PATIENCE_S

from pipar.cli import doctor_checks, main
from pipar.errors import ConfigError, InputError
from pipar.events import EpochResult, Event, Preparing, Started, TrackerFailed
from pipar.monitoring import tracker as trackers
from pipar.monitoring.tracker import (
    TRACKER_PACKAGES,
    RunDescription,
    Tracker,
    check_installed,
    describe,
    make_tracker,
    scalars,
)
from pipar.monitoring.tracker_threads import TrackerThread, Tracking, tracked
from pipar.settings.config import Config
from pipar.settings.config_file import config_from, load_config

ROOT = Path(__file__).parents[2]
EPOCH = EpochResult(
    epoch=1,
    seconds=4.0,
    samples=200,
    train_loss=2.25,
    val_loss=None,
    val_accuracy=0.5,
    bytes_up=10_000_000,
    bytes_down=1_000_000,
    server_idle_s=3.5,
    device_idle_s=0.25,
    bound_s=3.0,
    efficiency=0.75,
    validation_s=0.125,
    utilisation={"device": 0.5, "uplink": 0.25, "server": 0.125, "downlink": 0.0625},
    predicted_s=3.5,
    devices=2,
)
NUMBERS = {
    **{"seconds": 4.0, "samples": 200.0, "train_loss": 2.25, "val_accuracy": 0.5, "bytes_up": 1e7, "bytes_down": 1e6},
    **{"server_idle_s": 3.5, "device_idle_s": 0.25, "bound_s": 3.0, "efficiency": 0.75, "validation_s": 0.125},
    **{"utilisation/device": 0.5, "utilisation/uplink": 0.25, "utilisation/server": 0.125},
    **{"utilisation/downlink": 0.0625, "predicted_s": 3.5, "devices": 2.0},
}
RESULT = {"test_accuracy": 0.625}
CONFIG = config_from({"run": {"epochs": 2}, "devices": [{"count": 2, "link": "wifi"}]})


def _started(folder: Path) -> Started:
    return Started(
        folder=str(folder),
        method="pipar",
        epochs=2,
        cores=2,
        plans={"device-1": "P=2 N=3", "device-2": "P=1 N=4"},
        samples={"device-1": 100, "device-2": 100},
        iterations={"device-1": 1, "device-2": 1},
    )


def _epoch(number: int, **changed: Any) -> dict[str, Any]:
    return {**EPOCH.to_dict(), "epoch": number, **changed}


class Recording:
    """A tracker that records its calls, and fails at the one it is to fail at."""

    def __init__(self, fails_at: str = "") -> None:
        self.calls: list[tuple[str, Any]] = []
        self._fails_at = fails_at

    def begin(self, run: RunDescription) -> None:
        self._record("begin", run)

    def epoch(self, row: Mapping[str, Any]) -> None:
        self._record("epoch", row["epoch"])

    def end(self, result: Mapping[str, Any] | None) -> None:
        self._record("end", result)

    def _record(self, what: str, given: Any) -> None:
        if what == self._fails_at:
            raise OSError("the disk is full")
        self.calls.append((what, given))


def _with_trackers(*names: str) -> Config:
    return CONFIG.model_copy(update={"run": CONFIG.run.model_copy(update={"trackers": names})})


# --- the data of a tracker


def test_an_epoch_has_the_names_of_metrics_jsonl_without_unknown_values() -> None:
    assert scalars(EPOCH.to_dict()) == NUMBERS


def test_a_loss_that_diverged_is_kept() -> None:
    assert math.isnan(scalars({"train_loss": math.nan})["train_loss"])


def test_a_run_is_described_by_every_key_that_is_set_and_the_plans() -> None:
    settings = describe(CONFIG, _started(Path("runs/x"))).settings
    assert settings["run.epochs"] == 2
    assert (settings["devices.1.link.up"], settings["devices.1.count"]) == ("50Mbit/s", 2)
    assert (settings["plan.replan"], settings["run.trackers"]) == (True, "[]")
    assert settings["plans"] == "1 x P=1 N=4, 1 x P=2 N=3"
    assert describe(CONFIG, _started(Path("runs/x"))).name == "x"


# --- in a run


def test_a_tracker_is_called_from_the_first_epoch_to_the_result(tmp_path: Path) -> None:
    made, seen = Recording(), list[Event]()
    with tracked(_with_trackers("tensorboard"), seen.append, make=lambda _: made) as tracking:
        tracking.observe(_started(tmp_path))
        assert made.calls == []
        tracking.observe(EPOCH)
        tracking.end(RESULT)
    assert [what for what, _ in made.calls] == ["begin", "epoch", "end"]
    assert made.calls[-1] == ("end", RESULT)
    assert seen == [_started(tmp_path), EPOCH]


def test_a_package_is_not_imported_while_the_machine_is_measured() -> None:
    before = set(threading.enumerate())
    with tracked(_with_trackers("wandb"), lambda _: None, make=lambda _: Recording()) as tracking:
        tracking.observe(Preparing("the network is measured", 0.5))
        assert set(threading.enumerate()) <= before
        tracking.observe(_started(Path("runs/x")))
        assert [thread.name for thread in set(threading.enumerate()) - before] == ["tracker wandb"]
        tracking.observe(EPOCH)


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_run_that_fails_ends_without_a_result_and_one_without_epochs_is_not_tracked(epochs: int) -> None:
    made = Recording()

    def train() -> None:
        with tracked(_with_trackers("tensorboard"), lambda _: None, make=lambda _: made) as tracking:
            tracking.observe(_started(Path("runs/x")))
            for _ in range(epochs):
                tracking.observe(EPOCH)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert [what for what, _ in made.calls] == ["begin", "epoch", "end"][: 3 * epochs]
    assert made.calls[2 * epochs :] == [("end", None)] * epochs


@pytest.mark.parametrize("fails_at", ["make", "begin", "epoch", "end"])
def test_a_tracker_that_fails_is_turned_off_with_one_line_and_the_others_continue(fails_at: str) -> None:
    broken, whole, seen = Recording(fails_at), Recording(), list[Event]()

    def make(name: str) -> Tracker:
        if name == "mlflow" and fails_at == "make":
            raise OSError("the disk is full")
        return broken if name == "mlflow" else whole

    tracking = Tracking(CONFIG, seen.append, [TrackerThread(name, make) for name in ("mlflow", "wandb")])
    tracking.observe(_started(Path("runs/x")))
    tracking.observe(EPOCH)
    tracking.observe(EPOCH)
    tracking.end(RESULT)
    tracking.close()
    failures = [event for event in seen if isinstance(event, TrackerFailed)]
    assert failures == [TrackerFailed("mlflow", "OSError: the disk is full")]
    assert [what for what, _ in whole.calls] == ["begin", "epoch", "epoch", "end"]


def test_a_tracker_that_hangs_delays_nothing_and_is_turned_off_at_the_end() -> None:
    release, seen = threading.Event(), list[Event]()

    class Hanging(Recording):
        def begin(self, run: RunDescription) -> None:  # noqa: ARG002 - of the interface
            release.wait(PATIENCE_S)

    tracking = Tracking(CONFIG, seen.append, [TrackerThread("wandb", lambda _: Hanging())])
    tracking.observe(_started(Path("runs/x")))
    tracking.observe(EPOCH)
    tracking.close(patience_s=0.01)
    assert seen[2:] == [TrackerFailed("wandb", "it did not write everything in time")]
    release.set()


def _fail_during_check(step: int) -> bool:
    thread, heard = TrackerThread("wandb"), list[str]()

    def fail() -> None:
        thread._failure = "no network"

    has_failed = has_step(step, TrackerThread.take_failure.__code__, lambda: heard.append(thread.take_failure()), fail)
    assert [*heard, thread.take_failure()].count("no network") == has_failed
    return has_failed


def test_a_failure_during_the_check_for_failures_is_not_lost() -> None:
    assert next(step for step in range(1, 1000) if not _fail_during_check(step)) > 5


def test_a_run_that_never_started_does_not_wait_for_a_slow_import() -> None:
    release, imported, seen = threading.Event(), threading.Event(), list[Event]()

    def make(_: str) -> Tracker:
        release.wait(PATIENCE_S)
        imported.set()
        return Recording()

    tracking = Tracking(CONFIG, seen.append, [TrackerThread("mlflow", make)])
    tracking.observe(_started(Path("runs/x")))
    tracking.close()
    assert not imported.is_set()
    assert seen == [_started(Path("runs/x"))]
    release.set()


def test_a_tracker_that_is_not_installed_is_refused_before_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"^The tracker wandb .* run `pip install 'pipar\[wandb\]'`, or remove it"):
        check_installed(["wandb"])


def test_a_folder_with_the_name_of_a_tracker_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder_of_runs").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(
        trackers.TRACKER_PACKAGES, "wandb", trackers.TrackerPackage(("json", "folder_of_runs"), "wandb", "WandbTracker")
    )
    with pytest.raises(InputError, match=r"^The tracker wandb needs folder_of_runs, which is not installed"):
        check_installed(["wandb"])
    assert doctor_checks.installed("folder-of-runs") is None


def test_a_tracker_needs_all_packages_of_its_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for name, known in TRACKER_PACKAGES.items():
        packages = {re.split(r"[^\w-]", line)[0].removesuffix("-skinny") for line in extras[name]}
        assert set(known.packages) == packages


# --- how they are configured


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ('["tensorboard", "neptune"]', "names 'neptune', which is not a tracker; there are tensorboard, mlflow, wandb"),
        ('"tensorboard"', "run.trackers = 'tensorboard' is not a list; write the names of trackers, as in [\"tensor"),
    ],
)
def test_other_names_are_refused_with_the_list(given: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, [f"run.trackers={given}"])
    assert says in str(raised.value)


def test_a_repeated_tracker_counts_once() -> None:
    assert load_config(None, ['run.trackers=["wandb", "mlflow", "wandb"]']).run.trackers == ("wandb", "mlflow")


def test_the_command_line_refuses_an_unknown_tracker(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--timing-only", "--tracker", "neptune"])
    assert ended.value.code == 2
    assert "there are tensorboard, mlflow, wandb" in capfd.readouterr().err


# --- the real trackers


def _track(name: str, folder: Path, *rows: Mapping[str, Any], result: Mapping[str, Any] | None = RESULT) -> None:
    """Record a run of these epochs with a real tracker."""
    tracker = make_tracker(name)
    tracker.begin(describe(CONFIG, _started(folder)))
    for row in rows:
        tracker.epoch(row)
    tracker.end(result)


def _tensorboard_of(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        read = EventAccumulator(str(folder / "tensorboard"))
        read.Reload()
    return read


def test_tensorboard_has_every_number_at_its_epoch(tmp_path: Path) -> None:
    _track("tensorboard", tmp_path, _epoch(1), _epoch(2, train_loss=1.5), _epoch(3, train_loss=math.inf))
    read = _tensorboard_of(tmp_path)
    assert set(read.Tags()["scalars"]) == {*NUMBERS, "test_accuracy"}
    assert [(event.step, event.value) for event in read.Scalars("train_loss")] == [(1, 2.25), (2, 1.5), (3, math.inf)]
    for name, value in NUMBERS.items():
        assert read.Scalars(name)[0].value == pytest.approx(value, rel=1e-6)
    assert [(event.step, event.value) for event in read.Scalars("test_accuracy")] == [(3, 0.625)]


def test_tensorboard_has_the_configuration_as_text_and_as_hyper_parameters(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    _track("tensorboard", tmp_path, _epoch(1))
    read = _tensorboard_of(tmp_path)
    (text,) = read.Tensors("configuration")
    assert b"| run.epochs | `2` |" in text.tensor_proto.string_val[0]
    content = read.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["run.epochs"].number_value == 2
    assert hparams["plans"].string_value == "1 x P=1 N=4, 1 x P=2 N=3"
    assert hparams["plan.replan"].bool_value is True


def test_epochs_that_are_trained_again_after_a_resume_replace_those_before(tmp_path: Path) -> None:
    _track("tensorboard", tmp_path, _epoch(1), _epoch(2, train_loss=9.0), result=None)
    (first,) = (tmp_path / "tensorboard").iterdir()
    first.rename(first.with_name(first.name.replace("tfevents.", "tfevents.0")))  # files are read in name order
    _track("tensorboard", tmp_path, _epoch(2, train_loss=1.5))
    losses = _tensorboard_of(tmp_path).Scalars("train_loss")
    assert [(event.step, event.value) for event in losses] == [(1, 2.25), (2, 1.5)]


_TIMING_ONLY = ["run", "--timing-only", "--epochs", "2"]
_TIMING_ONLY += ["--set", "devices.profile=raspberry-pi-3b", "--set", "server.profile=i7-11850h"]


@pytest.mark.slow
def test_a_command_writes_event_files_with_the_numbers_of_metrics_jsonl_and_imports_no_torch(tmp_path: Path) -> None:
    script = "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr));"
    script += (
        f"from pipar.cli import main; main({[*_TIMING_ONLY, '--tracker', 'tensorboard', '--name', 'x', '--json']})"
    )
    environment = os.environ | {"PIPAR_RUNS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert len(json.loads(done.stdout)["epochs"]) == 2
    assert done.stderr.split() == ["False"]
    rows = [json.loads(line) for line in (tmp_path / "x" / "metrics.jsonl").read_text("utf-8").splitlines()]
    read = _tensorboard_of(tmp_path / "x")
    assert [event.value for event in read.Scalars("seconds")] == pytest.approx([row["seconds"] for row in rows])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_reads_the_run_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    from pipar.monitoring.mlflow import store_of

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    _track("mlflow", tmp_path, _epoch(1), _epoch(2, train_loss=1.5))
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"  # otherwise it connects to a server of its makers
    client = mlflow.MlflowClient(tracking_uri=store_of(describe(CONFIG, _started(tmp_path))))
    experiment = client.get_experiment_by_name("pipar")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", tmp_path.name)
    assert run.data.params["run.epochs"] == "2"
    assert [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "train_loss")] == [
        (1, 2.25),
        (2, 1.5),
    ]
    assert run.data.metrics["utilisation/uplink"] == 0.25
    assert run.data.metrics["test_accuracy"] == 0.625
    assert {path.name for path in tmp_path.iterdir()} == {"mlruns"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_the_run_offline_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    _track("wandb", tmp_path, _epoch(1), _epoch(2, train_loss=1.5))
    assert {path.name for path in tmp_path.iterdir()} == {"wandb"}
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    records = _wandb_records(file.read_bytes())
    deadline = time.monotonic() + PATIENCE_S
    while not any(record.HasField("exit") for record in records):  # another process writes it
        assert time.monotonic() < deadline
        time.sleep(0.05)
        records = _wandb_records(file.read_bytes())
    (run,) = (record.run for record in records if record.HasField("run"))
    assert (run.project, run.display_name) == ("pipar", tmp_path.name)
    assert {item.key: item.value_json for item in run.config.update}["run.epochs"] == "2"
    rows = [_items(record.history.item) for record in records if record.HasField("history")]
    assert [(row["_step"], row["train_loss"], row["utilisation/uplink"]) for row in rows] == [
        (1, 2.25, 0.25),
        (2, 1.5, 0.25),
    ]
    summaries = [_items(record.summary.update) for record in records if record.HasField("summary")]
    assert 0.625 in [summary.get("test_accuracy") for summary in summaries]
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]


def _wandb_records(content: bytes) -> list[Any]:
    """Return the records of an offline run: after seven bytes, pieces of a checksum, a length, a kind and data."""
    from wandb.proto.wandb_internal_pb2 import Record

    whole, records, at = b"", [], 7
    while at + 7 <= len(content):
        _, size, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # all of a record, or the last piece
            records.append(Record.FromString(whole))
            whole = b""
    return records


def _items(items: Iterable[Any]) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_known_trackers_are_those_of_the_configuration() -> None:
    from pipar.settings.values import TRACKERS

    assert tuple(TRACKER_PACKAGES) == TRACKERS
