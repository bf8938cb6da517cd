"""What differential privacy adds to an epoch: noise on the devices' updates, and noise on their inputs; paper V-F2."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

from pipar.reproduce.efficiency import METHODS, TIME_NOTES, about, by_all_methods, time_rows
from pipar.reproduce.experiment import Cell, Compared, Experiment, Row
from pipar.reproduce.plots import plot_if_possible
from pipar.reproduce.published import published
from pipar.reproduce.tables import against
from pipar.reproduce.testbed import LINKS, SMALL, Trial

WITHOUT = "none"
#: How much noise does not change how long it takes.
MECHANISMS: dict[str, dict[str, float]] = {
    WITHOUT: {},
    "classic-dp": {"clip": 1.0, "noise_multiplier": 1.0},
    "pixeldp": {"pixel_epsilon": 1.0},
}
#: Why pipar's epochs grow by more than the noise takes.
_LANE = "the noise of the next batch is made on the lane that encodes and decodes this one's micro-batches"


def _cells(quick: bool) -> list[Cell]:
    links = ("wifi",) if quick else LINKS
    return [
        cell
        for model, link, (mechanism, privacy) in product(SMALL, links, MECHANISMS.items())
        for cell in by_all_methods([Trial(model, "cifar10", link, privacy=privacy)], mechanism=mechanism)
    ]


def compare(rows: Sequence[Row]) -> list[Compared]:
    """Hold the seconds that noise adds against the paper's largest."""
    lines = []
    for statement in published().about("privacy"):
        mechanism = statement.name.removesuffix(f"-{statement.method}")
        added = _added(about(statement, rows), mechanism, str(statement.method))
        what = f"{statement.method}, {mechanism}: {statement.what}"
        why = _LANE if (mechanism, statement.method) == ("pixeldp", "pipar") else ""
        lines.append(against(statement, added, what=what, why=why))
    return lines


def _added(rows: Sequence[Row], mechanism: str, method: str) -> list[float]:
    """Return the seconds that a mechanism adds to an epoch by a method, of every network and link."""
    seconds = {(row["network"], row["link"], row["mechanism"]): row.get(f"{method}_s") for row in rows}
    found = []
    for (network, link, name), noisy in seconds.items():
        plain = seconds.get((network, link, WITHOUT))
        if name == mechanism and noisy is not None and plain is not None:
            found.append(noisy - plain)
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
