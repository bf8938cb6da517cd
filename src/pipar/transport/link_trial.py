"""Measuring a link before a training: trains of frames, each longer than the last, until one takes long enough.

The first frames of a train may pass in a burst that the link does not sustain, so its second half counts: the bytes of
these frames over the time between the arrivals of the first and the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipar.json_records import is_number

#: The payload of a frame: at 1 Mbit/s it takes an eighth of a second.
FRAME_BYTES = 16_000
#: Frames of the first train, and of the longest one.
FIRST_TRAIN, LONGEST_TRAIN = 4, 64
#: A train that took this long shows the rate; a longer one would only delay the training.
_ENOUGH_S = 0.08
#: TCP begins with few bytes in each round trip, and doubles them: a train of this many round trips is past that.
_ROUND_TRIPS = 4
#: Above this rate the machines are measured rather than the link: a frame takes them a third of a millisecond.
MOST_BPS = 400e6
_LONGEST_S = 1e9
#: Two clocks never differ in speed by this factor; told times are rounded to microseconds.
_CLOCKS_DIFFER, _ROUNDED_S = 1.01, 2e-6


@dataclass
class TrainLength:
    """How many frames the next train of a direction has, and what the trains so far have shown."""

    round_trip_s: float = 0.0
    frames: int = FIRST_TRAIN
    rate_bps: float | None = None
    is_done: bool = False
    trains: int = 0  # that were measured

    def take(self, arrivals: Sequence[float]) -> None:
        """Take when the frames of a train have arrived."""
        self.trains += 1
        passed_s = arrivals[-1] - arrivals[0]
        self.rate_bps = rate_of(arrivals)
        enough_s = max(_ENOUGH_S, _ROUND_TRIPS * self.round_trip_s)
        self.is_done = passed_s >= enough_s or self.frames >= LONGEST_TRAIN
        self.frames = 0 if self.is_done else 2 * self.frames


def rate_of(arrivals: Sequence[float]) -> float | None:
    """Return the rate that the second half of a train shows; None if it is so high that the machines limit it."""
    half = arrivals[(len(arrivals) - 1) // 2 :]
    passed_s = half[-1] - half[0]
    bits = 8 * FRAME_BYTES * (len(half) - 1)
    return None if passed_s <= 0 or bits / passed_s > MOST_BPS else bits / passed_s


def read_arrivals(told: object, frames: int, within_s: float) -> list[float] | None:
    """Return the times of arrival that the other side tells; None if they are not those of this many frames.

    They cannot be further apart than the time that this side has waited for the answer, but for the speed of clocks.
    """
    if not isinstance(told, list) or len(told) != frames or not all(is_number(at, 0, _LONGEST_S) for at in told):
        return None
    is_possible = (
        all(a <= b for a, b in pairwise(told)) and told[-1] - told[0] <= within_s * _CLOCKS_DIFFER + _ROUNDED_S
    )
    return [float(at) for at in told] if is_possible else None
