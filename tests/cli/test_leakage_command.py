"""`pipar leakage`: attacks on the cuts of a network, untrained and trained, and the files it writes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
from PIL import Image

from pipar.cli import main
from pipar.cli.leakage import with_time_left
from pipar.data.catalog import known_datasets
from pipar.errors import PlanError
from pipar.events import Event, Preparing
from pipar.job.leakage_audit import checked_cuts
from pipar.leakage.table import LeakageTable
from pipar.networks.models import build_model

Pipar = Callable[..., str]
SMALL = ["--data", "synthetic", "--set", "data.shape=[3,16,16]", "--set", "data.samples_per_device=20", "--images", "3"]


@pytest.fixture
def pipar(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pipar:
    """Run `pipar leakage` in a separate folder, and return what it wrote to standard output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def command(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["leakage", *words])
        captured = capfd.readouterr()
        # If it takes more than ten seconds, it prints its progress.
        wrong = [line for line in captured.err.splitlines() if not line.startswith(("Attacking P=", "Loading "))]
        assert (ended.value.code, wrong) == (0, [])
        return captured.out

    return command


@pytest.mark.slow
def test_a_table_of_every_cut_is_shown_and_written_with_a_picture(pipar: Pipar, tmp_path: Path) -> None:
    text = pipar(*SMALL, "--attacks", "small")
    table = LeakageTable.load(tmp_path / "leakage.json")
    assert [cut.split_point for cut in table.cuts] == [1, 2, 3, 4]
    assert (table.model, table.dataset, table.input_shape) == ("vgg5", "synthetic", (3, 16, 16))
    assert (table.images, table.compared, table.pixel_scale, set(table.attacks)) == (3, 20, 0.0, {"small"})
    assert "1 conv1" in " ".join(text.split())
    assert "5 fc5 - - -" in " ".join(text.split())
    assert "not that a cut is safe" in " ".join(text.split())
    assert (tmp_path / "leakage.csv").read_text("utf-8").count("\n") == 5
    assert "| 4 | fc4 |" in (tmp_path / "leakage.md").read_text("utf-8")
    with Image.open(tmp_path / "leakage.png") as picture:
        assert picture.width > 5 * 72
        assert picture.height > 3 * 72
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 100


@pytest.mark.slow
def test_trained_weights_are_attacked_if_they_fit_and_noise_is_reported(
    pipar: Pipar, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = build_model("vgg5", input_shape=(3, 16, 16), classes=10, seed=5).state_dict()
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    words = [*SMALL, "--attacks", "small", "--split-points", "2,5", "--set", "privacy.pixel_epsilon=1", "--json"]
    first, trained = (json.loads(pipar(*words, *more)) for more in ([], ["--model", "model.safetensors"]))
    assert [cut["split_point"] for cut in trained["cuts"]] == [2]
    assert trained["weights"].startswith("model.safetensors with SHA-256 ")
    assert trained["pixel_scale"] == pytest.approx(0.2537, abs=1e-4)
    assert first["cuts"] != trained["cuts"]
    with pytest.raises(SystemExit) as ended:
        main(["leakage", *words, "--model", "model.safetensors", "--set", "model.norm=batch"])
    assert ended.value.code == 2
    assert "has the weights of a network other than the configured one" in capfd.readouterr().err


@pytest.mark.parametrize("split_points", [[5], [5, 5]])
def test_a_cut_that_sends_no_activations_cannot_be_attacked(split_points: list[int]) -> None:
    with pytest.raises(PlanError, match="nothing can be attacked: give split points below 5"):
        checked_cuts(split_points, 5, "vgg5")
    assert checked_cuts([*split_points, 2], 5, "vgg5") == [2]
    with pytest.raises(PlanError, match="nothing can be attacked"):
        checked_cuts(None, 1, "one")


def test_the_time_left_is_estimated_from_the_share_done() -> None:
    told: list[Event] = []
    now = 0.0
    tell = with_time_left(told.append, lambda: now)
    tell("Attacking P=1: small", 0.0)
    now = 10.0
    tell("Attacking P=1: small", 0.25)
    assert told == [Preparing("Attacking P=1: small", 0.0), Preparing("Attacking P=1: small, 0:30 left", 0.25)]


def has_cifar() -> bool:
    path = os.environ.get("PIPAR_DATA")
    return any(info.name == "cifar10" and info.found for info in known_datasets(Path(path) if path else None))


@pytest.mark.slow
@pytest.mark.skipif(not has_cifar(), reason="needs the images of CIFAR-10")
def test_a_small_attack_reconstructs_cifar_images_after_the_first_layer_of_vgg5_but_not_after_the_second(
    pipar: Pipar, tmp_path: Path
) -> None:
    pipar("--data", "cifar10", "--attacks", "small", "--split-points", "1,2", "--images", "8")
    first, second = (cut.attacks["small"] for cut in LeakageTable.load(tmp_path / "leakage.json").cuts)
    assert first.pixel_correlation > 0.85
    assert second.pixel_correlation < 0.3
    assert first.psnr_db > second.psnr_db + 3
