"""The command `python -m reproduction`."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipar.cli.command_group import Interrupted, example
from pipar.cli.options import JSON, interrupted_by_sigterm, options, print_json
from pipar.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from reproduction.experiment import Compared, Experiment, Outcome, Row

_LIST = "list"


def _complete(_: click.Context, __: click.Parameter, typed: str) -> list[str]:
    from reproduction.catalog import ALL, EXPERIMENTS

    return [name for name in (*EXPERIMENTS, ALL, _LIST) if name.startswith(typed)]


@click.command(
    epilog=example(
        "python -m reproduction list",
        "python -m reproduction time-small --quick --processes 2",
        "python -m reproduction all",
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@options(
    click.argument("name", metavar="NAME", shell_complete=_complete),
    click.option("--quick", is_flag=True, help="Run fewer trainings and search fewer plans: minutes instead of hours."),
    click.option(
        "--processes",
        type=click.IntRange(min=1, max=256),
        default=os.cpu_count() or 1,
        metavar="COUNT",
        help="Number of worker processes.  [default: one per core]",
    ),
    click.option(
        "-o",
        "--output",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path("runs/reproduction"),
        show_default=True,
        metavar="FOLDER",
        help="Folder of tables and results; finished results are not run again.",
    ),
    JSON,
)
def reproduce(name: str, quick: bool, processes: int, output: Path, as_json: bool) -> None:
    """Run an experiment of the paper's evaluation on a virtual testbed, and compare it with the paper.

    NAME is an experiment from 'python -m reproduction list', or all. Each experiment writes a table (Markdown and CSV)
    and a comparison with the paper's statements. Every number names the cells it comes from: lines of cells.jsonl.
    Ctrl-C keeps finished results; run the same command again to continue.
    """
    from reproduction.catalog import EXPERIMENTS, experiments
    from reproduction.drawing import can_draw

    if name == _LIST:
        _list(list(EXPERIMENTS.values()), as_json=as_json)
        return
    asked, left_out = _runnable(experiments(name), quick=quick)
    _check_folder(output)
    reports = []
    hashes = {cell.hash for experiment in asked for cell in experiment.cells(quick)}
    with _stopping(output, hashes), interrupted_by_sigterm(), _shown(asked, output, quick=quick, quiet=as_json) as show:
        for experiment in asked:
            reports.append(_run(experiment, output, show, quick=quick, processes=processes))
            if not as_json:
                click.echo(str(reports[-1]))
    if len(reports) > 1:
        from reproduction.tables import write_comparisons

        write_comparisons({one.experiment.title: one.compared for one in reports}, output)
    if as_json:
        print_json({"folder": str(output), "quick": quick, "experiments": [one.to_dict() for one in reports]})
    elif not can_draw():
        click.echo(
            "No figures: matplotlib is not installed. Run pip install 'pipar[reproduce]', then the same command again.",
            err=True,
        )
    if left_out:
        raise InputError(
            f"Not run: {', '.join(left_out)}. Install what they need (see above), then run the same command again."
        )


def _runnable(asked: Sequence[Experiment], *, quick: bool) -> tuple[list[Experiment], list[str]]:
    """Return the experiments that can run, and the names of the others; raise if none can."""
    from reproduction.requirements import missing_requirement

    missing = {one.name: missing_requirement(one, quick=quick) for one in asked}
    left_out = {name: lack for name, lack in missing.items() if lack is not None}
    if len(left_out) == len(asked):
        raise InputError(next(iter(left_out.values())))
    for name, lack in left_out.items():
        click.echo(f"{name} is skipped. {lack}", err=True)
    return [one for one in asked if one.name not in left_out], list(left_out)


_SIZES = {"quick": True, "full": False}


def _list(experiments: Sequence[Experiment], *, as_json: bool) -> None:
    """Print every experiment with its number of cells, quick and full, and the measured time of one core."""
    from pipar.cli.tables import console, new_table
    from reproduction.durations import cpu_s

    cells = {one.name: {size: len(one.cells(quick)) for size, quick in _SIZES.items()} for one in experiments}
    taken = {one.name: {size: cpu_s(one, quick=quick) for size, quick in _SIZES.items()} for one in experiments}
    if as_json:
        print_json([{"name": n, "title": t, "cells": cells[n], "cpu_s": taken[n]} for n, t in _titles(experiments)])
        return
    table = new_table()
    table.add_column("name", no_wrap=True)
    for words in ("cells", "time on one core"):
        table.add_column(f"{words}\n{' / '.join(_SIZES)}", justify="right", no_wrap=True)
    table.add_column("description")
    for name, title in _titles(experiments):
        times = " / ".join(map(_about, taken[name].values()))
        table.add_row(name, " / ".join(map(str, cells[name].values())), times, title)
    console().print(table)


def _titles(experiments: Sequence[Experiment]) -> list[tuple[str, str]]:
    return [(one.name, one.title) for one in experiments]


def _about(seconds: float | None) -> str:
    """Return a rounded time; a dash if it was not measured."""
    if seconds is None:
        return "-"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _check_folder(folder: Path) -> None:
    """Raise if the folder cannot be made, before hours of computing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"Cannot make the folder {folder}: {error.strerror}.") from None


@contextmanager
def _stopping(folder: Path, hashes: Collection[str]) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise _Stopped(folder, hashes) from None


class _Stopped(Interrupted):
    """Ctrl-C; every result so far is in cells.jsonl."""

    def __init__(self, folder: Path, hashes: Collection[str]) -> None:
        super().__init__([])
        self._folder, self._hashes = folder, hashes

    def __str__(self) -> str:
        from reproduction.cell_file import read_cells

        kept = len(read_cells(self._folder).keys() & self._hashes)
        return (
            f"Stopped. {kept} of {len(self._hashes)} results are in {self._folder}/: "
            "run the same command again to continue."
        )


@dataclass(frozen=True)
class _Report:
    """An experiment that was run."""

    experiment: Experiment
    rows: Sequence[Row]
    compared: Sequence[Compared]
    files: Sequence[Path]

    def __str__(self) -> str:
        from reproduction.tables import tally

        against = f", {tally(self.compared)}" if self.compared else ""
        return f"{self.experiment.name}: {len(self.rows)} rows{against}; {self.files[0].parent}/"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.experiment.name,
            "title": self.experiment.title,
            "rows": self.rows,
            "comparison": [_line(line) for line in self.compared],
            "files": [str(file) for file in self.files],
        }


def _line(line: Compared) -> dict[str, Any]:
    """Return a line with what follows from it, and the reason if it is outside the paper's range."""
    fields = {name: value for name, value in asdict(line).items() if name not in ("below", "above")}
    follows = {"ratio": line.ratio, "verdict": line.verdict, "why": line.why, "is_counted": line.is_counted}
    return {**fields, **follows}


def _run(experiment: Experiment, folder: Path, show: _Shown, *, quick: bool, processes: int) -> _Report:
    """Run an experiment's cells, write its tables, and return its report."""
    from reproduction.durations import keep_duration
    from reproduction.sweep import sweep
    from reproduction.tables import write_tables

    cells = list(experiment.cells(quick))
    places = {id(cell): at for at, cell in enumerate(cells)}
    outcomes: list[Outcome | None] = [None] * len(cells)
    show.begin(experiment)
    with closing(sweep(cells, folder, processes=processes)) as coming:  # no process survives the loop, however it ends
        for outcome in coming:
            outcomes[places[id(outcome.cell)]] = outcome
            show.take(outcome)
    done = [outcome for outcome in outcomes if outcome is not None]
    keep_duration(experiment, done, folder, quick=quick)
    rows = experiment.rows(done)
    return _Report(experiment, rows, experiment.compare(rows), write_tables(experiment, rows, folder, quick=quick))


# --- progress


class _Shown:
    """Shows progress: a bar with the remaining time on a terminal, elsewhere a line for each cell that was run.

    `missing` are the cells to run, by hash, and their durations: in seconds if all were measured, otherwise equal.
    """

    def __init__(self, console: Console, total: int, missing: dict[str, float], *, quiet: bool, live: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self.progress = Progress(*columns, console=console, disable=quiet or not live, transient=True)
        self._bar = self.progress.add_task("", total=total, left="")
        self._total, self._done = total, 0
        self._missing, self._run = missing, 0.0
        self._lines = not quiet and not live
        self._began = time.monotonic()
        self._name = ""

    def begin(self, experiment: Experiment) -> None:
        self._name = experiment.name
        self.progress.update(self._bar, description=experiment.name)

    def take(self, outcome: Outcome) -> None:
        self._done += 1
        if outcome.was_kept:
            self.progress.update(self._bar, advance=1)
            return
        self._run += self._missing.pop(outcome.cell.hash, 0.0)
        left_s = (time.monotonic() - self._began) / self._run * sum(self._missing.values()) if self._run else 0.0
        left = f"about {_about(left_s)} left"
        self.progress.update(self._bar, advance=1, left=left)
        if self._lines:
            click.echo(f"{self._done} of {self._total}  {self._name}: {outcome.cell}  ({left})", err=True)


@contextmanager
def _shown(experiments: Sequence[Experiment], folder: Path, *, quick: bool, quiet: bool) -> Iterator[_Shown]:
    from pipar.cli.tables import console
    from pipar.monitoring.display import is_live

    where = console(stderr=True)
    total = sum(len(experiment.cells(quick)) for experiment in experiments)
    missing = _missing(experiments, folder, quick=quick)
    shown = _Shown(where, total, missing, quiet=quiet, live=is_live(where, os.environ))
    with shown.progress:
        yield shown


def _missing(experiments: Sequence[Experiment], folder: Path, *, quick: bool) -> dict[str, float]:
    """Return the cells to run and their durations; equal ones if any of them was not measured."""
    from reproduction.cell_file import read_cells
    from reproduction.durations import cpu_s

    kept = read_cells(folder)
    missing: dict[str, float | None] = {}
    for experiment in experiments:
        cells, seconds = experiment.cells(quick), cpu_s(experiment, quick=quick)
        for cell in cells:
            if cell.hash not in missing and cell.hash not in kept:
                missing[cell.hash] = None if seconds is None else max(seconds, 0.1) / len(cells)
    known = {cell: seconds for cell, seconds in missing.items() if seconds is not None}
    return known if len(known) == len(missing) else dict.fromkeys(missing, 1.0)
