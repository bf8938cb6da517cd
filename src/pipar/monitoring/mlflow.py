"""A run in MLflow: in a database in the run's folder, unless MLFLOW_TRACKING_URI names another store."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

# By default MLflow reports its usage to its makers; that should be the user's choice.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from pipar.monitoring.tracker import RunDescription, scalars, tested

FOLDER = "mlruns"
EXPERIMENT = "pipar"
#: MLflow's limits: parameters per call, and characters per value.
_BATCH, _LONGEST = 100, 500


class MlflowTracker:
    """One run: the settings are its parameters, the epochs its metrics."""

    def __init__(self) -> None:
        for name in ("mlflow", "alembic"):  # the terminal belongs to the training's display
            logging.getLogger(name).setLevel(logging.WARNING)
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._last_epoch = 0

    def begin(self, run: RunDescription) -> None:
        folder = run.folder.resolve() / FOLDER
        if is_local(os.environ):
            folder.mkdir(exist_ok=True)
        self._client = client = MlflowClient(tracking_uri=store_of(run))
        known = client.get_experiment_by_name(EXPERIMENT)
        artifacts = (folder / "artifacts").as_uri() if is_local(os.environ) else None
        experiment = client.create_experiment(EXPERIMENT, artifacts) if known is None else known.experiment_id
        self._run_id = client.create_run(experiment, run_name=run.name).info.run_id
        params = [Param(name, str(value)[:_LONGEST]) for name, value in run.settings.items()]
        for first in range(0, len(params), _BATCH):
            client.log_batch(self._run_id, params=params[first : first + _BATCH])

    def epoch(self, row: Mapping[str, Any]) -> None:
        self._last_epoch = int(row["epoch"])
        self._log(scalars(row))

    def end(self, result: Mapping[str, Any] | None) -> None:
        if self._client is None:
            return
        if result is not None:
            self._log(scalars(tested(result)))
        self._client.set_terminated(self._run_id, "KILLED" if result is None else "FINISHED")

    def _log(self, values: Mapping[str, float]) -> None:
        assert self._client is not None
        now_ms = int(time.time() * 1000)
        metrics = [Metric(name, value, now_ms, self._last_epoch) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)


def is_local(environment: Mapping[str, str]) -> bool:
    """Return whether the environment leaves the place of the store to pipar."""
    return not environment.get("MLFLOW_TRACKING_URI")


def store_of(run: RunDescription) -> str:
    """Return the address of the store: from the environment, else a database in the run's folder.

    MLflow's stores of plain files are no longer maintained.
    """
    own = f"sqlite:///{run.folder.resolve() / FOLDER / 'mlflow.db'}"
    return own if is_local(os.environ) else os.environ["MLFLOW_TRACKING_URI"]
