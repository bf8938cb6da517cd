"""A run is labelled "exact" only if it is: what a training did decides, in its files, its events and its tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import Case, make_job
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pipar
from pipar.events import EquivalenceChanged, Event, Started
from pipar.launch.virtual import train_virtually
from pipar.methods import Plan
from pipar.settings.links import Link
from pipar.storage.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "_place")]

MACHINES = {"server": {"profile": "i7-11850h", "cores": 1}, "devices": [{"profile": "raspberry-pi-3b", "count": 2}]}


@pytest.fixture
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def network(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *between, nn.Linear(8, 3))


PLAIN = network(nn.ReLU())


@pytest.mark.parametrize(
    ("model", "settings", "reasons"),
    [
        (PLAIN, [], []),
        (PLAIN, ["privacy.noise_multiplier=0.5"], ["noise on updates"]),
        (PLAIN, ["privacy.noise_multiplier=0.5", "run.method=fl"], ["noise on updates"]),
        (PLAIN, ["privacy.pixel_epsilon=1.0"], ["noise on inputs"]),
        (PLAIN, ["privacy.label_epsilon=2.0"], ["randomised labels"]),
        (PLAIN, ["privacy.label_epsilon=2.0", "run.method=fl"], []),
        (PLAIN, ["wire.encoding=fp16"], ["lossy encoding"]),
        (PLAIN, ["wire.encoding=fp16", "run.method=fl"], []),
        (network(nn.Dropout(0.5)), [], ["dropout"]),
        (network(nn.Dropout(0.0)), [], []),
        (network(nn.BatchNorm1d(8)), [], ["batch statistics"]),
        (network(nn.BatchNorm1d(8)), ["run.method=sfl"], []),
        (network(Centred()), [], ["batch statistics"]),
        (network(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))), [], ["forward per micro-batch"]),
        (network(LoRA()), [], ["LoRA averaging"]),
        (network(LoRA()), ["run.method=sl"], []),
        (
            network(nn.BatchNorm1d(8), nn.Dropout(0.5)),
            ["wire.encoding=int8"],
            ["batch statistics", "dropout", "lossy encoding"],
        ),
    ],
)
def test_a_run_names_every_reason_why_it_is_not_exact(
    model: nn.Module, settings: list[str], reasons: list[str]
) -> None:
    data = [TensorDataset(torch.randn(12, 8), torch.arange(12) % 3) for _ in range(2)]
    tree: dict[str, Any] = {**MACHINES, "run": {"epochs": 1, "batch_size": 6}}
    tree["plan"] = {"split_point": 1, "micro_batches": 2}
    seen: list[Event] = []
    result = pipar.run(tree, world="virtual", model=model, datasets=data, settings=settings, observe=seen.append)
    assert result.content["equivalence_reasons"] == reasons
    assert result.content["equivalence"] == ("statistical" if reasons else "exact")
    assert [list(event.equivalence_reasons) for event in seen if isinstance(event, Started)] == [reasons]
    assert not [event for event in seen if isinstance(event, EquivalenceChanged)]


@pytest.mark.parametrize(
    ("norm", "first", "then", "reasons"),
    [
        ("batch", Plan(2, 1), Plan(2, 3), [[], ["batch statistics"]]),
        ("batch", Plan(2, 3), Plan(2, 1), [["batch statistics"], ["batch statistics"]]),
        ("group", Plan(2, 1), Plan(3, 3), [[], []]),
        ("group", Plan(2, 1), Plan(2, 1, up="topk"), [[], ["lossy encoding"]]),
    ],
)
def test_new_plans_change_the_label_from_the_first_round_with_them_on(
    norm: str, first: Plan, then: Plan, reasons: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipar.planner.replanner.NOTICED", -1.0)  # every round's links count as changed
    case = Case("pipar", (first.split_point,), (first.micro_batches,), sizes=(20, 10), norm=norm, epochs=2)
    workload = case.workload()
    job, seen = make_job(workload), list[Event]()
    folder = RunFolder(tmp_path, job, world="virtual", command="test")

    async def replan(links: Mapping[str, Link]) -> Mapping[str, Plan]:
        return dict.fromkeys(links, then)

    before = list(folder.equivalence_reasons)
    train_virtually(
        job, workload, folder.epoch_recorder(seen.append), folder.event_recorder(seen.append), replan=replan
    )
    result = folder.finish()
    assert [one["epoch"] for one in result["replans"]] == [2]
    assert [before, result["equivalence_reasons"]] == reasons
    changes = [(event.epoch, list(event.reasons)) for event in seen if isinstance(event, EquivalenceChanged)]
    assert changes == ([(2, reasons[1])] if reasons[0] != reasons[1] else [])
