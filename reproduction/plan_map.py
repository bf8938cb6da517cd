"""Epoch times for each P and N, and the pair that the planner chooses; paper V-D."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

from reproduction.experiment import Cell, Experiment, Outcome, Row
from reproduction.plots import plot_if_possible
from reproduction.testbed import LINKS, Trial

#: Every N while epochs still change noticeably, then fewer.
MICRO_BATCHES = (*range(1, 17), 20, 25, 33, 50, 100)
FEWER = (1, 2, 4, 8, 16)


def _cells(quick: bool) -> list[Cell]:
    models = ("vgg5",) if quick else ("vgg5", "resnet18")
    options = {"micro_batches": list(FEWER if quick else MICRO_BATCHES)}
    return [
        Cell("map", Trial(model, "cifar10", link).tree(), options, {"network": model, "data": "cifar10", "link": link})
        for model, link in product(models, LINKS)
    ]


def _rows(outcomes: Sequence[Outcome]) -> list[Row]:
    return [row for outcome in outcomes for row in _pairs(outcome)]


def _pairs(outcome: Outcome) -> list[Row]:
    """Return a row for each pair that was tried; if no plan fits, one row without numbers."""
    if not outcome.result["fits"]:
        return [outcome.row]
    pairs, chosen = outcome.result["pairs"], outcome.result["chosen"]
    best = min(seconds for _, _, seconds in pairs)
    return [
        {
            **outcome.cell.labels,
            "split_point": split_point,
            "micro_batches": micro_batches,
            "seconds": seconds,
            "chosen": [split_point, micro_batches] == chosen,
            "score": best / seconds,
            "run": outcome.cell.hash,
        }
        for split_point, micro_batches, seconds in pairs
    ]


PLAN_MAP = Experiment(
    "plan-map",
    "Epoch times by P and N, and the chosen pair (V-D)",
    _cells,
    ("network", "data", "link", "split_point", "micro_batches", "seconds", "score", "chosen", "run"),
    plot=partial(plot_if_possible, "selection"),
    rows=_rows,
    notes="Seconds of an epoch of 100 devices that all have this plan, as the planner simulates them; "
    "`selection-small` has its choices with times that it does not know. Every P has a row with each N of "
    f"{', '.join(map(str, MICRO_BATCHES))} (with --quick: {', '.join(map(str, FEWER))}) and with the chosen N and the "
    "two on either side of it, unless that does not fit into a board's memory. The score is the best epoch of these "
    "over this one. A row without numbers: no plan of it fits.",
)
