"""How long tests wait for real time to pass.

A time limit in a test has one purpose: a program that hangs ends. So there is one limit, which no load of the machine
can reach. Nothing waits that long unless it hangs, and a test that asks how fast something is asks in virtual time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

#: For one wait. The limit of a whole test is `timeout` in pyproject.toml.
PATIENCE_S = 600.0


def until(is_so: Callable[[], Any], what: str, within_s: float = PATIENCE_S) -> Any:
    """Return the result of `is_so` as soon as it is true; fail if it hangs."""
    deadline = time.monotonic() + within_s
    while not (found := is_so()):
        assert time.monotonic() < deadline, f"waited {within_s:g} s for {what}"
        time.sleep(0.02)
    return found
