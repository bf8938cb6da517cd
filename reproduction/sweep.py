"""Running many cells in several processes: finished ones are read from a folder, new ones are saved there."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipar.errors import InputError
from pipar.launch.worker_pool import map_in_workers
from reproduction.cell_file import append_outcome, read_cells
from reproduction.cells import run_cell
from reproduction.experiment import Cell, Outcome
from reproduction.sources import have_sources_changed


def sweep(cells: Sequence[Cell], folder: Path, *, processes: int = 1) -> Generator[Outcome, None, None]:
    """Yield the outcome of every cell: first those that are in the folder, then the others as they finish.

    Two cells with the same configuration are run once. However the sweep ends, finished results are saved, unless
    the sources were edited meanwhile: then it is unknown which version computed them.
    """
    kept = read_cells(folder)
    missing: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.hash in kept:
            yield _kept_outcome(cell, kept[cell.hash])
        else:
            missing.setdefault(cell.hash, []).append(cell)
    firsts = [same[0] for same in missing.values()]
    with closing(_run_all(firsts, min(processes, len(firsts)))) as finished:
        for outcome in finished:
            _check_sources()
            append_outcome(folder, outcome)
            yield from (replace(outcome, cell=same) for same in missing[outcome.cell.hash])


def _kept_outcome(cell: Cell, record: Mapping[str, Any]) -> Outcome:
    seconds = record.get("cpu_s")
    return Outcome(cell, record["result"], was_kept=True, cpu_s=seconds if isinstance(seconds, int | float) else None)


def _check_sources() -> None:
    if have_sources_changed():
        raise InputError(
            "The sources of pipar have changed since this command started, so its results belong to no single version. "
            "Run it again; results saved before the change stay valid for the sources as they were."
        )


def _run(cell: Cell) -> Outcome:
    """Run a cell and measure its CPU seconds."""
    began = time.process_time()
    result = run_cell(cell.how, cell.config, cell.options)
    return Outcome(cell, result, cpu_s=time.process_time() - began)


def _run_all(cells: Sequence[Cell], processes: int) -> Generator[Outcome, None, None]:
    """Yield outcomes as they finish, from this process alone or from several."""
    if processes <= 1:
        yield from map(_run, cells)
        return
    yield from map_in_workers(_run, cells, processes, preload=run_cell.__module__, prepare=_use_one_core)


def _use_one_core() -> None:
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
