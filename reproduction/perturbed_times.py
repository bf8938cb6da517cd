"""Times that the planner does not know, to score its choices.

Machines differ from their profiles layer by layer, and no stage takes the same time twice. Both are drawn from a seed
that the planner does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from pipar import random_streams
from pipar.methods import Plan
from pipar.planner.fleet import Fleet
from pipar.planner.simulated_device import Disturb
from pipar.planner.simulator import simulate, simulate_within
from pipar.planner.stage_times import BatchTimes
from pipar.planner.timing import Simulate, SimulateWithin, Timing

#: Maximum difference of a layer's time from its profile, either way.
PERTURBATION = 0.15
#: Maximum difference of a single stage from its usual time, either way.
JITTER = 0.05
_STAGES = ("fc", "encode", "u", "served", "d", "decode", "bc")
_MOST_MICRO_BATCHES = 1024
#: Micro-batches whose times are kept: some 300 bytes each.
_REMEMBERED = 400_000


def perturbed(fleet: Fleet, seed: int) -> Fleet:
    """Return the fleet with other times for every layer, by factors of each machine; kinds of devices are kept."""
    return fleet.varied(lambda machine: _factors(seed, machine))


def jittered_simulation(seed: int) -> Simulate:
    """Return a simulation in which every stage takes a little more or less than its usual time."""
    world = _World(seed)

    def simulate_world(fleet: Fleet, plans: Mapping[str, Plan], iterations: int | None) -> Timing:
        return simulate(fleet, plans, iterations, disturb=world.disturb(fleet, plans))

    return simulate_world


def jittered_simulation_within(seed: int) -> SimulateWithin:
    """Return the same simulation, which stops as soon as an epoch must exceed a limit."""
    world = _World(seed)

    def simulate_world(
        fleet: Fleet, plans: Mapping[str, Plan], iterations: int | None, within_s: float
    ) -> Timing | None:
        return simulate_within(fleet, plans, iterations, within_s, disturb=world.disturb(fleet, plans))

    return simulate_world


def jitter(seed: int) -> Disturb:
    """Return factors between 0.95 and 1.05, by device, iteration, stage and micro-batch, for any plan."""
    known: dict[tuple[str, int], np.ndarray] = {}
    latest: tuple[BatchTimes, np.ndarray] | None = None

    def usual(times: BatchTimes) -> np.ndarray:
        nonlocal latest
        if latest is None or latest[0] is not times:  # consecutive devices often have the same
            latest = times, np.array([getattr(times, stage) for stage in _STAGES])
        return latest[1]

    def disturb(device: str, iteration: int, times: BatchTimes) -> BatchTimes:
        key = (device, iteration)
        if key not in known:
            draw = random_streams.generator(seed, "jitter", device, iteration)
            known[key] = draw.uniform(1 - JITTER, 1 + JITTER, (len(_STAGES), _MOST_MICRO_BATCHES))
        factors = known[key][:, : len(times.fc)]
        changed = dict(zip(_STAGES, (usual(times) * factors).tolist(), strict=True))
        answer = (np.array(times.answer) * factors[_STAGES.index("served")]).tolist()  # a part of `served`
        return replace(times, **changed, answer=answer)

    return disturb


class _World:
    """Keeps jittered times, which are needed again: with two kinds of devices, each plan is tried with many others."""

    def __init__(self, seed: int) -> None:
        self._disturb = jitter(seed)
        self._fleet: Fleet | None = None
        self._known: dict[tuple[str, int, Plan], BatchTimes] = {}
        self._micro_batches = 0

    def disturb(self, fleet: Fleet, plans: Mapping[str, Plan]) -> Disturb:
        """Return a function that jitters the times of these plans, always in the same way."""
        if fleet is not self._fleet:
            self._fleet = fleet
            self._forget()

        def disturb(device: str, iteration: int, times: BatchTimes) -> BatchTimes:
            key = (device, iteration, plans[device])
            changed = self._known.get(key)
            if changed is None:
                if self._micro_batches > _REMEMBERED:
                    self._forget()
                changed = self._known[key] = self._disturb(device, iteration, times)
                self._micro_batches += len(times.fc)
            return changed

        return disturb

    def _forget(self) -> None:
        self._known.clear()
        self._micro_batches = 0


def _factors(seed: int, machine: str) -> Callable[[], float]:
    draw = random_streams.generator(seed, "perturbation", machine)
    return lambda: float(draw.uniform(1 - PERTURBATION, 1 + PERTURBATION))
