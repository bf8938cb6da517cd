"""Why ours is not what the paper says, in words: from what rows tell of the bottleneck and of the plans."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from pipar.planner.search_settings import TIE
from reproduction.experiment import Row
from reproduction.published import Statement, published

_N = re.compile(r"\bN=(\d+)")
#: Two simulations of the same plan may differ in their last digits.
ROUNDING = 1e-6
#: What else rows of one link and one number of devices are told apart by.
_NAMED_BY = ("network", "data", "batch_size", "boards", "wire", "board", "server_speed", "mechanism")
SERVER_BOUND = "the server's cores are the bottleneck: the paper's rows imply faster ones, see `testbed`"
FITTED = (
    "boards and server have one speed each, fitted to VGG-5 and off by a third there; the paper's rows imply others"
)
FITS = (
    "weights, gradients, momentum and activations of a batch, as its profile counts them, are less than the 800 MiB "
    "that a board has for them; what the paper's software takes beside them is not printed"
)
NOT_THE_BEST = "the planner has missed the best plan there"
MORE_FOR_THE_SERVER = (
    "the planner minimises the epoch, not the devices' idle time: by a cut that leaves them less of the network they "
    "wait longer for their links, in a shorter epoch"
)
LESS_FOR_THE_SERVER = (
    "the planner minimises the epoch, not the server's idle time: by a later cut a full server is spared more work "
    "than the epoch gets shorter"
)
_WAITING_FOR_LINKS = "devices wait for their links, by both methods, and not for the server"
_BUSY_DEVICES = "where the devices are the bottleneck they hardly idle at all by pipar"
LINKS_COUNT_MORE = "links take more of an epoch here: a model's bytes over the stated rates, whatever the machines"
LINKS_COUNT_LESS = "links take less of an epoch here: machines take more of it than in the paper"


def who(devices: int) -> str:
    """Return how many devices there are, in words."""
    return "one device" if devices == 1 else f"{devices} devices"


def is_server_bound(rows: Iterable[Row]) -> bool:
    """Return whether in one of these rows nothing is as busy as the server."""
    return any(row["bottleneck"] == "server" for row in rows)


def named(rows: Iterable[Row]) -> str:
    """Return which rows these are, in words: "resnet18 cifar10 (4g, wifi)"."""
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
            f"by the paper's range and its printed seconds an epoch of fl takes {implied:.0f} s or more, here at most "
            f"{ours:.0f}: boards are as fast for every network as they are for VGG-5"
        )
    if statement.against == "fl":
        return "by the paper's ratios its boards take longer for whole networks: here they are as fast as for VGG-5"
    return (
        f"{statement.against} is quicker beside {statement.method} here than in the paper: it has the best of all plans"
    )


def why_whole(least: float) -> str:
    """Return why the whole network on the device is a tie; `least` is another method's epoch over pipar's."""
    why = "with these boards and links no cut pays, the best plan is federated learning itself"
    if least >= 1 - ROUNDING:
        return why
    return (
        f"{why}, as far as the first iterations tell, by which plans are compared; over a whole epoch sfl takes up to "
        f"{100 * (1 - least):.2g} % less, and {100 * TIE:g} % is a tie"
    )


def why_uncut(rows: Sequence[Row]) -> str:
    """Return why pipar is as quick as sfl, and no quicker."""
    is_same = all(row["pipar_plan"] == row.get("sfl_plan") for row in rows)
    planned = "the planner chooses N = 1, which is sfl" if is_same else f"its plans gain no more than {100 * TIE:g} %"
    if not all(row["bottleneck"] == "server" for row in rows):
        return f"micro-batches would add more in calls than overlaps, and {planned}"
    busy = _busy(rows)
    full = f" (its cores are busy for {busy} of the epoch, the exchange of models included)" if busy else ""
    return f"the server is the bottleneck{full}: micro-batches would only add calls there, and {planned}"


def why_idle(value: str, rows: Sequence[Row]) -> tuple[str, str]:
    """Return why idle times of the devices or of the server would differ less than in the paper, and why more."""
    if value == "device_idle":
        less, more = _WAITING_FOR_LINKS, _BUSY_DEVICES
    else:
        less = f"the server idles when it has no work, and by pipar it is busy for {_busy(rows)} of the epoch"
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
    """Yield our N and the paper's, where all devices have one plan and the paper has printed its own."""
    for row in rows:
        printed = published().selection(row["network"], row["data"], row["link"])
        found = _N.findall(str(row.get("pipar_plan")))
        if printed is not None and len(found) == 1:
            yield int(found[0]), printed.micro_batches


def _busy(rows: Iterable[Row]) -> str:
    """Return for which share of the epoch the server is busy in these rows, in words."""
    busy = sorted(100 * row["server_busy"] for row in rows if row.get("server_busy") is not None)
    shares = " to ".join(dict.fromkeys(f"{share:.0f}" for share in (*busy[:1], *busy[-1:])))
    return f"{shares} %" if busy else ""
