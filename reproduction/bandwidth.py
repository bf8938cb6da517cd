"""The cost of choosing new plans on links that change between 4g, 4g+ and wifi (Fig. 14)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

from reproduction.experiment import Cell, Compared, Experiment, Found, Outcome, Row
from reproduction.plots import plot_if_possible
from reproduction.published import Statement, published
from reproduction.reasons import device_count
from reproduction.tables import against
from reproduction.testbed import DEVICES, LINKS, SMALL, Trial

#: Minutes between changes of the links. Longer intervals are computed from the longest one that was run: each change
#: is planned for once, for any interval.
RUN_MINUTES = (1, 5, 10)
COMPUTED_MINUTES = (30, 60)
#: Changes of the links in a training, and its minimum duration.
_CHANGES, _LEAST_S = 3, 600.0
_LONGER = "choosing simulates the whole fleet on one core of this machine, which was slower or busy"


def _cells(quick: bool) -> list[Cell]:
    minutes = RUN_MINUTES[:1] if quick else RUN_MINUTES
    devices, least_s = (10, 180.0) if quick else (DEVICES, _LEAST_S)
    return [
        _cell(model, every, devices, max(least_s, _CHANGES * every * 60.0)) for model, every in product(SMALL, minutes)
    ]


def _cell(model: str, minutes: int, devices: int, training_s: float) -> Cell:
    link = {"cycle": list(LINKS), "every": f"{minutes * 60}s"}
    tree = Trial(model, "cifar10", link, devices=devices).tree()
    tree["plan"] = {"replan": True}
    labels = {"network": model, "devices": devices, "minutes": minutes}
    return Cell("replan", tree, {"training_s": training_s}, labels)


def _rows(outcomes: Sequence[Outcome]) -> list[Row]:
    rows = []
    for network in dict.fromkeys(outcome.cell.labels["network"] for outcome in outcomes):
        run = sorted(
            (outcome.row for outcome in outcomes if outcome.cell.labels["network"] == network),
            key=lambda row: row["minutes"],
        )
        last = run[-1]["minutes"]
        rows += [
            {**row, "overhead_percent": 100 * row["planning_s"] / row["training_s"], "is_run": True} for row in run
        ]
        rows += [_computed(run[-1], minutes) for minutes in (*RUN_MINUTES, *COMPUTED_MINUTES) if minutes > last]
    return rows


def _computed(row: Row, minutes: int) -> Row:
    """Return the row of a longer interval, with the same seconds of choosing per change."""
    changes = max(1.0, row["training_s"] / (60.0 * row["minutes"]))
    share = row["planning_s"] / changes / (60.0 * minutes)
    same = {key: row[key] for key in ("network", "devices", "run")}
    return {**same, "minutes": minutes, "overhead_percent": 100 * share, "is_run": False}


def compare(rows: Sequence[Row]) -> list[Compared]:
    """Compare the overhead of choosing with what the paper says."""
    lines = []
    for statement in published().about("bandwidth"):
        if statement.name == "intervals":
            continue  # part of the set-up
        least, most = _minutes(statement)
        here = [row for row in rows if row["network"] in statement.models and least <= row["minutes"] <= most]
        values = [Found(row["overhead_percent"], row["run"]) for row in here]
        computed = "" if any(row["is_run"] for row in here) else ", computed from shorter intervals"
        devices_text = ", ".join(dict.fromkeys(device_count(row["devices"]) for row in here))
        what = f"{', '.join(statement.models)}, {devices_text}: {statement.what}{computed}"
        lines.append(against(statement, values, what=what, above=_LONGER, better="less"))
    return lines


def _minutes(statement: Statement) -> tuple[int, int]:
    return {"overhead-1-min": (1, 1), "overhead-10-min": (10, 60)}.get(statement.name, (60, 60))


BANDWIDTH = Experiment(
    "bandwidth",
    "Cost of choosing new plans when bandwidth changes (Fig. 14)",
    _cells,
    (
        "network", "devices", "minutes", "is_run", "epochs", "training_s", "first_planning_s", "searches", "replans",
        "planning_s", "overhead_percent", "run",
    ),
    compare,
    partial(plot_if_possible, "bandwidth"),
    rows=_rows,
    notes="Links cycle through 4g, 4g+ and wifi; `minutes` is the time between changes. first_planning_s are the CPU "
    "seconds of planning before the training; planning_s those of all later searches, which run in the background: no "
    "round waits for them. The overhead is planning_s over training_s. Intervals that were not run use the duration of "
    "a search in the longest run.",
)  # fmt: skip
