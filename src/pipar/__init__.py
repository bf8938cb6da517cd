"""Pipelined split federated learning across real devices, and their testbed in virtual time.

Where to find the paper: Algorithm 1 in `device.program`, Algorithm 2 in `server.program`, the stage graph in
`execution.stages`, the estimate in `planner.paper_estimate`, the choice of P and N in `planner.search`. The wire format
is in `wire.frames`, exact encodings in `wire.exact`, the checkpoint format in `storage.checkpoint`, the live page in
`dashboard.web`.

Packages, in reading order: `nn` (the mathematics), `data`, `execution` (work on lanes in time), `wire` (messages and
their bytes), `transport` (connections), `privacy`, `leakage` (what cuts reveal), `profiling` (what a network costs on a
machine), `planner`, `device`, `server`, `job` (from a configuration to a training with every choice made), `storage`
(the files of a run), `monitoring`, `report` (the page of a run), `dashboard` (the live page), `launch` (starting the
programs), `cli`, `scripting` (objects for scripts and notebooks).
"""

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
