"""How long experiments take: measured while they run, and kept in `durations.json` next to their tables.

The file of this package comes from a folder in which everything was run; `python -m reproduction list` shows it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pipar.errors import InputError
from pipar.storage.whole_files import write_atomically
from reproduction.experiment import Experiment, Outcome

FILE = "durations.json"


def cpu_s(experiment: Experiment, *, quick: bool) -> float | None:
    """Return the measured CPU seconds of all its cells; None if these cells were not measured."""
    found = _measured().get(experiment.name, {}).get(_size(quick), {})
    return float(found["cpu_s"]) if found.get("cells") == len(experiment.cells(quick)) else None


@cache
def _measured() -> dict[str, Any]:
    found = json.loads(resources.files("reproduction").joinpath(FILE).read_text("utf-8"))
    assert isinstance(found, dict)
    return found


def keep_duration(experiment: Experiment, outcomes: Sequence[Outcome], folder: Path, *, quick: bool) -> None:
    """Write to a folder how long an experiment's cells took, including those that were run before."""
    taken = {outcome.cell.hash: outcome.cpu_s for outcome in outcomes}
    seconds = [each for each in taken.values() if each is not None]
    if len(seconds) < len(taken):
        return  # some were run without measuring
    noted = _noted(folder / FILE)
    own = {**noted.get(experiment.name, {}), _size(quick): {"cells": len(outcomes), "cpu_s": round(sum(seconds), 1)}}
    text = json.dumps({**noted, experiment.name: own}, indent=1, sort_keys=True) + "\n"
    try:
        write_atomically(folder / FILE, text.encode())
    except OSError as error:
        raise InputError(f"Cannot write {folder / FILE}: {error.strerror}.") from None


def _noted(file: Path) -> dict[str, Any]:
    """Return the content of a file; nothing if it is missing or damaged."""
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and all(isinstance(each, dict) for each in found.values()) else {}


def _size(quick: bool) -> str:
    return "quick" if quick else "full"
