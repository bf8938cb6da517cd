"""What earlier versions wrote still loads: configurations, results, recordings, checkpoints, introductions.

Each folder of `support/earlier_runs` is the run of a deployment with two devices, two rounds and kept momentum, as the
version of that day wrote it; only the trace is compressed here. Both versions continued it to the same weights.
"""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from support.programs import Place, address_of, place
from support.training import EXACT

import pipar
from pipar.cli import main
from pipar.profiling.profile import Profile
from pipar.recording.frames import read_records
from pipar.server.device_messages import Expected, read_hello
from pipar.settings.config import hints
from pipar.settings.config_file import config_tree
from pipar.storage.checkpoint import identity_of, latest
from pipar.wire.messages import Kind, Message, json_body

RUNS = Path(__file__).parents[1] / "support" / "earlier_runs"
DAYS = ("2026-11-17", "2026-11-18")
#: The model after two more rounds, which both versions trained after --resume. Its last bits depend on the processor.
CONTINUED = RUNS / "continued.safetensors"


def copied(day: str, folder: Path) -> Path:
    """Return a copy of the run in a folder with the configuration and the network of the training."""
    run = folder / "runs" / "old"
    shutil.copytree(RUNS / day, run)
    packed = run / "trace.json.gz"
    (run / "trace.json").write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    for name in ("train.toml", "old_network.py"):
        shutil.copy(RUNS / name, folder)
    return run


def test_a_configuration_with_a_former_name_loads_with_a_hint() -> None:
    config = pipar.load_config(RUNS / "train.toml")
    assert config.optimizer.state_at_aggregation == "keep"
    assert hints(config) == [
        "optimizer.momentum_at_aggregation is now optimizer.state_at_aggregation, for all optimisers; the former name "
        "is still accepted."
    ]


@pytest.mark.parametrize("day", DAYS)
def test_the_resolved_configuration_of_an_earlier_run_means_the_same(day: str) -> None:
    saved, written = (pipar.load_config(path) for path in (RUNS / day / "config.toml", RUNS / "train.toml"))
    older = {"resume_window", "keepalive"} if day == DAYS[0] else set()  # "auto" since then
    trees = [config_tree(one) for one in (saved, written)]
    assert {key: trees[0]["server"].pop(key) for key in older} == dict.fromkeys(older, 30.0)
    assert all(trees[1]["server"].pop(key) == "auto" for key in older)
    assert trees[0] == trees[1]


@pytest.mark.parametrize("day", DAYS)
def test_an_earlier_checkpoint_is_of_the_same_training(day: str) -> None:
    said: list[str] = []
    saved = latest(RUNS / day / "checkpoint", identity_of(pipar.load_config(RUNS / "train.toml")), said.append)
    assert saved is not None
    assert (saved.round, said) == (2, [])
    assert len(saved.round_log) == 2
    assert len(saved.metrics) in (1, 2)  # the last round may have been saved before it was validated


@pytest.mark.parametrize("day", DAYS)
def test_an_earlier_result_is_an_object_to_look_at(day: str) -> None:
    folder = RUNS / day
    result = pipar.Result(folder, json.loads((folder / "result.json").read_text("utf-8")))
    assert [epoch["epoch"] for epoch in result.epochs] == [1, 2]
    assert list(result.frame()["train_loss"]) == [epoch["train_loss"] for epoch in result.epochs]
    assert "pipar" in result._repr_html_()
    assert sorted(result.state_dict()) == sorted(safetensors.torch.load_file(folder / "model.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("day", DAYS)
def test_an_earlier_run_has_a_report(day: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = copied(day, tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run)])
    assert ended.value.code == 0
    assert "old_network:network" in (run / "report.html").read_text("utf-8")


@pytest.mark.slow
def test_an_earlier_recording_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(RUNS / "2026-11-18" / "flight.jsonl.zst")])
    assert ended.value.code == 0
    assert "old_network:network on synthetic, method pipar, 2 devices, 2 rounds" in capsys.readouterr().out


def test_a_device_of_an_earlier_version_introduces_itself() -> None:
    records, _ = read_records(RUNS / "2026-11-18" / "flight.jsonl.zst")
    profile = next(record["profile"] for record in records if record["is"] == "profile")
    said = {"name": "pi-1", "samples": 9, "profile": json.loads(profile)}
    expected = Expected(Profile.from_json(profile), "[1, 8, 8]")
    device = read_hello(Message(Kind.HELLO, body=json_body(said)), expected, None)
    assert (device.threads, device.machine, device.answers_probes) == (1, "", False)


def _resume(here: Place) -> None:
    server = here.server("--resume", "--epochs", "4")
    address = address_of(server)
    devices = [here.device(name, address) for name in ("pi-1", "pi-2")]
    assert [program.ends() for program in (server, *devices)] == [0, 0, 0], server.text()
    assert "resuming after round 2" in server.text()


@pytest.mark.slow
@pytest.mark.parametrize("day", DAYS)
def test_an_earlier_checkpoint_continues_to_the_weights_of_its_version(
    day: str, tmp_path: Path, profiles: Path
) -> None:
    run = copied(day, tmp_path)
    with place(tmp_path, profiles, {}) as here:
        shutil.copy(RUNS / "train.toml", tmp_path)
        _resume(here)
    content = json.loads((run / "result.json").read_text("utf-8"))
    assert [epoch["epoch"] for epoch in content["epochs"]] == [1, 2, 3, 4]
    found, expected = (safetensors.torch.load_file(path) for path in (run / "model.safetensors", CONTINUED))
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], rtol=0, atol=EXACT) for name in expected)
