"""A user's module, its class and its weights are left alone by a training; the result has a trained copy of it."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.waiting import PATIENCE_S
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pipar
from pipar.errors import ModelError, PiparError
from pipar.job.user_objects import UserObjects
from pipar.job.workload import Workload
from pipar.settings.config_file import config_from

ROOT = Path(__file__).parents[2]
MACHINES = {"server": {"profile": "i7-11850h", "cores": 1}, "devices": [{"profile": "raspberry-pi-3b"}]}
TREE: dict[str, Any] = {"run": {"epochs": 1, "batch_size": 10}, "plan": {"split_point": 1, "micro_batches": 2}}
#: Cells of a notebook; together, a script. The network is defined where they run, as is what its methods use.
CELLS = [
    """
import pipar, torch
from torch import nn
from torch.utils.data import TensorDataset

SCALE = 1.0

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return SCALE * self.head(torch.relu(self.second(torch.relu(self.first(x)))))
""",
    f"""
if __name__ == "__main__":
    tree = { {**TREE, **MACHINES, "model": {"cut_points": []}}!r}
    data = TensorDataset(torch.randn(20, 8, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 3)
    torch.manual_seed(0)
    net, forward = Net(), Net.forward
    before = {{name: value.clone() for name, value in net.state_dict().items()}}
    results = [pipar.run(tree, model=net, datasets=[data], test=data, world=world) for world in WORLDS]
""",
    """
if __name__ == "__main__":
    assert Net.forward is forward and Net.forward.__globals__ is globals(), "the class was replaced"
    assert net.second.weight is net.first.weight and Net().second.weight is not net.first.weight
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items()), "it was trained itself"
    inputs = torch.ones(1, 8)
    one = net(inputs)
    SCALE = 2.0
    assert torch.equal(net(inputs), 2 * one), "a constant that was changed later is not seen"
    later = Net()
    assert later.second.weight is later.first.weight, "weights came apart"
    assert len({result.content["weights_sha256"] for result in results}) == 1
    trained = results[0].model()
    assert type(trained) is Net and trained.second.weight is trained.first.weight and not trained.training
    pipar.run(tree, model=net, datasets=[data], world="virtual")
    print("left alone")
""",
]
EXECUTE = """
import json, sys, nbclient, nbformat
cells = [nbformat.v4.new_code_cell(cell) for cell in json.loads(sys.argv[1])]
notebook = nbformat.v4.new_notebook(cells=cells)
nbclient.NotebookClient(notebook, timeout=600).execute()
print(*(output.text for output in notebook.cells[-1].outputs if output.output_type == "stream"))
"""


def printed(arguments: list[str], folder: Path) -> str:
    own = {"PIPAR_RUNS": str(folder / "runs"), "XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(ROOT / "src")}
    program = [sys.executable, *arguments]
    done = subprocess.run(
        program, cwd=folder, env=os.environ | own, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_script_keeps_its_classes_and_its_module(tmp_path: Path) -> None:
    """In virtual time and with real processes, which get a copy of the class."""
    (tmp_path / "script.py").write_text("\n".join(["WORLDS = ['virtual', 'real']", *CELLS]), "utf-8")
    assert "left alone" in printed(["script.py"], tmp_path)


@pytest.mark.slow
def test_a_notebook_keeps_its_classes_and_its_module(tmp_path: Path) -> None:
    cells = ["WORLDS = ['virtual']", *CELLS]
    assert "left alone" in printed(["-c", EXECUTE, json.dumps(cells)], tmp_path)


# --- a result's module


class Moody(nn.Module):
    """It computes something else in train mode."""

    modes: list[bool] = []  # noqa: RUF012 - of all forwards

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        x = torch.relu(self.norm(self.first(x)))
        return self.head(x if self.training else -x)


def dataset(size: int, seed: int = 0) -> TensorDataset:
    return TensorDataset(torch.randn(size, 8, generator=torch.Generator().manual_seed(seed)), torch.arange(size) % 3)


@pytest.fixture
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.usefixtures("_place", "one_thread")
@pytest.mark.parametrize("method", ["pipar", "fl"])
def test_accuracy_is_that_of_the_users_module_in_eval_mode(method: str) -> None:
    torch.manual_seed(0)
    model, held_out = Moody(), dataset(60, 1)
    tree = {**TREE, **MACHINES, "run": {"epochs": 2, "batch_size": 10, "method": method}, "plan": {}}
    Moody.modes.clear()
    result = pipar.run(tree, model=model, datasets=[dataset(30)], validation=held_out, test=held_out, world="virtual")
    assert model.training
    trained = result.model()
    assert isinstance(trained, Moody)
    assert not trained.training
    inputs, labels = held_out.tensors
    outputs = trained(inputs).detach()
    assert result.test_accuracy == int((outputs.argmax(1) == labels).sum()) / 60
    loss = float(nn.functional.cross_entropy(outputs, labels))
    assert result.epochs[-1]["val_loss"] == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(result.state_dict(), dict(trained.state_dict()), rtol=0, atol=0)
    assert sorted(result.state_dict()) == sorted(model.state_dict())
    assert False in Moody.modes


@pytest.mark.slow
@pytest.mark.usefixtures("_place", "one_thread")
def test_a_network_by_name_is_built_again_with_the_trained_weights() -> None:
    data = {"name": "synthetic", "shape": [1, 8, 8], "samples_per_device": 20, "validation": 10, "test": 10}
    result = pipar.run({**TREE, **MACHINES, "data": data}, world="virtual")
    torch.testing.assert_close(dict(result.model().state_dict()), result.state_dict(), rtol=0, atol=0)


def test_a_result_without_weights_or_network_says_so(tmp_path: Path) -> None:
    with pytest.raises(PiparError, match=r"no model\.safetensors .*timing-only"):
        pipar.Result(tmp_path, {}).state_dict()
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(PiparError, match=r"load Result\.state_dict\(\) into your own module"):
        pipar.Result(tmp_path, {}).model()


# --- a module of the user's own


@pytest.mark.slow
def test_a_workload_copies_the_module_and_pickles_it_for_other_processes_only() -> None:
    class Local(nn.Sequential):
        pass

    model = Local(nn.Linear(8, 4), nn.Linear(4, 3))
    forward = Local.forward
    config = config_from({})
    own = UserObjects.of(config, model, [dataset(4)] * 4, None, None)
    built = Workload(config, own).build_model()
    assert (type(built), Local.forward) == (Local, forward)
    assert next(built.parameters()) is not next(model.parameters())
    sent = pickle.loads(pickle.dumps(own))  # noqa: S301 - what this test has pickled
    received = Workload(config, sent).build_model()
    torch.testing.assert_close(dict(received.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (nn.Sequential(nn.Linear(8, 3, device="meta")), r"0\.weight is on the device 'meta'.*, but training starts"),
        (nn.Sequential(nn.LazyLinear(3)), r"0\.weight has no shape yet.*run a batch through it"),
        (nn.Linear, "the model is the class Linear, but it must be"),
    ],
    ids=["meta", "lazy", "a class"],
)
def test_a_module_that_cannot_be_trained_here_is_refused(model: Any, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        UserObjects.of(config_from({}), model, None, None, None)


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 3))
    model[0].kept = next(model.parameters()) * 2  # part of a graph
    with pytest.raises(ModelError, match="cannot be copied"):
        Workload(config_from({}), UserObjects.of(config_from({}), model, None, None, None)).build_model()
    assert copy.copy(model) is not model
