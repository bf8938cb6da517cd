"""The paper's figures, drawn from the rows of the tables.

    figure         panels                  rows have
    time           network x data          link, seconds of each method
    idle           network x data          link, server_idle and device_idle of each method
    convergence    network x data          method, seed, epoch, val_loss
    accuracy       network x data          percent of each method, of_seeds
    batch-size     link                    batch_size, seconds of each method
    heterogeneous  network x link          boards, seconds of each method
    privacy        network x link          mechanism, seconds of each method
    bandwidth      network                 minutes, overhead_percent
    selection      network, data and link  split_point, micro_batches, seconds, chosen
    scores         one                     network, data, link, score, its_score
    scale          link x what grows       devices, method, seconds, up_GB, down_GB, server_GB, planning_s

A table has methods side by side (`fl_s`, `sfl_s`, `pipar_s`) or below each other (`method`, `seconds`); both are
drawn. None is not drawn: federated learning of a network that does not fit on the device has no time. Marks of rows
with `is_run` False are hollow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipar.errors import InputError
from reproduction.bars import draw_heterogeneous, draw_idle_times, draw_privacy, draw_times
from reproduction.curves import draw_bandwidth, draw_batch_sizes, draw_losses, draw_scale
from reproduction.dots import draw_accuracies, draw_scores
from reproduction.drawing import LOOKS, Row, Rows, can_draw, name_of, save, styled
from reproduction.maps import draw_selection
from reproduction.reasons import device_count
from reproduction.testbed import LARGE

#: The ending of a value's column, after the method's name.
_SHORT = {"seconds": "s", "server_idle_s": "server_idle", "device_idle_s": "device_idle"}

_TESTBEDS = ("size", "devices", "wire", "board", "server_speed")
#: How each is drawn, and the columns whose values have separate figures.
FIGURES: dict[str, tuple[Callable[[Rows], Any], Sequence[str]]] = {
    "time": (draw_times, _TESTBEDS),
    "idle": (draw_idle_times, _TESTBEDS),
    "convergence": (draw_losses, ("norm",)),
    "accuracy": (draw_accuracies, ("norm",)),
    "batch-size": (draw_batch_sizes, ("network", "devices")),
    "heterogeneous": (draw_heterogeneous, _TESTBEDS),
    "privacy": (draw_privacy, _TESTBEDS),
    "bandwidth": (draw_bandwidth, ("devices",)),
    "selection": (draw_selection, _TESTBEDS),
    "scores": (draw_scores, ()),
    "scale": (draw_scale, ("network",)),
}


def plot_if_possible(name: str, rows: Rows, folder: Path) -> list[Path]:
    """Draw the figures of an experiment as `plot` does; nothing where matplotlib is not installed."""
    return plot(name, rows, folder) if can_draw() else []


def plot(name: str, rows: Rows, folder: Path) -> list[Path]:
    """Draw the figures of an experiment into a folder, each as SVG and PNG, and return the files."""
    if name not in FIGURES:
        raise InputError(f"'{name}' is not a figure; choose from {', '.join(FIGURES)}.")
    draw, apart = FIGURES[name]
    files = []
    with styled():
        for ending, part in figures_of(by_method(rows), apart):
            figure = draw(part)
            if about := _about(part[0], apart):
                figure.supxlabel(about)  # above there is the legend
            files += save(figure, folder, f"{name}{ending}") if figure.axes else []
    return files


def _about(row: Row, apart: Sequence[str]) -> str:
    """Return what all rows of a figure have in common and no panel shows: "100 devices"."""
    words: dict[str, Callable[[Any], str]] = {
        "devices": device_count,
        "server_speed": lambda speed: f"a server with {speed:g} times the speed of the named one",
        "board": name_of,
        "wire": lambda wire: f"wire {wire}",
    }
    return ", ".join(words[key](row[key]) for key in apart if key in words and row.get(key) is not None)


def by_method(rows: Rows) -> list[Row]:
    """Return a row for each method of rows that have all of them: `fl_s` becomes the `seconds` of `fl`."""
    found: list[Row] = []
    for row in rows:
        methods = [method for method in LOOKS if f"{method}_{_SHORT['seconds']}" in row]
        values = ({name: row.get(f"{method}_{end}") for name, end in _SHORT.items()} for method in methods)
        found += [{**row, "method": method, **of} for method, of in zip(methods, values, strict=True)] or [row]
    return found


def figures_of(rows: Rows, apart: Sequence[str]) -> list[tuple[str, Rows]]:
    """Return the rows of each figure with the end of its name: each value of the columns in `apart` has a figure.

    `size` is "small" or "large": the paper has separate figures for both, because their times differ so much.
    """
    sized: list[Row] = [{**row, "size": "large" if row.get("network") in LARGE else "small"} for row in rows]
    keys = [key for key in apart if len({row.get(key) for row in sized}) > 1]
    parts: dict[tuple[Any, ...], list[Row]] = {}
    for row in sized:
        parts.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return [("".join(f"-{value}" for value in values), part) for values, part in parts.items()]
