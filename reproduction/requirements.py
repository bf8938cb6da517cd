"""What an experiment needs that may be missing: images, and the package that computes epsilon."""

from __future__ import annotations

from pathlib import Path

from pipar.data.catalog import dataset_info, locate
from pipar.errors import PiparError
from pipar.privacy import accounting
from reproduction.experiment import LEARNING, Cell, Experiment


def missing_requirement(experiment: Experiment, *, quick: bool) -> str | None:
    """Return in one sentence what an experiment lacks and how to get it; None if it can run."""
    try:
        for cell in experiment.cells(quick):
            _check(cell)
    except PiparError as error:
        return str(error)
    return None


def _check(cell: Cell) -> None:
    if cell.config.get("privacy", {}).get("noise_multiplier"):
        accounting.require()
    if cell.how in LEARNING:
        data = cell.config["data"]
        info = dataset_info(data["name"])
        if info.needs:
            locate(info, Path(data["path"]) if "path" in data else None)
