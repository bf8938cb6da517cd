"""The iteration that is shown, and its critical path: the chain of spans that determined its duration.

    device   fc1 fc2            bc1  bc2 step        fc1 -> u1 -> u2 -> fs2 -> bs2 -> d2 -> bc2 -> step
    uplink      u1----u2----
    server            fs1 bs1  fs2 bs2
    downlink                d1     d2

The path is found backwards. Before each span comes the one that released it: of the previous span on its lane and the
spans that its data came from, the one that ended last.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipar.execution.spans import COMPUTE, CORE, DOWNLINK, IO, SERVER, UPLINK, Span
from pipar.execution.stage_graph import DATA_FROM, StageKind

#: The precision of clocks and of rounded times in files.
_SAME_S = 2e-6

_FOR_ALL = ((CORE, "aggregate"), (CORE, "pack"))
_STAGES = frozenset({"fc", "encode", "u", "decode", "fs", "bs", "d", "bc"})


@dataclass(frozen=True)
class Window:
    """The time that is shown, in seconds: an iteration of a device, or (iteration 0) its whole epoch."""

    device: str
    epoch: int
    iteration: int
    start: float
    end: float

    def overlaps(self, span: Span) -> bool:
        return span.end > self.start + _SAME_S and span.start < self.end - _SAME_S


def lane_of(span: Span) -> str:
    """Return the kind of lane: all cores are "core"."""
    return CORE if span.lane.startswith(CORE) else span.lane


def subject(span: Span) -> str:
    """Return the device that a span works for; "server" for the server's own work."""
    return span.device or span.owner


# --- the window


def middle_iteration(spans: Iterable[Span], device: str, epoch: int, *, like: int | None = None) -> Window | None:
    """Return the window of an iteration in the middle of a device's epoch, or of the iteration `like` if it exists.

    It begins at the end of the previous optimiser step (the first iteration: with its load), and ends with its own.
    """
    own = [span for span in spans if span.owner == device and span.epoch == epoch and not span.waiting]
    steps = sorted((s for s in own if s.lane == COMPUTE and s.kind == "step"), key=lambda span: span.iteration)
    if not steps:
        return None
    numbers = [step.iteration for step in steps]
    place = numbers.index(like) if like in numbers else (len(steps) - 1) // 2
    step = steps[place]
    first = min(span.start for span in own if span.iteration == step.iteration)
    return Window(device, epoch, step.iteration, steps[place - 1].end if place else first, step.end)


def whole_epoch(spans: Iterable[Span], device: str, epoch: int) -> Window | None:
    """Return the window from the start of a device's epoch until it has installed the new model."""
    own = [s for s in spans if s.owner == device and s.epoch == epoch and not s.waiting and s.lane in (COMPUTE, IO)]
    if not own:
        return None
    return Window(device, epoch, 0, min(span.start for span in own), max(span.end for span in own))


def uses_link(spans: Iterable[Span], window: Window) -> bool:
    """Return whether the device sent activations in the window's iteration."""
    place = (window.device, window.epoch, window.iteration)
    return any(span.kind == "u" and (span.owner, span.epoch, span.iteration) == place for span in spans)


# --- the path


def critical_path(spans: Iterable[Span], window: Window) -> list[Span]:
    """Return the chain of spans that ends with the device's last span of the window, in order of time.

    Each span begins when the previous one ends, or during it if data arrives piece by piece; if it begins later, all
    lanes of the path waited in between. The first span begins at or before the window's start.
    """
    inside = [span for span in spans if not span.waiting and window.overlaps(span) and span.end <= window.end + _SAME_S]
    last = _last_of(inside, window)
    if last is None:
        return []
    index = _SpanIndex(inside, window.device)
    path, seen = [last], {id(last)}
    while path[-1].start > window.start + _SAME_S:
        before = index.released_by(path[-1], seen)
        if before is None:
            break
        path.append(before)
        seen.add(id(before))
    return path[::-1]


def _last_of(spans: Sequence[Span], window: Window) -> Span | None:
    own = [span for span in spans if span.owner == window.device and span.lane == COMPUTE]
    return max(own, key=lambda span: (span.end, span.start), default=None)


class _SpanIndex:
    """The spans of a window, found by kind and end time; among equal ones, those of `device` are preferred."""

    def __init__(self, spans: Iterable[Span], device: str) -> None:
        self._device = device
        self._found: dict[tuple[object, ...], list[Span]] = {}
        for span in sorted(spans, key=lambda span: (span.end, span.start)):
            for key in _keys(span):
                self._found.setdefault(key, []).append(span)
        self._ends = {key: [span.end for span in found] for key, found in self._found.items()}
        self._latencies: dict[tuple[str, str], float] = {}

    def _under_way_s(self, span: Span) -> float:
        return self._latency_s((span.owner, span.lane)) if span.lane in (UPLINK, DOWNLINK) else 0.0

    def _latency_s(self, link: tuple[str, str]) -> float:
        """Return the latency of a device's link: the shortest time between a transfer and its use by an idle lane."""
        if link not in self._latencies:
            shortest = math.inf
            for span in self._found.get(("subject", link[0]), ()):
                busy = [self._last(key, span.start, span, {id(span)}) for key in _lane_keys(span)]
                if any(before is not None and before.end > span.start - _SAME_S for before in busy):
                    continue
                upstream = (self._last(key, span.start, span, set()) for key in _upstream_keys(span))
                sent = next((one for one in upstream if one is not None), None)  # the nearest is first
                if sent is not None and (sent.owner, sent.lane) == link:
                    shortest = min(shortest, span.start - sent.end)
            self._latencies[link] = max(0.0, shortest) if math.isfinite(shortest) else 0.0
        return self._latencies[link]

    def released_by(self, span: Span, seen: set[int]) -> Span | None:
        """Return the span that released this one: of those it waited for, the one whose end or data came last."""
        # A lane does one thing at a time; but work on data that arrives in pieces begins before the last piece.
        before = [self._last(key, span.start, span, seen) for key in _lane_keys(span)]
        here = [self._last(key, span.end, span, seen) for key in _upstream_keys(span)]
        found = [(b.end, b) for b in before if b is not None]
        found += [(b.end + self._under_way_s(b), b) for b in here if b is not None]
        device = subject(span)
        best = max(
            found,
            key=lambda one: (one[0], subject(one[1]) == device, subject(one[1]) == self._device, one[1].start),
            default=None,
        )
        return None if best is None else best[1]

    def _last(self, key: tuple[object, ...], until: float, span: Span, seen: set[int]) -> Span | None:
        """Return the last span that ended by `until` and did not begin after `span`, which waited for it."""
        found = self._found.get(key, [])
        last: Span | None = None
        for place in range(bisect_right(self._ends.get(key, []), until + _SAME_S) - 1, -1, -1):
            before = found[place]
            if last is not None and before.end < last.end - _SAME_S:
                break
            if id(before) in seen or (before.start, before.end) > (span.start, span.end):
                continue
            # Models of equal devices arrive at the same time: prefer the device that is shown.
            if key[0] != "any device" or subject(before) == self._device:
                return before
            last = last or before
        return last


def _keys(span: Span) -> list[tuple[object, ...]]:
    """Return all keys by which a span is found."""
    kind = _kind(span)
    return [*_lane_keys(span), _place(kind, span), ("any device", *kind), ("subject", subject(span))]


def _lane_keys(span: Span) -> list[tuple[object, ...]]:
    keys: list[tuple[object, ...]] = [("lane", span.owner, span.lane)]
    # A replica does one job at a time, on whichever core.
    return [*keys, ("replica", span.device)] if span.owner == SERVER and span.device else keys


def _upstream_keys(span: Span) -> list[tuple[object, ...]]:
    kinds = DATA_FROM.get(_kind(span), ())
    # The averaging needs the models of all devices, and all devices need the average.
    return [
        ("any device", *kind) if span.kind == "aggregate" or kind in _FOR_ALL else _place(kind, span) for kind in kinds
    ]


def _kind(span: Span) -> StageKind:
    # A model that was sent as a difference is decoded before it can be averaged.
    is_model = span.kind == "decode" and not span.iteration
    return (lane_of(span), "install" if is_model else span.kind)


def _place(kind: StageKind, span: Span) -> tuple[object, ...]:
    """Return the key of the span's own work of this kind, or of the work of this kind that it waited for."""
    if kind[1] in _STAGES:
        return (*kind, subject(span), span.iteration, span.micro_batch)
    return (*kind, subject(span), span.iteration) if kind[1] in ("load", "noise") else (*kind, subject(span))


def shares(path: Sequence[Span], window: Window) -> dict[str, float]:
    """Return the seconds of the window that each kind of lane contributes to the critical path; the rest is "wait"."""
    seconds = dict.fromkeys((COMPUTE, IO, UPLINK, CORE, DOWNLINK, "wait"), 0.0)
    at = window.start
    for span in path:
        start, end = max(span.start, at), max(span.end, at)
        seconds["wait"] += start - at
        seconds[lane_of(span)] = seconds.get(lane_of(span), 0.0) + end - start
        at = end
    seconds["wait"] += max(0.0, window.end - at)
    return seconds
