"""Actions of another thread at a given moment, without a second thread: the same moment every time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def has_step(number: int, of: CodeType, run: Callable[[], object], meanwhile: Callable[[], object]) -> bool:
    """Call a function, with an interruption before this step of one of its functions; return whether that step exists.

    A step is an instruction of Python: between any two of them, threads may change.
    """
    steps = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal steps
        if frame.f_code is not of:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            steps += 1
            if steps == number:
                meanwhile()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return steps >= number
