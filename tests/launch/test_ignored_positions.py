"""Data with positions that do not count is measured and trained like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import pipar

pytestmark = pytest.mark.slow

CLASSES, SIDE, LENGTH = 3, 4, 6


def segmentation(ignored: int) -> tuple[nn.Sequential, TensorDataset]:
    masks = torch.randint(CLASSES, (12, SIDE, SIDE))
    masks[:, 0] = ignored
    network = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, CLASSES, 1))
    return network, TensorDataset(torch.randn(12, 1, SIDE, SIDE), masks)


def sentences(ignored: int) -> tuple[nn.Sequential, TensorDataset]:
    tokens = torch.randint(CLASSES, (12, LENGTH))
    following = tokens.roll(-1, 1)
    following[:, -1] = ignored
    return nn.Sequential(nn.Embedding(CLASSES, 4), nn.Linear(4, CLASSES)), TensorDataset(tokens, following)


@pytest.mark.parametrize(
    ("make", "task"),
    [
        (segmentation, {"metrics": ["iou"]}),
        (segmentation, {"ignore_index": 255, "metrics": ["iou"]}),
        (sentences, {"loss": "next_token", "metrics": ["perplexity"]}),
        (sentences, {"loss": "next_token", "ignore_index": 255}),
    ],
)
def test_a_training_without_a_given_profile_takes_ignored_positions(
    make: Any, task: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    network, data = make(task.get("ignore_index", -100))
    tree = {"run": {"epochs": 1, "batch_size": 4}, "task": task, "devices": [{"count": 2}]}
    result = pipar.run(tree, model=network, datasets=data, validation=data, world="virtual")
    assert result.epochs[0]["val_loss"] < 5
