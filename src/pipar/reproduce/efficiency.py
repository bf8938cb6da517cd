"""Seconds and idle time of an epoch by fl, sfl and pipar: the paper's figures of both, and the same beyond it.

The same cells serve several tables: an epoch that was run for its time is read for its idle time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pipar.planner.select import TIE
from pipar.reproduce.experiment import Cell, Compared, Experiment, Outcome, Row
from pipar.reproduce.plots import plot_if_possible
from pipar.reproduce.published import Statement, published
from pipar.reproduce.tables import against
from pipar.reproduce.testbed import DEVICES, LARGE, SMALL, Trial, trainings

METHODS = ("fl", "sfl", "pipar")
#: The paper's number of devices, and with how many a server of eight cores hardly matters.
DEVICE_COUNTS = (DEVICES, 10, 1)
#: A printed time is met if ours is off by no more than this.
NEAR = 0.25
#: Two simulations of the same plan may differ in their last digits.
_ROUNDING = 1e-6

WHERE = ("network", "data", "link", "devices")
_SERVER_BOUND = "the server's cores are the bottleneck: the paper's rows imply faster ones, see `testbed`"
_QUICKER = "quicker here: the paper's iterations hold time that neither its links nor its machines explain"
_MORE = "pipar gains more here than in the paper"


def who(devices: int) -> str:
    """Return how many devices there are, in words."""
    return "one device" if devices == 1 else f"{devices} devices"


def timed(trial: Trial, **labels: Any) -> Cell:
    """Return the cell of one training that is run for its times."""
    link = labels.pop("link", trial.link)
    where = {"network": trial.model, "data": trial.dataset, "link": link, "devices": trial.devices}
    return Cell("timing", trial.tree(), labels={**where, **labels, "method": trial.method})


def by_all_methods(trials: Iterable[Trial], **labels: Any) -> list[Cell]:
    """Return the cells of trainings by each of the three methods."""
    return [timed(replace(trial, method=method), **labels) for trial in trials for method in METHODS]


def _paper_cells(models: tuple[str, ...], quick: bool) -> list[Cell]:
    counts = (DEVICES, 1) if quick else DEVICE_COUNTS
    where = list(trainings(models, quick=quick))
    return by_all_methods(Trial(*of, devices=count) for count in counts for of in where)


def side_by_side(
    outcomes: Sequence[Outcome], keys: Sequence[str] = WHERE, values: Mapping[str, str] | None = None
) -> list[Row]:
    """Return a row for each training with the values of all methods beside each other: `fl_s`, `sfl_s`, `pipar_s`.

    A method that does not fit into the devices' memory has none.
    """
    names = values or {"s": "seconds"}
    groups: dict[tuple[Any, ...], dict[str, Outcome]] = {}
    for outcome in outcomes:
        labels = outcome.cell.labels
        groups.setdefault(tuple(labels[key] for key in keys), {})[labels["method"]] = outcome
    return [_row(dict(zip(keys, where, strict=True)), by_method, names) for where, by_method in groups.items()]


def _row(where: Row, by_method: Mapping[str, Outcome], names: Mapping[str, str]) -> Row:
    of = {method: outcome.result for method, outcome in by_method.items()}
    row = dict(where)
    for short, name in names.items():
        row |= {f"{method}_{short}": result.get(name) for method, result in of.items()}
    row |= {f"{method}_plan": result.get("plan") for method, result in of.items() if method != "fl"}
    pipar = of.get("pipar", {})
    busy = pipar.get("utilisation") or {"nothing": 0.0}
    row["bottleneck"] = max(busy, key=lambda lane: busy[lane])
    row["run"] = " ".join(outcome.cell.key for outcome in by_method.values())
    return row


# --- seconds


def time_rows(outcomes: Sequence[Outcome], keys: Sequence[str] = WHERE) -> list[Row]:
    rows = side_by_side(outcomes, keys)
    for row in rows:
        printed = published().selection(row["network"], row["data"], row["link"])
        row["paper_s"] = printed.epoch_s if printed is not None else None
        row |= {f"{method}/pipar": ratio(row, method, "pipar") for method in ("fl", "sfl")}
    return rows


def ratio(row: Row, over: str, under: str, value: str = "s") -> float | None:
    """Return one method's value over another's; None where one of them has none."""
    above, below = row.get(f"{over}_{value}"), row.get(f"{under}_{value}")
    return None if above is None or not below else above / below


def about(statement: Statement, rows: Iterable[Row]) -> list[Row]:
    """Return the rows that a statement of the paper is about."""
    return [
        row
        for row in rows
        if (not statement.models or row["network"] in statement.models)
        and (not statement.datasets or row["data"] in statement.datasets)
        and (not statement.links or row["link"] in statement.links)
    ]


def present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def why(rows: Sequence[Row]) -> str:
    """Return why ours may be other than the paper's, if that is known."""
    return _SERVER_BOUND if any(row["bottleneck"] == "server" for row in rows) else ""


def gained(line: Compared, rows: Sequence[Row]) -> Compared:
    """Return a line about what pipar gains over another method, with why it is not the paper's."""
    return replace(line, why=_MORE if line.verdict == "above" else why(rows))


def compare_times(rows: Sequence[Row]) -> list[Compared]:
    """Hold printed seconds, and what the text says of the methods, against ours: for each number of devices."""
    lines = []
    for devices in dict.fromkeys(row["devices"] for row in rows):
        here = [row for row in rows if row["devices"] == devices]
        for statement in published().about("time"):
            lines += _of_statement(statement, about(statement, here), devices)
        lines += _ties(here, devices)
        lines += [_seconds(row) for row in here if row["paper_s"] is not None]
    return lines


def _ties(rows: Sequence[Row], devices: int) -> list[Compared]:
    """Count the cases in which another method takes as long as pipar, as its planner sees it, and those of less."""
    ratios = present(ratio(row, other, "pipar") for row in rows for other in ("fl", "sfl"))
    place, whose = "V-B1, Fig. 4 and 5", who(devices)
    ties = float(sum(abs(found - 1) <= TIE for found in ratios))
    what = f"{whose}: cases in which fl or sfl takes as long as pipar, which has chosen P = Q or N = 1"
    slower = float(sum(found < 1 - TIE for found in ratios))
    return [
        Compared(place, what, "0", ties, low=0.0, high=0.0, why=why(rows)),
        Compared(place, f"{whose}: cases in which pipar takes longer than fl or sfl", "0", slower, low=0.0, high=0.0),
    ]


def _of_statement(statement: Statement, rows: Sequence[Row], devices: int) -> list[Compared]:
    if not rows:
        return []
    what = f"{', '.join(dict.fromkeys(row['network'] for row in rows))}, {who(devices)}: {statement.what}"
    if statement.name.startswith("spread"):
        return [against(statement, _spreads(statement, rows), what=what)]
    if statement.method is not None and statement.against is not None:
        values = present(ratio(row, statement.against, statement.method) for row in rows)
        return [gained(against(statement, values, what=what), rows)] if values else []
    # "In all cases": a plan that is federated learning is a tie with it.
    values = present(ratio(row, other, "pipar") for row in rows for other in ("fl", "sfl"))
    return [replace(against(statement, values, what=what), within=TIE)]


def _spreads(statement: Statement, rows: Sequence[Row]) -> list[float]:
    """Return, in percent for each dataset, how much shorter an epoch is on the fastest link than on the slowest."""
    found = []
    for data in dict.fromkeys(row["data"] for row in rows):
        seconds = present(row[f"{statement.method}_s"] for row in rows if row["data"] == data)
        found += [100 * (1 - min(seconds) / max(seconds))] if seconds else []
    return found


def _seconds(row: Row) -> Compared:
    printed = published().selection(row["network"], row["data"], row["link"])
    assert printed is not None
    return Compared(
        place=printed.place,
        what=f"{row['network']}, {row['data']}, {row['link']}, {who(row['devices'])}: seconds of an epoch by pipar",
        paper=f"{printed.epoch_s:g} s",
        ours=row["pipar_s"],
        low=printed.epoch_s,
        high=printed.epoch_s,
        unit="s",
        within=NEAR,
        why=why([row]) if row["pipar_s"] is None or row["pipar_s"] > printed.epoch_s else _QUICKER,
    )


_TIME_COLUMNS = (
    *WHERE, "fl_s", "sfl_s", "pipar_s", "paper_s", "fl/pipar", "sfl/pipar", "sfl_plan", "pipar_plan", "bottleneck",
    "run",
)  # fmt: skip
TIME_NOTES = (
    "Seconds of an epoch by each method: sfl with its best split point, pipar with the plan that its planner chooses; "
    "paper_s is what the paper prints of pipar. A method without seconds does not fit into a board's memory. `run` "
    "names the folders of fl, sfl and pipar, in this order."
)


plot_times = partial(plot_if_possible, "time")


def _timing(name: str, title: str, cells: Callable[[bool], list[Cell]]) -> Experiment:
    return Experiment(name, title, cells, _TIME_COLUMNS, compare_times, plot_times, rows=time_rows, notes=TIME_NOTES)


TIME_SMALL = _timing("time-small", "Training time per epoch, small networks (Fig. 4)", partial(_paper_cells, SMALL))
TIME_LARGE = _timing("time-large", "Training time per epoch, large networks (Fig. 5)", partial(_paper_cells, LARGE))


# --- idle time


def _idle_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    values = {"s": "seconds", "server_idle": "server_idle_s", "device_idle": "device_idle_s"}
    return side_by_side(outcomes, values=values)


def compare_idle(rows: Sequence[Row]) -> list[Compared]:
    """Hold how much shorter idle times are against what the text says: for each number of devices."""
    lines = []
    for devices in dict.fromkeys(row["devices"] for row in rows):
        here = [row for row in rows if row["devices"] == devices]
        for statement in published().about("idle"):
            concerned, value = about(statement, here), "_".join(statement.name.split("-")[:2])
            values = present(ratio(row, str(statement.against), "pipar", value) for row in concerned)
            what = f"{who(devices)}: {statement.what}, at most"
            lines += [gained(against(statement, values, what=what), concerned)] if values else []
        lines.append(_never_more(here, devices))
    return lines


def _never_more(rows: Sequence[Row], devices: int) -> Compared:
    """Count the rows in which the server idles longer by pipar than by another method."""
    worse = sum(
        row["pipar_server_idle"] > row[f"{other}_server_idle"] * (1 + _ROUNDING)
        for row in rows
        for other in ("fl", "sfl")
        if row.get(f"{other}_server_idle") is not None and row["pipar_server_idle"] is not None
    )
    what = f"{who(devices)}: cases in which the server idles longer by pipar than by fl or sfl"
    return Compared("V-B2, Fig. 6 and 7", what, "0", float(worse), low=0.0, high=0.0)


_IDLE_COLUMNS = (
    *WHERE, "fl_server_idle", "sfl_server_idle", "pipar_server_idle",
    "fl_device_idle", "sfl_device_idle", "pipar_device_idle", "sfl_plan", "pipar_plan", "run",
)  # fmt: skip
_IDLE_NOTES = (
    "Seconds of an epoch in which the server (the mean of its cores) and the devices (the mean of all) compute "
    "nothing. The epochs are those of the tables of times."
)


def _idling(name: str, title: str, models: tuple[str, ...]) -> Experiment:
    cells = partial(_paper_cells, models)
    return Experiment(
        name,
        title,
        cells,
        _IDLE_COLUMNS,
        compare_idle,
        partial(plot_if_possible, "idle"),
        rows=_idle_rows,
        notes=_IDLE_NOTES,
    )


IDLE_SMALL = _idling("idle-small", "Idle time per epoch, small networks (Fig. 6)", SMALL)
IDLE_LARGE = _idling("idle-large", "Idle time per epoch, large networks (Fig. 7)", LARGE)
