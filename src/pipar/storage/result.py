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
    """A finished run: its folder and the content of its result.json."""

    folder: Path
    content: Mapping[str, Any]

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The results of the epochs, in order."""
        return list(self.content["epochs"])

    @property
    def report(self) -> Path | None:
        """The HTML report of the run, if one was written."""
        page = self.folder / "report.html"
        return page if page.exists() else None

    @property
    def test_accuracy(self) -> float | None:
        """Share of the test set that the trained model classifies correctly; None without a test set."""
        accuracy = self.content["test_accuracy"]
        return None if accuracy is None else float(accuracy)

    @property
    def seconds_per_epoch(self) -> float:
        """Mean duration of an epoch in seconds."""
        seconds = [float(epoch["seconds"]) for epoch in self.epochs]
        return sum(seconds) / len(seconds)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the trained weights, to load into the same network."""
        import safetensors.torch  # imports torch, which a timing-only run does without

        return safetensors.torch.load_file(self.folder / "model.safetensors")
