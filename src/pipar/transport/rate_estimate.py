"""The rate of a link between two machines, estimated from when frames were ready and when they arrived.

Transports buffer frames, so the time to write a frame says little about the link. But if a frame was ready before the
previous one had arrived, the time between the two arrivals is the time that the link needs for it. The clocks of the
two machines differ; the least of all delays serves as their difference.

A machine with too little processor time reads and writes frames late, and then the link looks slow. But no delay lets
bytes arrive before the link has carried them: the bytes of a burst, over the time since its first frame was ready, are
at most the rate of the link. So if a burst was several times as fast as all frames together, it shows the rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from pipar.json_records import is_number, is_whole
from pipar.transport.shaping import ENOUGH_BYTES, Traffic
from pipar.wire.frames import Frame

#: Enough for some bursts; more would add load to the measured link.
_REMEMBERED = 100
#: A frame of at most this share of another's size needs a negligible time on the link.
_SMALL = 0.1
#: This many bytes may pass in a burst that a link does not sustain, because it was idle before.
_BURST_BYTES = 32_000
#: Links vary less within a few rounds. With more between the best burst and the mean, the machines were late.
_LATE = 3.0
#: The best burst is one of the latest frames, so that a link that has become slow is not taken for one that is late.
_LATEST = _REMEMBERED // 2
#: Times of frames are told in microseconds.
_LEAST_S = 1e-6
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
    small frame, if there is one. If the latest frames were several times as fast in their best burst, it is that burst.
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
    carried = both[0].size_bytes  # since the link was idle
    for before, one in pairwise(both):
        starts = max(before.came, one.ready + delay)
        has_waited = one.ready + delay < before.came
        if has_waited and carried >= _BURST_BYTES:
            waited.append((one.size_bytes, one.came - starts))
        carried = one.size_bytes + (carried if has_waited else 0)
        if has_waited:
            continue
        if quickest.size_bytes <= _SMALL * one.size_bytes:
            alone.append((one.size_bytes, one.came - starts))
    queued = _sum(waited)
    mean = queued if queued.is_enough else _sum(waited + alone)
    best = _best(both[-_LATEST:], delay, quickest.size_bytes)
    is_late = (
        mean.is_enough and best.is_enough and best.seconds * _LATE * mean.size_bytes < mean.seconds * best.size_bytes
    )
    return best if is_late else mean


def _best(passages: Sequence[_Passage], delay: float, small_bytes: int) -> Traffic:
    """Return the fastest bursts that are enough for a rate together, each from when its first frame was ready.

    `delay` is that of a frame of `small_bytes`, whose time on the link is part of it: so its bytes do not count.
    """
    bursts: list[list[Traffic]] = []
    starts, carried, until = 0.0, 0, -math.inf
    for one in passages:
        if one.ready + delay >= until:
            starts, carried = one.ready + delay, 0
            bursts.append([])
        carried, until = carried + one.size_bytes, max(until, one.came)
        if small_bytes <= _SMALL * carried and carried >= 2 * _BURST_BYTES:
            bursts[-1].append(Traffic(carried - small_bytes, max(_LEAST_S, one.came - starts)))
    fastest = sorted((max(burst, key=_speed) for burst in bursts if burst), key=_speed, reverse=True)
    found: list[tuple[int, float]] = []
    for burst in fastest:
        found.append((burst.size_bytes, burst.seconds))
        if _sum(found).size_bytes >= ENOUGH_BYTES:
            break
    return _sum(found)


def _speed(traffic: Traffic) -> float:
    return traffic.size_bytes / traffic.seconds


def _sum(stretches: list[tuple[int, float]]) -> Traffic:
    return Traffic(sum(size for size, _ in stretches), max(0.0, math.fsum(seconds for _, seconds in stretches)))
