"""The best model so far: the lowest validation loss, also after a crash and on a full disk."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from pipar.storage.best_model import BestModel
from pipar.wire.messages import Body


def body(text: str) -> Body:
    return Body.of(text.encode(), encoding="safetensors")


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "best").iterdir())


def content(best: BestModel) -> str:
    found = best.read()
    assert found is not None
    return bytes(found.contiguous()).decode()


def kept(folder: Path, *losses: float, every: int = 1, safe: float = math.inf) -> BestModel:
    """Return what is kept after rounds with these losses, of which those up to `safe` are in a checkpoint."""
    best = BestModel(folder, every)
    best.note_safe(safe)
    for number, loss in enumerate(losses, start=1):
        best.offer(number, loss, body(f"model {number}"))
    return best


@pytest.mark.parametrize(
    ("losses", "wanted"),
    [((1.0, 0.5, 0.7), 2), ((0.5, 0.5), 1), ((math.nan, 3.0, math.inf), 2), ((3.0, 2.0, 1.0), 3)],
)
def test_the_lowest_loss_wins_and_of_equal_ones_the_first(
    tmp_path: Path, losses: tuple[float, ...], wanted: int
) -> None:
    best = kept(tmp_path, *losses)
    assert content(best) == f"model {wanted}"
    assert files(tmp_path) == [f"round-{wanted:06d}_{losses[wanted - 1]!r}.safetensors"]


def test_a_training_that_has_diverged_from_the_start_has_no_best_model(tmp_path: Path) -> None:
    best = kept(tmp_path, math.nan, math.inf)
    assert best.best is None
    assert best.read() is None


def test_the_best_model_and_its_loss_survive_a_crash(tmp_path: Path) -> None:
    kept(tmp_path, 0.9, 0.1 + 0.2)
    after = BestModel(tmp_path)
    assert content(after) == "model 2"
    assert after.best is not None
    assert after.best.loss == 0.1 + 0.2
    after.offer(3, 0.3, body("model 3"))
    assert content(after) == "model 3"


def test_a_crash_that_undoes_the_best_round_leaves_the_best_one_before_it(tmp_path: Path) -> None:
    kept(tmp_path, 0.5, 0.7, 0.4, safe=2)
    after = BestModel(tmp_path)
    after.resume(2)
    assert content(after) == "model 1"
    assert files(tmp_path) == ["round-000001_0.5.safetensors"]


@pytest.mark.parametrize("every", [1, 4])
def test_few_models_are_on_disk_however_often_the_loss_improves(tmp_path: Path, every: int) -> None:
    best = BestModel(tmp_path, every)
    for number in range(1, 41):
        best.offer(number, 1 / number, body(f"model {number}"))
        due = (number - 1) // every * every  # a checkpoint is written during the next round
        best.note_safe(due)
        assert len(files(tmp_path)) <= 4
        after = BestModel(tmp_path, every)
        known = [one for one in after._written if one <= due]
        assert max(known, default=0) == due  # what a resumed training finds
    assert content(best) == "model 40"


def test_on_a_full_disk_the_best_model_stays_in_memory_and_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = kept(tmp_path, 0.9)
    really_sync = os.fsync

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    best.offer(2, 0.5, body("model 2"))
    assert isinstance(best.take_failure(), OSError)
    assert best.take_failure() is None
    assert content(best) == "model 2"
    assert files(tmp_path) == ["round-000001_0.9.safetensors"]
    monkeypatch.setattr(os, "fsync", really_sync)
    best.offer(3, 0.8, body("model 3"))  # is no better, but there is space again
    assert files(tmp_path) == ["round-000002_0.5.safetensors"]
    assert content(best) == "model 2"


def test_other_files_in_its_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "round-000009_worst.safetensors").write_text("mine")
    best = kept(tmp_path, 0.9)
    best.remove()
    assert files(tmp_path) == ["round-000009_worst.safetensors"]
