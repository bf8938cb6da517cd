"""`pipar cuts` and the same list in `pipar plan`: what crosses each cut, and why other places are not offered."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pipar.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

NETWORKS = """
import torch
from torch import nn
from support.networks import *

class TooFew(Residual):
    def forward(self, x):
        return super().forward(x)[:, :7]

class TwoOutputs(Residual):
    def forward(self, x):
        return super().forward(x), x

class Counting(Residual):
    def forward(self, x):
        while x.abs().max() > 1:
            x = x / 2
        return super().forward(x)

class Reading(Residual):
    def forward(self, x):
        total = x.sum().item()
        return super().forward(x) * total

class Selecting(Residual):
    def forward(self, x):
        features = self.pool(self.stem(x)).flatten(1)
        found = torch.nonzero(features.detach() > 0)
        places = (found[:, 0], found[:, 1])
        kept = torch.zeros_like(features).index_put(places, torch.tanh(features[places]))
        return self.head(kept.reshape(x.shape[0], 4, -1).mean(2))

def on_meta():
    with torch.device("meta"):
        return Residual()

def lazy():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))

def number():
    return 3
"""
DATA = ("data.name=synthetic", "data.shape=[1,4,4]", "data.classes=10", "data.samples_per_device=20")


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "listed_networks.py").write_text(NETWORKS, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")


def typed(capsys: pytest.CaptureFixture[str], *words: str, network: str = "", settings: tuple[str, ...] = ()) -> Any:
    """Return the exit code, what is printed, and the error of a command."""
    own = (f"model.factory=listed_networks:{network}",) if network else ()
    sets = [word for setting in (*DATA, *own, *settings) for word in ("--set", setting)]
    with pytest.raises(SystemExit) as ended:
        main([*words, *sets])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


def test_cuts_are_listed_with_what_crosses_them(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = typed(capsys, "cuts", network="Attention")
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()[:1].isdigit()}
    assert code == 0
    assert "4x8 float32, 4x4 bool" in rows["1"]
    assert "not 4x4 bool" in rows["1"]
    assert "usable places are offered: of those with the same work before them" in out
    assert "whole network on the device" in out


def test_reasons_of_places_that_are_not_offered_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = typed(capsys, "cuts", network="Tied")
    assert any("first ... " in line and "weight is used on both sides" in line for line in out.splitlines())
    _, printed, _ = typed(capsys, "cuts", "--json", network="Tied")
    listed = json.loads(printed)
    assert [cut["after"] for cut in listed["cuts"]] == ["decoder, tanh"]
    assert listed["cuts"][0]["crossing"] == [
        {"shape": [12], "dtype": "float32", "size_bytes": 48, "has_gradient": True}
    ]
    assert [one["reason"] for one in listed["not_offered"] if one["is_thinned"]] == [
        listed["not_offered"][-1]["reason"]
    ]


def test_a_number_that_depends_on_the_data_cannot_cross(capsys: pytest.CaptureFixture[str]) -> None:
    _, printed, _ = typed(capsys, "cuts", "--json", network="Reading")
    listed = json.loads(printed)
    assert listed["cuts"] == []
    assert any("is a number that depends on the data" in one["reason"] for one in listed["not_offered"])


def test_a_shape_that_depends_on_the_data_cannot_cross(capsys: pytest.CaptureFixture[str]) -> None:
    _, printed, _ = typed(capsys, "cuts", "--json", network="Selecting")
    listed = json.loads(printed)
    assert [cut["after"] for cut in listed["cuts"]] != []
    assert any("the shape of nonzero" in one["reason"] for one in listed["not_offered"])
    assert any("depends on the data" in one["reason"] for one in listed["not_offered"])


def test_only_named_cuts_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    named = ('model.cut_points=["pool", "layer1.0"]', "run.method=fl")
    _, printed, _ = typed(capsys, "cuts", "--json", network="Residual", settings=named)
    assert [cut["after"] for cut in json.loads(printed)["cuts"]] == ["pool", "layer1.0"]


def test_the_cuts_of_a_sequence_are_its_children(capsys: pytest.CaptureFixture[str]) -> None:
    _, printed, _ = typed(capsys, "cuts", "--json", settings=("data.shape=[1,32,32]",))
    listed = json.loads(printed)
    assert (listed["source"], listed["layers"], len(listed["cuts"])) == ("children", 5, 4)
    assert listed["cuts"][0]["crossing"][0]["shape"] == [32, 16, 16]


def test_a_plan_lists_the_cuts(capsys: pytest.CaptureFixture[str]) -> None:
    machines = ("server.profile=raspberry-pi-3b", "devices.profile=raspberry-pi-3b")
    _, out, _ = typed(capsys, "plan", network="Tied", settings=machines)
    assert any(line.split()[:3] == ["1", "decoder,", "tanh"] for line in out.splitlines())
    _, printed, _ = typed(capsys, "plan", "--json", network="Tied", settings=machines)
    assert json.loads(printed)["cuts"]["cuts"][0]["size_bytes"] == 48


@pytest.mark.parametrize(
    ("network", "points", "sentence"),
    [
        ("Residual", '["pool", "layer7"]', "names 'layer7', which is not a module of Residual"),
        ("Residual", '["layer1", "pool"]', "is not in order of execution: write ['pool', 'layer1']"),
        ("Tied", '["first"]', "cannot be cut after 'first', because"),
        ("Residual", '"pool"', "is not a list of module paths"),
        ("", '["layer1"]', "model.cut_points is for your own network, but model.name is 'vgg5'"),
    ],
    ids=["unknown", "order", "shared", "no list", "a named network"],
)
@pytest.mark.parametrize("command", [("cuts",), ("run", "--virtual")], ids=["cuts", "run"])
def test_cut_points_that_do_not_fit_are_one_sentence_and_exit_2(
    command: tuple[str, ...], network: str, points: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = typed(capsys, *command, network=network, settings=(f"model.cut_points={points}",))
    assert (code, out) == (2, "")
    said = [line for line in err.splitlines() if "preparing" not in line]
    assert len(said) == 1
    assert sentence in said[0]


@pytest.mark.parametrize(
    ("network", "sentence"),
    [
        ("TooFew", "to (2, 7), but 10 classes need (2, 10): change its last layer, or data.classes."),
        ("TwoOutputs", "the model returns a tuple, but it must return one tensor of logits."),
        ("Branching", "`return self.one(flat) if flat.sum() > 0 else self.two(flat)`. Name modules"),
        ("Counting", "`while x.abs().max() > 1:`. Name modules"),
        ("on_meta", "weight is on the device 'meta', but training starts on the CPU: build it with values"),
        ("lazy", "1.weight has no shape yet, because its layer is lazy: run a batch through it first."),
        ("number", "the model is of type int, but it must be a torch.nn.Module."),
    ],
)
def test_a_network_that_cannot_be_used_is_one_sentence_and_exit_2(
    network: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = typed(capsys, "plan", network=network)
    assert (code, out) == (2, "")
    starting, *error = err.splitlines()
    assert starting.startswith("pipar plan: preparing ")
    assert len(error) == 1
    assert sentence.lower() in error[0].lower()


def test_a_network_that_cannot_be_recorded_is_planned_whole_if_the_user_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    machines = ("server.profile=raspberry-pi-3b", "devices.profile=raspberry-pi-3b", "model.cut_points=[]")
    code, printed, _ = typed(capsys, "plan", "--json", network="Branching", settings=machines)
    document = json.loads(printed)
    assert (code, document["method"], document["cuts"]["source"]) == (0, "pipar", "whole")
    assert {plan["split_point"] for plan in document["plans"]} == {1}
