"""Why our results differ from the paper's, in words, from the bottleneck and the plans of the rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from pipar.planner.search_settings import TIE
from reproduction.experiment import Row
from reproduction.published import Statement, published

_N = re.compile(r"\bN=(\d+)")
#: Two simulations of the same plan may differ in their last digits.
ROUNDING = 1e-6
#: Other columns that identify a row, in addition to link and number of devices.
_NAMED_BY = ("network", "data", "batch_size", "boards", "wire", "board", "server_speed", "mechanism")
SERVER_BOUND = "the server's cores are the bottleneck: the paper's rows imply faster ones, see `testbed`"
FITTED = (
    "boards and server have one speed each, fitted to VGG-5 with an error of a third; the paper's rows imply others"
)
FITS = (
    "by its profile, weights, gradients, momentum and activations of a batch need less than the 800 MiB that a board "
    "has for them; the paper does not print what its software needs in addition"
)
NOT_THE_BEST = "the planner missed the best plan there"
MORE_FOR_THE_SERVER = (
    "the planner minimises the epoch, not the devices' idle time: with an earlier split point devices compute less and "
    "wait longer for their links, but the epoch is shorter"
)
LESS_FOR_THE_SERVER = (
    "the planner minimises the epoch, not the server's idle time: a later split point saves a busy server more time "
    "than it saves the epoch"
)
_WAITING_FOR_LINKS = "with both methods devices wait for their links, not for the server"
_BUSY_DEVICES = "where the devices are the bottleneck, they are hardly ever idle with pipar"
LINKS_COUNT_MORE = (
    "links take a larger share of an epoch here: a model's bytes over the stated rates, whatever the machines"
)
LINKS_COUNT_LESS = "links take a smaller share of an epoch here: machines take a larger one than in the paper"


def device_count(devices: int) -> str:
    """Return "one device" or "N devices"."""
    return "one device" if devices == 1 else f"{devices} devices"


def is_server_bound(rows: Iterable[Row]) -> bool:
    """Return whether the server is the bottleneck in one of these rows."""
    return any(row["bottleneck"] == "server" for row in rows)


def named(rows: Iterable[Row]) -> str:
    """Return the names of rows: "resnet18 cifar10 (4g, wifi)"."""
    links: dict[str, list[str]] = {}
    for row in rows:
        links.setdefault(" ".join(str(row[key]) for key in _NAMED_BY if key in row), []).append(row["link"])
    return ", ".join(f"{training} ({', '.join(of)})" for training, of in links.items())


def why_less(statement: Statement, rows: Sequence[Row]) -> str:
    """Return why pipar gains less over another method here than the paper says."""
    if is_server_bound(rows):
        return SERVER_BOUND
    printed = [row["paper_s"] for row in rows if row.get("paper_s") is not None and row.get("fl_s") is not None]
    if (statement.method, statement.against) == ("pipar", "fl") and statement.low is not None and printed:
        implied, ours = statement.low * max(printed), max(row["fl_s"] for row in rows if row.get("fl_s") is not None)
        return (
            f"the paper's range and its printed seconds imply that an epoch of fl takes at least {implied:.0f} s; here "
            f"it takes at most {ours:.0f} s, because boards have the speed fitted to VGG-5 for every network"
        )
    if statement.against == "fl":
        return "the paper's ratios imply slower boards with whole networks; here they have the speed fitted to VGG-5"
    return (
        f"compared with {statement.method}, {statement.against} is faster here than in the paper: it has the best plan"
    )


def why_whole(least: float) -> str:
    """Return why having the whole network on the device is a tie; `least` is another method's epoch over pipar's."""
    why = "with these boards and links splitting does not pay: the best plan is federated learning itself"
    if least >= 1 - ROUNDING:
        return why
    return (
        f"{why}, judged by the first iterations, by which plans are compared; over a whole epoch sfl takes up to "
        f"{100 * (1 - least):.2g} % less, and up to {100 * TIE:g} % is a tie"
    )


def why_uncut(rows: Sequence[Row]) -> str:
    """Return why pipar is only as fast as sfl."""
    is_same = all(row["pipar_plan"] == row.get("sfl_plan") for row in rows)
    planned = "the planner chooses N = 1, which is sfl" if is_same else f"its plans gain no more than {100 * TIE:g} %"
    if not all(row["bottleneck"] == "server" for row in rows):
        return f"micro-batches would cost more in calls than they gain by overlapping, and {planned}"
    busy = _busy(rows)
    full = f" (its cores are busy for {busy} of the epoch, including the exchange of models)" if busy else ""
    return f"the server is the bottleneck{full}: micro-batches would only add calls there, and {planned}"


def why_idle(value: str, rows: Sequence[Row]) -> tuple[str, str]:
    """Return why idle times of devices or server would differ less than in the paper, and why more."""
    if value == "device_idle":
        less, more = _WAITING_FOR_LINKS, _BUSY_DEVICES
    else:
        less = f"the server is idle when it has no work, and with pipar it is busy for {_busy(rows)} of the epoch"
        more = why_more(rows)
    return SERVER_BOUND if is_server_bound(rows) else less, more


def why_more(rows: Sequence[Row]) -> str:
    """Return why pipar gains more over another method here than the paper says."""
    pairs = list(_numbers(rows))
    larger, smaller = sum(ours > theirs for ours, theirs in pairs), sum(ours < theirs for ours, theirs in pairs)
    beside = (
        f"; N is larger than the paper's in {larger} and smaller in {smaller} of {len(pairs)} cases" if pairs else ""
    )
    return f"pipar gains more here: plans are simulated for the whole fleet{beside}"


def _numbers(rows: Iterable[Row]) -> Iterator[tuple[int, int]]:
    """Yield our N and the paper's where all devices have the same plan and the paper prints one."""
    for row in rows:
        printed = published().selection(row["network"], row["data"], row["link"])
        found = _N.findall(str(row.get("pipar_plan")))
        if printed is not None and len(found) == 1:
            yield int(found[0]), printed.micro_batches


def _busy(rows: Iterable[Row]) -> str:
    """Return the share of the epoch for which the server is busy in these rows, as text."""
    busy = sorted(100 * row["server_busy"] for row in rows if row.get("server_busy") is not None)
    shares = " to ".join(dict.fromkeys(f"{share:.0f}" for share in (*busy[:1], *busy[-1:])))
    return f"{shares} %" if busy else ""
