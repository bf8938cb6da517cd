"""`pipar.plan` returns what `pipar plan` prints, as an object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.small_runs import SETTINGS
from torch import nn
from torch.utils.data import TensorDataset

import pipar
from pipar.cli import cli

pytestmark = pytest.mark.slow


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pipar.ChosenPlans:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return pipar.plan(settings=SETTINGS)


def without_times(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != "seconds"}


def test_it_has_the_content_of_the_command(chosen: pipar.ChosenPlans) -> None:
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    printed = CliRunner().invoke(cli, ["plan", "--json", *words])
    assert printed.exit_code == 0, printed.output
    assert without_times(json.loads(printed.stdout)) == without_times(json.loads(json.dumps(chosen.to_dict())))


def test_its_text_is_that_of_the_command(chosen: pipar.ChosenPlans) -> None:
    text = str(chosen)
    assert text.startswith("Plans, by simulation\nvgg5 on digits, method pipar")
    for words in ("Predicted epoch", "<- bottleneck", "Runners-up", "Cuts", "3 x device"):
        assert words in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 110


def test_it_has_plans_by_device_the_bottleneck_and_runners_up(chosen: pipar.ChosenPlans) -> None:
    document = chosen.to_dict()
    assert list(chosen.plans) == [entry["device"] for entry in document["plans"]]
    assert chosen.predicted_epoch_s == document["predicted_epoch_s"]
    assert chosen.bottleneck == document["bottleneck"]
    assert [seconds for _, seconds in chosen.runners_up] == [one["epoch_s"] for one in document["runners_up"]]
    assert repr(chosen) == f"ChosenPlans(3 devices, predicted epoch {chosen.predicted_epoch_s:.2f} s)"


def test_its_frame_has_a_row_for_each_device(chosen: pipar.ChosenPlans) -> None:
    frame = chosen.frame()
    assert frame.index.tolist() == list(chosen.plans)
    assert frame["split_point"].to_dict() == {name: plan.split_point for name, plan in chosen.plans.items()}
    assert (frame["needed_bytes"] > 0).all()
    assert set(frame["machine"]) == {"raspberry-pi-3b"}


def test_its_html_has_the_choice_and_the_runners_up(chosen: pipar.ChosenPlans) -> None:
    html = chosen._repr_html_()
    for words in ("Plans of vgg5 on digits, pipar", "predicted epoch", "3 x device-1 ...", "Runners-up", "memory MiB"):
        assert words in html


def test_a_network_and_datasets_of_the_caller_are_planned_and_trained_alike(chosen: pipar.ChosenPlans) -> None:
    assert chosen
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    data = [TensorDataset(torch.randn(30, 8), torch.arange(30) % 3) for _ in range(2)]
    tree = {"run": {"epochs": 1, "batch_size": 10}, "server": {"profile": "i7-11850h"}}
    own: dict[str, Any] = {"model": model, "datasets": data, "settings": ['devices.profile="raspberry-pi-3b"']}
    plans = pipar.plan(tree, **own).plans
    result = pipar.run(tree, world="timing-only", **own)
    assert {entry["device"]: entry["split_point"] for entry in result.content["plans"]} == {
        name: plan.split_point for name, plan in plans.items()
    }
    numbers = [TensorDataset(torch.randn(30, 8), torch.randn(30, 3)) for _ in range(2)]
    assert len(pipar.plan(tree, **{**own, "datasets": numbers}, loss=nn.functional.mse_loss).plans) == 2
    whole = pipar.plan(tree, cut_points=[], **own)
    assert {plan.split_point for plan in whole.plans.values()} == {1}
