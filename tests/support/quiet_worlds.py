"""Simulated worlds with only the faults that a test asks for, to show which invariant finds a planted error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipar.methods import Plan
from simulation.scenario import Fault, Scenario, draw_scenario
from simulation.world import Outcome, simulate

SEEDS = range(6)


def quiet(seed: int, *faults: Fault, **changes: Any) -> Scenario:
    """Return the training of a seed, short and cheap, with these faults only."""
    scenario = draw_scenario(seed, devices=3, rounds=4)
    plain: dict[str, Any] = {
        "method": "pipar",
        "network": "plain",
        "plans": dict.fromkeys(scenario.names, Plan(1, 1)),
        "privacy": None,
        "replans": False,
        "keep_state": False,
        "min_devices": 1,
        "resume_window_s": 2.0,
        "round_deadline_s": 8.0,
        "encoding": "raw",
        "chunk_bytes": 1_000_000,
        "has_credentials": True,
        "local_epochs": 1,
        "devices_per_round": "all",
        "clip_norm": None,
        "evaluates": False,
    }
    return replace(scenario, faults=tuple(sorted(faults)), **{**plain, **changes})


def found(make: Callable[[int], Scenario]) -> str | None:
    """Return the invariant that is violated first in a few worlds."""
    outcomes = (simulate(make(seed)) for seed in SEEDS)
    return next((one.violation.invariant for one in outcomes if one.violation is not None), None)


def holds(make: Callable[[int], Scenario]) -> list[Outcome]:
    """Return the outcomes of two worlds, in which every invariant has to hold."""
    outcomes = [simulate(make(seed)) for seed in range(2)]
    assert [outcome.violation for outcome in outcomes] == [None, None]
    return outcomes
