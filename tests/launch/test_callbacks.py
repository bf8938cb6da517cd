"""Callbacks see every epoch, and can end a training in every world, with everything saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import pipar
from pipar.events import EndedByCallback, EpochResult, Event

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "_place")]

TREE: dict[str, Any] = {
    "run": {"name": "called", "epochs": 6, "batch_size": 10},
    "plan": {"split_point": 1, "micro_batches": 2},
    "server": {"profile": "i7-11850h", "cores": 1},
    "devices": [{"profile": "raspberry-pi-3b", "link": "unlimited", "count": 2}],
}
WORLDS = ["virtual", "timing-only", "real"]


@pytest.fixture
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def train(world: Any, *callbacks: Callable[[EpochResult], Any], **options: Any) -> pipar.Result:
    data = [TensorDataset(torch.randn(20, 8), torch.arange(20) % 3) for _ in range(2)]
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    return pipar.run(TREE, world=world, model=model, datasets=data, test=data[0], callbacks=callbacks, **options)


@pytest.mark.parametrize("world", WORLDS)
def test_a_callback_gets_the_record_of_every_epoch(world: str) -> None:
    seen: list[EpochResult] = []
    result = train(world, seen.append)
    assert [one.to_dict() for one in seen] == result.epochs
    assert len(seen) == 6
    assert result.content["stopped"] is None


@pytest.mark.parametrize("world", WORLDS)
def test_a_callback_ends_the_training_after_the_round_that_is_being_trained(world: str) -> None:
    seen: list[int] = []
    events: list[Event] = []

    def enough(epoch: EpochResult) -> object:
        seen.append(epoch.epoch)
        return pipar.STOP if epoch.epoch == 2 else None

    result = train(world, enough, observe=events.append)
    trained = len(result.epochs)
    assert trained == 3 if world != "real" else 2 <= trained < 6  # the message takes time
    assert seen == list(range(1, trained + 1))
    assert result.content["stopped"] == f"Training ended after epoch {trained}: a callback ended it."
    assert [event.epoch for event in events if isinstance(event, EndedByCallback)] == [trained]
    assert json.loads((result.folder / "result.json").read_text("utf-8")) == result.content
    if world != "timing-only":
        assert result.test_accuracy is not None
        assert result.state_dict()


@pytest.mark.parametrize("world", WORLDS)
def test_the_error_of_a_callback_is_raised_as_it_is_when_everything_is_saved(world: str, tmp_path: Path) -> None:
    error, later = ZeroDivisionError("of the caller"), list[int]()

    def fail(epoch: EpochResult) -> None:
        if epoch.epoch == 2:
            raise error

    with pytest.raises(ZeroDivisionError) as raised:
        train(world, fail, lambda epoch: later.append(epoch.epoch), report=True)
    assert raised.value is error
    folder = tmp_path / "runs" / "called"
    result = json.loads((folder / "result.json").read_text("utf-8"))
    assert 2 <= len(result["epochs"]) < 6
    assert len((folder / "metrics.jsonl").read_text("utf-8").splitlines()) == len(result["epochs"])
    assert (folder / "report.html").exists()
    assert (folder / "model.safetensors").exists() == (world != "timing-only")
    assert later == [1]


def test_every_callback_is_called_although_one_has_ended_the_training() -> None:
    first: list[int] = []
    second: list[int] = []

    def enough(epoch: EpochResult) -> object:
        first.append(epoch.epoch)
        return pipar.STOP

    train("timing-only", enough, lambda epoch: second.append(epoch.epoch))
    assert first == second == [1, 2]


def test_an_interruption_in_a_callback_is_no_error_of_it(tmp_path: Path) -> None:
    def interrupt(_: EpochResult) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train("virtual", interrupt)
    assert (tmp_path / "runs" / "called" / "result.json").exists()


def test_other_values_than_stop_end_nothing() -> None:
    assert len(train("timing-only", lambda _: True, lambda _: "stop").epochs) == 6
