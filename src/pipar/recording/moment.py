"""What happened around a moment of a recorded training: events of the server, and the work of every lane."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any

from pipar import events
from pipar.errors import InputError
from pipar.execution.spans import Span, by_lane
from pipar.monitoring.event_text import EventDescriber
from pipar.recording.flight import Flight, RecordedEvent, RecordedRound

#: Events up to this long before and after a moment are shown.
_AROUND_S = 30.0
_MOST_EVENTS = 40
#: What is said instead of texts that are not recorded, because they may name addresses and paths.
_LEFT_OUT = {"device": "", "reason": "the server's log says why"}
_TIME = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}(?:\.\d+)?))?")


@dataclass(frozen=True)
class Moment:
    """A time on the recorded server's clock, and the round that it is in or that began last."""

    at: float
    round: RecordedRound


@dataclass(frozen=True)
class LaneState:
    """What a lane does at a moment: one piece of work or waiting, since when and for how long, in seconds."""

    owner: str
    lane: str
    doing: str
    iteration: int
    began_s: float  # after the start of the round
    seconds: float


def utc(flight: Flight, at: float) -> datetime:
    """Return the date and time of a moment on the server's clock."""
    return datetime.fromtimestamp(at + (flight.utc_offset_s or 0.0), UTC)


def moment_at(flight: Flight, text: str) -> Moment:
    """Return the moment of "12:31:05" (UTC) or of a whole date and time."""
    first, last = flight.rounds[0].start, flight.rounds[-1].end
    at = _parse(flight, text)
    if not first - _AROUND_S <= at <= last + _AROUND_S:
        begins, ends = (f"{utc(flight, time):%Y-%m-%d %H:%M:%S}" for time in (first, last))
        raise InputError(f"--at {text} is outside of the recorded rounds, which are from {begins} to {ends} UTC.")
    begun = [one for one in flight.rounds if one.start <= at]
    return Moment(at, begun[-1] if begun else flight.rounds[0])


def _parse(flight: Flight, text: str) -> float:
    offset_s = flight.utc_offset_s or 0.0
    match = _TIME.fullmatch(text.strip())
    try:
        if match is None:
            given = datetime.fromisoformat(text)
            return given.replace(tzinfo=given.tzinfo or UTC).timestamp() - offset_s
        begins = utc(flight, flight.rounds[0].start)
        of_day = timedelta(hours=int(match[1]), minutes=int(match[2]), seconds=float(match[3] or 0))
        at = begins.replace(hour=0, minute=0, second=0, microsecond=0) + of_day
    except (ValueError, OverflowError):
        raise InputError(f"--at {text} is not a time: write 12:31:05 or 2026-11-18T12:31:05, in UTC.") from None
    if at < begins - timedelta(seconds=_AROUND_S):  # a training past midnight
        at += timedelta(days=1)
    return at.timestamp() - offset_s


def round_numbered(flight: Flight, number: int) -> RecordedRound:
    """Return a round by its number."""
    found = next((one for one in flight.rounds if one.number == number), None)
    if found is None:
        numbers = f"{flight.rounds[0].number} to {flight.rounds[-1].number}"
        raise InputError(f"Round {number} is not in this recording, which has the rounds {numbers}.")
    return found


def events_of_round(flight: Flight, one: RecordedRound) -> list[RecordedEvent]:
    """Return the events from the start of a round to the start of the next one."""
    following = min((other.start for other in flight.rounds if other.start > one.start), default=float("inf"))
    first = one.start if one is not flight.rounds[0] else float("-inf")
    return [event for event in flight.events if first <= event.at < following][:_MOST_EVENTS]


def events_around(flight: Flight, moment: Moment) -> list[RecordedEvent]:
    """Return the events shortly before and after a moment, the nearest if there are many."""
    near = [event for event in flight.events if abs(event.at - moment.at) <= _AROUND_S]
    nearest = sorted(near, key=lambda event: abs(event.at - moment.at))[:_MOST_EVENTS]
    return sorted(nearest, key=lambda event: event.at)


def event_text(event: RecordedEvent) -> str:
    """Return a sentence about an event, as the server logs it."""
    kind = getattr(events, event.what, None)
    try:
        needed = {one.name for one in fields(kind) if one.default is MISSING}  # type: ignore[arg-type]
        left_out = {name: text for name, text in _LEFT_OUT.items() if name in needed}
        return EventDescriber().sentence(kind(**{**left_out, **event.about}))  # type: ignore[misc]
    except Exception:  # noqa: BLE001 - a file may have any fields; then they are shown as they are
        about = ", ".join(f"{key} {str(value)[:60]}" for key, value in event.about.items())
        return f"{event.what[:40]}: {about}" if about else event.what[:40]


def lanes_at(spans: Sequence[Span], start: float, offset_s: float) -> list[LaneState]:
    """Return what each lane does at a time after the start of a round."""
    at, found = start + offset_s, []
    for (owner, lane), own in by_lane(spans).items():
        now = next((span for span in own if span.start <= at < span.end), None)
        if now is None:
            found.append(LaneState(owner, lane, "-", 0, 0.0, 0.0))
            continue
        words = f"waits for {now.kind}" if now.waiting else now.kind
        name = words + (str(now.micro_batch) if now.micro_batch else "")
        of = f" of {now.device}" if now.device else ""
        found.append(LaneState(owner, lane, name + of, now.iteration, now.start - start, now.end - now.start))
    return found


#: The stages that a summary of a round shows.
STAGES = ("load", "fc", "encode", "u", "fs", "bs", "d", "decode", "bc", "step")


def stage_means(spans: Sequence[Span]) -> dict[str, dict[str, float]]:
    """Return the mean seconds of each stage of a round, by device."""
    sums: dict[str, dict[str, tuple[float, int]]] = {}
    for span in spans:
        name = span.device or span.owner
        is_served = span.device and span.kind in ("encode", "decode", "step")  # those of the device are shown
        if span.waiting or span.kind not in STAGES or is_served:
            continue
        total, count = sums.setdefault(name, {}).get(span.kind, (0.0, 0))
        sums[name][span.kind] = total + span.end - span.start, count + 1
    return {
        name: {kind: total / count for kind, (total, count) in kinds.items()} for name, kinds in sorted(sums.items())
    }


def about_flight(flight: Flight) -> Mapping[str, Any]:
    """Return what was recorded, in a few words for people."""
    job, header = flight.job, flight.header
    return {
        "model": job.model,
        "dataset": job.dataset,
        "method": job.method.name,
        "world": str(header.get("world", ""))[:20],
        "devices": [spec.name for spec in job.specs],
        "rounds": len(flight.rounds),
        "began": f"{utc(flight, flight.rounds[0].start):%Y-%m-%d %H:%M:%S} UTC",
        "pipar": str(header.get("pipar", ""))[:40],
        "machine": str(header.get("machine", ""))[:200],
        "unread_bytes": flight.unread_bytes,
    }
