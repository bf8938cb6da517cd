"""A run reports the error of its encodings: none, or its share of the activations and of the gradients."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.training import Case, hand_made_profile

import pipar
from pipar.methods import METHODS
from pipar.profiling.profile import CodingTimes
from pipar.storage.result import Result
from pipar.tensors.relu_outputs import rectified_cuts
from pipar.wire.encodings import LOSSY

pytestmark = pytest.mark.usefixtures("one_thread")

#: Approximate error relative to the norm; the last encoding sends few values, plus what it left out before.
MOST = {"fp16": 1e-3, "bf16": 1e-2, "int8": 5e-2, "topk": 1.5}


@pytest.fixture
def method() -> str:
    return "pipar"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> Callable[[str], Result]:
    """Train in virtual time with an encoding and a profile made by hand."""
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    micro_batches = 3 if METHODS[method].pipelines else 1
    case = Case(method, (1,), (micro_batches,), sizes=(20, 10), dtype="float32")
    workload, file, tree = case.workload(), tmp_path / "profile.json", case.tree()
    model = workload.build_model()
    plain = hand_made_profile(model, workload.samples.input_shape, case.dtype)
    rectified = rectified_cuts(model, tuple(workload.samples.input_shape))
    shares = {"sparse-planes": (0.5, 0.5), "planes": (0.9, 0.9)}
    layers = (replace(one, rectified=cut in rectified, shares=shares) for cut, one in enumerate(plain.layers, start=1))
    replace(plain, layers=tuple(layers), coding=dict.fromkeys(shares, CodingTimes())).save(file)
    tree["server"]["profile"] = str(file)
    for device in tree["devices"]:
        device["profile"] = str(file)

    def trained(encoding: str) -> Result:
        tree["run"]["name"] = encoding
        tree["wire"]["encoding"] = encoding
        return pipar.run(tree, world="virtual")

    return trained


def metrics(result: Result) -> list[dict[str, Any]]:
    """Return the errors of every epoch, after checking that metrics and result agree."""
    told = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert told == json.loads((result.folder / "result.json").read_text("utf-8"))["epochs"]
    assert len(told) == 2
    return told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "encoding"), [*(("pipar", one) for one in LOSSY), ("sfl2", "int8"), ("sfl2", "topk"), ("sl", "topk")]
)
def test_a_lossy_encoding_reports_its_error(encoding: str, run: Callable[[str], Result]) -> None:
    result = run(encoding)
    assert result.content["equivalence"] == "statistical"
    assert result.content["equivalence_reasons"] == ["lossy encoding"]
    for epoch in metrics(result):
        for name in ("error_up", "error_down"):
            assert 0 < epoch[name] < MOST[encoding], name


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["raw", "auto", "sparse-planes"])
def test_an_exact_encoding_has_no_error(encoding: str, run: Callable[[str], Result]) -> None:
    result = run(encoding)
    assert result.content["equivalence"] == "exact"
    assert [epoch[name] for epoch in metrics(result) for name in ("error_up", "error_down")] == [None] * 4


@pytest.mark.slow
def test_errors_are_the_same_each_time(run: Callable[[str], Result]) -> None:
    first, again = (run("int8").content["epochs"] for _ in range(2))
    assert first == again
