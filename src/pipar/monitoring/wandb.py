"""A run in Weights & Biases, in the run's folder: offline unless WANDB_MODE says otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

# By default wandb reports its errors to its makers; that should be the user's choice.
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

import wandb

from pipar.monitoring.tracker import RunDescription, scalars, tested

PROJECT = "pipar"


class WandbTracker:
    """One run: the settings are its configuration, the epochs its history. `wandb sync` uploads it."""

    def __init__(self) -> None:
        self._run: Any = None
        self._last_epoch = 0

    def begin(self, run: RunDescription) -> None:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            dir=str(run.folder),  # where the folder `wandb` is created
            config=dict(run.settings),
            mode=mode(os.environ),
            settings=quiet_settings(),
        )

    def epoch(self, row: Mapping[str, Any]) -> None:
        self._last_epoch = int(row["epoch"])
        self._run.log(scalars(row), step=self._last_epoch)

    def end(self, result: Mapping[str, Any] | None) -> None:
        if self._run is None:
            return
        if result is not None:
            self._run.summary.update(scalars(tested(result)))
        self._run.finish(exit_code=1 if result is None else 0)


def mode(environment: Mapping[str, str]) -> Any:
    """Return the mode that the environment names, else "offline": nothing leaves this machine."""
    return environment.get("WANDB_MODE", "offline")


def quiet_settings() -> Any:
    """Return settings with which wandb prints nothing and collects nothing but what it is given."""
    return wandb.Settings(
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,
        save_code=False,
        x_disable_stats=True,
        x_disable_meta=True,
    )
