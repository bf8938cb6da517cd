"""Pipelined split federated learning across real devices, and their testbed in virtual time.

Where to find the paper: Algorithm 1 in `device.program`, Algorithm 2 in `server.program`, the stage graph in
`execution.stage_graph`, the estimate in `planner.paper_selection`, the choice of P and N in `planner.search`. The wire
format is in `wire.frames`, exact encodings in `wire.exact`, the checkpoint format in `storage.checkpoint`, the live
page in `live_page.web`.

Packages, in reading order: `networks` (those that come with pipar), `cutting` (where a network can be cut), `tasks`
(losses, targets and scores), `tensors` (what crosses a cut), `nn` (training on both sides of it), `aggregation` (the
next global model), `data`, `execution` (work on lanes in time), `wire` (messages and their bytes), `transport`
(connections), `privacy`, `leakage` (what cuts reveal), `profiling` (what a network costs on a machine), `planner`,
`device`, `server`, `job` (from a configuration to a training with every choice made), `storage` (the files of a run),
`monitoring`, `recording` (the flight recorder), `report` (the page of a run), `live_page`, `launch` (starting the
programs), `cli`, `scripting` (objects for scripts and notebooks).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipar.errors import PiparError
    from pipar.launch.callbacks import STOP
    from pipar.launch.run import compare, run
    from pipar.scripting.plans import ChosenPlans, plan
    from pipar.settings.config import Config
    from pipar.settings.config_file import load_config
    from pipar.storage.comparison import Comparison
    from pipar.storage.result import Result

__version__ = "0.1.0"
__all__ = [
    "STOP",
    "ChosenPlans",
    "Comparison",
    "Config",
    "PiparError",
    "Result",
    "compare",
    "load_config",
    "plan",
    "run",
]

#: Where each public name lives. It is imported when it is first used, so that every program and every process of a
#: device starts without the rest.
_HOMES = {
    "STOP": "launch.callbacks",
    "ChosenPlans": "scripting.plans",
    "Comparison": "storage.comparison",
    "Config": "settings.config",
    "PiparError": "errors",
    "Result": "storage.result",
    "compare": "launch.run",
    "load_config": "settings.config_file",
    "plan": "scripting.plans",
    "run": "launch.run",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
