"""Epochs with other batch sizes, and with boards of two speeds: the paper's figures of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

from pipar.planner.select import TIE
from pipar.reproduce.efficiency import (
    METHODS,
    TIME_NOTES,
    about,
    by_all_methods,
    gained,
    present,
    ratio,
    time_rows,
)
from pipar.reproduce.experiment import Cell, Compared, Experiment, Row
from pipar.reproduce.plots import plot_if_possible
from pipar.reproduce.published import published
from pipar.reproduce.tables import against
from pipar.reproduce.testbed import LINKS, SMALL, Trial

BATCH_SIZES = (25, 50, 100, 250)


def _batch_size_cells(quick: bool) -> list[Cell]:
    sizes = (50, 100) if quick else BATCH_SIZES
    of = (("vgg5", "cifar10"), ("vgg16", "cifar100"))
    links = ("4g", "wifi") if quick else LINKS
    return [
        cell
        for (model, data), link, size in product(of, links, sizes)
        for cell in by_all_methods([Trial(model, data, link, batch_size=size)], batch_size=size)
    ]


def _compare_batch_sizes(rows: Sequence[Row]) -> list[Compared]:
    lines = []
    for statement in published().about("batch-size"):
        concerned = about(statement, rows)
        if statement.against is not None:
            values = present(ratio(row, statement.against, "pipar") for row in concerned)
        else:
            values = _quicker_with_more(concerned)
        what = f"{', '.join(statement.models)}: {statement.what}"
        lines.append(replace(against(statement, values, what=what), within=TIE))
    return lines


def _quicker_with_more(rows: Sequence[Row]) -> list[float]:
    """Return each epoch over the one of the next larger batches, of every method, network and link."""
    found = []
    for network, link in dict.fromkeys((row["network"], row["link"]) for row in rows):
        here = [row for row in rows if (row["network"], row["link"]) == (network, link)]
        for method in METHODS:
            by_size = sorted((row["batch_size"], s) for row in here if (s := row.get(f"{method}_s")) is not None)
            found += [small / large for (_, small), (_, large) in pairwise(by_size)]
    return found


_SIZED = ("network", "data", "link", "devices", "batch_size")
BATCH_SIZE = Experiment(
    "batch-size",
    "Training time per epoch by batch size (Fig. 10 and 11)",
    _batch_size_cells,
    (*_SIZED, "fl_s", "sfl_s", "pipar_s", "fl/pipar", "sfl/pipar", "sfl_plan", "pipar_plan", "run"),
    _compare_batch_sizes,
    partial(plot_if_possible, "batch-size"),
    rows=partial(time_rows, keys=_SIZED),
    notes="The paper prints no batch sizes; these divide the 500 samples of a device. " + TIME_NOTES,
)


def _heterogeneous_cells(quick: bool) -> list[Cell]:
    links = ("4g", "wifi") if quick else LINKS
    return [
        cell
        for boards, slow in (("alike", 1.0), ("half at half speed", 0.5))
        for model, link in product(SMALL, links)
        for cell in by_all_methods([Trial(model, "cifar10", link, slow=slow)], boards=boards)
    ]


def _compare_heterogeneous(rows: Sequence[Row]) -> list[Compared]:
    mixed = [row for row in rows if row["boards"] != "alike"]
    lines = []
    for statement in published().about("heterogeneous"):
        if statement.name.startswith("slow-half"):
            continue  # how it is set up
        if statement.name == "heterogeneous-difference":
            values = _added(rows)
        elif statement.against is not None:
            values = present(ratio(row, statement.against, "pipar") for row in about(statement, mixed))
        else:
            values = present(ratio(row, other, "pipar") for row in rows for other in ("fl", "sfl"))
        lines.append(gained(replace(against(statement, values), within=TIE), mixed))
    return lines


def _added(rows: Sequence[Row]) -> list[float]:
    """Return the seconds that slow boards add to fl over those that they add to pipar, of every network and link."""
    by_boards: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        by_boards.setdefault((row["network"], row["link"]), {})[row["boards"]] = row
    found = []
    for both in by_boards.values():
        alike, mixed = both["alike"], both["half at half speed"]
        more = {method: mixed[f"{method}_s"] - alike[f"{method}_s"] for method in ("fl", "pipar")}
        found += [more["fl"] / more["pipar"]] if more["pipar"] > 0 else []
    return found


_MIXED = ("network", "data", "link", "devices", "boards")
HETEROGENEOUS = Experiment(
    "heterogeneous",
    "Training time per epoch with boards of two speeds (Fig. 12)",
    _heterogeneous_cells,
    (*_MIXED, "fl_s", "sfl_s", "pipar_s", "fl/pipar", "sfl/pipar", "sfl_plan", "pipar_plan", "run"),
    _compare_heterogeneous,
    partial(plot_if_possible, "heterogeneous"),
    rows=partial(time_rows, keys=_MIXED),
    notes="Every other board at half its clock: half its speed. " + TIME_NOTES,
)
