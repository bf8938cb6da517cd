"""Training time with other batch sizes (Fig. 10 and 11), and with boards of two speeds (Fig. 12)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise, product

from pipar.planner.search_settings import TIE
from reproduction.efficiency import (
    METHODS,
    TIME_NOTES,
    about,
    by_all_methods,
    compare_methods,
    over_others,
    ratios,
    time_rows,
)
from reproduction.experiment import Cell, Compared, Experiment, Found, Row
from reproduction.plots import plot_if_possible
from reproduction.published import published
from reproduction.reasons import NOT_THE_BEST, why_less, why_more
from reproduction.tables import against
from reproduction.testbed import LINKS, SMALL, Trial

BATCH_SIZES = (25, 50, 100, 250)
_UNEVEN = "larger batches arrive at the server in larger pieces, which its cores share less evenly"
_WAITING = "with pipar slow boards leave the server without work, while with fl they only cost their own time"


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
        concerned, what = about(statement, rows), f"{', '.join(statement.models)}: {statement.what}"
        if statement.against is not None:
            values, below = ratios(concerned, statement.against), NOT_THE_BEST
        else:
            by_case = _quicker_with_more(concerned)
            slower = [case for case, found in by_case.items() if found.value < 1 - TIE]
            values, below = list(by_case.values()), f"{', '.join(slower)}: {_UNEVEN}"
        lines.append(against(statement, values, what=what, within=TIE, below=below))
    return [*lines, *compare_methods(rows)]


def _quicker_with_more(rows: Sequence[Row]) -> dict[str, Found]:
    """Return each epoch over the one with the next larger batch size, for every method, network and link."""
    found = {}
    for network, link in dict.fromkeys((row["network"], row["link"]) for row in rows):
        here = [row for row in rows if (row["network"], row["link"]) == (network, link)]
        for method in METHODS:
            timed = [row for row in here if row.get(f"{method}_s") is not None]
            for small, large in pairwise(sorted(timed, key=lambda row: row["batch_size"])):
                case = f"{network} {link} with {method} from {small['batch_size']} to {large['batch_size']}"
                quicker = small[f"{method}_s"] / large[f"{method}_s"]
                found[case] = Found(quicker, f"{small['run']} {large['run']}")
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
            continue  # part of the set-up
        if statement.name == "heterogeneous-difference":
            lines.append(against(statement, _added(rows), within=TIE, below=_WAITING))
        elif statement.against is not None:
            concerned = about(statement, mixed)
            less = why_less(statement, concerned)
            lines.append(
                against(statement, ratios(concerned, statement.against), below=less, above=why_more(concerned))
            )
        else:
            lines.append(against(statement, over_others(rows), within=TIE, below=NOT_THE_BEST))
    return [*lines, *compare_methods(rows)]


def _added(rows: Sequence[Row]) -> list[Found]:
    """Return the seconds that slow boards add to fl over those that they add to pipar, for every network and link."""
    by_boards: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        by_boards.setdefault((row["network"], row["link"]), {})[row["boards"]] = row
    found = []
    for both in by_boards.values():
        alike, mixed = both["alike"], both["half at half speed"]
        more = {method: mixed[f"{method}_s"] - alike[f"{method}_s"] for method in ("fl", "pipar")}
        run = f"{alike['run']} {mixed['run']}"
        found += [Found(more["fl"] / more["pipar"], run)] if more["pipar"] > 0 else []
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
    notes="Every second board runs at half its clock, at half its speed. " + TIME_NOTES,
)
