"""The rate of a link between two machines, from when frames could have left and when they came.

A transport takes frames into buffers on the way, and makes room for several at once: how long it takes to write one
says little of the link. Where a frame was ready before the one in front of it had come, the two came as far apart as
the link needs for the second. Clocks of two machines differ: the least of all delays stands for by how much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from pipar.transport.shaping import Traffic
from pipar.wire.frames import Frame

#: Enough to see some bursts; more would weigh on the link that is measured.
_REMEMBERED = 100
#: A frame of a tenth of another's size is on the link for next to no time.
_SMALL = 0.1
_MOST_BYTES = 1 << 62
#: More seconds than any epoch, or clock, has.
_LONGEST_S = 1e9


class FrameTime(NamedTuple):
    """When a frame could leave, or came, on the clock of one machine; its size is known to the side that reckons."""

    at: float
    size_bytes: int = 0


#: By the frame's message and chunk, in order.
FrameTimes = Mapping[tuple[int, int], FrameTime]


class FrameLog:
    """The moments of the last frames of one direction, seen from one side."""

    def __init__(self) -> None:
        self.times: dict[tuple[int, int], FrameTime] = {}

    def note(self, frame: Frame, at: float) -> None:
        self.times[frame.sequence, frame.chunk] = FrameTime(at, frame.size_bytes)
        if len(self.times) > _REMEMBERED:
            del self.times[next(iter(self.times))]

    def as_json(self) -> list[list[float]]:
        """Return what the other side needs of it: message, chunk and seconds of each."""
        return [[*key, round(moment.at, 6)] for key, moment in self.times.items()]

    def clear(self) -> None:
        self.times.clear()


def read_frame_times(told: Any) -> FrameTimes | None:
    """Return what the other side has told of its moments; None if it is nothing of the kind."""
    if not isinstance(told, list) or len(told) > _REMEMBERED + 1:
        return None
    if not all(isinstance(one, list) and len(one) == 3 for one in told):
        return None
    if not all(type(sequence) is int and type(chunk) is int and _is_time(at) for sequence, chunk, at in told):
        return None
    return {(sequence, chunk): FrameTime(float(at)) for sequence, chunk, at in told}


def read_traffic(told: Mapping[str, Any]) -> Traffic | None:
    """Return what the other side says that the uplink has carried, nothing if it does not; None if it cannot be."""
    size_bytes, seconds = told.get("up_bytes", 0), told.get("up_s", 0.0)
    if type(size_bytes) is not int or not 0 <= size_bytes < _MOST_BYTES or not _is_time(seconds):
        return None
    return Traffic(size_bytes, seconds)


def _is_time(seconds: object) -> bool:
    return type(seconds) in (int, float) and isinstance(seconds, int | float) and 0 <= seconds < _LONGEST_S


class _Passage(NamedTuple):
    """One frame, on both clocks."""

    ready: float
    came: float
    size_bytes: int


def estimate_traffic(ready: FrameTimes, came: FrameTimes) -> Traffic:
    """Return what a link has carried, and for how long it was busy with that; too little to tell if nothing waited.

    A frame is on the link from when it was ready, or the one before it had come, until it has come itself. Where frames
    waited for each other that is the time between them. Where none did, it is what they took longer than a small one.
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
    behind_others = _sum(waited)
    return behind_others if behind_others.is_enough else _sum(waited + alone)


def _sum(stretches: list[tuple[int, float]]) -> Traffic:
    return Traffic(sum(size for size, _ in stretches), max(0.0, math.fsum(seconds for _, seconds in stretches)))
