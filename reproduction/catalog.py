"""All experiments by name."""

from __future__ import annotations

import difflib

from pipar.errors import InputError
from reproduction.bandwidth import BANDWIDTH
from reproduction.beyond_the_paper import EXACT_WIRE, SERVER_SPEEDS_TRIED, TODAY
from reproduction.efficiency import IDLE_LARGE, IDLE_SMALL, TIME_LARGE, TIME_SMALL
from reproduction.experiment import Experiment
from reproduction.learning import ACCURACY, CONVERGENCE, EQUALITY
from reproduction.plan_map import PLAN_MAP
from reproduction.privacy import PRIVACY
from reproduction.scale import SCALE
from reproduction.selection import SELECTION_LARGE, SELECTION_SMALL
from reproduction.testbed_check import TESTBED
from reproduction.variations import BATCH_SIZE, HETEROGENEOUS

EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        TESTBED, TIME_SMALL, TIME_LARGE, IDLE_SMALL, IDLE_LARGE, SELECTION_SMALL, SELECTION_LARGE, PLAN_MAP,
        BATCH_SIZE, HETEROGENEOUS, PRIVACY, BANDWIDTH, SERVER_SPEEDS_TRIED, TODAY, EXACT_WIRE, SCALE, EQUALITY,
        CONVERGENCE, ACCURACY,
    )
}  # fmt: skip
#: The name for all of them.
ALL = "all"


def experiments(name: str) -> list[Experiment]:
    """Return the experiment of this name, or all of them."""
    if name == ALL:
        return list(EXPERIMENTS.values())
    if name not in EXPERIMENTS:
        close = difflib.get_close_matches(name.lower(), [*EXPERIMENTS, ALL], n=1)
        hint = f" (did you mean '{close[0]}'?)" if close else ""
        raise InputError(f"'{name}' is not an experiment{hint}; choose from {', '.join(EXPERIMENTS)} and {ALL}.")
    return [EXPERIMENTS[name]]
