"""Many cells, in several processes: what was run before is read, what is run now is kept at once."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipar.config_file import config_from, dump_config
from pipar.errors import InputError
from pipar.storage.run_folder import strict_json, write_atomically
from reproduction.cells import run_cell
from reproduction.experiment import Cell, Outcome
from reproduction.sources import have_sources_changed


def sweep(cells: Sequence[Cell], folder: Path, *, processes: int = 1) -> Generator[Outcome, None, None]:
    """Yield every cell's outcome: first those that are in the folder, then the others as they come.

    Two cells with the same configuration are run once. Whatever ends the sweep, what has come is kept, unless the
    sources were edited meanwhile: nobody knows then which of them has computed it.
    """
    missing: dict[str, list[Cell]] = {}
    for cell in cells:
        kept = read_outcome(folder, cell)
        if kept is not None:
            yield kept
        else:
            missing.setdefault(cell.key, []).append(cell)
    firsts = [same[0] for same in missing.values()]
    with closing(_run_all(firsts, min(processes, len(firsts)))) as coming:
        for outcome in coming:
            _check_sources()
            keep_outcome(folder, outcome)
            yield from (replace(outcome, cell=same) for same in missing[outcome.cell.key])


def _check_sources() -> None:
    if have_sources_changed():
        raise InputError(
            "The sources of pipar have changed since this command began: what it computes now is of no one version. "
            "Type it again; what was computed before is kept, and belongs to the sources as they were."
        )


def read_outcome(folder: Path, cell: Cell) -> Outcome | None:
    """Return what is kept of a cell; None if there is nothing, or nothing whole."""
    try:
        found = json.loads((_place(folder, cell) / "result.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("result"), dict):
        return None
    seconds = found.get("cpu_s")
    return Outcome(cell, found["result"], was_kept=True, cpu_s=seconds if isinstance(seconds, int | float) else None)


def keep_outcome(folder: Path, outcome: Outcome) -> None:
    """Write a cell's folder: its configuration, and last its result, which is there whole or not at all.

    Labels are not: another experiment with the same cell has others.
    """
    cell, place = outcome.cell, _place(folder, outcome.cell)
    what = {"how": cell.how, "options": dict(cell.options)}
    content = {**what, "cpu_s": outcome.cpu_s, "result": dict(outcome.result)}
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_atomically(place / "config.toml", dump_config(config_from(cell.config)).encode())
        write_atomically(place / "result.json", (json.dumps(strict_json(content), indent=1) + "\n").encode())
    except OSError as error:
        raise InputError(f"Cannot write {place}: {error.strerror}.") from None


def _place(folder: Path, cell: Cell) -> Path:
    return folder / "cells" / cell.key


def _run(cell: Cell) -> Outcome:
    """Run a cell, and count the seconds of a core that it takes."""
    began = time.process_time()
    result = run_cell(cell.how, cell.config, cell.options)
    return Outcome(cell, result, cpu_s=time.process_time() - began)


def _run_all(cells: Sequence[Cell], processes: int) -> Generator[Outcome, None, None]:
    """Yield outcomes as they come, from this process alone or from several."""
    if processes <= 1:
        yield from map(_run, cells)
        return
    # A server of forks has imported everything once; torch does not survive a fork behind its threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([run_cell.__module__])
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_prepare) as pool:
        running = [pool.submit(_run, cell) for cell in cells]
        try:
            for done in as_completed(running):
                yield done.result()
        except BaseException:  # also of who reads: nobody waits for what is being computed
            _end(child for child in multiprocessing.active_children() if child not in others)
            raise  # without its processes the pool gives up everything else, and is waited for


def _end(children: Iterable[Any]) -> None:
    for child in children:
        child.terminate()


def _prepare() -> None:
    """Make a process that computes on one core, and leaves Ctrl-C to the one that it computes for."""
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
