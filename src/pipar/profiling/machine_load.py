"""How busy other programs keep the cores of this machine, and how long a thread waits for one."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STATISTICS = Path("/proc/stat")
_OWN_SCHEDULE = Path("/proc/thread-self/schedstat")
#: Fields of a line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal (by other virtual machines).
_AT_WORK = (0, 1, 2, 5, 6, 7)


class OtherPrograms:
    """The cores that other programs use from now on, among those that this process may use."""

    def __init__(self, statistics: Path = _STATISTICS) -> None:
        self._statistics = statistics
        self._before = self._now()

    def cores(self) -> float:
        """Return how many cores other programs used on average; 0 where the system does not say."""
        at, used_s, own_s = (now - before for now, before in zip(self._now(), self._before, strict=True))
        return max(0.0, used_s - own_s) / at if at > 0 else 0.0

    def _now(self) -> tuple[float, float, float]:
        """Return the time, what all cores have worked, and what this process has, in seconds."""
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
        try:
            text = self._statistics.read_text("ascii")
        except OSError:
            text = ""
        return time.monotonic(), worked_s(text, usable, os.sysconf("SC_CLK_TCK") if text else 1), time.process_time()


def worked_s(statistics: str, cores: set[int], ticks_per_s: int) -> float:
    """Return how long these cores have worked, by the content of /proc/stat; stolen time is work, too."""
    total = 0
    for line in statistics.splitlines():
        name, *counts = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cores:
            total += sum(int(counts[place]) for place in _AT_WORK if place < len(counts))
    return total / ticks_per_s


def waited_for_core_s() -> float:
    """Return how long this thread has been ready to run without a core; 0 where the system does not say."""
    try:
        return int(_OWN_SCHEDULE.read_text("ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
