"""From one device to 100,000: time and bytes of an epoch, models on the server, and planning time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product, takewhile

from reproduction.efficiency import METHODS, beside, compare_methods
from reproduction.experiment import UNSAID, Cell, Compared, Experiment, Outcome, Row
from reproduction.plots import plot_if_possible
from reproduction.testbed import Trial

#: Fleets up to this size run the programs; for larger ones a sample of 128 devices is simulated, with its share of the
#: server's cores.
RUN_DEVICES = 1000
COUNTS = (1, 10, 30, 100, 300, 1000, 10_000, 100_000)
#: One server is enough while an epoch takes at most this many times as long as with one device.
_ENOUGH = 1.1
_SERVER_BYTES = 32e9


def _cells(quick: bool) -> list[Cell]:
    counts = (1, 10, 30, 100, 10_000) if quick else COUNTS
    models = ("vgg5",) if quick else ("vgg5", "resnet18")
    return [_cell(*of) for of in product(models, ("4g", "wifi"), counts, METHODS)]


def _cell(model: str, link: str, count: int, method: str) -> Cell:
    # No dataset has 500 samples for each of 100,000 devices.
    trial = Trial(model, "synthetic", link, method=method, devices=count, samples=500)
    is_run = count <= RUN_DEVICES
    where = {"network": model, "link": link, "devices": count, "method": method}
    return Cell("timing" if is_run else "plan", trial.tree(), labels={**where, "is_run": is_run})


def _rows(outcomes: Sequence[Outcome]) -> list[Row]:
    rows = [_row(outcome) for outcome in outcomes if outcome.result["fits"]]
    alone = {_series(row): row["seconds"] for row in rows if row["devices"] == 1}
    for row in rows:
        row["times_one"] = row["seconds"] / alone[_series(row)]
        row["is_enough"] = row["times_one"] <= _ENOUGH and row["server_bytes"] <= _SERVER_BYTES
    return rows


def _series(row: Row) -> tuple[str, str, str]:
    return row["network"], row["link"], row["method"]


def _row(outcome: Outcome) -> Row:
    row = outcome.row
    sizes = {f"{name}_GB": row[f"bytes_{name}"] / 1e9 for name in ("up", "down")}
    rate = 8 * sum(sizes.values()) / row["seconds"]
    return {**row, **sizes, "server_GB": row["server_bytes"] / 1e9, "server_Gbit/s": rate}


def _compare(rows: Sequence[Row]) -> list[Compared]:
    """Compare the methods for every number of devices, and find for how many one server is enough."""
    lines = compare_methods(beside(rows, ("network", "link", "devices"), {"s": "seconds"}))
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(_series(row), []).append(row)
    return [*lines, *(_enough(*of, sorted(group, key=lambda row: row["devices"])) for of, group in groups.items())]


def _enough(network: str, link: str, method: str, rows: Sequence[Row]) -> Compared:
    """Return the largest number of devices, of those that were tried, for which one server is enough."""
    up_to = list(takewhile(lambda row: row["is_enough"], rows))
    too_many = rows[len(up_to)]["devices"] if len(up_to) < len(rows) else None
    more = f"; it is not enough for {too_many:,}" if too_many is not None else ""
    return Compared(
        place="-",
        what=f"{network}, {link}: number of devices for which one server is enough with {method}{more}",
        paper=UNSAID,
        ours=float(up_to[-1]["devices"]) if up_to else None,
        unit="devices",
        run=" ".join(row["run"] for row in rows[: len(up_to) + 1][-2:]),
    )


SCALE = Experiment(
    "scale",
    "From one device to 100,000",
    _cells,
    (
        "network", "link", "devices", "method", "is_run", "plan", "seconds", "times_one", "up_GB", "down_GB",
        "server_Gbit/s", "server_GB", "planning_s", "is_enough", "run",
    ),
    _compare,
    partial(plot_if_possible, "scale"),
    rows=_rows,
    notes="500 samples of 3x32x32 per device. Up to 1,000 devices the programs are run; beyond that a sample of the "
    "fleet is simulated. server_GB is the size of the models on the server, planning_s CPU seconds; server_Gbit/s is "
    "the average traffic of the server, which is not limited here. One server is enough while an "
    "epoch lasts at most 1.1 times as long as with one device (times one), and its 32 GB hold the models; beyond "
    "that the planner leaves more and more layers to the devices, up to federated learning (P = Q).",
)  # fmt: skip
