"""The times of many equal pieces of work in few characters: their mean, and how they changed.

The mean is kept to five digits, or to twelve if all times are the same, as in virtual time. The changes are kept for at
most sixteen groups of consecutive times, or 64 if they vary wildly, each as one character: a step of 4 %, so at most
2 % off. The mean of all times is exact.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from pipar.json_records import is_number, is_whole

_USUAL_GROUPS, _MOST_GROUPS = 16, 64
#: Times whose standard deviation is above this share of their mean vary wildly, as on a machine with other work.
_WILD = 0.25
_STEP = 0.04
#: Printable characters that JSON does not escape. Times vary more upwards than downwards.
_ALPHABET = "".join(chr(code) for code in range(32, 127) if chr(code) not in '"\\')
_SAME = _ALPHABET.index("A")
#: The ratio to the mean from which on a time has each character but the first.
_LIMITS = [math.exp(_STEP * (place - _SAME - 0.5)) for place in range(1, len(_ALPHABET))]
_LONGEST_S = 1e9
_MOST_COUNT = 1 << 32
#: Times that differ by less than this share are equal, up to the rounding of clocks in virtual time.
_EQUAL = 1e-9


@dataclass(frozen=True)
class Series:
    """`count` times in order, by their mean and a character for each group; no characters if all are the same."""

    count: int
    mean_s: float
    shape: str = ""

    @classmethod
    def of(cls, times: Sequence[float]) -> Series:
        """Return the series of one or more times; a time above 1e9 seconds is taken as that."""
        longest = max(times)
        if longest > _LONGEST_S:
            times, longest = [min(seconds, _LONGEST_S) for seconds in times], _LONGEST_S
        count, mean_s = len(times), math.fsum(times) / len(times)
        if longest - min(times) <= _EQUAL * mean_s:
            return cls(count, _rounded(mean_s, 12))
        number = min(count, _MOST_GROUPS if _varies(times, mean_s) else _USUAL_GROUPS)
        groups = times if number == count else _means(times, _bounds(count, number))
        return cls(count, _rounded(mean_s, 5), "".join([_character(group / mean_s) for group in groups]))

    @classmethod
    def read(cls, value: Any) -> Series:
        """Return the series that `to_json` has written, or raise ValueError."""
        count, mean_s, *rest = value
        shape = rest[0] if rest else ""
        if not is_whole(count, 1, _MOST_COUNT) or not is_number(mean_s, 0, _LONGEST_S) or not isinstance(shape, str):
            raise ValueError("not a series of times")
        if len(shape) > min(count, _MOST_GROUPS) or not set(shape) <= set(_ALPHABET):
            raise ValueError("not a series of times")
        return cls(count, float(mean_s), shape)

    def to_json(self) -> list[Any]:
        return [self.count, self.mean_s, self.shape] if self.shape else [self.count, self.mean_s]

    def at(self, index: int) -> float:
        """Return the time at a position; beyond the last one, the mean."""
        if not self.shape or not 0 <= index < self.count:
            return self.mean_s
        return self._groups[index * len(self.shape) // self.count]

    @cached_property
    def _groups(self) -> list[float]:
        ratios = [math.exp(_STEP * (_ALPHABET.index(letter) - _SAME)) for letter in self.shape]
        sizes = [end - start for start, end in pairwise(_bounds(self.count, len(self.shape)))]
        total = math.fsum(ratio * size for ratio, size in zip(ratios, sizes, strict=True))
        return [self.mean_s * ratio * self.count / total for ratio in ratios]


def _means(times: Sequence[float], bounds: Sequence[int]) -> list[float]:
    return [math.fsum(times[start:end]) / (end - start) for start, end in pairwise(bounds)]


def _varies(times: Sequence[float], mean_s: float) -> bool:
    return math.fsum([(seconds - mean_s) ** 2 for seconds in times]) > len(times) * (_WILD * mean_s) ** 2


def _bounds(count: int, groups: int) -> list[int]:
    """Return where groups begin, so that the time at `index` is in group `index * groups // count`."""
    return [-(-place * count // groups) for place in range(groups + 1)]


def _character(ratio: float) -> str:
    # Thousands of times a round: a search among the limits is faster than a logarithm that is rounded and clamped.
    return _ALPHABET[bisect_right(_LIMITS, ratio)]


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
