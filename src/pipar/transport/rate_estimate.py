"""The rate of a link between two machines, estimated from when frames were ready and when they arrived.

Transports buffer frames, so the time to write a frame says little about the link. But if a frame was ready before the
previous one had arrived, the time between the two arrivals is the time that the link needs for it. The clocks of the
two machines differ; the least of all delays serves as their difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from pipar.json_records import is_number, is_whole
from pipar.transport.shaping import Traffic
from pipar.wire.frames import Frame

#: Enough for some bursts; more would add load to the measured link.
_REMEMBERED = 100
#: A frame of at most this share of another's size needs a negligible time on the link.
_SMALL = 0.1
_MOST_BYTES = 1 << 62
#: Longer than any epoch, and than any clock shows.
_LONGEST_S = 1e9


class FrameTime(NamedTuple):
    """When a frame was ready or arrived, on the clock of one machine; only the estimating side knows its size."""

    at: float
    size_bytes: int = 0


#: By the number of the frame's message and its chunk, in order.
FrameTimes = Mapping[tuple[int, int], FrameTime]


class FrameLog:
    """The times of the last frames of one direction, on one side."""

    def __init__(self) -> None:
        self.times: dict[tuple[int, int], FrameTime] = {}

    def note(self, frame: Frame, at: float) -> None:
        self.times[frame.sequence, frame.chunk] = FrameTime(at, frame.size_bytes)
        if len(self.times) > _REMEMBERED:
            del self.times[next(iter(self.times))]

    def as_json(self) -> list[list[float]]:
        """Return message, chunk and seconds of each frame, to send to the other side."""
        return [[*key, round(moment.at, 6)] for key, moment in self.times.items()]

    def clear(self) -> None:
        self.times.clear()


def read_frame_times(told: Any) -> FrameTimes | None:
    """Return the times that the other side sent; None if they are not valid."""
    if not isinstance(told, list) or len(told) > _REMEMBERED + 1:
        return None
    if not all(isinstance(one, list) and len(one) == 3 for one in told):
        return None
    if not all(
        is_whole(one, 0, _MOST_BYTES) and is_whole(chunk, 0, _MOST_BYTES) and _is_time(at) for one, chunk, at in told
    ):
        return None
    return {(sequence, chunk): FrameTime(float(at)) for sequence, chunk, at in told}


def read_traffic(told: Mapping[str, Any]) -> Traffic | None:
    """Return the uplink traffic that the other side reports, empty if it reports none; None if it is not valid."""
    size_bytes, seconds = told.get("up_bytes", 0), told.get("up_s", 0.0)
    if not is_whole(size_bytes, 0, _MOST_BYTES) or not _is_time(seconds):
        return None
    return Traffic(size_bytes, seconds)


def _is_time(seconds: object) -> bool:
    return is_number(seconds, 0, _LONGEST_S)


class _Passage(NamedTuple):
    """One frame, on both clocks."""

    ready: float
    came: float
    size_bytes: int


def estimate_traffic(ready: FrameTimes, came: FrameTimes) -> Traffic:
    """Return the bytes that a link carried and how long it was busy with them.

    A frame is on the link from when it was ready, or the previous one had arrived, until it arrives. If frames waited
    for each other, that is the time between their arrivals. If none did, it is the time that they took longer than a
    small frame, if there is one.
    """
    both = [
        _Passage(moment.at, came[key].at, max(moment.size_bytes, came[key].size_bytes))
        for key, moment in ready.items()
        if key in came
    ]
    if not both:
        return Traffic()
    quickest = min(both, key=lambda one: one.came - one.ready)
    delay = quickest.came - quickest.ready
    waited, alone = [], []
    for before, one in pairwise(both):
        starts = max(before.came, one.ready + delay)
        if one.ready + delay < before.came:
            waited.append((one.size_bytes, one.came - starts))
        elif quickest.size_bytes <= _SMALL * one.size_bytes:
            alone.append((one.size_bytes, one.came - starts))
    queued = _sum(waited)
    return queued if queued.is_enough else _sum(waited + alone)


def _sum(stretches: list[tuple[int, float]]) -> Traffic:
    return Traffic(sum(size for size, _ in stretches), max(0.0, math.fsum(seconds for _, seconds in stretches)))
