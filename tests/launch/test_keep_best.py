"""run.keep = "best": which weights model.safetensors has, in virtual time, in real processes and after a resumption."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from support.deployments import final_model, recomputed, training
from support.programs import address_of, place
from support.training import EXACT, Case, largest_error

import pipar
from pipar.errors import ConfigError, TrainingError
from pipar.events import EpochResult
from pipar.storage.result import Result
from pipar.tensors.bodies import weights_sha256

#: A learning rate that makes the validation loss worse in some rounds.
ROUGH = ["run.epochs=6", "optimizer.learning_rate=1.2", "run.keep=best"]
#: A round of pi-3 has three batches, of two micro-batches each. Before them, both gates of the whole network let a
#: step pass that tries it.
IN_ROUND_3 = 2 * 6 + 1 + 2


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    """Run a small training with a profile made by hand, so that nothing is measured."""
    tree = Case("pipar", (1,), (3,), sizes=(20, 10), dtype="float32").tree_with_profile(tmp_path)
    tree["data"]["validation"] = 30
    return partial(pipar.run, tree, world="virtual")


def losses(result: Result) -> list[float]:
    return [epoch["val_loss"] for epoch in result.epochs]


def sha_of(path: Path) -> str:
    import safetensors.torch

    return weights_sha256(safetensors.torch.load_file(path))


@pytest.mark.slow
def test_the_model_with_the_lowest_validation_loss_is_kept_and_the_last_one_saved(run: Callable[..., Result]) -> None:
    result = run(settings=ROUGH)
    best = losses(result).index(min(losses(result))) + 1
    assert best < 6
    assert result.content["kept_epoch"] == best
    shorter = run(settings=[*ROUGH, f"run.epochs={best}", "run.keep=last"])
    last = run(settings=[*ROUGH, "run.keep=last"])
    assert result.content["weights_sha256"] == shorter.content["weights_sha256"]
    assert result.content["last_weights_sha256"] == last.content["weights_sha256"]
    assert sha_of(result.folder / "model.safetensors") == result.content["weights_sha256"]
    assert sha_of(result.folder / "model-last.safetensors") == result.content["last_weights_sha256"]
    assert result.test_accuracy == shorter.test_accuracy
    assert not (result.folder / "best").exists()
    assert [e["seconds"] for e in result.epochs] == [e["seconds"] for e in last.epochs]


def sharpness(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().mean()


def bluntness(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().mean()


bluntness.higher_is_better = False  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "best_of"), [(sharpness, max), (bluntness, min)])
def test_the_model_with_the_best_monitored_metric_is_kept(
    run: Callable[..., Result], metric: Any, best_of: Any
) -> None:
    name = metric.__name__
    result = run(settings=[*ROUGH, f"run.monitor={name}"], metrics={name: metric})
    known = [epoch["val_metrics"][name] for epoch in result.epochs]
    assert len(set(known)) == 6
    assert result.content["kept_epoch"] == known.index(best_of(known)) + 1


@pytest.mark.slow
@pytest.mark.parametrize(("is_better", "epochs"), [(True, 6), (False, 3)])
def test_patience_goes_by_the_monitored_metric(run: Callable[..., Result], is_better: bool, epochs: int) -> None:
    calls = count()

    def later(_: Any, __: Any) -> float:
        return next(calls)

    later.higher_is_better = is_better  # type: ignore[attr-defined]
    settings = ["run.epochs=6", "run.patience=1", "run.monitor=later"]
    result = run(settings=settings, metrics={"later": later})
    # Validation runs during the next round, so the training stops one epoch later.
    assert len(result.epochs) == epochs


def test_a_monitored_metric_that_is_not_computed_is_refused(run: Callable[..., Result]) -> None:
    with pytest.raises(ConfigError, match=r"run\.monitor = 'f1' is neither 'val_loss' nor a metric of this training"):
        run(settings=["run.keep=best", "run.monitor=f1"])


@pytest.mark.slow
def test_a_best_model_that_is_the_last_one_is_saved_once(run: Callable[..., Result]) -> None:
    result = run(settings=["run.epochs=1", "run.keep=best"])
    assert (result.content["kept_epoch"], result.content["last_weights_sha256"]) == (1, None)
    assert not (result.folder / "model-last.safetensors").exists()
    assert not (result.folder / "best").exists()


@pytest.mark.slow
def test_the_last_model_is_kept_by_default(run: Callable[..., Result]) -> None:
    result = run(settings=["run.epochs=2"])
    assert (result.content["kept_epoch"], result.content["last_weights_sha256"]) == (2, None)


@pytest.mark.slow
def test_an_interrupted_run_keeps_the_best_model_so_far(run: Callable[..., Result], tmp_path: Path) -> None:
    def interrupt(event: Any) -> None:
        if isinstance(event, EpochResult) and event.epoch == 4:
            raise TrainingError("no more")

    with pytest.raises(TrainingError):
        run(settings=[*ROUGH, "run.name=stopped"], observe=interrupt)
    result = json.loads((tmp_path / "runs" / "stopped" / "result.json").read_text("utf-8"))
    known = [epoch["val_loss"] for epoch in result["epochs"]]
    assert result["kept_epoch"] == known.index(min(known)) + 1
    assert sha_of(tmp_path / "runs" / "stopped" / "model.safetensors") == result["weights_sha256"]


@pytest.mark.parametrize(
    ("settings", "world", "says"),
    [
        (["data.validation=0"], "virtual", "run.keep = 'best' needs a validation set, and there is none"),
        ([], "timing-only", "run.keep = 'best' needs validation losses, and a timing-only run has none"),
    ],
)
def test_without_a_validation_set_there_is_no_best_model(
    run: Callable[..., Result], settings: list[str], world: Any, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        run(settings=["run.keep=best", *settings], world=world)


@pytest.mark.slow
def test_real_processes_keep_the_best_model(run: Callable[..., Result]) -> None:
    torch.manual_seed(0)
    virtual = run(settings=[*ROUGH, "run.epochs=4"])
    real = run(settings=[*ROUGH, "run.epochs=4", "devices.speed=1.0"], world="real")
    assert losses(real) == pytest.approx(losses(virtual), rel=1e-3)
    assert real.content["kept_epoch"] == losses(real).index(min(losses(real))) + 1
    assert sha_of(real.folder / "model.safetensors") == real.content["weights_sha256"]


@pytest.mark.slow
def test_the_best_model_survives_a_killed_server(tmp_path: Path, profiles: Path) -> None:
    tree = training(epochs=4, keep="best")
    with place(tmp_path, profiles, tree) as here:
        server = here.server()
        address = address_of(server)
        here.hold("pi-3", after=IN_ROUND_3)
        device = here.device("pi-3", address)
        server.says("round 2 saved"), server.says("result of round 2")
        server.kill()
        here.let_go("pi-3")
        # From here on the loss becomes worse.
        worse = here.server("--resume", "--set", "optimizer.learning_rate=1.2", listen=address)
        assert (worse.ends(), device.ends()) == (0, 0)
        result = here.result()
        known = [epoch["val_loss"] for epoch in result["epochs"]]
        best = result["kept_epoch"]
        assert best <= 2
        assert known[best - 1] == min(known)
        expected = recomputed(tree, here.rounds()[:best])
        assert largest_error({name: final_model(here)[name] for name in expected}, expected) < EXACT
        assert sha_of(here.run_folder / "model-last.safetensors") == result["last_weights_sha256"]
        assert len(list((here.run_folder / "best").iterdir())) == 1
