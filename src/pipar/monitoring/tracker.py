"""What a tracker is told of a run: what it is, each epoch, and how it ended."""

from __future__ import annotations

import importlib
import importlib.util
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipar.config import Config
from pipar.config_file import dump_config
from pipar.errors import InputError
from pipar.events import Started
from pipar.wording import plans_text

Setting = str | int | float | bool


@dataclass(frozen=True)
class RunDescription:
    """A run that begins: where its files are, and what it was told, by "section.key"."""

    folder: Path
    settings: Mapping[str, Setting]

    @property
    def name(self) -> str:
        return self.folder.name


class Tracker(Protocol):
    """Writes down what it is told, somewhere. It may take its time, and it may fail: training does neither for it."""

    def begin(self, run: RunDescription) -> None:
        """A run has begun, and its first epoch follows."""

    def epoch(self, row: Mapping[str, Any]) -> None:
        """An epoch is over; the row is its line of metrics.jsonl."""

    def end(self, result: Mapping[str, Any] | None) -> None:
        """The run is over, with this result.json; None if it was stopped or has failed."""


@dataclass(frozen=True)
class TrackerPackage:
    """A tracker that can be named: the packages that it needs, the module of this package, and its class there."""

    packages: tuple[str, ...]
    module: str
    class_name: str


#: By the names that `config.TRACKERS` has, which are also those of the extras.
TRACKER_PACKAGES = {
    "tensorboard": TrackerPackage(("tensorboard",), "tensorboard", "TensorBoardTracker"),
    "mlflow": TrackerPackage(("mlflow", "alembic", "sqlalchemy"), "mlflow", "MlflowTracker"),
    "wandb": TrackerPackage(("wandb",), "wandb", "WandbTracker"),
}


def is_package(name: str) -> bool:
    """Return whether there is a package of this name: a folder alone, as `wandb` leaves one behind, is none."""
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None


def check_installed(names: Sequence[str]) -> None:
    """Raise one sentence about the first tracker that lacks a package here: before anything is trained."""
    for name in names:
        if missing := [package for package in TRACKER_PACKAGES[name].packages if not is_package(package)]:
            raise InputError(
                f"The tracker {name} is asked for, but {missing[0]} is not installed: run "
                f"`pip install 'pipar[{name}]'`, or leave it out of run.trackers."
            )


def make_tracker(name: str) -> Tracker:
    """Return a tracker of this name; its package is imported now."""
    known = TRACKER_PACKAGES[name]
    made: Tracker = getattr(importlib.import_module(f"pipar.monitoring.{known.module}"), known.class_name)()
    return made


def describe(config: Config, started: Started) -> RunDescription:
    """Return what a run was told: its configuration, and the plans that were made of it."""
    tree = tomllib.loads(dump_config(config))  # in the words of a configuration file
    settings = dict(_flattened(tree))
    return RunDescription(Path(started.folder), {**settings, "plans": plans_text(started.plans.values())})


def _flattened(tree: Any, path: str = "") -> Iterator[tuple[str, Setting]]:
    """Yield every value with its way through the tables; groups of devices are counted from 1."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flattened(value, f"{path}.{key}" if path else key)
    elif isinstance(tree, list) and tree and all(isinstance(value, Mapping) for value in tree):
        for number, value in enumerate(tree, start=1):
            yield from _flattened(value, f"{path}.{number}")
    else:
        yield path, tree if isinstance(tree, str | int | float | bool) else json.dumps(tree, default=str)


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an epoch by the names of metrics.jsonl; those of a lane are "utilisation/uplink".

    What is not known is left out. A loss that has diverged stays: that is worth seeing.
    """
    found: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            found |= {f"{key}/{inner}": number for inner, number in scalars(value).items()}
        elif key != "epoch" and isinstance(value, int | float):
            found[key] = float(value)
    return found
