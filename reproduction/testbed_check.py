"""The paper's own plans on the fitted testbed with 100, 10 and one device, and the server speed that they imply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reproduction.efficiency import DEVICE_COUNTS, bottleneck, timed
from reproduction.experiment import Cell, Compared, Experiment, Outcome, Row
from reproduction.published import Selection, published
from reproduction.reasons import FITTED, SERVER_BOUND, device_count
from reproduction.tables import NEAR
from reproduction.testbed import CALIBRATION, LARGE, SERVER_SPEED, SMALL, Trial, is_fitted_to, trainings

#: Memory of the paper's server.
_SERVER_GB = 32.0
_CONTRADICTION = (
    "one server cannot have all of these speeds: the paper's rows contradict each other, or its 100 devices"
)


def _cells(quick: bool) -> list[Cell]:
    return [
        timed(Trial(*of, devices=count, plan=(row.split_point, row.micro_batches)))
        for of in trainings((*SMALL, *LARGE), quick=quick)
        if (row := published().selection(*of)) is not None
        for count in DEVICE_COUNTS
    ]


def _rows(outcomes: Sequence[Outcome]) -> list[Row]:
    groups: dict[tuple[Any, ...], dict[int, Outcome]] = {}
    for outcome in outcomes:
        labels = outcome.cell.labels
        of = (labels["network"], labels["data"], labels["link"])
        groups.setdefault(of, {})[labels["devices"]] = outcome
    rows = []
    for of, by_count in groups.items():
        printed = published().selection(*of)
        assert printed is not None
        rows.append({**dict(zip(("network", "data", "link"), of, strict=True)), **_row(printed, by_count)})
    return rows


def _row(printed: Selection, by_count: dict[int, Outcome]) -> Row:
    """Return one training: seconds for each number of devices, and what 100 of them need on the server.

    `server_speed` is the minimum speed, relative to the named machine, at which the server can do its part of the
    printed epoch, with all of its cores always busy.
    """
    row: Row = {"plan": f"P={printed.split_point} N={printed.micro_batches}", "paper_s": printed.epoch_s}
    for count, outcome in by_count.items():
        row[f"{count}_s"] = outcome.result.get("seconds")
        row[f"{count}_run"] = outcome.cell.hash
        row[f"{count}_bottleneck"] = bottleneck(outcome.result)
    most = by_count.get(DEVICE_COUNTS[0])
    if most is not None and most.result["fits"]:
        busy_s = most.result["utilisation"]["server"] * most.result["seconds"] * SERVER_SPEED
        row["server_speed"] = busy_s / printed.epoch_s
        row["server_GB"] = most.result["server_bytes"] / 1e9
    row["run"] = " ".join(outcome.cell.hash for outcome in by_count.values())
    return row


def _compare(rows: Sequence[Row]) -> list[Compared]:
    lines = []
    for row in rows:
        lines += [_seconds(row, count) for count in DEVICE_COUNTS if row.get(f"{count}_s") is not None]
    asked = [row for row in rows if row.get("server_speed") is not None]
    return [*lines, _server_speed(asked), _server_memory(asked)] if asked else lines


def _seconds(row: Row, count: int) -> Compared:
    of = published().selection(row["network"], row["data"], row["link"])
    assert of is not None
    return Compared(
        place=of.place,
        what=f"{row['network']}, {row['data']}, {row['link']}, {row['plan']}, {device_count(count)}: epoch with pipar",
        paper=f"{of.epoch_s:g} s",
        ours=row[f"{count}_s"],
        low=of.epoch_s,
        high=of.epoch_s,
        unit="s",
        within=NEAR,
        below=FITTED,
        above=SERVER_BOUND if row[f"{count}_bottleneck"] == "server" else FITTED,
        run=row[f"{count}_run"],
        is_fitted=is_fitted_to([row["network"]], count),
    )


def _server_speed(rows: Sequence[Row]) -> Compared:
    """Compare the server speeds that the paper's rows imply with the fitted one."""
    least, most = min(rows, key=_speed), max(rows, key=_speed)
    return Compared(
        place="V-D, Tables VII and VIII",
        what="minimum speed of the server that the printed epochs of pipar imply, relative to the named one, by row",
        paper="one machine",
        ours=least["server_speed"],
        low=SERVER_SPEED,
        high=SERVER_SPEED,
        unit="x",
        most=most["server_speed"],
        below=_CONTRADICTION,
        above=_CONTRADICTION,
        run=" ".join(row[f"{DEVICE_COUNTS[0]}_run"] for row in (least, most)),
    )


def _speed(row: Row) -> float:
    return float(row["server_speed"])


def _server_memory(rows: Sequence[Row]) -> Compared:
    largest = max(rows, key=lambda row: float(row["server_GB"]))
    return Compared(
        place="V-A",
        what="models of 100 devices on the server with pipar, for the largest network: weights, gradients and momentum "
        "of replicas",
        paper="32 GB",
        ours=largest["server_GB"],
        high=_SERVER_GB,
        unit="GB",
        above="they do not fit into the paper's server",
        run=largest[f"{DEVICE_COUNTS[0]}_run"],
    )


TESTBED = Experiment(
    "testbed",
    "The paper's plans on the fitted testbed",
    _cells,
    ("network", "data", "link", "plan", "paper_s", "100_s", "10_s", "1_s", "server_speed", "server_GB", "run"),
    _compare,
    rows=_rows,
    notes="Seconds of an epoch with the plan that the paper chose, with 100, 10 and one device, and the printed ones. "
    "server_speed is the minimum speed, relative to the named machine, at which the server can do its part for 100 "
    "devices in the printed time; the fit has one speed for all rows. server_GB is the size of the models of 100 "
    f"devices there. `run` names the cells of 100, 10 and one device, in this order. {CALIBRATION}",
)
