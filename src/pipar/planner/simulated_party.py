"""A device of a simulated training between two rounds: its link, what it waits for, and what it reports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pipar.execution.spans import (
    COMPUTE,
    DOWNLINK,
    IO,
    MOST_SPANS,
    NOISE,
    UPLINK,
    Clock,
    EpochTrace,
    Span,
    Totals,
    pack_trace,
)
from pipar.methods import Plan
from pipar.planner.fleet import Fleet, Member
from pipar.planner.replanner import MeasuredLink
from pipar.planner.simulated_device import SimulatedDevice
from pipar.planner.stage_times import batch_times, crossing_bytes, framed_bytes
from pipar.transport.shaping import Traffic
from pipar.wire.frames import CHUNK_BYTES, HEADER_BYTES
from pipar.wire.messages import json_body

_NORM_BYTES = 8
#: What a lane waited for before some work, by the kind of this work.
_CAUSES = {"u": "fc", "d": "bs", "model": "pack", "fc": "load", "bc": "d", "step": "d"}


@dataclass(frozen=True)
class RoundSizes:
    """The bytes of a device's round, and the work of its lanes: devices with the same work share it."""

    up: int = 0  # activations and norms
    down: int = 0  # gradients and norms
    io_s: float = 0.0
    noise_s: float = 0.0
    first_fc_s: float = 0.0  # from the load of the first batch to its first forward
    first_u_s: float | None = None  # and to its first activation on the link
    trains: bool = True  # it has something to train, and gets gradients


def round_sizes(fleet: Fleet, member: Member, plan: Plan) -> RoundSizes:
    """Return the bytes and the work of a device's round with a plan."""
    splits, trains = plan.split_point < fleet.layers, fleet.trains(plan.split_point)
    norms = framed_bytes(_NORM_BYTES) if fleet.exchanges_norms and splits and trains else 0
    up, down, io_s, noise_s = 0, 0, 0.0, 0.0
    for batch, count in fleet.batch_counts(member.samples).items():
        times, pieces = batch_times(fleet, member, plan, batch), fleet.pieces(batch, plan.micro_batches)
        if splits:
            sent = (crossing_bytes(member.costs.profile, plan, m, "up", fleet.targets.of(m)) for m in pieces)
            back = (crossing_bytes(fleet.server.profile, plan, m, "down", 0) for m in pieces)
            up += count * (sum(sent) + norms)
            down += count * ((sum(back) if trains else len(pieces) * framed_bytes(0)) + norms)
        io_s += count * (times.load + sum(times.encode) + sum(times.decode))
        noise_s += count * times.noise
    first = batch_times(fleet, member, plan, fleet.batches(member.samples, 1)[0])
    begin = first.load + first.noise
    first_u = begin + first.fc[0] + first.encode[0] * first.up_chunks[0][0] if splits else None
    return RoundSizes(up, down, io_s, noise_s, begin, first_u, trains)


class Sent(NamedTuple):
    """A message of the server, or a trace, on a link."""

    kind: str
    epoch: int  # in which it travelled
    start: float
    end: float
    free_before: float  # when the link was free before it


class Way:
    """One direction of a link: until when it is busy, and how many bytes of each epoch were on it."""

    __slots__ = ("_counted", "_late", "_latency_s", "_metered", "_rate_bps", "_unfinished", "free", "sent")

    def __init__(self, rate_bps: float | None, latency_s: float, *, watched: bool) -> None:
        self.free = 0.0
        self.sent: list[Sent] | None = [] if watched else None
        self._rate_bps, self._latency_s = rate_bps, latency_s
        self._counted: dict[int, int] = {}  # not taken yet
        self._late: dict[int, int] = {}  # that follow what is taken next
        self._metered: dict[int, int] = {}
        self._unfinished = 0  # bytes of a message that was not over when the epoch was taken

    def send(self, now: float, epoch: int, size_bytes: int, kind: str = "control", *, counted: bool = True) -> float:
        """Send a message that travels in an epoch; return when it arrives."""
        size = framed_bytes(size_bytes)
        if counted:
            self.count(epoch, size)
        before = self.free
        begin = now if now > before else before
        self.free = begin + self._seconds(size)
        if self.sent is not None:
            self.sent.append(Sent(kind, epoch, begin, self.free, before))
        return self.free + self._latency_s

    def sends_after(self, when: float, epoch: int, size_bytes: int) -> None:
        """Count the frames of the last message, of this size, that left after this time with what is taken later."""
        sizes = [min(CHUNK_BYTES, size_bytes - at) + HEADER_BYTES for at in range(0, max(1, size_bytes), CHUNK_BYTES)]
        left_at, late = self.free, 0
        for size in reversed(sizes):
            if left_at <= when:
                break
            late, left_at = late + size, left_at - self._seconds(size)
        if late:
            self._unfinished = sum(sizes)
            if self.sent is not None:
                self.sent.pop()
        self._counted[epoch] -= late
        self._late[epoch] = self._late.get(epoch, 0) + late

    def count(self, epoch: int, size_bytes: int) -> None:
        """Count bytes that are on the link in an epoch."""
        self._counted[epoch] = self._counted.get(epoch, 0) + size_bytes
        self._metered[epoch] = self._metered.get(epoch, 0) + size_bytes

    def take(self, epoch: int, since: int) -> int:
        """Return the bytes that were counted in an epoch, and `since` an earlier one; forget the counts up to it."""
        total = sum(self._counted.get(number, 0) for number in range(since, epoch + 1))
        self._counted = {number: size for number, size in self._counted.items() if number > epoch}
        for number, size in self._late.items():
            self._counted[number] = self._counted.get(number, 0) + size
        self._late.clear()
        self._unfinished = 0
        self._metered = {number: size for number, size in self._metered.items() if number >= epoch}
        return total

    def busy_s(self, epoch: int) -> float:
        """Return how long the direction was busy in an epoch."""
        return self._seconds(self._metered.get(epoch, 0) - self._unfinished)

    def traffic(self, epoch: int) -> Traffic:
        """Return the traffic of an epoch so far, or of the one before if that is too little."""
        now, before = self._traffic(epoch), self._traffic(epoch - 1)
        return before if before.is_enough and not now.is_enough else now

    def _traffic(self, epoch: int) -> Traffic:
        size = self._metered.get(epoch, 0)
        return Traffic(size, self._seconds(size)).recent()

    def _seconds(self, size_bytes: int) -> float:
        return size_bytes * 8 / self._rate_bps if self._rate_bps else 0.0


class Party:
    """One device: it waits for messages of the server, one after another, and trains in between."""

    __slots__ = (
        "_busy_s", "_clock", "_device", "_down_spans", "_free_at", "_last_end", "_report", "_spans", "_up_began",
        "_uplink", "_wait_s", "down", "epoch", "installed", "measured", "member", "plan", "ready_at", "reported_at",
        "sizes", "up", "watched",
    )  # fmt: skip

    plan: Plan
    sizes: RoundSizes
    measured: MeasuredLink  # its link, as the traffic of the round has shown it
    _clock: Clock
    _device: SimulatedDevice
    _uplink: Traffic  # as the device has measured it when it had trained
    _report: EpochTrace

    def __init__(self, member: Member, *, watched: bool) -> None:
        self.member, self.watched, self.epoch = member, watched, 0
        self.up = Way(member.link.up_bps, member.link.latency_s, watched=watched)
        self.down = Way(member.link.down_bps, member.link.latency_s, watched=watched)
        self.installed: tuple[int, int] | None = None  # epoch and split point of the last model that it was sent
        self.ready_at = 0.0  # when it can load the first batch of the round
        self.reported_at = 0.0  # when the server has the trace of its last round
        self._free_at = 0.0  # when it waits for the next message
        self._busy_s = self._wait_s = self._last_end = 0.0  # of its compute lane in this round
        self._up_began: tuple[int, float, float] = (0, 0.0, 0.0)  # of an epoch on its uplink: first start, free before
        self._spans: list[Span] = []
        self._down_spans: list[Span] = []

    def join(self, machine: str, welcome_at: float) -> None:
        """The device has been welcomed."""
        self._clock = Clock(machine, 0.0, welcome_at)
        self._free_at = welcome_at

    def has_model_of(self, epoch: int) -> bool:
        """Whether the last model that it was sent is that of an epoch."""
        return self.installed is not None and self.installed[0] == epoch

    def wait_for(self, arrival: float, kind: str) -> None:
        """Let the device wait for a message of the server."""
        if arrival > self._free_at:
            self._wait_s += arrival - self._free_at
            self._add_span(COMPUTE, kind, self._free_at, arrival, waiting=True)
            self._free_at = arrival

    def compute(self, seconds: float, kind: str) -> None:
        """Let the device compute between two messages."""
        self._last_end = self._free_at + seconds
        self._add_span(COMPUTE, kind, self._free_at, self._last_end)
        self._busy_s += seconds
        self._free_at = self._last_end

    def _add_span(self, lane: str, kind: str, start: float, end: float, *, waiting: bool = False) -> None:
        if self.watched:
            self._spans.append(Span(self.member.name, lane, kind, self.epoch, 0, 0, start, end, waiting))

    # --- a round

    def begin(self, number: int, told_at: float) -> None:
        """Begin a round when the server's message arrives, which is all that this round has of the time before."""
        self.epoch = number
        self._busy_s = self._wait_s = 0.0
        self._spans = []
        self.wait_for(told_at, "round")
        self.ready_at = self._free_at
        if self._up_began[0] != number:
            first_u_s = self.sizes.first_u_s
            self._up_began = (number, 0.0 if first_u_s is None else self.ready_at + first_u_s, self.up.free)

    def end_bytes(self, passes: int) -> int:
        """Return the bytes of 'stop epoch', with which the device says what its uplink has carried in the round."""
        self.up.count(self.epoch, self.sizes.up)
        self._uplink = uplink = self.up.traffic(self.epoch)
        samples = self.member.samples * passes
        up_s = _measured(uplink.seconds, self.up.free)
        said = {"samples": samples, "loss_sum": None, "up_bytes": uplink.size_bytes, "up_s": up_s}
        size = json_body(said).size_bytes
        self.up.count(self.epoch, framed_bytes(size))
        return size

    def end(self, device: SimulatedDevice, model_bytes: int) -> None:
        """The device has trained and has sent its part, of this many bytes."""
        ended = device.ends[-1]
        self.up.count(self.epoch, model_bytes)
        self.down.count(self.epoch, self.sizes.down)
        self.measured = MeasuredLink(self._uplink, self.down.traffic(self.epoch))
        self.up.free, self.down.free = device.up_free, device.down_free
        self._busy_s += device.compute_s + (device.packed_at - ended)
        self._wait_s += ended - self.ready_at - device.compute_s
        self._free_at = self._last_end = device.packed_at
        if self.sizes.first_u_s is None and not self._up_began[1]:
            self._up_began = (self.epoch, ended, self._up_began[2])
        self._device = device

    def add_spans(self, spans: Iterable[Span]) -> None:
        """Add the spans of the round on the device and its link."""
        by_lane: dict[str, list[Span]] = {COMPUTE: [], UPLINK: [], DOWNLINK: []}
        for span in spans:
            by_lane.setdefault(span.lane, []).append(span)
        computed = sorted(by_lane.pop(COMPUTE), key=lambda span: span.start)
        self._spans += [span for span in computed if self.sizes.trains or span.kind not in ("bc", "step")]
        self._spans += _waits(computed, self.ready_at)
        uplink, self._down_spans = by_lane.pop(UPLINK), by_lane.pop(DOWNLINK)
        self._spans += self._on_link(self.up, UPLINK, uplink)
        self._spans += [span for lane in by_lane.values() for span in lane]
        self._spans = sorted(self._spans, key=lambda span: span.end)[:MOST_SPANS]

    def _on_link(self, way: Way, lane: str, spans: Iterable[Span]) -> list[Span]:
        """Return these spans of the round on a direction, those of the other messages of its epoch, and the waits."""
        assert way.sent is not None
        mine = [sent for sent in way.sent if sent.epoch == self.epoch]
        way.sent = [sent for sent in way.sent if sent.epoch > self.epoch]
        others = [Span(self.member.name, lane, one.kind, one.epoch, 0, 0, one.start, one.end) for one in mine]
        free_before = {one.start: one.free_before for one in reversed(mine)}
        in_order = sorted([*others, *spans], key=lambda span: span.start)
        return [*in_order, *_waits(in_order, self._up_began[2], free_before)]

    def report(self) -> None:
        """Send the trace of the round."""
        sizes, device = self.sizes, self._device
        start, free_before = self._up_began[1:]
        up_busy_s, up_end = _measured(self.up.busy_s(self.epoch), start), device.up_free
        first_fc = self.ready_at + sizes.first_fc_s
        totals = {
            IO: Totals(_measured(sizes.io_s, self.ready_at), 0.0, self.ready_at, device.io_free),
            COMPUTE: Totals(self._busy_s, self._wait_s, first_fc, self._last_end),
            UPLINK: Totals(up_busy_s, max(0.0, up_end - free_before - up_busy_s), start, up_end),
        }
        if sizes.noise_s:
            totals[NOISE] = Totals(sizes.noise_s, 0.0, first_fc - sizes.noise_s, first_fc)
        self._report = EpochTrace(self.member.name, self.epoch, totals, self._spans, self._clock)
        self._spans = []
        size = len(pack_trace(self._report))
        free_before, sent_at = self.up.free, max(self.up.free, self._free_at)
        self.reported_at = self.up.send(self._free_at, self.epoch + 1, size, "trace")
        self._up_began = (self.epoch + 1, sent_at, free_before)

    def traces(self) -> tuple[EpochTrace, EpochTrace]:
        """Return the trace of the round, and that of the downlink."""
        totals = {DOWNLINK: Totals(self.down.busy_s(self.epoch), 0.0, 0.0, self.down.free)}
        spans: list[Span] = []
        if self.watched:
            spans = self._on_link(self.down, DOWNLINK, self._down_spans)
        return self._report, EpochTrace(self.member.name, self.epoch, totals, spans)


def _waits(spans: Iterable[Span], free_at: float, free_before: dict[float, float] | None = None) -> list[Span]:
    """Return what a lane that was free at this time waited for before each of its spans, which are in order.

    `free_before` says when the lane was free before spans that start at these times, if spans before are missing.
    """
    found, known = [], free_before or {}
    for span in spans:
        free_at = known.pop(span.start, free_at)
        if span.start > free_at:
            kind = _CAUSES.get(span.kind, span.kind)
            n = 0 if kind == "load" or span.kind == "step" else span.micro_batch
            place = (span.epoch, span.iteration, n, free_at, span.start)
            found.append(Span(span.owner, span.lane, kind, *place, waiting=True))
        free_at = max(free_at, span.end)
    return found


def _measured(seconds: float, at: float) -> float:
    """Return seconds as a difference of two times has them, whose last digits differ: they are sent as text."""
    return (at + seconds) - at
