"""The examples run, and show what they claim."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.waiting import PATIENCE_S

from pipar.aggregation.aggregators import DeviceModel
from pipar.aggregation.averaging import federated_average
from pipar.aggregation.named_aggregators import make_aggregator
from pipar.job.explain import explain
from pipar.job.prepare import job_to_plan
from pipar.launch.rehearsal import rehearse
from pipar.settings.config_file import load_config

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

# In a separate process: warnings of Jupyter's libraries are not ours to fix.
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": sys.argv[2]}}).execute()
for cell in notebook.cells:
    for output in cell.get("outputs", []):
        shown = output.get("data", {})
        print(output.get("text") or "".join(text for kind, text in shown.items() if kind != "image/png"))
        print(*(f"shown as {kind}" for kind in shown))
"""


def run(arguments: list[str], folder: Path, cache: Path) -> str:
    """Run Python, with the repository's examples to import from, and return what it printed."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    own = {"PIPAR_RUNS": str(folder / "runs"), "XDG_CACHE_HOME": str(cache), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- the notebook


def test_the_notebook_keeps_no_outputs() -> None:
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text("utf-8"))["cells"]
    assert [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, profiles: Path) -> None:
    printed = run(["-c", EXECUTE, str(EXAMPLES / "quickstart.ipynb"), str(EXAMPLES)], tmp_path, profiles)
    compared = next(line for line in printed.splitlines() if ">vs fl<" in line)
    rows = {cells[0]: cells for row in compared.split("<tr")[2:] if (cells := re.findall(r"<td[^>]*>([^<]*)<", row))}
    assert set(rows) == {"fl", "sfl", "pipar"}
    assert len({row[4] for row in rows.values()}) == 1, "equal accuracies"
    assert {row[7] for row in rows.values()} == {"exact"}
    seconds = {method: float(row[2]) for method, row in rows.items()}
    assert seconds["pipar"] < min(seconds["fl"], seconds["sfl"])
    assert "predicted epoch" in printed  # of the plan
    assert "notebook-pipar: 2 of 2 epochs" in printed  # the progress, at its end
    assert printed.count("shown as image/png") == 1
    assert "<svg" in printed
    assert len(re.findall(r"predicted [0-9.]+ s, measured", printed)) == 2
    assert "model.safetensors" in printed


# --- an aggregator


def fleet_models() -> list[DeviceModel]:
    random = torch.Generator().manual_seed(0)
    states = [{"weight": torch.randn(5, generator=random), "seen": torch.tensor(n)} for n in (3, 4, 5)]
    return [
        DeviceModel(f"d{n}", state, samples) for n, (state, samples) in enumerate(zip(states, (1, 4, 25), strict=True))
    ]


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_the_aggregator_weights_by_a_power_of_samples(monkeypatch: pytest.MonkeyPatch, power: float) -> None:
    monkeypatch.chdir(ROOT)
    models = fleet_models()
    made = make_aggregator("examples.own_aggregator:ByPower", {"power": power})
    new = made.aggregate(models[0].state, models, {"weight"})
    weights = {0.0: (1, 1, 1), 0.5: (1, 2, 5), 1.0: (1, 4, 25)}[power]
    wanted = federated_average((model.state, weight) for model, weight in zip(models, weights, strict=True))
    assert torch.allclose(new["weight"], wanted["weight"])
    assert new["seen"].dtype == torch.int64


# --- different devices


@pytest.mark.slow
def test_each_kind_of_device_has_its_own_plan() -> None:
    plans = explain(job_to_plan(load_config(EXAMPLES / "fleet.toml")), rehearse).to_dict()["groups"]
    assert {group["devices"][0].partition("-")[0] for group in plans} == {"phone", "board", "box"}
    assert len({(group["split_point"], group["micro_batches"]) for group in plans}) == 3


# --- pictures


def test_a_stage_has_one_colour_in_pictures_and_on_the_page() -> None:
    script = (ROOT / "src" / "pipar" / "report" / "static" / "page.js").read_text("utf-8")
    on_page = {
        kind: (fill, ink, words)
        for kind, words, fill, ink in re.findall(r'(\w+): \{ words: "([^"]+)", fill: "(#\w+)", ink: "(#\w+)"', script)
    }
    stages = runpy.run_path(str(EXAMPLES / "timeline.py"))["STAGES"]
    assert stages == {kind: on_page[kind] for kind in stages}


@pytest.mark.slow
def test_the_pictures_in_the_documents_are_those_of_the_current_programs(tmp_path: Path, profiles: Path) -> None:
    program = "import json; from docs.pictures import pictures; print(json.dumps(pictures()))"
    drawn = json.loads(run(["-c", program], tmp_path, profiles))
    kept = {path.stem.removeprefix("timeline-"): path for path in (ROOT / "docs" / "images").glob("timeline-*.svg")}
    assert {method: kept[method].read_text("utf-8") == svg for method, svg in drawn.items()} == dict.fromkeys(
        kept, True
    )
