"""The lanes of one iteration or epoch as rows of the page: the traced spans, with the critical path marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pipar.execution.spans import COMPUTE, CORE, DOWNLINK, IO, NOISE, SERVER, UPLINK, Span
from pipar.report.critical_path import (
    Window,
    critical_path,
    middle_iteration,
    shares,
    subject,
    uses_link,
    whole_epoch,
)

#: A browser on a slow machine draws this many blocks in about a second; more could not be distinguished.
MOST_SPANS = 4000
_MOST_CORES = 8
_LANES = (COMPUTE, IO, NOISE, UPLINK, DOWNLINK)
#: Lanes that have a row only if they are used.
_SELDOM = (IO, NOISE)


@dataclass(frozen=True)
class EpochTrace:
    """The spans of the epoch that is shown."""

    spans: Sequence[Span]
    epoch: int

    @cached_property
    def devices(self) -> list[str]:
        """The devices that trained and were traced, in name order."""
        return sorted({s.owner for s in self.spans if s.lane == COMPUTE and s.kind == "step" and not s.waiting})

    def ended_s(self) -> dict[str, float]:
        """Return when each device finished its last iteration."""
        ends: dict[str, float] = {}
        for span in self.spans:
            if span.lane == COMPUTE and span.kind == "step" and not span.waiting:
                ends[span.owner] = max(span.end, ends.get(span.owner, 0.0))
        return ends

    @cached_property
    def busy_s(self) -> dict[str, dict[str, float]]:
        """The busy seconds of each lane of each device."""
        seconds: dict[str, dict[str, float]] = {
            name: dict.fromkeys((COMPUTE, UPLINK, DOWNLINK), 0.0) for name in self.devices
        }
        for span in self.spans:
            of = seconds.get(span.owner)
            if of is not None and not span.waiting and span.lane in of:
                of[span.lane] += span.end - span.start
        return seconds


def iteration_timeline(
    traced: EpochTrace, devices: Sequence[str], *, like: int | None = None, most: int = MOST_SPANS
) -> dict[str, Any] | None:
    """Return an iteration of the first device, and what the other devices and the cores did meanwhile.

    Devices on its critical path take precedence over the other given devices.
    """
    window = middle_iteration(traced.spans, devices[0], traced.epoch, like=like)
    if window is None:
        return None
    path = critical_path(traced.spans, window)
    first, *others = [*dict.fromkeys([devices[0], *_involved(traced, path), *devices])][: len(devices)]
    return _timeline(traced.spans, window, path, [first, *sorted(others)], most)


def epoch_timeline(traced: EpochTrace, devices: Sequence[str], *, most: int = MOST_SPANS) -> dict[str, Any] | None:
    """Return the first device's whole epoch including the exchange of models; of a long one, its last part.

    Devices on its critical path are shown too, at most as many in all as these.
    """
    window = whole_epoch(traced.spans, devices[0], traced.epoch)
    if window is None:
        return None
    path = critical_path(traced.spans, window)
    first, *others = [*dict.fromkeys([devices[0], *_involved(traced, path)])][: len(devices)]
    return _timeline(traced.spans, window, path, [first, *sorted(others)], most)


def _involved(traced: EpochTrace, path: Sequence[Span]) -> list[str]:
    """Return the devices on a critical path: first by their own lanes, then by the work of the cores for them."""
    names = dict.fromkeys([*(span.owner for span in path), *map(subject, path)])
    return [name for name in names if name in traced.devices]


def _timeline(
    spans: Sequence[Span], window: Window, path: Sequence[Span], devices: Sequence[str], most: int
) -> dict[str, Any]:
    critical = {id(span) for span in path}
    inside = [span for span in spans if window.overlaps(span)]
    lanes = _lanes(inside, devices, path)
    has_row = set(lanes)
    wanted = [span for span in inside if (span.owner, span.lane) in has_row]
    kept, shown = _fewer(wanted, devices, critical, most)
    begins = _drawn_from(kept, window, most)
    kept = [span for span in kept if begins.overlaps(span)]
    taken = {(span.owner, span.lane) for span in kept}
    lanes = [lane for lane in lanes if lane[0] in (*shown, SERVER) or lane in taken]
    numbers = {lane: number for number, lane in enumerate(lanes)}
    rows = [(numbers[span.owner, span.lane], span) for span in kept]
    rows.sort(key=lambda row: (row[0], row[1].start, row[1].end))
    return {
        "device": window.device,
        "epoch": window.epoch,
        "iteration": window.iteration,
        "start_us": _us(begins.start),
        "end_us": _us(window.end),
        "before_us": _us(begins.start - window.start),
        "uses_link": uses_link(spans, window) if window.iteration else True,
        "lanes": [{"owner": owner, "lane": lane} for owner, lane in lanes],
        "spans": [_row(number, span, id(span) in critical) for number, span in rows],
        "critical_s": {lane: round(seconds, 9) for lane, seconds in shares(path, begins).items()},
        "left_out": _busy_count(wanted) - _busy_count(kept),
    }


def _busy_count(spans: Sequence[Span]) -> int:
    return sum(not span.waiting and span.end > span.start for span in spans)


def _fewer(
    spans: list[Span], devices: Sequence[str], critical: set[int], most: int
) -> tuple[list[Span], Sequence[str]]:
    """Return at most `most` spans, if possible, and the devices that remain.

    Waits are left out first, then the cores' work for other devices, then whole devices, the last ones first. The
    critical path and the first device's own spans are always kept.
    """
    if len(spans) > most:
        spans = [span for span in spans if not span.waiting]
    if len(spans) > most:
        spans = [span for span in spans if subject(span) in (*devices, SERVER) or id(span) in critical]
    while len(spans) > most and len(devices) > 1:
        spans = [span for span in spans if subject(span) != devices[-1] or id(span) in critical]
        devices = devices[:-1]
    return spans, devices


def _drawn_from(spans: Sequence[Span], window: Window, most: int) -> Window:
    """Return the window, or as much of its end as can be drawn."""
    if len(spans) <= most:
        return window
    return replace(window, start=sorted(span.end for span in spans)[-most - 1])


def _lanes(spans: Sequence[Span], devices: Sequence[str], path: Sequence[Span]) -> list[tuple[str, str]]:
    """Return the rows: the lanes of each device, then the cores that are on the critical path or served them."""
    busy = {(span.owner, span.lane) for span in spans if not span.waiting and span.end > span.start}
    own = [(device, lane) for device in devices for lane in _LANES if lane not in _SELDOM or (device, lane) in busy]
    served = [span for span in spans if span.owner == SERVER and span.lane.startswith(CORE) and not span.waiting]
    cores = {span.lane for span in served if subject(span) in devices} or {span.lane for span in served}
    critical = {span.lane for span in path if span.owner == SERVER and span.lane.startswith(CORE)}
    first = sorted(cores | critical, key=lambda lane: (lane not in critical, _core_number(lane)))[:_MOST_CORES]
    return own + [(SERVER, lane) for lane in sorted(first, key=_core_number)]


def _core_number(lane: str) -> int:
    number = lane.removeprefix(CORE).strip()
    return int(number) if number.isdecimal() else 0


def _us(seconds: float) -> float:
    """Return microseconds, rounded as in trace.json."""
    return round(seconds * 1e6, 3)


def _row(lane: int, span: Span, is_critical: bool) -> list[Any]:
    """Return lane, kind, micro-batch, iteration, start and length in microseconds, waiting, device served, critical."""
    length = round((span.end - span.start) * 1e6, 3)
    served = span.device if span.owner == SERVER else ""
    return [
        lane, span.kind, span.micro_batch, span.iteration, _us(span.start), length,
        int(span.waiting), served, int(is_critical),
    ]  # fmt: skip
