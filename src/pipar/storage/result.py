"""The result of a run, as Python programs read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Result:
    """A finished run: its folder, and what result.json says."""

    folder: Path
    content: Mapping[str, Any]

    @property
    def epochs(self) -> list[dict[str, Any]]:
        return list(self.content["epochs"])

    @property
    def report(self) -> Path | None:
        """The page of the run, if one was written."""
        page = self.folder / "report.html"
        return page if page.exists() else None

    @property
    def test_accuracy(self) -> float | None:
        accuracy = self.content["test_accuracy"]
        return None if accuracy is None else float(accuracy)

    @property
    def seconds_per_epoch(self) -> float:
        """The mean over the epochs."""
        seconds = [float(epoch["seconds"]) for epoch in self.epochs]
        return sum(seconds) / len(seconds)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the trained weights, to be loaded into the same network."""
        import safetensors.torch

        return safetensors.torch.load_file(self.folder / "model.safetensors")
