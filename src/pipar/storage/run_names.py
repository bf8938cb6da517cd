"""The folders of runs: their names, and folders for new runs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from pipar.errors import InputError
from pipar.settings.config import Config


def runs_folder() -> Path:
    """Return the folder of all runs: $PIPAR_RUNS, or `runs` in the current directory."""
    return Path(os.environ.get("PIPAR_RUNS", "runs"))


def new_folder(name: str) -> Path:
    """Make and return a folder of this name for a new run; a number is appended if the name is taken."""
    parent, number = runs_folder(), 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise cannot_make_folder(folder, error) from None
        else:
            return folder


def cannot_make_folder(folder: Path, error: OSError) -> InputError:
    """Return the error to raise when a run's folder cannot be made."""
    return InputError(
        f"Cannot make the run's folder {folder}: {error.strerror}. Set PIPAR_RUNS to a folder that can be written."
    )


def refuse_to_replace_result(folder: Path) -> None:
    """Raise InputError if a folder has the result of a training, which a new training would replace."""
    advice = "give another run.name, or move the folder away."
    try:
        rounds = len(json.loads((folder / "result.json").read_text("utf-8"))["rounds"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, LookupError, TypeError):
        raise InputError(f"{folder} has a result.json that cannot be read: {advice}") from None
    if rounds:
        text = f"{rounds} round{'s' if rounds > 1 else ''}"
        raise InputError(f"{folder} has the result of a training of {text} and no checkpoint to resume from: {advice}")


def remove_if_no_epochs(folder: Path) -> None:
    """Remove the folder of a run that has not finished a single epoch."""
    if not (folder / "metrics.jsonl").exists():
        shutil.rmtree(folder, ignore_errors=True)


def run_name(config: Config, model: str, dataset: str) -> str:
    """Return the name of a run: as configured, or made of network, dataset and method."""
    return config.run.name or f"{_plain(model)}-{_plain(dataset)}-{config.run.method}"


def comparison_name(config: Config, model: str, dataset: str) -> str:
    """Return the name of the folder for the report that compares several methods."""
    return f"{config.run.name or f'{_plain(model)}-{_plain(dataset)}'}-comparison"


def _plain(text: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in text)
