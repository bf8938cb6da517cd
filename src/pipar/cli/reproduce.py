"""`pipar reproduce`: the paper's evaluation on a virtual testbed, and beyond it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipar.cli.options import JSON, Interrupted, example, interrupted_by_sigterm, options, print_json
from pipar.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from pipar.reproduce.experiment import Cell, Compared, Experiment, Outcome, Row

_LIST = "list"


def _complete(_: click.Context, __: click.Parameter, typed: str) -> list[str]:
    from pipar.reproduce.catalog import ALL, EXPERIMENTS

    return [name for name in (*EXPERIMENTS, ALL, _LIST) if name.startswith(typed)]


@click.command(
    short_help="Run the paper's evaluation on a virtual testbed.",
    epilog=example("pipar reproduce list", "pipar reproduce time-small --quick --processes 2", "pipar reproduce all"),
)
@options(
    click.argument("name", metavar="NAME", shell_complete=_complete),
    click.option("--quick", is_flag=True, help="Fewer trainings and fewer plans to search: minutes instead of hours."),
    click.option(
        "--processes",
        type=click.IntRange(min=1, max=256),
        default=os.cpu_count() or 1,
        metavar="COUNT",
        help="Processes that share the trainings.  [default: one for each core]",
    ),
    click.option(
        "-o",
        "--output",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path("reproduction"),
        show_default=True,
        metavar="FOLDER",
        help="Where tables, comparisons and every single result go; what is there already is not run again.",
    ),
    JSON,
)
def reproduce(name: str, quick: bool, processes: int, output: Path, as_json: bool) -> None:
    """Run an experiment of the paper's evaluation, or one beyond it, on the virtual testbed, and compare.

    NAME is one of those that 'pipar reproduce list' shows, or all. Each writes a table (Markdown and CSV) and a
    comparison with what the paper says, line by line; every number names the folder of the run that it comes from.
    Ctrl-C keeps what is done, and the same command goes on from there.
    """
    from pipar.reproduce.catalog import EXPERIMENTS, experiments
    from pipar.reproduce.drawing import can_draw

    if name == _LIST:
        _list(list(EXPERIMENTS.values()), quick=quick, as_json=as_json)
        return
    asked = experiments(name)
    _check_folder(output)
    told = []
    with _stopping(output), interrupted_by_sigterm(), _shown(asked, quick=quick, quiet=as_json) as show:
        for experiment in asked:
            told.append(_run(experiment, output, show, quick=quick, processes=processes))
    if len(told) > 1:
        from pipar.reproduce.tables import write_comparisons

        write_comparisons({one.experiment.title: one.compared for one in told}, output)
    if as_json:
        print_json({"folder": str(output), "quick": quick, "experiments": [one.to_dict() for one in told]})
        return
    for one in told:
        click.echo(str(one))
    if not can_draw():
        click.echo(
            "Without figures: matplotlib is not here. pip install 'pipar[reproduce]', then type it again.", err=True
        )


def _list(experiments: Sequence[Experiment], *, quick: bool, as_json: bool) -> None:
    rows = [{"name": one.name, "title": one.title, "cells": len(one.cells(quick))} for one in experiments]
    if as_json:
        print_json(rows)
        return
    from pipar.tables import console, new_table

    table = new_table()
    table.add_column("name", no_wrap=True)
    table.add_column("cells", justify="right", no_wrap=True)
    table.add_column("what")
    for row in rows:
        table.add_row(str(row["name"]), str(row["cells"]), str(row["title"]))
    console().print(table)


def _check_folder(folder: Path) -> None:
    """Raise if nothing can be written there, before hours of computing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"Cannot make the folder {folder}: {error.strerror}.") from None


@contextmanager
def _stopping(folder: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise _Stopped(folder) from None


class _Stopped(Interrupted):
    """Ctrl-C; every result so far is in its folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__([])
        self._folder = folder

    def __str__(self) -> str:
        kept = len(list(self._folder.glob("cells/*/result.json")))
        return f"Stopped. {kept} results are in {self._folder}/: the same command goes on from there."


@dataclass(frozen=True)
class _Told:
    """An experiment that was run."""

    experiment: Experiment
    rows: Sequence[Row]
    compared: Sequence[Compared]
    files: Sequence[Path]

    def __str__(self) -> str:
        inside = sum(line.verdict == "inside" for line in self.compared)
        against = f", {inside} of {len(self.compared)} lines inside what the paper says" if self.compared else ""
        return f"{self.experiment.name}: {len(self.rows)} rows{against}; {self.files[0].parent}/"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.experiment.name,
            "title": self.experiment.title,
            "rows": self.rows,
            "comparison": [{**asdict(line), "ratio": line.ratio, "verdict": line.verdict} for line in self.compared],
            "files": [str(file) for file in self.files],
        }


def _run(experiment: Experiment, folder: Path, show: _Shown, *, quick: bool, processes: int) -> _Told:
    """Run an experiment's cells, write its tables, and return what is told of it."""
    from pipar.reproduce.sweep import sweep
    from pipar.reproduce.tables import write_tables

    cells = list(experiment.cells(quick))
    places = {id(cell): at for at, cell in enumerate(cells)}
    outcomes: list[Outcome | None] = [None] * len(cells)
    show.begin(experiment)
    with closing(sweep(cells, folder, processes=processes)) as coming:  # whatever ends it, no process is left behind
        for outcome in coming:
            outcomes[places[id(outcome.cell)]] = outcome
            show.take(outcome)
    done = [outcome for outcome in outcomes if outcome is not None]
    rows = experiment.rows(done)
    return _Told(experiment, rows, experiment.compare(rows), write_tables(experiment, rows, folder))


# --- what a person sees meanwhile


class _Shown:
    """Counts cells: a bar with the time left on a terminal, a line for each cell that was run elsewhere."""

    def __init__(self, console: Console, total: int, *, quiet: bool, live: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=console, disable=quiet or not live, transient=True)
        self._bar = self.progress.add_task("", total=total)
        self._total, self._done, self._run = total, 0, 0
        self._lines = not quiet and not live
        self._began = time.monotonic()
        self._name = ""

    def begin(self, experiment: Experiment) -> None:
        self._name = experiment.name
        self.progress.update(self._bar, description=experiment.name)

    def take(self, outcome: Outcome) -> None:
        self._done += 1
        self._run += not outcome.was_kept
        self.progress.update(self._bar, advance=1)
        if self._lines and not outcome.was_kept:
            left_s = (time.monotonic() - self._began) / self._run * (self._total - self._done)
            click.echo(f"{self._done} of {self._total}  {self._name}: {outcome.cell}  ({_left(left_s)})", err=True)


def _left(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


@contextmanager
def _shown(experiments: Sequence[Experiment], *, quick: bool, quiet: bool) -> Iterator[_Shown]:
    from pipar.display import is_live
    from pipar.tables import console

    cells: list[Cell] = [cell for experiment in experiments for cell in experiment.cells(quick)]
    where = console(stderr=True)
    shown = _Shown(where, len(cells), quiet=quiet, live=is_live(where, os.environ))
    with shown.progress:
        yield shown
