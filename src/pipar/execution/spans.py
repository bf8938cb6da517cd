"""Spans in; busy, waiting and idle time, utilisation and Chrome trace events out.

A lane runs one thing at a time: a device's compute, its input/output thread and the one that draws noise, its uplink,
its downlink, a core of the server. Waiting is a span too: it names what the lane waited for and is not busy time.
All times that are shown are computed from spans, or from sums taken while the spans were recorded.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipar.errors import ProtocolError
from pipar.json_records import is_number, parse_json

SERVER = "server"
COMPUTE, IO, NOISE, UPLINK, DOWNLINK, CORE = "compute", "io", "noise", "uplink", "downlink", "core"
#: What a device does between two rounds to evaluate the model on its own samples; the model also travels on it.
EVALUATION = "evaluation"

#: The kinds of work in spans; a device sends the position in this list to the server.
WORK_KINDS = (
    "load", "fc", "encode", "u", "decode", "fs", "bs", "d", "bc", "step",
    "pack", "model", "install", "aggregate", "validate", "control", "trace", "round",
    "protect", "noise",
)  # fmt: skip
#: The lanes of a device.
_DEVICE_LANES = frozenset({COMPUTE, IO, NOISE, UPLINK, DOWNLINK, EVALUATION})
#: The spans of one device in one epoch that are kept; the sums are exact without the others.
MOST_SPANS = 50_000
_KIND_NUMBER = {kind: number for number, kind in enumerate(WORK_KINDS)}


@dataclass(frozen=True, slots=True)
class Span:
    """A lane was busy with (or, if `waiting`, was waiting for) one thing from start to end, in seconds."""

    owner: str
    lane: str
    kind: str
    epoch: int
    iteration: int
    micro_batch: int
    start: float
    end: float
    waiting: bool = False
    device: str = ""  # for a core of the server: the device of the micro-batch

    @property
    def name(self) -> str:
        label = f"{self.kind}{self.micro_batch}" if self.micro_batch else self.kind
        return f"wait {label}" if self.waiting else label


@dataclass(slots=True)
class Totals:
    """Exact sums of one lane in one epoch, whether or not its spans are kept."""

    busy_s: float = 0.0
    waiting_s: float = 0.0
    first_start: float = float("inf")
    last_end: float = 0.0


class Recorder:
    """Records the work of one owner's lanes; keeps spans only for the devices in `keep` (None: for all).

    Of each device it keeps the first `MOST_SPANS` of an epoch.
    """

    def __init__(self, owner: str, keep: Container[str] | None = None) -> None:
        self.owner = owner
        self.spans: dict[int, list[Span]] = {}
        self.totals: dict[int, dict[str, Totals]] = {}
        self.busy_s: dict[str, float] = {}  # by lane over all epochs, for live displays
        self._keep = keep
        self._kept: dict[int, dict[str, int]] = {}  # by epoch: spans of each device

    def busy(
        self,
        lane: str,
        kind: str,
        epoch: int,
        iteration: int,
        micro_batch: int,
        start: float,
        end: float,
        device: str = "",
    ) -> None:
        totals = self._totals(epoch, lane)
        totals.busy_s += end - start
        totals.first_start = min(totals.first_start, start)
        totals.last_end = max(totals.last_end, end)
        self.busy_s[lane] = self.busy_s.get(lane, 0.0) + (end - start)
        if self._keeps(device, epoch):
            self._add(Span(self.owner, lane, kind, epoch, iteration, micro_batch, start, end, False, device))

    def waited(
        self,
        lane: str,
        kind: str,
        epoch: int,
        iteration: int,
        micro_batch: int,
        start: float,
        end: float,
        device: str = "",
    ) -> None:
        """Record that a lane had nothing to do until `kind` was available."""
        if end <= start:
            return
        self._totals(epoch, lane).waiting_s += end - start
        if self._keeps(device, epoch):
            self._add(Span(self.owner, lane, kind, epoch, iteration, micro_batch, start, end, True, device))

    def _keeps(self, device: str, epoch: int) -> bool:
        name = device or self.owner
        if self._keep is not None and name not in self._keep:
            return False
        kept = self._kept.setdefault(epoch, {})
        kept[name] = kept.get(name, 0) + 1
        return kept[name] <= MOST_SPANS

    def _add(self, span: Span) -> None:
        self.spans.setdefault(span.epoch, []).append(span)

    def _totals(self, epoch: int, lane: str) -> Totals:
        lanes = self.totals.get(epoch)
        if lanes is None:
            lanes = self.totals[epoch] = {}
        totals = lanes.get(lane)
        if totals is None:
            totals = lanes[lane] = Totals()
        return totals

    def take(self, epoch: int) -> EpochTrace:
        """Return the record of an epoch, and forget it."""
        self._kept.pop(epoch, None)
        return EpochTrace(self.owner, epoch, self.totals.pop(epoch, {}), self.spans.pop(epoch, []))


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock that a device reads, and its time when the device sent HELLO and when WELCOME arrived."""

    machine: str
    hello_at: float
    welcome_at: float

    def offset_s(self, machine: str, hello_at: float, welcome_at: float) -> float:
        """Return how far another machine's clock is ahead, given when HELLO arrived and WELCOME was sent there.

        Both messages arrive a little later than they are sent, so the mean of the two differences is off by half the
        difference of the two delays. Programs of one machine share its clock.
        """
        if machine == self.machine:
            return 0.0
        return ((hello_at - self.hello_at) + (welcome_at - self.welcome_at)) / 2


@dataclass(slots=True)
class EpochTrace:
    """The record of one owner's lanes in one epoch; a device sends it to the server after the epoch."""

    owner: str
    epoch: int
    totals: dict[str, Totals] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    clock: Clock | None = None  # of the device that recorded it

    def later(self, seconds: float) -> EpochTrace:
        """Return the trace with all its times moved by this number of seconds, as on a clock that is ahead."""
        if seconds == 0.0:
            return self
        totals = {
            lane: replace(t, first_start=t.first_start + seconds, last_end=t.last_end + seconds)
            for lane, t in self.totals.items()
        }
        spans = [replace(span, start=span.start + seconds, end=span.end + seconds) for span in self.spans]
        return replace(self, totals=totals, spans=spans)


def with_one_evaluation(trace: EpochTrace) -> EpochTrace:
    """Return the trace with one span for all batches of an evaluation: a trace is sent, and they may be many."""
    batches = [span for span in trace.spans if span.lane == EVALUATION and span.kind == "validate"]
    if len(batches) < 2:
        return trace
    one = replace(batches[0], end=max(span.end for span in batches))
    gone = {id(span) for span in batches}
    return replace(trace, spans=[*(span for span in trace.spans if id(span) not in gone), one])


#: Three hundred years: more than the uptime of any machine.
_LONGEST_S = 1e10
_SPAN = struct.Struct("!BB?IHdd")
SPAN_BYTES = _SPAN.size


def pack_trace(trace: EpochTrace) -> bytes:
    """Return an epoch's trace as bytes: the sums as JSON, then 25 bytes per span."""
    lanes = sorted({span.lane for span in trace.spans} | set(trace.totals))
    numbers = {lane: number for number, lane in enumerate(lanes)}
    totals = {lane: [t.busy_s, t.waiting_s, t.first_start, t.last_end] for lane, t in trace.totals.items()}
    content: dict[str, Any] = {"owner": trace.owner, "epoch": trace.epoch, "lanes": lanes, "totals": totals}
    if trace.clock is not None:
        content["clock"] = [trace.clock.machine, trace.clock.hello_at, trace.clock.welcome_at]
    head = json.dumps(content).encode()
    spans = b"".join(
        _SPAN.pack(numbers[s.lane], _KIND_NUMBER[s.kind], s.waiting, s.iteration, s.micro_batch, s.start, s.end)
        for s in trace.spans
    )
    return struct.pack("!I", len(head)) + head + spans


def unpack_trace(data: bytes | memoryview, *, owner: str) -> EpochTrace:
    """Return the trace that the device `owner` sent; the owner that the trace itself names is ignored."""
    try:
        (length,) = struct.unpack_from("!I", data)
        head = parse_json(bytes(data[4 : 4 + length]))
        lanes, epoch = head["lanes"], int(head["epoch"])
        totals = {lane: Totals(*map(float, values)) for lane, values in head["totals"].items()}
        clock = _read_clock(head.get("clock"))
        spans = [
            Span(owner, lanes[lane], WORK_KINDS[kind], epoch, iteration, micro_batch, start, end, waiting)
            for lane, kind, waiting, iteration, micro_batch, start, end in _SPAN.iter_unpack(data[4 + length :])
        ]
    except (struct.error, ArithmeticError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ProtocolError(f"{owner} sent a trace that cannot be read.") from None
    sums = [value for t in totals.values() for value in (t.busy_s, t.waiting_s, t.last_end)]
    # A lane that was never busy has no first start.
    sums += [t.first_start for t in totals.values() if t.first_start != math.inf]
    if not all(is_number(value, 0, _LONGEST_S) for value in sums):
        raise ProtocolError(f"{owner} sent a trace with a time outside 0..{_LONGEST_S:g} s.")
    if not (isinstance(lanes, list) and {*totals, *map(str, lanes)} <= _DEVICE_LANES):
        known = ", ".join(sorted(_DEVICE_LANES))
        raise ProtocolError(f"{owner} sent a trace of lanes that no device has; a device has {known}.")
    if not all(isinstance(span.lane, str) and 0 <= span.start <= span.end < _LONGEST_S for span in spans):
        raise ProtocolError(f"{owner} sent a trace with a span that has no lane, or an impossible start or end.")
    return EpochTrace(owner, epoch, totals, spans, clock)


def _read_clock(said: Any) -> Clock | None:
    if said is None:
        return None
    machine, hello_at, welcome_at = said
    are_times = is_number(hello_at, 0, _LONGEST_S) and is_number(welcome_at, 0, _LONGEST_S)
    if not (isinstance(machine, str) and are_times):
        raise ValueError("not a clock")
    return Clock(machine, float(hello_at), float(welcome_at))


def busy_s(spans: Iterable[Span], start: float, end: float) -> float:
    """Return the length of the union of the spans within [start, end]."""
    total, covered = 0.0, start
    for span in sorted(spans, key=lambda span: span.start):
        first, last = max(span.start, covered), min(span.end, end)
        if last > first:
            total += last - first
            covered = last
    return total


def uncovered_s(spans: Sequence[Span], start: float, end: float) -> float:
    """Return how long a lane was neither busy nor waiting, by its spans."""
    return (end - start) - busy_s(spans, start, end)


def by_lane(spans: Iterable[Span]) -> dict[tuple[str, str], list[Span]]:
    """Return the spans of each (owner, lane), sorted by owner and lane."""
    lanes: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        lanes.setdefault((span.owner, span.lane), []).append(span)
    return dict(sorted(lanes.items()))


def excerpt(spans: Sequence[Span], *, most: int = 3000, devices: int = 4) -> tuple[list[Span], int]:
    """Return the spans of an epoch that a picture of one iteration needs, and how many were left out of it.

    If there are few, these are all spans. Otherwise they are three iterations in the middle of the slowest device's
    epoch, with what the fastest device, some between and the server did for them meanwhile. If that is too much, it is
    one iteration, then fewer devices, then the last part of the iteration. Work of the server's cores for other devices
    is included as far as there is room. Never more than twice `most`.
    """
    if len(spans) <= most:
        return list(spans), 0
    shown = slowest_to_fastest(_ended_s(spans), devices)
    if not shown:
        return [], 0
    mine = _middle([span for span in spans if (span.device or span.owner) == shown[0]], 3)
    meanwhile = _within(spans, mine)
    own = mine
    for iterations, count in [(3, len(shown)), *((1, count) for count in range(len(shown), 0, -1))]:
        mine, shown = _middle(mine, iterations), shown[:count]
        end = max(span.end for span in mine)
        others = [span for span in _within(meanwhile, mine) if (span.device or span.owner) in shown[1:]]
        # A device that ends an iteration after the end of the picture would be taken for the slowest.
        own = mine + [span for span in others if span.kind != "step" or span.end <= end]
        if len(own) <= most:
            break
    kept = _latest(own, most)
    cores = [span for span in _within(meanwhile, kept) if span.owner == SERVER and span.device not in shown]
    busy = _latest(cores, 2 * most - len(kept))
    return kept + busy, len(own) - len(kept) + len(cores) - len(busy)


def _middle(spans: Sequence[Span], iterations: int) -> list[Span]:
    """Return the spans of this number of iterations in the middle of a device's epoch."""
    numbers = sorted({span.iteration for span in spans if span.iteration})
    middle = max(0, (len(numbers) - 1) // 2)
    around = set(numbers[max(0, middle - iterations // 2) : middle + iterations // 2 + 1])
    return [span for span in spans if span.iteration in around]


def _within(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the spans that overlap the time from the start to the end of others."""
    start, end = min(span.start for span in others), max(span.end for span in others)
    return [span for span in spans if span.end > start and span.start < end]


def _latest(spans: list[Span], most: int) -> list[Span]:
    return spans if len(spans) <= most else sorted(spans, key=lambda span: span.end)[len(spans) - most :]


def _ended_s(spans: Iterable[Span]) -> dict[str, float]:
    """Return when each device ended its last step."""
    ends: dict[str, float] = {}
    for span in spans:
        if span.lane == COMPUTE and span.kind == "step":
            ends[span.owner] = max(span.end, ends.get(span.owner, 0.0))
    return ends


def slowest_to_fastest(ends: Mapping[str, float], most: int) -> list[str]:
    """Return `most` devices, spread evenly from the last to end to the first."""
    order = sorted(ends, key=lambda name: (-ends[name], name))
    if len(order) <= most:
        return order
    return [order[round(place * (len(order) - 1) / (most - 1))] for place in range(most)]


class ChromeEvents:
    """Makes Chrome trace events (for Perfetto) of spans, epoch by epoch: one process per owner, one track per lane."""

    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._tracks: dict[str, dict[str, int]] = {}
        self._named: set[tuple[str, str | None]] = set()

    def name_again(self) -> None:
        """Let the next events name their owners and lanes, also those that were named before."""
        self._named.clear()

    def events(self, spans: Iterable[Span], origin: float = 0.0) -> Iterator[dict[str, Any]]:
        """Yield the events of spans, with times in microseconds after `origin`; a name comes before its first use."""
        lanes = by_lane(spans)
        for owner in sorted({owner for owner, _ in lanes}, key=lambda owner: (owner != SERVER, owner)):
            process = self._processes.setdefault(owner, len(self._processes) + 1)
            tracks = self._tracks.setdefault(owner, {})
            if self._is_new(owner, None):
                yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": owner}}
            for lane, found in ((lane, found) for (name, lane), found in lanes.items() if name == owner):
                track = tracks.setdefault(lane, len(tracks) + 1)
                if self._is_new(owner, lane):
                    yield {"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": lane}}
                for span in sorted(found, key=lambda span: span.start):
                    yield _event(span, process, track, origin)

    def _is_new(self, owner: str, lane: str | None) -> bool:
        is_new = (owner, lane) not in self._named
        self._named.add((owner, lane))
        return is_new


def _event(span: Span, process: int, track: int, origin: float) -> dict[str, Any]:
    args: dict[str, Any] = {"epoch": span.epoch, "iteration": span.iteration, "micro_batch": span.micro_batch}
    if span.device:
        args["device"] = span.device
    return {
        "ph": "X",
        "name": span.name,
        "cat": "wait" if span.waiting else span.kind,
        "pid": process,
        "tid": track,
        "ts": round((span.start - origin) * 1e6, 3),
        "dur": round((span.end - span.start) * 1e6, 3),
        "args": args,
    }
