"""In virtual time the same seed gives the same files, byte for byte, whatever else the machine does."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import Case, hand_made_profile
from torch import nn
from torch.utils.data import TensorDataset

import pipar
from pipar.launch.run import World
from pipar.storage.result import Result

MEASURED = {"run": {"epochs": 1, "batch_size": 20}, "data": {"samples_per_device": 20}, "devices": [{"count": 2}]}
METHODS = ("fl", "sl", "sfl", "sfl2", "pipar")


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def configuration(tmp_path: Path, method: str, **fields: Any) -> dict[str, Any]:
    """Return a configuration with uneven devices, latencies, and a profile file for every machine."""
    case = Case(method, (1,), (5,), **{"dtype": "float32", "shape": (1, 8, 8), "norm": "group", **fields})
    workload = case.workload()
    model = workload.build_model()
    overheads = {"load_s": 1e-5, "encode_s_per_byte": 1e-9, "decode_s_per_byte": 2e-9, "step_s_per_byte": 1e-9}
    exchange = {"pack_s_per_byte": 1e-9, "install_s_per_byte": 1e-9, "aggregate_s_per_byte": 3e-9}
    profile = hand_made_profile(model, workload.samples.input_shape, case.dtype, **overheads, **exchange)
    file = tmp_path / "profile.json"
    profile.save(file)
    tree = case.tree()
    tree["server"]["profile"] = str(file)
    for device in tree["devices"]:
        device["profile"] = str(file)
    return tree


def run(tree: dict[str, Any], world: World = "virtual") -> Result:
    return pipar.run(tree, world=world)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "world"),
    [
        ("pipar", "timing-only"),
        *(pytest.param(method, "timing-only", marks=pytest.mark.slow) for method in METHODS if method != "pipar"),
        *(pytest.param(method, "virtual", marks=pytest.mark.slow) for method in METHODS),
    ],
)
def test_same_seed_gives_the_same_files(tmp_path: Path, method: str, world: World) -> None:
    tree = configuration(tmp_path, method)
    one, other = run(tree, world), run(tree, world)
    assert one.folder != other.folder
    names = sorted(path.name for path in one.folder.iterdir())
    assert {"config.toml", "metrics.jsonl", "result.json", "trace.json"} <= set(names)
    assert names == sorted(path.name for path in other.folder.iterdir())
    for name in names:
        assert (one.folder / name).read_bytes() == (other.folder / name).read_bytes(), name


def own_model() -> dict[str, Any]:
    datasets = [TensorDataset(torch.randn(30, 8), torch.arange(30) % 2) for _ in range(2)]
    return {"model": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)), "datasets": datasets}


@pytest.mark.slow
@pytest.mark.usefixtures("measured_at_once")
@pytest.mark.parametrize("named", [True, False], ids=["named", "own"])
def test_same_seed_gives_the_same_files_with_measured_profiles(named: bool) -> None:
    own = {} if named else own_model()
    one, other = (pipar.run(MEASURED, world="virtual", **own) for _ in range(2))
    for name in ("result.json", "trace.json"):
        assert (one.folder / name).read_bytes() == (other.folder / name).read_bytes(), name


@pytest.mark.slow
@pytest.mark.usefixtures("measured_at_once")
def test_a_factory_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept_factory.py").write_text(FACTORY, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    tree = {**MEASURED, "model": {"factory": "kept_factory:network"}}
    one, other = (pipar.run(tree, world="virtual") for _ in range(2))
    assert (one.folder / "result.json").read_bytes() == (other.folder / "result.json").read_bytes()


FACTORY = """
from torch import nn

def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(1024, 16), nn.Linear(16, 10))
"""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_another_seed_gives_other_weights(tmp_path: Path, method: str) -> None:
    one, other = (run(configuration(tmp_path, method, seed=seed, epochs=1)) for seed in (0, 1))
    assert one.content["weights_sha256"] != other.content["weights_sha256"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_a_timing_only_run_takes_as_long_as_the_virtual_one(tmp_path: Path, method: str) -> None:
    # Large enough for the bytes that sizes alone do not know of, a tensor's shape and its name, not to count.
    # Nor do they know how much of a model changes in a round.
    tree = {**configuration(tmp_path, method, shape=(1, 16, 16)), "wire": {"encoding": "raw"}}
    virtual, timed = run(tree), run(tree, "timing-only")
    assert len(virtual.epochs) == len(timed.epochs) == 2
    for one, other in zip(virtual.epochs, timed.epochs, strict=True):
        assert other["seconds"] == pytest.approx(one["seconds"], rel=1e-3)
        assert other["samples"] == one["samples"]


@pytest.mark.slow
def test_trace_has_a_track_for_every_lane_and_spans_that_do_not_overlap(tmp_path: Path) -> None:
    result = run(configuration(tmp_path, "pipar"))
    events = json.loads((result.folder / "trace.json").read_text("utf-8"))["traceEvents"]
    tracks = [event for event in events if event["name"] == "thread_name"]
    lanes = sorted(event["args"]["name"] for event in tracks)
    phones = ["compute", "downlink", "io", "uplink"] * 3
    assert [lane for lane in lanes if not lane.startswith(("core", "validation"))] == sorted(phones)
    for track in tracks:
        busy = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (track["pid"], track["tid"])]
        for one, after in itertools.pairwise(busy):
            assert one["ts"] + one["dur"] <= after["ts"] + 0.002, (track["args"], one, after)  # two roundings


@pytest.mark.slow
def test_a_sampled_trace_has_some_devices_and_the_servers_work_that_is_for_no_single_device(tmp_path: Path) -> None:
    tree = configuration(tmp_path, "pipar", sizes=(20,) * 25, epochs=1)
    tree["run"]["trace"] = "sampled"
    sampled, full = run(tree), run({**tree, "run": {**tree["run"], "trace": "full"}})
    events = json.loads((sampled.folder / "trace.json").read_text("utf-8"))["traceEvents"]
    owners = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(owners - {"server"}) == 20
    assert {"aggregate", "validate", "pack"} <= {event["cat"] for event in events if event["ph"] == "X"}
    # A smaller trace is sent: bytes differ, the sums of the compute lanes do not.
    for one, other in zip(sampled.epochs, full.epochs, strict=True):
        assert (one["samples"], one["train_loss"]) == (other["samples"], other["train_loss"])
        assert one["device_idle_s"] == pytest.approx(other["device_idle_s"], rel=1e-9)
