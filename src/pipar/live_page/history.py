"""The runs that the live page has seen, as records of the report: finished ones, and the current one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipar.errors import InputError
from pipar.events import EpochResult, EquivalenceChanged, Event, Pictured, Replanned, Started
from pipar.methods import Plan, plans_as_json
from pipar.report.content import content
from pipar.report.record import RunRecord
from pipar.settings.wording import equivalence
from pipar.storage.run_json import replan_as_json


@dataclass
class _Run:
    folder: Path
    world: str
    plans: dict[str, Plan]
    layers: int | None
    epochs: dict[int, EpochResult] = field(default_factory=dict)
    replans: list[Replanned] = field(default_factory=list)
    reasons: tuple[str, ...] = ()  # why the weights are not exact
    picture: Pictured | None = None
    finished: RunRecord | None = None


class History:
    """Collects from events what the report needs of every run so far."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._is_over = False

    def take(self, event: Event) -> bool:
        """Process one event; return whether it changes the report."""
        if isinstance(event, Started):
            run = _Run(Path(event.folder), event.world, _plans(event), event.layers, reasons=event.equivalence_reasons)
            self._runs.append(run)
        elif isinstance(event, EpochResult) and self._runs:
            self._runs[-1].epochs[event.epoch] = event
        elif isinstance(event, Pictured) and self._runs:
            self._runs[-1].picture = event
        elif isinstance(event, Replanned) and self._runs:
            self._runs[-1].replans.append(event)
        elif isinstance(event, EquivalenceChanged) and self._runs:
            self._runs[-1].reasons = event.reasons
        else:
            return False
        return True

    def end(self) -> None:
        """Mark the last run as finished."""
        self._is_over = True

    def content(self) -> dict[str, Any] | None:
        """Return the content of the report's part of the page; None before a run has its folder."""
        records = [record for number in range(len(self._runs)) if (record := self._record(number)) is not None]
        return content(records) if records else None

    def _record(self, number: int) -> RunRecord | None:
        run, is_current = self._runs[number], number == len(self._runs) - 1 and not self._is_over
        if run.finished is not None:
            return run.finished
        try:
            # The current run gets its spans by events; a trace in its folder is of the training that it resumes.
            record = RunRecord.read(run.folder, with_spans=not is_current)
        except InputError:  # the files do not exist yet, or no longer
            return None
        if is_current:
            return _so_far(record, run)
        run.finished = record
        return record


def _plans(event: Started) -> dict[str, Plan]:
    return {device: Plan.parse(plan) for device, plan in event.plans.items()}


def _so_far(record: RunRecord, run: _Run) -> RunRecord:
    """Return the record of the current run; its files may be of the training that it resumes."""
    epochs = {row["epoch"]: row for row in record.result["epochs"]}
    epochs |= {number: result.to_dict() for number, result in run.epochs.items()}
    changes: dict[str, Any] = {
        "world": run.world,
        "epochs": [row for _, row in sorted(epochs.items())],
        "test_accuracy": None,
        "test_metrics": {},
        "equivalence": equivalence(run.reasons),
        "equivalence_reasons": list(run.reasons),
    }
    if run.plans and record.running:  # without a result.json; config.toml lacks the encodings
        changes["plans"] = plans_as_json(run.plans)
    changes["layers"] = run.layers
    result = {**record.result, **changes}
    result["replans"] = [replan_as_json(event) for event in run.replans] or record.result["replans"]
    shown: dict[str, Any] = {"spans": ()}
    if (picture := run.picture) is not None:
        shown = {"spans": picture.spans, "spans_missing": None if picture.is_whole else picture.left_out}
    return replace(record, result=result, running=True, outlook=None, **shown)
