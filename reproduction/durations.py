"""How long experiments take: counted while they are run, kept beside their tables, told before the next time.

`durations.json` of this package is such a file, of a folder in which everything was run; what was not measured is not
in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pipar.errors import InputError
from pipar.storage.run_folder import write_atomically
from reproduction.experiment import Experiment, Outcome

FILE = "durations.json"


def cpu_s(experiment: Experiment, *, quick: bool) -> float | None:
    """Return the seconds of one core that all of its cells were measured to take; None if these cells never were."""
    found = _measured().get(experiment.name, {}).get(_size(quick), {})
    return float(found["cpu_s"]) if found.get("cells") == len(experiment.cells(quick)) else None


@cache
def _measured() -> dict[str, Any]:
    found = json.loads(resources.files("reproduction").joinpath(FILE).read_text("utf-8"))
    assert isinstance(found, dict)
    return found


def keep_duration(experiment: Experiment, outcomes: Sequence[Outcome], folder: Path, *, quick: bool) -> None:
    """Note in a folder how long an experiment's cells took, those that had been run before among them."""
    taken = {outcome.cell.hash: outcome.cpu_s for outcome in outcomes}
    seconds = [each for each in taken.values() if each is not None]
    if len(seconds) < len(taken):
        return  # some are of a time when nobody counted
    noted = _noted(folder / FILE)
    own = {**noted.get(experiment.name, {}), _size(quick): {"cells": len(outcomes), "cpu_s": round(sum(seconds), 1)}}
    text = json.dumps({**noted, experiment.name: own}, indent=1, sort_keys=True) + "\n"
    try:
        write_atomically(folder / FILE, text.encode())
    except OSError as error:
        raise InputError(f"Cannot write {folder / FILE}: {error.strerror}.") from None


def _noted(file: Path) -> dict[str, Any]:
    """Return what a file has; nothing if there is none, or none that can be read."""
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and all(isinstance(each, dict) for each in found.values()) else {}


def _size(quick: bool) -> str:
    return "quick" if quick else "full"
