"""Training time and idle time per epoch with fl, sfl and pipar (Fig. 4 to 7).

The same cells serve both tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pipar.planner.search_settings import TIE
from reproduction.experiment import Cell, Compared, Experiment, Found, Outcome, Row
from reproduction.plots import plot_if_possible
from reproduction.published import Statement, published
from reproduction.reasons import (
    FITS,
    FITTED,
    LESS_FOR_THE_SERVER,
    LINKS_COUNT_LESS,
    LINKS_COUNT_MORE,
    MORE_FOR_THE_SERVER,
    NOT_THE_BEST,
    ROUNDING,
    SERVER_BOUND,
    device_count,
    is_server_bound,
    named,
    why_idle,
    why_less,
    why_more,
    why_uncut,
    why_whole,
)
from reproduction.tables import NEAR, against, runs
from reproduction.testbed import CALIBRATION, DEVICES, LARGE, SMALL, Trial, is_fitted_to, trainings

METHODS = ("fl", "sfl", "pipar")
#: The paper's number of devices, and smaller ones for which a server of eight cores is hardly a bottleneck.
DEVICE_COUNTS = (DEVICES, 10, 1)

WHERE = ("network", "data", "link", "devices")


def timed(trial: Trial, **labels: Any) -> Cell:
    """Return the cell of one training that is run for its times."""
    link = labels.pop("link", trial.link)
    where = {"network": trial.model, "data": trial.dataset, "link": link, "devices": trial.devices}
    return Cell("timing", trial.tree(), labels={**where, **labels, "method": trial.method})


def by_all_methods(trials: Iterable[Trial], **labels: Any) -> list[Cell]:
    """Return the cells of trainings with each of the three methods."""
    return [timed(replace(trial, method=method), **labels) for trial in trials for method in METHODS]


def _paper_cells(models: tuple[str, ...], quick: bool) -> list[Cell]:
    where = list(trainings(models, quick=quick))
    return by_all_methods(Trial(*of, devices=count) for count in DEVICE_COUNTS for of in where)


def side_by_side(
    outcomes: Sequence[Outcome], keys: Sequence[str] = WHERE, values: Mapping[str, str] | None = None
) -> list[Row]:
    """Return a row for each training with the values of all methods side by side: `fl_s`, `sfl_s`, `pipar_s`.

    A method that does not fit into the devices' memory has no value.
    """
    names = values or {"s": "seconds"}
    return beside([outcome.row for outcome in outcomes], keys, names)


def beside(rows: Iterable[Row], keys: Sequence[str], names: Mapping[str, str]) -> list[Row]:
    """Return a row for each training from one row per method."""
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), {})[row["method"]] = row
    return [_row(dict(zip(keys, where, strict=True)), of, names) for where, of in groups.items()]


def _row(where: Row, of: Mapping[str, Row], names: Mapping[str, str]) -> Row:
    row = dict(where)
    for short, name in names.items():
        row |= {f"{method}_{short}": result.get(name) for method, result in of.items()}
    row |= {f"{method}_plan": result.get("plan") for method, result in of.items() if method != "fl"}
    pipar = of.get("pipar", {})
    row["bottleneck"] = bottleneck(pipar)
    row["server_busy"] = (pipar.get("utilisation") or {}).get("server")
    row["is_whole"] = pipar.get("is_whole", False)
    row["run"] = " ".join(result["run"] for result in of.values())
    return row


def bottleneck(result: Mapping[str, Any]) -> str:
    """Return the lane that is busy for the largest share of an epoch."""
    busy: Mapping[str, float] = result.get("utilisation") or {"nothing": 0.0}
    return max(busy, key=lambda lane: busy[lane])


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


def ratios(rows: Iterable[Row], over: str, under: str = "pipar", value: str = "s") -> list[Found]:
    """Return one method's value over another's, of every row that has both."""
    found = ((ratio(row, over, under, value), row["run"]) for row in rows)
    return [Found(each, run) for each, run in found if each is not None]


def over_others(rows: Iterable[Row]) -> list[Found]:
    """Return the epochs of fl and of sfl divided by those of pipar."""
    return [each for row in rows for other in ("fl", "sfl") for each in ratios([row], other)]


def compare_times(rows: Sequence[Row]) -> list[Compared]:
    """Compare printed seconds and statements about the methods with ours, for each number of devices."""
    lines = []
    for devices, here in by_device_count(rows).items():
        for statement in published().about("time"):
            lines += _of_statement(statement, about(statement, here), devices)
        lines += never_slower(here)
        lines += [_seconds(row) for row in here if row["paper_s"] is not None]
    return lines


def by_device_count(rows: Iterable[Row]) -> dict[int, list[Row]]:
    """Return the rows for each number of devices."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row["devices"], []).append(row)
    return found


def compare_methods(rows: Sequence[Row]) -> list[Compared]:
    """Compare the methods where the paper has no numbers: pipar is never slower, and ties are explained."""
    return [line for here in by_device_count(rows).values() for line in never_slower(here)]


def never_slower(rows: Sequence[Row]) -> list[Compared]:
    """Count and name the cases in which another method takes no longer than pipar, within the planner's tolerance."""
    devices_text = device_count(rows[0]["devices"])
    ties = [row for row in rows if any(abs(each.value - 1) <= TIE for each in over_others([row]))]
    slower = [row for row in rows if any(each.value < 1 - TIE for each in over_others([row]))]
    whole, cut = [row for row in ties if row["is_whole"]], [row for row in ties if not row["is_whole"]]
    place, as_long = "V-B1, Fig. 4 and 5", f"{devices_text}: cases in which fl or sfl takes as long as pipar"
    return [
        counted(place, f"{as_long}, which has chosen P = Q", _apart(whole, _is_beaten), _why_whole),
        counted(
            place, f"{as_long}, which has cut the network", _apart(cut, lambda row: is_server_bound([row])), why_uncut
        ),
        counted(
            place, f"{devices_text}: cases in which pipar takes longer than fl or sfl", [slower], lambda _: NOT_THE_BEST
        ),
    ]


def _apart(rows: Sequence[Row], differs: Callable[[Row], bool]) -> list[list[Row]]:
    """Return the rows in two groups that have different reasons."""
    return [[row for row in rows if differs(row) == wanted] for wanted in (True, False)]


def counted(place: str, what: str, groups: Sequence[Sequence[Row]], why: Callable[[Sequence[Row]], str]) -> Compared:
    """Return the number of rows that should not exist, with their names and the reason of each group."""
    rows = [row for group in groups for row in group]
    above = "; ".join(f"{named(group)}: {why(group)}" for group in groups if group) or why([])
    folders = runs(Found(0.0, row["run"]) for row in rows) or "all of table.md"
    return Compared(place, what, "0", float(len(rows)), high=0.0, above=above, run=folders)


def _is_beaten(row: Row) -> bool:
    return _least([row]) < 1 - ROUNDING


def _why_whole(rows: Sequence[Row]) -> str:
    return why_whole(_least(rows))


def _least(rows: Sequence[Row]) -> float:
    """Return the shortest epoch of another method that ties with pipar's, over pipar's."""
    return min((each.value for each in over_others(rows) if each.value >= 1 - TIE), default=1.0)


def _of_statement(statement: Statement, rows: Sequence[Row], devices: int) -> list[Compared]:
    if not rows:
        return []
    what = f"{', '.join(dict.fromkeys(row['network'] for row in rows))}, {device_count(devices)}: {statement.what}"
    if statement.name == "no-fl-large":
        fits = [row for row in rows if row.get("fl_s") is not None]
        return [counted(statement.place, what, [fits], lambda _: FITS)]
    if statement.name.startswith("spread"):
        found = _spreads(statement, rows)
        return [against(statement, found, what=what, below=LINKS_COUNT_LESS, above=LINKS_COUNT_MORE)]
    if statement.method is not None and statement.against is not None:
        values = ratios(rows, statement.against, statement.method)
        below, is_fitted = why_less(statement, rows), _is_fitted(statement, devices)
        return (
            [against(statement, values, what=what, below=below, above=why_more(rows), is_fitted=is_fitted)]
            if values
            else []
        )
    # "In all cases": a plan that is federated learning ties with it.
    what = f"{what}, or as fast (ties are counted below)"
    return [against(statement, over_others(rows), what=what, within=TIE, below=NOT_THE_BEST)]


def _is_fitted(statement: Statement, devices: int) -> bool:
    """Return whether the testbed was fitted to epochs of fl that follow from this range."""
    return is_fitted_to(statement.models, devices) and (statement.method, statement.against) == ("pipar", "fl")


def _spreads(statement: Statement, rows: Sequence[Row]) -> list[Found]:
    """Return, in percent for each dataset, how much shorter an epoch is on the fastest link than on the slowest."""
    found = []
    for data in dict.fromkeys(row["data"] for row in rows):
        own = [row for row in rows if row["data"] == data and row[f"{statement.method}_s"] is not None]
        ends = sorted((row[f"{statement.method}_s"], row["run"]) for row in own)
        if ends:
            (least, quickest), (most, slowest) = ends[0], ends[-1]
            found.append(Found(100 * (1 - least / most), f"{slowest} {quickest}"))
    return found


def _seconds(row: Row) -> Compared:
    printed = published().selection(row["network"], row["data"], row["link"])
    assert printed is not None
    return Compared(
        place=printed.place,
        what=f"{row['network']}, {row['data']}, {row['link']}, {device_count(row['devices'])}: epoch with pipar",
        paper=f"{printed.epoch_s:g} s",
        ours=row["pipar_s"],
        low=printed.epoch_s,
        high=printed.epoch_s,
        unit="s",
        within=NEAR,
        below=FITTED,
        above=SERVER_BOUND if is_server_bound([row]) else FITTED,
        run=row["run"].split()[-1],  # of pipar
        is_fitted=is_fitted_to([row["network"]], row["devices"]),
    )


_TIME_COLUMNS = (
    *WHERE, "fl_s", "sfl_s", "pipar_s", "paper_s", "fl/pipar", "sfl/pipar", "sfl_plan", "pipar_plan", "bottleneck",
    "run",
)  # fmt: skip
TIME_NOTES = (
    "Seconds of an epoch with each method: sfl with its best split point, pipar with the plan that its planner "
    "chooses; paper_s is what the paper prints for pipar. A method without seconds does not fit into a board's memory. "
    "`run` names the cells of fl, sfl and pipar, in this order."
)


plot_times = partial(plot_if_possible, "time")


def _timing(name: str, title: str, cells: Callable[[bool], list[Cell]]) -> Experiment:
    notes = f"{TIME_NOTES} {CALIBRATION}"
    return Experiment(name, title, cells, _TIME_COLUMNS, compare_times, plot_times, rows=time_rows, notes=notes)


TIME_SMALL = _timing("time-small", "Training time per epoch, small networks (Fig. 4)", partial(_paper_cells, SMALL))
TIME_LARGE = _timing("time-large", "Training time per epoch, large networks (Fig. 5)", partial(_paper_cells, LARGE))


# --- idle time


def _idle_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    values = {"s": "seconds", "server_idle": "server_idle_s", "device_idle": "device_idle_s"}
    return side_by_side(outcomes, values=values)


def compare_idle(rows: Sequence[Row]) -> list[Compared]:
    """Compare how much shorter idle times are with what the paper says, for each number of devices."""
    lines = []
    for devices, here in by_device_count(rows).items():
        for statement in published().about("idle"):
            concerned, value = about(statement, here), "_".join(statement.name.split("-")[:2])
            values = ratios(concerned, str(statement.against), value=value)
            what = f"{device_count(devices)}: {statement.what}, at most"
            less, more = why_idle(value, concerned)
            lines += [against(statement, values, what=what, below=less, above=more)] if values else []
        lines.append(_never_more("server", ("fl", "sfl"), here, _why_the_server_idles))
        lines.append(_never_more("device", ("sfl",), here, lambda _: MORE_FOR_THE_SERVER))
    return lines


def _never_more(lane: str, others: Sequence[str], rows: Sequence[Row], why: Callable[[Sequence[Row]], str]) -> Compared:
    """Count and name the rows in which the server, or the devices, are idle longer with pipar than with others."""
    worse = [row for row in rows if any(_idles_less_by(row, lane, other) for other in others)]
    devices_text = device_count(rows[0]["devices"])
    what = f"{devices_text}: cases in which the {lane} is idle longer with pipar than with {' or '.join(others)}"
    return counted("V-B2, Fig. 6 and 7", what, [worse], why)


def _why_the_server_idles(rows: Sequence[Row]) -> str:
    is_quickest = all(row["pipar_s"] < row["sfl_s"] * (1 - ROUNDING) for row in rows)
    return LESS_FOR_THE_SERVER if is_quickest else NOT_THE_BEST


def _idles_less_by(row: Row, lane: str, other: str) -> bool:
    less, ours = row.get(f"{other}_{lane}_idle"), row[f"pipar_{lane}_idle"]
    return less is not None and ours is not None and bool(ours > less * (1 + ROUNDING))


_IDLE_COLUMNS = (
    *WHERE, "fl_server_idle", "sfl_server_idle", "pipar_server_idle",
    "fl_device_idle", "sfl_device_idle", "pipar_device_idle", "sfl_plan", "pipar_plan", "run",
)  # fmt: skip
_IDLE_NOTES = (
    "Seconds of an epoch in which the server (the mean of its cores) and the devices (the mean of all) compute "
    "nothing. The epochs are those of the tables of times. Micro-batches add calls on the server and keep it busier: "
    "part of its shorter idle time is work that the other methods do not have. `run` names the cells of fl, sfl and "
    "pipar, in this order."
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
