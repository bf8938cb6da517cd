"""Memory and open files of this process over a long world: both have to stay flat."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Sample:
    """What a process uses at some time."""

    at: float  # a round, or seconds
    rss_bytes: int
    open_files: int

    def __str__(self) -> str:
        return f"{self.at:8g} {self.rss_bytes / 2**20:9.1f} {self.open_files:6d}"


def sample(at: float, pid: int | None = None) -> Sample:
    """Return the resident memory and the open files of a process, by default this one."""
    process = Path("/proc", str(os.getpid() if pid is None else pid))
    pages = int((process / "statm").read_text().split()[1])
    return Sample(at, pages * os.sysconf("SC_PAGE_SIZE"), len(list((process / "fd").iterdir())))


def growth(samples: list[Sample]) -> tuple[float, float]:
    """Return by how much memory (as a factor) and open files (as a number) grow from the second quarter to the last.

    Medians of the two quarters are compared: the first quarter fills caches, and single samples vary.
    """
    quarter = len(samples) // 4
    second, last = samples[quarter : 2 * quarter], samples[-quarter:]
    rss = [_median([one.rss_bytes for one in part]) for part in (second, last)]
    files = [_median([one.open_files for one in part]) for part in (second, last)]
    return rss[1] / rss[0], files[1] - files[0]


def _median(values: list[int]) -> float:
    return float(sorted(values)[len(values) // 2])
