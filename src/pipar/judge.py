"""A world that the planner does not know, to judge its choices in.

Machines differ from their profiles, layer by layer, and no stage takes the same time twice. Both are drawn from a seed
that the planner is not given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from pipar import keyed
from pipar.forecast import BatchTimes, Disturb, forecast, forecast_within
from pipar.methods import Plan
from pipar.planner.fleet import Fleet
from pipar.planner.timing import Simulate, SimulateWithin, Timing

#: How far a layer's time may lie from its profile, either way.
PERTURBATION = 0.15
#: How far a single stage may lie from the usual, either way.
JITTER = 0.05
_STAGES = ("fc", "encode", "u", "served", "d", "decode", "bc")
_MOST_MICRO_BATCHES = 1024
#: Batches that one simulation asks for again and again: a few for each kind of device.
_LATEST = 64


def perturbed(fleet: Fleet, seed: int) -> Fleet:
    """Return the fleet with other times for every layer, on each machine by its own factors; kinds stay kinds."""
    return fleet.varied(lambda machine: _factors(seed, machine))


def judging(seed: int) -> Simulate:
    """Return a simulation in which every stage of every device lasts a little more or less than it should."""
    disturb = jitter(seed)

    def simulate(fleet: Fleet, plans: Mapping[str, Plan], iterations: int | None) -> Timing:
        return forecast(fleet, plans, iterations=iterations, disturb=disturb)

    return simulate


def judging_within(seed: int) -> SimulateWithin:
    """Return the same simulation, given up as soon as an epoch cannot be as short as it is to be."""
    disturb = jitter(seed)

    def simulate(fleet: Fleet, plans: Mapping[str, Plan], iterations: int | None, within_s: float) -> Timing | None:
        return forecast_within(fleet, plans, within_s, iterations=iterations, disturb=disturb)

    return simulate


def jitter(seed: int) -> Disturb:
    """Return factors between 0.95 and 1.05, by device, iteration, stage and micro-batch, whatever the plan."""
    known: dict[tuple[str, int], np.ndarray] = {}
    as_arrays = _Arrays()

    def disturb(device: str, iteration: int, times: BatchTimes) -> BatchTimes:
        key = (device, iteration)
        if key not in known:
            draw = keyed.generator(seed, "jitter", device, iteration)
            known[key] = draw.uniform(1 - JITTER, 1 + JITTER, (len(_STAGES), _MOST_MICRO_BATCHES))
        changed = as_arrays(times) * known[key][:, : len(times.fc)]
        return replace(times, **dict(zip(_STAGES, changed.tolist(), strict=True)))

    return disturb


class _Arrays:
    """The stages' times of a batch as one array: devices that are alike have one batch in common."""

    def __init__(self) -> None:
        # With the times themselves: as long as they are here, nothing else has their id.
        self._latest: dict[int, tuple[BatchTimes, np.ndarray]] = {}

    def __call__(self, times: BatchTimes) -> np.ndarray:
        if id(times) not in self._latest:
            if len(self._latest) >= _LATEST:
                self._latest.clear()
            self._latest[id(times)] = times, np.array([getattr(times, stage) for stage in _STAGES])
        return self._latest[id(times)][1]


def _factors(seed: int, machine: str) -> Callable[[], float]:
    draw = keyed.generator(seed, "perturbation", machine)
    return lambda: float(draw.uniform(1 - PERTURBATION, 1 + PERTURBATION))
