"""Training time with differential privacy: noise on the devices' updates, or on their inputs; paper V-F2."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

from reproduction.efficiency import (
    METHODS,
    TIME_NOTES,
    about,
    by_all_methods,
    compare_methods,
    counted,
    time_rows,
)
from reproduction.experiment import Cell, Compared, Experiment, Found, Row
from reproduction.plots import plot_if_possible
from reproduction.published import published
from reproduction.reasons import ROUNDING
from reproduction.tables import against
from reproduction.testbed import LINKS, SMALL, Trial

WITHOUT = "none"
#: The amount of noise does not change its duration.
MECHANISMS: dict[str, dict[str, float]] = {
    WITHOUT: {},
    "classic-dp": {"clip": 1.0, "noise_multiplier": 1.0},
    "pixeldp": {"pixel_epsilon": 1.0},
}
#: Why epochs grow by more than in the paper.
_SLOWER = "noise takes the seconds per byte of the board's profile, scaled by its fitted speed"
_UNHIDDEN = "with pipar there is less waiting in an epoch that could hide the noise"


def _cells(quick: bool) -> list[Cell]:
    links = ("wifi",) if quick else LINKS
    return [
        cell
        for model, link, (mechanism, privacy) in product(SMALL, links, MECHANISMS.items())
        for cell in by_all_methods([Trial(model, "cifar10", link, privacy=privacy)], mechanism=mechanism)
    ]


def compare(rows: Sequence[Row]) -> list[Compared]:
    """Compare the seconds that noise adds with the paper's largest."""
    lines = []
    for statement in published().about("privacy"):
        if statement.name == "dp-not-more":
            more = [_adds_more(about(statement, rows))]
            lines.append(counted(statement.place, statement.what, more, lambda _: _UNHIDDEN))
            continue
        mechanism = statement.name.removesuffix(f"-{statement.method}")
        added = _added(about(statement, rows), mechanism, str(statement.method))
        what = f"{statement.method}, {mechanism}: {statement.what}"
        lines.append(against(statement, added, what=what, above=_SLOWER, better="less"))
    return [*lines, *compare_methods(rows)]


def _adds_more(rows: Sequence[Row]) -> list[Row]:
    """Return the rows in which noise adds more to an epoch with pipar than with another method."""
    without = {(row["network"], row["link"]): row for row in rows if row["mechanism"] == WITHOUT}
    found = []
    for row in rows:
        plain = without[row["network"], row["link"]]
        fit = [method for method in METHODS if row[f"{method}_s"] is not None and plain[f"{method}_s"] is not None]
        more = {method: row[f"{method}_s"] - plain[f"{method}_s"] for method in fit}
        found += [row] if more["pipar"] > min(more.values()) + ROUNDING * row["pipar_s"] else []
    return found


def _added(rows: Sequence[Row], mechanism: str, method: str) -> list[Found]:
    """Return the seconds that a mechanism adds to an epoch with a method, for every network and link."""
    by_place = {(row["network"], row["link"], row["mechanism"]): row for row in rows}
    found = []
    for (network, link, name), noisy in by_place.items():
        plain = by_place.get((network, link, WITHOUT))
        if name == mechanism and plain is not None:
            with_noise, without = noisy.get(f"{method}_s"), plain.get(f"{method}_s")
            if with_noise is not None and without is not None:
                found.append(Found(with_noise - without, f"{plain['run']} {noisy['run']}"))
    return found


_NOISY = ("network", "data", "link", "devices", "mechanism")
PRIVACY = Experiment(
    "privacy",
    "Training time per epoch with differential privacy (Fig. 13)",
    _cells,
    (*_NOISY, *(f"{method}_s" for method in METHODS), "sfl_plan", "pipar_plan", "run"),
    compare,
    partial(plot_if_possible, "privacy"),
    partial(time_rows, keys=_NOISY),
    "classic-dp clips each round's update of a device's part and adds noise to it; pixeldp adds noise to the inputs. "
    + TIME_NOTES,
)
