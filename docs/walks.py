"""The modules that one micro-batch and one plan pass, in order: traced, not listed by hand.

    python -m docs.walks            print both
    python -m docs.walks --write    update them in docs/architecture.md

The root's modules and the settings, which are vocabulary, do not count, nor what emulates time. A micro-batch is
followed from its load on the device to its backward pass there, in a training in virtual time with the real
mathematics. A plan is followed from a job whose plans are "auto" to the plan of each device.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from docs.shape import ARCHITECTURE
from pipar.settings.config import Config
from pipar.settings.config_file import config_from

#: What only virtual time needs: the jumping clock, and what work costs.
_EMULATION = ("execution.clock", "planner.costs", "profiling.profile")
_SETTINGS = "pipar.settings."
_LIST = re.compile(r"(<!-- (micro-batch|plan) -->\n).*?(<!-- /\2 -->)", re.DOTALL)


def trace(
    call: Callable[[], object], begins: Callable[[FrameType], bool], ends: Callable[[FrameType], bool]
) -> list[str]:
    """Return the modules of pipar's packages whose functions run between two calls, in the order of their first one."""
    order: dict[str, None] = {}
    is_on, is_over = False, False

    def see(frame: FrameType, event: str, _: Any) -> None:
        nonlocal is_on, is_over
        module = str(frame.f_globals.get("__name__", ""))
        # Neither a module nor the body of a class; nor the constructor of a dataclass, which Python writes.
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED and not frame.f_code.co_filename.startswith("<")
        if event != "call" or is_over or not is_function or not module.startswith("pipar."):
            return
        is_on = is_on or begins(frame)
        if is_on and module.count(".") > 1 and not module.startswith(_SETTINGS):
            order.setdefault(module.removeprefix("pipar."))
        is_over = is_on and ends(frame)

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(order)


def micro_batch() -> list[str]:
    """Return the modules that one micro-batch passes, without what comes after its backward pass."""
    import pipar

    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("PIPAR_RUNS")
        os.environ["PIPAR_RUNS"] = folder
        try:
            passed = trace(
                lambda: pipar.run(
                    _config(1, schedule="1f1b", window=1, split_point=2, micro_batches=4), world="virtual"
                ),
                lambda frame: _starts(frame, "load"),
                lambda frame: _starts(frame, "bc"),
            )
            return [module for module in passed if module not in _EMULATION]
        finally:
            os.environ.pop("PIPAR_RUNS")
            if before is not None:
                os.environ["PIPAR_RUNS"] = before


def plan() -> list[str]:
    """Return the modules that plans pass from a job to every device's split point and micro-batches."""
    from pipar.job.plans import make_plans
    from pipar.job.prepare import unplanned_timing_only_job
    from pipar.launch.rehearsal import rehearse

    job = unplanned_timing_only_job(_config(3))
    assert job is not None
    return trace(lambda: make_plans(job, rehearse), lambda _: True, lambda _: False)


def _config(devices: int, **plan: Any) -> Config:
    """Return a training of three iterations on some equal devices."""
    tree = {
        "run": {"epochs": 1, "batch_size": 20},
        "data": {"name": "digits", "samples_per_device": 60, "validation": 0, "test": 0},
        "plan": {"replan": False, **plan},
        "server": {"profile": "i7-11850h"},
        "devices": [{"profile": "raspberry-pi-3b", "count": devices}],
    }
    return config_from(tree)


def _starts(frame: FrameType, kind: str) -> bool:
    """Return whether a lane is given this work now."""
    steps = frame.f_locals.get("steps") if frame.f_code.co_name == "run" else None
    if not isinstance(steps, tuple) or not steps:
        return False
    return bool(steps[0][0].kind == kind)


_WALKS = {"micro-batch": micro_batch, "plan": plan}


def with_walks(text: str) -> str:
    """Return the architecture page with the current walks."""
    return _LIST.sub(lambda match: f"{match[1]}{_as_text(_WALKS[match[2]]())}{match[3]}", text)


def _as_text(modules: Sequence[str]) -> str:
    return f"{len(modules)} modules: " + ", ".join(f"`{module}`" for module in modules) + ".\n"


def main(words: Sequence[str]) -> int:
    if list(words) == ["--write"]:
        ARCHITECTURE.write_text(with_walks(ARCHITECTURE.read_text("utf-8")), "utf-8")
        return 0
    if words:
        print("usage: python -m docs.walks [--write]", file=sys.stderr)
        return 2
    for name, walk in _WALKS.items():
        print(f"one {name} passes {_as_text(walk())}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
