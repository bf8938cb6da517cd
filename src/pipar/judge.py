"""A world that the planner does not know, to judge its choices in.

Machines differ from their profiles, layer by layer, and no stage takes the same time twice. Both are drawn from a seed
that the planner is not given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from pipar import keyed
from pipar.forecast import BatchTimes, Disturb, forecast
from pipar.methods import Plan
from pipar.planner.fleet import Fleet
from pipar.planner.timing import Simulate, Timing

#: How far a layer's time may lie from its profile, either way.
PERTURBATION = 0.15
#: How far a single stage may lie from the usual, either way.
JITTER = 0.05
_STAGES = ("fc", "encode", "u", "served", "d", "decode", "bc")
_MOST_MICRO_BATCHES = 1024


def perturbed(fleet: Fleet, seed: int) -> Fleet:
    """Return the fleet with other times for every layer, on each machine by its own factors; kinds stay kinds."""
    return fleet.varied(lambda machine: _factors(seed, machine))


def judging(seed: int) -> Simulate:
    """Return a simulation in which every stage of every device lasts a little more or less than it should."""
    disturb = jitter(seed)

    def simulate(fleet: Fleet, plans: Mapping[str, Plan], iterations: int | None) -> Timing:
        return forecast(fleet, plans, iterations=iterations, disturb=disturb)

    return simulate


def jitter(seed: int) -> Disturb:
    """Return factors between 0.95 and 1.05, by device, iteration, stage and micro-batch, whatever the plan."""
    known: dict[tuple[str, int], np.ndarray] = {}

    def disturb(device: str, iteration: int, times: BatchTimes) -> BatchTimes:
        key = (device, iteration)
        if key not in known:
            draw = keyed.generator(seed, "jitter", device, iteration)
            known[key] = draw.uniform(1 - JITTER, 1 + JITTER, (len(_STAGES), _MOST_MICRO_BATCHES))
        factors, count = known[key], len(times.fc)
        changed = {
            stage: (np.array(getattr(times, stage)) * row[:count]).tolist()
            for stage, row in zip(_STAGES, factors, strict=True)
        }
        return replace(times, **changed)

    return disturb


def _factors(seed: int, machine: str) -> Callable[[], float]:
    draw = keyed.generator(seed, "perturbation", machine)
    return lambda: float(draw.uniform(1 - PERTURBATION, 1 + PERTURBATION))
