"""A notebook during a run: one output that is updated, without widgets or JavaScript."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Any

from pipar.events import (
    BudgetSpent,
    EndedByCallback,
    EpochResult,
    Event,
    MeasuredBusy,
    Preparing,
    Progress,
    SaveFailed,
    Started,
    Starting,
)
from pipar.monitoring.epoch_lines import percent
from pipar.monitoring.event_text import starting_text
from pipar.monitoring.progress import TrainingProgress

#: More often would fill the connection to the browser without being seen.
_EVERY_S = 0.25
#: Lines stay until the end; more of them would hide the progress.
_MOST_LINES = 10


class NotebookDisplay:
    """Shows runs in the output of a cell: what is prepared, then a bar for all epochs with the latest numbers.

    It is updated when events arrive, in the caller's thread: a kernel takes the output of other threads for that of the
    cell that runs next.
    """

    def __init__(self, shell: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._publish = shell.display_pub.publish
        self._clock = clock
        self._id = uuid.uuid4().hex
        self._progress = TrainingProgress()
        self._preparing = Preparing("Preparing", 0.0)
        self._run: Started | None = None  # that is being trained
        self._finished = 0  # epochs of this run
        self._lines: list[str] = []  # of runs that are over, and notices
        self._since = self._drawn = clock()
        self._is_shown = self._is_over = False

    def __enter__(self) -> NotebookDisplay:
        self._draw()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end_run()
        self._is_over = True
        self._draw()

    def observe(self, event: Event) -> None:
        """Show one event; small steps are shown a few times a second."""
        self._progress.take(event)
        match event:
            case Starting():
                self._preparing = Preparing(starting_text(event), 0.0)
            case Preparing():
                self._end_run()  # that of another method, in a comparison
                self._preparing = event
            case Started():
                self._end_run()
                self._run, self._finished, self._since = event, 0, self._clock()
            case EpochResult():
                self._finished = event.epoch
            case BudgetSpent() | EndedByCallback() | SaveFailed() | MeasuredBusy():
                self._lines = [*self._lines, event.reason][-_MOST_LINES:]
        if not isinstance(event, Progress | Preparing) or self._clock() - self._drawn >= _EVERY_S:
            self._draw()

    def _end_run(self) -> None:
        """Keep one line of the run that was shown."""
        if self._run is not None:
            took = f"{self._finished} of {self._run.epochs} epochs in {self._clock() - self._since:.1f} s"
            self._lines.append(f"{Path(self._run.folder).name}: {took}")
        self._run = None

    def _now(self) -> tuple[str, float]:
        """Return what happens now in words, and the share of it that is done."""
        if self._run is None:
            return self._preparing.what, self._preparing.share
        epoch, iteration, iterations, share = self._progress.place()
        last, loss, epochs = self._progress.last, self._progress.loss, self._run.epochs
        words = [f"{self._run.method}: epoch {epoch} of {epochs}", f"iteration {iteration} of {iterations or '?'}"]
        words += [f"loss {loss:.3f}"] if loss is not None else []
        words += [f"val acc. {percent(last.val_accuracy)}"] if last and last.val_accuracy is not None else []
        return ", ".join(words), min(1.0, (epoch - 1 + share) / epochs)

    def _draw(self) -> None:
        self._drawn = self._clock()
        text, share = self._now()
        lines = self._lines if self._is_over else [*self._lines, text]
        bar = "" if self._is_over else f'<progress max="1" value="{share:.3f}" style="width:320px"></progress>'
        body = "".join(f"<div>{escape(line)}</div>" for line in lines)
        data = {"text/html": f'<div style="font-size:13px">{body}{bar}</div>', "text/plain": "\n".join(lines)}
        self._publish(data=data, metadata={}, transient={"display_id": self._id}, update=self._is_shown)
        self._is_shown = True
