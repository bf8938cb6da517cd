"""A run in virtual time: inside another event loop, interrupted anywhere, and without side effects in the caller."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import Case
from torch import nn

import pipar
from pipar.errors import TrainingError
from pipar.events import EpochResult, Event
from pipar.execution.clock import run_virtually
from pipar.launch.run import World
from pipar.storage.result import Result


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    """Run a small training with a profile made by hand, so that nothing is measured."""
    tree = Case("pipar", (1,), (3,), sizes=(20, 10), dtype="float32").tree_with_profile(tmp_path)
    tree["run"]["name"] = "it"
    return partial(pipar.run, tree, world="virtual")


def saved(tmp_path: Path, name: str = "it") -> dict[str, Any]:
    result: dict[str, Any] = json.loads((tmp_path / "runs" / name / "result.json").read_text("utf-8"))
    return result


# --- inside another event loop


@pytest.mark.slow
@pytest.mark.parametrize("world", ["virtual", "timing-only"])
def test_a_run_inside_an_event_loop_is_the_run_outside_of_it(run: Callable[..., Result], world: World) -> None:
    async def cell() -> Result:
        return run(world=world)

    inside, outside = asyncio.run(cell()), run(world=world)
    assert inside.content == outside.content
    assert (inside.folder / "trace.json").read_bytes() == (outside.folder / "trace.json").read_bytes()


def test_an_error_in_virtual_time_is_raised_in_the_event_loop_around_it() -> None:
    async def fails(error: BaseException) -> None:
        await asyncio.sleep(1)
        raise error

    async def cell(error: BaseException) -> None:
        with pytest.raises(type(error)) as caught:
            run_virtually(fails(error))
        assert caught.value is error

    for error in (TrainingError("no more"), KeyboardInterrupt()):
        asyncio.run(cell(error))


def test_ctrl_c_in_the_event_loop_around_it_ends_virtual_time() -> None:
    ended = threading.Event()

    async def endless() -> None:
        # As in a notebook, the signal reaches the main thread, which waits for this one.
        asyncio.get_running_loop().call_later(5, os.kill, os.getpid(), signal.SIGUSR1)
        try:
            while True:
                await asyncio.sleep(1)
        finally:
            ended.set()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    async def cell() -> None:
        before = signal.signal(signal.SIGUSR1, interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                run_virtually(endless())
        finally:
            signal.signal(signal.SIGUSR1, before)

    asyncio.run(cell())
    assert ended.is_set()


# --- interrupted


@pytest.mark.slow
def test_ctrl_c_in_the_final_test_keeps_the_training(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipar.job.model_setup.scores_on_test_set", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    result = saved(tmp_path)
    assert (len(result["epochs"]), result["test_accuracy"]) == (2, None)
    assert len(result["weights_sha256"]) == 64
    assert {"trace.json", "model.safetensors"} <= {path.name for path in (tmp_path / "runs" / "it").iterdir()}


def failing_in(epoch: int) -> Callable[[Event], None]:
    """Return an observer that fails at the end of an epoch."""

    def observe(event: Event) -> None:
        if isinstance(event, EpochResult) and event.epoch == epoch:
            raise TrainingError("no more")

    return observe


@pytest.mark.slow
@pytest.mark.parametrize("world", ["virtual", "timing-only"])
def test_a_run_that_fails_keeps_the_epochs_so_far(run: Callable[..., Result], tmp_path: Path, world: World) -> None:
    with pytest.raises(TrainingError, match="no more"):
        run(world=world, observe=failing_in(1))
    assert [epoch["epoch"] for epoch in saved(tmp_path)["epochs"]] == [1]
    assert (tmp_path / "runs" / "it" / "model.safetensors").exists() == (world == "virtual")


@pytest.mark.slow
@pytest.mark.parametrize("world", ["virtual", "timing-only"])
def test_a_run_that_fails_before_the_end_of_its_first_epoch_leaves_no_folder(
    run: Callable[..., Result], tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TrainingError("no more")

    monkeypatch.setattr("pipar.storage.run_folder.RunFolder.add_epoch", fail)
    with pytest.raises(TrainingError, match="no more"):
        run(world=world)
    assert list((tmp_path / "runs").iterdir()) == []


# --- side effects in the caller


@pytest.mark.slow
def test_the_callers_thread_count_is_restored(run: Callable[..., Result]) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def network_with_dropout() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 10))


@pytest.mark.slow
@pytest.mark.usefixtures("measured_at_once")
def test_dropout_depends_on_the_seed_alone_and_the_callers_generator_is_restored() -> None:
    data = {"name": "synthetic", "shape": [1, 4, 4], "samples_per_device": 20, "validation": 0, "test": 0}
    tree = {"run": {"epochs": 1, "batch_size": 10}, "data": data, "devices": [{"count": 2}]}
    plan, model = ["plan.split_point=2", "plan.micro_batches=2"], network_with_dropout()

    def weights(seed: int) -> str:
        result = pipar.run(tree, world="virtual", model=model, settings=[*plan, f"run.seed={seed}"])
        return str(result.content["weights_sha256"])

    before = torch.default_generator.get_state()
    one, other = weights(0), weights(1)
    assert torch.equal(torch.default_generator.get_state(), before)
    torch.rand(3)  # drawn by the caller
    assert weights(0) == one != other
