"""Where a script or a notebook sees the progress of a training."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from pipar.events import Observer, Starting, ignore


@contextlib.contextmanager
def shown(progress: bool | None, starting: Starting, emulated: str = "") -> Iterator[Observer]:
    """Yield an observer that shows what starts, and then events, until the block ends.

    In a notebook that is a part of the cell's output, in a terminal a live part below the lines of epochs; both also
    show what is prepared before the training. Elsewhere, in a pipe or a log, there are lines if `progress` is True,
    and nothing if it is None. False shows nothing anywhere.
    """
    if progress is False:
        yield ignore
    elif (shell := notebook_shell()) is not None:
        from pipar.monitoring.notebook_display import NotebookDisplay

        with NotebookDisplay(shell) as notebook:
            notebook.observe(starting)
            yield notebook.observe
    elif progress or _is_terminal():
        from rich.console import Console

        from pipar.monitoring.display import Display

        with Display(Console(stderr=True, highlight=False), emulated=emulated) as terminal:
            terminal.observe(starting)
            yield terminal.observe
    else:
        yield ignore


def notebook_shell() -> Any:
    """Return IPython's shell if a notebook's kernel runs this program, else None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None


def _is_terminal() -> bool:
    return bool(sys.stderr and sys.stderr.isatty()) and not os.environ.get("CI")
