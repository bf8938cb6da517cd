"""The terminal during a run: a line per epoch, and a live part below them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipar.errors import one_line
from pipar.events import (
    BudgetSpent,
    EndedByCallback,
    EpochResult,
    EquivalenceChanged,
    Event,
    Joined,
    MeasuredBusy,
    NotEvaluated,
    NotKept,
    Preparing,
    Refused,
    ReplanFailed,
    Replanned,
    ReportFailed,
    SaveFailed,
    Started,
    Starting,
    TimedByPrograms,
    TrackerFailed,
)
from pipar.methods import METHODS, Plan
from pipar.monitoring.epoch_lines import epoch_header, epoch_line, metrics_text, percent
from pipar.monitoring.event_text import (
    not_evaluated_text,
    not_kept_text,
    refused_text,
    starting_text,
    timed_by_programs_text,
)
from pipar.monitoring.progress import TimeEstimate, TrainingProgress
from pipar.settings.wording import equivalence, equivalence_text, plan_text, plans_text, whole_network_text

#: How often the live part is drawn; more often would cost time without being seen.
REFRESH_HZ = 4.0
#: Interval of progress lines of a long preparation where no terminal shows it.
_SAY_EVERY_S = 10.0


class Display:
    """Shows runs: a line for each finished epoch and, on a terminal, a live part below them.

    Without a terminal, on one that cannot move its cursor, and in CI there are only lines: the first one says what
    starts, and one follows every ten seconds during a long preparation. On a terminal, lines are cut to its width, and
    nothing stays on it before a run begins, so that an early error is the only line. `quiet` writes only what changes
    the result or should be looked into: a failed tracker, a spent privacy budget, a program that may not join.
    `folders` are those of the runs so far.
    """

    def __init__(self, console: Console, *, quiet: bool = False, emulated: str = "") -> None:
        self.folders: list[Path] = []
        self._emulated = emulated
        self._console = console
        self._quiet = quiet
        self._progress = TrainingProgress()
        self._estimate = TimeEstimate()
        self._preparing: Preparing | None = None
        self._since = self._said = time.monotonic()
        self._live: Live | None = None
        self._layers: int | None = None  # of the current run
        self._replanned: Replanned | None = None  # to be shown after the line of the epoch before it
        self._ended: BudgetSpent | EndedByCallback | None = None  # to be shown after the line of its epoch

    def __enter__(self) -> Display:
        if not self._quiet and is_live(self._console, os.environ):
            self._live = Live(
                get_renderable=self._picture,
                console=self._console,
                refresh_per_second=REFRESH_HZ,
                transient=True,
                # Child processes print nothing, and a redirected stdout must not be captured.
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def observe(self, event: Event) -> None:
        """Show one event; this must be quick."""
        self._progress.take(event)
        if isinstance(event, Starting):
            self._say_what_starts(event)
        elif isinstance(event, Preparing):
            self._preparing = event
            self._say_how_far(event)
        elif isinstance(event, Started):
            self._preparing, self._replanned, self._since = None, None, time.monotonic()
            self._estimate = TimeEstimate()
            self._introduce(event)
            self.folders.append(Path(event.folder))
        elif isinstance(event, Joined):
            self._estimate.begin(0.0, time.monotonic())
        elif isinstance(event, EpochResult):
            self._print(Text(epoch_line(event)))
            self._show_new_plans()
            self._show_end()
        elif isinstance(event, Replanned):
            self._replanned = event
            self._show_new_plans()
        elif isinstance(event, BudgetSpent | EndedByCallback):
            self._ended = event
            self._show_end()
        elif isinstance(event, MeasuredBusy):
            self._print(Text(one_line(event.reason), style="dim"), whole=True, always=True)
        elif isinstance(event, ReplanFailed | ReportFailed):
            self._print(Text(event.reason, style="dim"), whole=True)
        elif isinstance(event, EquivalenceChanged):
            self._print(Text(f"After epoch {event.epoch}, {_weights_text(event.reasons)}", style="dim"), whole=True)
        elif isinstance(event, TimedByPrograms):
            self._print(Text(one_line(timed_by_programs_text(event)), style="dim"), whole=True)
        elif isinstance(event, NotKept):
            self._print(Text(one_line(not_kept_text(event)), style="dim"), whole=True)
        elif isinstance(event, NotEvaluated):
            self._print(Text(one_line(not_evaluated_text(event))), whole=True, always=True)
        elif isinstance(event, Refused):
            self._print(Text(one_line(refused_text(event))), whole=True, always=True)
        elif isinstance(event, SaveFailed):
            self._print(Text(one_line(event.reason)), whole=True, always=True)
        elif isinstance(event, TrackerFailed):
            words = f"Tracker {event.tracker} is off, training continues without it: {event.reason}"
            self._print(Text(one_line(words), style="dim"), whole=True, always=True)

    def say(self, sentence: str) -> None:
        """Write a line above the live part, unbroken, so that a URL in it can be clicked."""
        if not self._quiet:
            self._console.print(Text(sentence), soft_wrap=True, highlight=False)

    def _say_what_starts(self, starting: Starting) -> None:
        """Write what starts, where no live part shows it: the next line may take seconds."""
        if self._live is None:
            self._print(Text(one_line(starting_text(starting))))

    def _say_how_far(self, preparing: Preparing) -> None:
        """Write the progress of a preparation from time to time, where no live part shows it."""
        if self._live is None and time.monotonic() - self._said >= _SAY_EVERY_S:
            self._said = time.monotonic()
            self._print(Text(f"{preparing.what} ({percent(preparing.share, 0)}, {self._elapsed()})", style="dim"))

    def _elapsed(self) -> str:
        return clock_text(time.monotonic() - self._since)

    def _left(self, started: Started) -> str:
        """Return elapsed and remaining time: "0:12, 1:05 left"."""
        end = self._estimate.ends_at(started.epochs)
        return self._elapsed() if end is None else f"{self._elapsed()}, {clock_text(end - time.monotonic())} left"

    def _show_new_plans(self) -> None:
        """Write the plans of the next epoch, below the line of the last epoch with the old ones.

        That line may come later than the new plans: it waits for the validation, which runs during the next epoch.
        """
        new, done = self._replanned, self._progress.last.epoch if self._progress.last else 0
        if new is not None and done >= new.epoch - 1:
            plans = plans_text(plan_text(Plan(**plan), self._layers) for plan in new.plans.values())
            why = f" ({one_line(new.reason)})" if new.reason else ""
            said = f"New plans from epoch {new.epoch} on: {plans}"
            if self._live is None:
                self._print(Text(f"{said}{why}", style="dim"))
            else:  # plans of many devices fill a terminal's line, which would cut off the reason
                self._print(Text(said, style="dim"))
                self._print(Text(why.strip(), style="dim"), whole=True)
            self._replanned = None

    def _show_end(self) -> None:
        """Write why the training has ended, below the line of its last epoch."""
        ended, done = self._ended, self._progress.last.epoch if self._progress.last else 0
        if ended is not None and done >= ended.epoch:
            self._print(Text(ended.reason), whole=True, always=True)
            self._ended = None

    def _introduce(self, started: Started) -> None:
        """Write what is emulated, once, and the title of the following lines."""
        self._layers = started.layers
        if not self.folders and self._emulated:
            self._print(Text(f"Emulated: {self._emulated}."))
        plans = [Plan.parse(plan) for plan in started.plans.values()]
        shown = plans_text(plan_text(plan, started.layers) for plan in plans)
        title = f"{started.method}: {METHODS[started.method].title}, {shown}"
        if whole := whole_network_text(started.method, plans, started.layers):
            title += f" ({whole})"
        self._print(Text())
        self._print(Text(title, style="bold"))
        if started.leakage:
            self._print(Text(started.leakage), whole=True)
        if started.equivalence_reasons:
            self._print(Text(_weights_text(started.equivalence_reasons), style="dim"), whole=True)
        self._print(Text(epoch_header(private=started.is_private, metric=started.metric), style="dim"))

    def _print(self, text: Text, *, whole: bool = False, always: bool = False) -> None:
        """Write a line: whole to a log; cut to the width of a terminal, or wrapped if `whole`."""
        if self._live is not None and not whole:
            text.truncate(self._console.width, overflow="ellipsis")
        if always or not self._quiet:
            self._console.print(text, soft_wrap=self._live is None, highlight=False)

    def _picture(self) -> RenderableType:
        preparing = self._preparing  # another thread may clear it at any moment
        if preparing is not None:
            words = Text(f"{preparing.what}  {self._elapsed()}", no_wrap=True, overflow="ellipsis")
            return Group(words, _bar_line("", preparing.share, percent(preparing.share, 0)))
        if self._progress.started is None:
            return Text("Preparing", style="dim")
        if not self._progress.running:
            return Text(f"{self._progress.joined} of {len(self._progress.started.samples)} devices joined", style="dim")
        lanes = [_bar_line(lane, share, percent(share, 0)) for lane, share in self._progress.utilisation().items()]
        return Group(self._headline(self._progress.started), *lanes)

    def _headline(self, started: Started) -> RenderableType:
        epoch, iteration, iterations, share = self._progress.place()
        self._estimate.note(epoch - 1 + share, time.monotonic())
        rate = self._progress.samples_per_s()
        words = [f"epoch {epoch}/{started.epochs}", f"iteration {iteration}/{iterations or '?'}"]
        drawn, present = self._progress.drawn
        if present:
            words.append(f"{drawn} of {present} devices drawn")
        words += [f"{rate:.3g} samples/s"] if rate else []
        last, loss = self._progress.last, self._progress.loss
        words += [f"loss {loss:.3f}"] if loss is not None else []
        words += [f"val acc {percent(last.val_accuracy)}"] if last and last.val_accuracy is not None else []
        words += [metrics_text(last.val_metrics)] if last and last.val_metrics else []
        words += [f"on devices {metrics_text(last.device_metrics['mean'])}"] if last and last.device_metrics else []
        return Group(
            Text("  ".join(words), style="bold", no_wrap=True, overflow="ellipsis"),
            _bar_line("epoch", share, percent(share, 0), self._left(started), style="cyan"),
        )


def _weights_text(reasons: Sequence[str]) -> str:
    return f"weights are {equivalence_text({'equivalence': equivalence(reasons), 'equivalence_reasons': reasons})}"


def _bar_line(label: str, share: float | None, text: str, more: str = "", style: str = "green") -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=8, no_wrap=True)
    grid.add_column(width=40)
    grid.add_column(width=6, justify="right", no_wrap=True)
    grid.add_column(no_wrap=True)
    bar = ProgressBar(total=1.0, completed=share or 0.0, complete_style=style, finished_style=style)
    grid.add_row(label, bar, text, more)
    return grid


def is_live(console: Console, environment: Mapping[str, str]) -> bool:
    """Return whether a part of the screen can be redrawn: on a terminal, and not in the log of a CI job."""
    forced = bool(environment.get("FORCE_COLOR")) and not console.file.isatty()  # colours are wanted, but it is a file
    return console.is_interactive and not console.is_dumb_terminal and not forced and not environment.get("CI")


def clock_text(seconds: float) -> str:
    """Return a duration as a clock shows it: "1:05", "12:00:59"."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
