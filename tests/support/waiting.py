"""How long tests wait for real time to pass.

A time limit in a test has one purpose: a program that hangs ends. So there is one limit, which no load of the machine
can reach. Nothing waits that long unless it hangs, and a test that asks how fast something is asks in virtual time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

#: For one wait. The limit of a whole test is `timeout` in pyproject.toml; hangs.py ends a run with several hangs.
PATIENCE_S = 240.0
_USUAL_LOAD = 2.0  # processes that want each core while three workers of pytest run on two


def until(is_so: Callable[[], Any], what: str, within_s: float = PATIENCE_S) -> Any:
    """Return the result of `is_so` as soon as it is true; fail if it hangs.

    On a machine with more to do than these tests, time counts less, in proportion to its load.
    """
    left_s, before = within_s, time.monotonic()
    while not (found := is_so()):
        now = time.monotonic()
        left_s -= (now - before) / slowdown()
        before = now
        assert left_s > 0, f"waited {within_s:g} s for {what}"
        time.sleep(0.02)
    return found


def slowdown() -> float:
    """Return how many times longer than usual everything takes, at most, for other work on this machine."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / _USUAL_LOAD)
