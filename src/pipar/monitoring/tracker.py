"""The interface of experiment trackers, and what they get of a run: its settings, each epoch, its result."""

from __future__ import annotations

import importlib
import importlib.util
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipar.errors import InputError
from pipar.events import Started
from pipar.methods import Plan
from pipar.settings.config import Config
from pipar.settings.config_file import dump_config
from pipar.settings.wording import plan_text, plans_text

Setting = str | int | float | bool


@dataclass(frozen=True)
class RunDescription:
    """A run that starts: the folder of its files, and its settings by "section.key"."""

    folder: Path
    settings: Mapping[str, Setting]

    @property
    def name(self) -> str:
        return self.folder.name


class Tracker(Protocol):
    """Records a run somewhere. It may be slow or fail: that neither delays nor ends the training."""

    def begin(self, run: RunDescription) -> None:
        """Record that a run has started; its first epoch follows."""

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Record an epoch; the row is its line of metrics.jsonl."""

    def end(self, result: Mapping[str, Any] | None) -> None:
        """Record the end of the run, with its result.json; None if it was stopped or failed."""


@dataclass(frozen=True)
class TrackerPackage:
    """What a tracker is made of: the packages that it needs, and its module and class in `pipar.monitoring`."""

    packages: tuple[str, ...]
    module: str
    class_name: str


#: By name, as in `config.TRACKERS`; the extras of pipar have the same names.
TRACKER_PACKAGES = {
    "tensorboard": TrackerPackage(("tensorboard",), "tensorboard", "TensorBoardTracker"),
    "mlflow": TrackerPackage(("mlflow", "alembic", "sqlalchemy"), "mlflow", "MlflowTracker"),
    "wandb": TrackerPackage(("wandb",), "wandb", "WandbTracker"),
}


def is_package(name: str) -> bool:
    """Return whether a package of this name is installed; a mere folder, such as one with runs of wandb, is none."""
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None


def check_installed(names: Sequence[str]) -> None:
    """Raise an InputError about the first tracker whose packages are not installed, before anything is trained."""
    for name in names:
        if missing := [package for package in TRACKER_PACKAGES[name].packages if not is_package(package)]:
            raise InputError(
                f"The tracker {name} needs {missing[0]}, which is not installed: run "
                f"`pip install 'pipar[{name}]'`, or remove it from run.trackers."
            )


def make_tracker(name: str) -> Tracker:
    """Return a new tracker of this name; this imports its package."""
    known = TRACKER_PACKAGES[name]
    made: Tracker = getattr(importlib.import_module(f"pipar.monitoring.{known.module}"), known.class_name)()
    return made


def describe(config: Config, started: Started) -> RunDescription:
    """Return the settings of a run: its configuration, and the plans chosen for it."""
    tree = tomllib.loads(dump_config(config))  # with the values as a configuration file has them
    settings = dict(_flattened(tree))
    return RunDescription(
        Path(started.folder),
        {
            **settings,
            "plans": plans_text(plan_text(Plan.parse(plan), started.layers) for plan in started.plans.values()),
        },
    )


def _flattened(tree: Any, path: str = "") -> Iterator[tuple[str, Setting]]:
    """Yield every value with its path through the tables; groups of devices are numbered from 1."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flattened(value, f"{path}.{key}" if path else key)
    elif isinstance(tree, list) and tree and all(isinstance(value, Mapping) for value in tree):
        for number, value in enumerate(tree, start=1):
            yield from _flattened(value, f"{path}.{number}")
    else:
        yield path, tree if isinstance(tree, str | int | float | bool) else json.dumps(tree, default=str)


def tested(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of the finished model on the test set; those of older results may have fewer."""
    names = ("test_accuracy", "test_loss", "test_metrics")
    own = result.get("device_metrics") or {}
    on_devices = {"device_metrics": {key: own[key] for key in ("mean", "worst_decile")}} if own else {}
    return {**{name: result.get(name) for name in names}, **on_devices}


#: Parts of `device_metrics` that are no curves.
_BY_DEVICE = frozenset({"devices", "missing", "higher_is_better"})


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an epoch by their names in metrics.jsonl; nested ones as in "utilisation/uplink".

    Unknown values are left out. A loss that diverged stays, because users want to see it. Of the devices' own values
    there are the mean and the worst decile: trackers are not made for a curve per device.
    """
    found: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            if key in _BY_DEVICE:
                continue
            found |= {f"{key}/{inner}": number for inner, number in scalars(value).items()}
        elif key != "epoch" and isinstance(value, int | float):
            found[key] = float(value)
    return found
