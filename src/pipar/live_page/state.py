"""The state of a running training as the live page shows it: events in, a JSON document out, without I/O."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipar.errors import one_line
from pipar.events import (
    Away,
    Back,
    Drawn,
    Dropped,
    Event,
    Failed,
    Heard,
    Joined,
    Left,
    Lost,
    Preparing,
    Progress,
    Replanned,
    Resumed,
    RoundOver,
    Silent,
    Started,
    Stopping,
    Trained,
    Waiting,
    Welcomed,
)
from pipar.execution.spans import COMPUTE, SERVER, UPLINK
from pipar.methods import METHODS, Plan
from pipar.monitoring.event_text import EventDescriber
from pipar.monitoring.logs import level_of
from pipar.monitoring.progress import TimeEstimate, TrainingProgress
from pipar.settings.wording import plan_text
from pipar.storage.run_json import strict_json

#: More rows would be hard to read, and costly to send several times a second.
MOST_ROWS = 100
_LOG_LINES = 40
#: A line with the plans of a thousand devices would be sent four times a second.
_LONGEST_LINE = 400
_LOSSES = 120

#: The states of a device, the most serious first.
DEVICE_STATES = ("lost", "away", "silent", "back", "expected", "joined", "training", "idle", "left")


@dataclass
class DeviceRow:
    """One device in the table."""

    state: str
    since: float  # Unix time
    plan: str = ""
    threads: int = 1  # that compute one of its stages
    samples: int | None = None
    note: str = ""
    until: float | None = None  # for a device that is away: until when it may reconnect
    silent_since: float | None = None  # connected, but nothing arrives although the server waits for it

    @property
    def shown(self) -> tuple[str, float]:
        """The displayed state, and its start."""
        return (self.state, self.since) if self.silent_since is None else ("silent", self.silent_since)

    def become(self, state: str, at: float, note: str = "", until: float | None = None) -> None:
        self.silent_since = None
        if state != self.state:
            self.since = at
        self.state, self.note, self.until = state, note, until


class LiveState:
    """Follows the events of one or more runs, each with the Unix time of its arrival."""

    def __init__(self) -> None:
        self.progress = TrainingProgress()
        self._describer = EventDescriber()
        self._phase = "preparing"
        self._preparing: Preparing | None = None
        self._waiting: Waiting | None = None
        self._trouble = ""
        self._since: float | None = None  # when this run began
        self._rows: dict[str, DeviceRow] = {}
        self._log: deque[dict[str, Any]] = deque(maxlen=_LOG_LINES)
        self._losses: deque[float] = deque(maxlen=_LOSSES)
        self._estimate = TimeEstimate()
        self._rounds_over = 0
        self._layers: int | None = None  # of the current run's network

    def take(self, event: Event, at: float) -> None:
        """Update the state by one event."""
        self.progress.take(event)
        self._log_event(event, at)
        self._follow_run(event, at)
        self._follow_devices(event, at)

    def end(self, at: float, trouble: str = "") -> None:
        """Set the final state: the program ends, with `trouble` if it failed."""
        self._preparing = self._waiting = None
        if trouble:
            self._phase, self._trouble = "failed", one_line(trouble)
            self._add_line(at, "error", self._trouble)
        else:
            self._phase = {"stopping": "stopped", "failed": "failed"}.get(self._phase, "over")

    def _log_event(self, event: Event, at: float) -> None:
        self._describer.remember(event)
        if level_of(event) > logging.DEBUG and not isinstance(event, Trained | Welcomed):
            level = logging.getLevelName(level_of(event)).lower()
            self._add_line(at, level, self._describer.sentence(event))

    def _add_line(self, at: float, level: str, text: str) -> None:
        shown = text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE - 1]}…"
        self._log.append({"at": at, "level": level, "text": shown})

    # --- the run

    def _follow_run(self, event: Event, at: float) -> None:
        match event:
            case Preparing():
                self._phase, self._preparing = "preparing", event if event.share < 1 else None
            case Started():
                self._begin(event, at)
            case Waiting():
                self._waiting = event
            case Joined() if self._waiting is not None:
                wanted = self._waiting.wanted
                self._waiting = Waiting(event.devices, wanted) if event.devices < wanted else None
            case Resumed():
                self._rounds_over = event.epoch
            case Progress():
                if self._phase == "preparing":  # reports may still arrive while the program stops
                    self._phase = "training"
                if event.loss is not None:
                    self._losses.append(event.loss)
            case RoundOver():
                self._rounds_over = event.epoch
            case Stopping():
                self._phase, self._trouble = "stopping", one_line(event.reason)
            case Failed():
                self._phase, self._trouble = "failed", one_line(event.reason)
        if isinstance(event, Started | Joined):
            self._estimate.begin(self._epochs_done(), at)
        elif isinstance(event, Progress | RoundOver):
            self._estimate.note(self._epochs_done(), at)

    def _begin(self, started: Started, at: float) -> None:
        # A second run of the same program has other devices; those of a deployment join before its run starts.
        if self._since is not None:
            self._rows, self._rounds_over = {}, 0
        self._phase, self._preparing, self._since = "training", None, at
        self._losses.clear()
        self._layers = started.layers
        self._estimate = TimeEstimate()
        for name, samples in started.samples.items():
            row = self._rows.setdefault(name, DeviceRow("expected", at))
            plan = started.plans.get(name)
            row.threads = started.threads.get(name, 1)
            row.plan, row.samples = plan_text(Plan.parse(plan), self._layers) if plan else "", samples

    def _epochs_done(self) -> float:
        epoch, _, _, share = self.progress.place()
        return max(float(self._rounds_over), epoch - 1 + share)

    # --- its devices

    def _follow_devices(self, event: Event, at: float) -> None:
        match event:
            case Started():
                self._all_present_train(at)
            case Progress() if event.owner != SERVER:
                self._row(event.owner, at).become("training", at)
            case Joined():
                self._row(event.device, at).become("joined", at)
                self._row(event.device, at).threads = event.threads
            case Away():
                self._row(event.device, at).become("away", at, until=at + event.seconds_allowed)
            case Back():
                self._row(event.device, at).become("back", at, f"after {event.away_s:.1f} s")
            case Silent():
                self._row(event.device, at).silent_since = at - event.seconds
            case Heard():
                self._row(event.device, at).silent_since = None
            case Lost():
                self._row(event.device, at).become("lost", at, one_line(event.reason))
            case Left():
                self._row(event.device, at).become("left", at)
            case Dropped():
                self._row(event.device, at).note = f"excluded from round {event.epoch}: {one_line(event.reason)}"
            case RoundOver():
                self._all_present_train(at)
            case Drawn():
                self._drawn_train(set(event.devices), at)
            case Replanned():
                for name, plan in event.plans.items():
                    self._row(name, at).plan = plan_text(Plan(**plan), self._layers)

    def _all_present_train(self, at: float) -> None:
        """Mark the devices that are present at the start of a round: later ones wait for the next round."""
        for row in self._rows.values():
            if row.state in ("joined", "back"):
                row.become("training", at)

    def _drawn_train(self, drawn: set[str], at: float) -> None:
        """Mark the devices that are drawn for a round, and those that are idle until they are."""
        for name, row in self._rows.items():
            state = "training" if name in drawn else "idle"
            if row.state in ("joined", "back", "training", "idle") and row.state != state:
                row.become(state, at)

    def _row(self, name: str, at: float) -> DeviceRow:
        return self._rows.setdefault(name, DeviceRow("expected", at))

    # --- the document

    def picture(self) -> dict[str, Any]:
        """Return everything that the live part of the page shows; NaN and infinities are null."""
        document: dict[str, Any] = strict_json({**self._run_part(), **self._device_part(), "log": list(self._log)})
        return document

    def _run_part(self) -> dict[str, Any]:
        progress, started = self.progress, self.progress.started
        epoch, iteration, iterations, share = progress.place()
        last = progress.last
        return {
            "phase": self._phase,
            "trouble": self._trouble,
            "preparing": None if self._preparing is None else [self._preparing.what, self._preparing.share],
            "waiting": None if self._waiting is None else [self._waiting.present, self._waiting.wanted],
            "run": Path(started.folder).name if started else None,
            "method": started.method if started else None,
            "title": METHODS[started.method].title if started else None,
            "since": self._since,
            "epoch": max(epoch, min(self._rounds_over + 1, started.epochs)) if started else None,
            "epochs": started.epochs if started else None,
            "iteration": iteration,
            "iterations": iterations,
            "share": share,
            "done": min(1.0, self._epochs_done() / started.epochs) if started else 0.0,
            "ends_at": self._estimate.ends_at(started.epochs) if started else None,
            "loss": progress.loss,
            "losses": list(self._losses),
            "accuracy": last.val_accuracy if last else None,
            "metrics": dict(last.val_metrics) if last else {},
            "on_devices": _on_devices(last.device_metrics) if last else None,
            "samples_per_s": progress.samples_per_s(),
            "lanes": progress.utilisation(),
            "lanes_before": last.utilisation if last else {},
        }

    def _device_part(self) -> dict[str, Any]:
        ordered = sorted(self._rows.items(), key=lambda item: (DEVICE_STATES.index(item[1].shown[0]), item[0]))
        shown = sorted(ordered[:MOST_ROWS])
        states = Counter(row.shown[0] for row in self._rows.values())
        return {
            "devices": [self._device(name, row) for name, row in shown],
            "unseen": len(ordered) - len(shown),
            "states": {state: states[state] for state in DEVICE_STATES if states[state]},
        }

    def _device(self, name: str, row: DeviceRow) -> dict[str, Any]:
        busy, started = self.progress.busy(name), self.progress.started
        epoch, iteration = self.progress.device_place(name) or (None, None)
        state, since = row.shown
        return {
            "name": one_line(name),
            "state": state,
            "since": since,
            "until": row.until,
            "note": row.note,
            "plan": row.plan,
            "threads": row.threads,
            "samples": row.samples,
            "epoch": epoch or None,
            "iteration": iteration,
            "iterations": started.iterations.get(name) if started else None,
            "compute": busy.get(COMPUTE),
            "uplink": busy.get(UPLINK),
        }


def _on_devices(metrics: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the value that tells most about the model on the devices' own samples; None if none is known."""
    means = metrics.get("mean") or {}
    name = "accuracy" if "accuracy" in means else next(iter(means), None)
    if name is None:
        return None
    return {"name": name, "mean": means[name], "worst": metrics["worst_decile"].get(name)}
