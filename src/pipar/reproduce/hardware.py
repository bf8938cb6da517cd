"""The paper's own plans on the fitted testbed, for 100 devices, 10 and one, and what its rows ask of a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipar.reproduce.efficiency import DEVICE_COUNTS, NEAR, timed, who
from pipar.reproduce.experiment import Cell, Compared, Experiment, Outcome, Row
from pipar.reproduce.published import Selection, published
from pipar.reproduce.testbed import LARGE, SERVER_SPEED, SMALL, Trial, trainings

#: What the paper's server has.
_SERVER_GB = 32.0


def _cells(quick: bool) -> list[Cell]:
    counts = (DEVICE_COUNTS[0], DEVICE_COUNTS[-1]) if quick else DEVICE_COUNTS
    return [
        timed(Trial(*of, devices=count, plan=(row.split_point, row.micro_batches)))
        for of in trainings((*SMALL, *LARGE), quick=quick)
        if (row := published().selection(*of)) is not None
        for count in counts
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

    `server_speed` is how many times as fast as the named machine a server must be to do its part of the printed epoch
    at all, with all of its cores busy all the time.
    """
    row: Row = {"plan": f"P={printed.split_point} N={printed.micro_batches}", "paper_s": printed.epoch_s}
    for count, outcome in by_count.items():
        row[f"{count}_s"] = outcome.result.get("seconds")
    most = by_count.get(DEVICE_COUNTS[0])
    if most is not None and most.result["fits"]:
        busy_s = most.result["utilisation"]["server"] * most.result["seconds"] * SERVER_SPEED
        row["server_speed"] = busy_s / printed.epoch_s
        row["server_GB"] = most.result["server_bytes"] / 1e9
    row["run"] = " ".join(outcome.cell.key for outcome in by_count.values())
    return row


def _compare(rows: Sequence[Row]) -> list[Compared]:
    lines = []
    for row in rows:
        of = published().selection(row["network"], row["data"], row["link"])
        assert of is not None
        for count in DEVICE_COUNTS:
            if row.get(f"{count}_s") is not None:
                what = f"{row['network']}, {row['data']}, {row['link']}, {row['plan']}, {who(count)}: an epoch"
                time = (f"{of.epoch_s:g} s", row[f"{count}_s"], of.epoch_s, of.epoch_s, "s")
                lines.append(Compared(of.place, what, *time, within=NEAR))
    needed = [row["server_speed"] for row in rows if row.get("server_speed") is not None]
    memory = [row["server_GB"] for row in rows if row.get("server_GB") is not None]
    if needed:
        what = "how fast the server must at least be, over the named one, by its printed epochs; by row"
        speed = {"low": SERVER_SPEED, "high": SERVER_SPEED, "unit": "x", "most": max(needed)}
        why = "one server cannot have all of these speeds: the paper's rows contradict each other, or 100 devices"
        lines.append(Compared("V-D, Tables VII and VIII", what, "one machine", min(needed), **speed, why=why))
        what = "models of 100 devices on the server, the largest network: weights, gradients and momentum of replicas"
        why = "the paper's server cannot have held them"
        lines.append(Compared("V-A", what, "32 GB", max(memory), high=_SERVER_GB, unit="GB", why=why))
    return lines


TESTBED = Experiment(
    "testbed",
    "The paper's plans on the fitted testbed",
    _cells,
    ("network", "data", "link", "plan", "paper_s", "100_s", "10_s", "1_s", "server_speed", "server_GB", "run"),
    _compare,
    rows=_rows,
    notes="Seconds of an epoch by the plan that the paper chose, with 100 devices, 10 and one, beside those that it "
    "prints. server_speed is how many times as fast as the named machine the server must be to do its part for 100 "
    "devices in the printed time at all; the fit has one speed for all rows. server_GB is what the models of 100 "
    "devices take there.",
)
