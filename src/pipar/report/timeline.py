"""The lanes of one iteration, or of an epoch, as rows of a page: the spans of the trace, the critical path marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipar.report.critical import (
    Window,
    critical_path,
    middle_iteration,
    shares,
    subject,
    uses_link,
    whole_epoch,
)
from pipar.trace import COMPUTE, CORE, DOWNLINK, IO, SERVER, UPLINK, Span

#: Browsers draw so many blocks without delay, and nobody sees more.
_MOST_SPANS = 1500
_MOST_CORES = 8
_LANES = (COMPUTE, IO, UPLINK, DOWNLINK)


@dataclass(frozen=True)
class Traced:
    """The spans of the epoch that is shown."""

    spans: Sequence[Span]
    epoch: int

    @cached_property
    def devices(self) -> list[str]:
        """The devices whose lanes were traced and that trained, in name order."""
        return sorted({s.owner for s in self.spans if s.lane == COMPUTE and s.kind == "step" and not s.waiting})

    def ended_s(self) -> dict[str, float]:
        """Return when each device had ended its last iteration."""
        ends: dict[str, float] = {}
        for span in self.spans:
            if span.lane == COMPUTE and span.kind == "step" and not span.waiting:
                ends[span.owner] = max(span.end, ends.get(span.owner, 0.0))
        return ends

    @cached_property
    def busy_s(self) -> dict[str, dict[str, float]]:
        """How long each lane of each device worked."""
        seconds: dict[str, dict[str, float]] = {
            name: dict.fromkeys((COMPUTE, UPLINK, DOWNLINK), 0.0) for name in self.devices
        }
        for span in self.spans:
            of = seconds.get(span.owner)
            if of is not None and not span.waiting and span.lane in of:
                of[span.lane] += span.end - span.start
        return seconds


def iteration_timeline(traced: Traced, devices: Sequence[str], *, like: int | None = None) -> dict[str, Any] | None:
    """Return a steady iteration of the first of these devices, and what others and the cores did meanwhile.

    Whoever held it up is shown in place of the last of the others.
    """
    window = middle_iteration(traced.spans, devices[0], traced.epoch, like=like)
    if window is None:
        return None
    path = critical_path(traced.spans, window)
    involved = [name for name in dict.fromkeys(map(subject, path)) if name in traced.devices]
    first, *others = list(dict.fromkeys([devices[0], *involved, *devices]))[: len(devices)]
    return _timeline(traced.spans, window, path, [first, *sorted(others)])


def epoch_timeline(traced: Traced, device: str) -> dict[str, Any] | None:
    """Return a device's whole epoch with the exchange of models; of a long one, its last part."""
    window = whole_epoch(traced.spans, device, traced.epoch)
    return None if window is None else _timeline(traced.spans, window, critical_path(traced.spans, window), [device])


def _timeline(spans: Sequence[Span], window: Window, path: Sequence[Span], devices: Sequence[str]) -> dict[str, Any]:
    critical = {id(span) for span in path}
    wanted = [span for span in spans if window.overlaps(span) and _is_shown(span, devices)]
    kept = _fewer(wanted, devices, critical)
    lanes = _lanes(kept, devices)
    numbers = {lane: number for number, lane in enumerate(lanes)}
    rows = [(numbers[span.owner, span.lane], span) for span in kept if (span.owner, span.lane) in numbers]
    rows.sort(key=lambda row: (row[0], row[1].start, row[1].end))
    return {
        "device": window.device,
        "epoch": window.epoch,
        "iteration": window.iteration,
        "start_us": _us(window.start),
        "end_us": _us(window.end),
        "uses_link": uses_link(spans, window) if window.iteration else True,
        "lanes": [{"owner": owner, "lane": lane} for owner, lane in lanes],
        "spans": [_row(number, span, id(span) in critical) for number, span in rows],
        "critical_s": {lane: round(seconds, 9) for lane, seconds in shares(path, window).items()},
        "left_out": _busy_count(wanted) - _busy_count([span for _, span in rows]),
    }


def _busy_count(spans: Sequence[Span]) -> int:
    return sum(not span.waiting and span.end > span.start for span in spans)


def _is_shown(span: Span, devices: Sequence[str]) -> bool:
    return span.lane in _LANES if span.owner in devices else span.owner == SERVER and span.lane.startswith(CORE)


def _fewer(spans: list[Span], devices: Sequence[str], critical: set[int]) -> list[Span]:
    """Return no more spans than can be drawn: without the cores' work for others, then without what came first."""
    if len(spans) > _MOST_SPANS:
        spans = [s for s in spans if s.owner != SERVER or subject(s) in (*devices, SERVER) or id(s) in critical]
    return sorted(spans, key=lambda span: span.start)[-_MOST_SPANS:]


def _lanes(spans: Sequence[Span], devices: Sequence[str]) -> list[tuple[str, str]]:
    """Return the rows: the lanes of each device, then the cores that worked for one of them."""
    busy = {(span.owner, span.lane) for span in spans if not span.waiting and span.end > span.start}
    own = [(device, lane) for device in devices for lane in _LANES if lane != IO or (device, lane) in busy]
    mine = {span.lane for span in spans if span.owner == SERVER and not span.waiting and subject(span) in devices}
    cores = mine or {lane for owner, lane in busy if owner == SERVER}
    return own + [(SERVER, lane) for lane in sorted(cores, key=_core_number)[:_MOST_CORES]]


def _core_number(lane: str) -> int:
    return int(lane.removeprefix(CORE).strip() or 0)


def _us(seconds: float) -> float:
    """Return microseconds as trace.json has them."""
    return round(seconds * 1e6, 3)


def _row(lane: int, span: Span, is_critical: bool) -> list[Any]:
    """Return lane, kind, micro-batch, iteration, start and length in microseconds, waiting, for whom, critical."""
    length = round((span.end - span.start) * 1e6, 3)
    whose = span.device if span.owner == SERVER else ""
    return [
        lane, span.kind, span.micro_batch, span.iteration, _us(span.start), length,
        int(span.waiting), whose, int(is_critical),
    ]  # fmt: skip
