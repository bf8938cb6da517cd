"""What the server expects of the epochs to come, and how it learns from those that have passed.

An epoch's trace arrives while the next one is under way, so what it teaches counts from the one after that; links are
measured by the round itself and count from the next one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TypeVar

from pipar.links import Link
from pipar.methods import Plan
from pipar.planner.calibration import Calibration, MachineHistory, calibrated
from pipar.planner.compute_load import ComputeLoad, compute_loads, server_contention
from pipar.planner.fleet import Fleet
from pipar.planner.replanner import MeasuredLink, differs
from pipar.planner.simulator import simulate
from pipar.planner.timing import FEWEST_ITERATIONS, STEADY_ITERATIONS, steady_epoch_s

T = TypeVar("T")

#: Less work than this says nothing about how fast the server is.
_TELLING_S = 0.02
#: Machines whose speed was this far from what was believed are planned for again: with work that was not planned with,
#: and with work that was, whose epochs scatter.
_NOTICED, _NOTICED_AGAIN = 0.002, 0.03
#: A machine that seems further off than this was disturbed, not profiled wrongly.
_MOST = 5.0


#: A prediction is made in the middle of a training, and the server's messages wait for it. So a large fleet is
#: predicted by a sample of this size,
_SAMPLE = 32
#: and of at most this many micro-batches, which take less than a tenth of a second.
_MOST_MICRO_BATCHES = 4000


class Predictor:
    """Predicts each epoch's seconds with what was known when it began, and re-fits the cost model after each."""

    def __init__(self, fleet: Fleet, plans: Mapping[str, Plan]) -> None:
        self.fleet = fleet  # as profiled
        self._plans: dict[int, Mapping[str, Plan]] = {1: plans}  # by the first epoch that they hold for
        self._links: dict[int, Mapping[str, Link]] = {}
        self._fits: dict[int, Calibration] = {1: Calibration()}
        self._planned_with = Calibration()
        self._steadiness = _Steadiness()
        self._tried: dict[str, frozenset[int]] = {}
        self._remember(plans)

    @property
    def plans(self) -> Mapping[str, Plan]:
        """The plans in force, or about to be."""
        return self._plans[max(self._plans)]

    def replan(self, first_epoch: int, plans: Mapping[str, Plan]) -> None:
        """From this epoch on the devices train by these plans."""
        self._plans[first_epoch] = {**_at(self._plans, first_epoch), **plans}
        self._remember(plans)

    def _remember(self, plans: Mapping[str, Plan]) -> None:
        for name, plan in plans.items():
            self._tried[name] = self._tried.get(name, frozenset()) | {plan.split_point}

    def measure_links(self, epoch: int, measured: Mapping[str, MeasuredLink]) -> None:
        """Take the links as an epoch's traffic showed them; a direction without much traffic stays as it was known."""
        before = self._links[max(self._links)] if self._links else {m.name: m.link for m in self.fleet.members}
        known = {member.name: member.link for member in self.fleet.members}
        now = {name: one.over(before.get(name, known[name])) for name, one in measured.items()}
        self._links[epoch + 1] = {**before, **now}
        self._steadiness.observe({**known, **before}, self._links[epoch + 1])

    def learn(self, epoch: int, device_s: Mapping[str, float], server_s: float) -> None:
        """Take how long the devices and the server's cores computed in an epoch, and re-fit."""
        fit, plans, fleet = self._fits[max(self._fits)], _at(self._plans, epoch), self.fleet.of(device_s)
        # From the profiles, each device by itself: what a group has in common would let single ones run away.
        profiled, served = compute_loads(fleet, plans)
        learned = {
            name: _learned(fit.of(name), busy, device_s[name]) for name, busy in profiled.items() if name in device_s
        }
        server = fit.server
        if served.seconds * server.latest > _TELLING_S:
            server = _learned(server, served, server_s / server_contention(self.fleet_for(epoch).of(device_s), plans))
        self._fits[epoch + 2] = replace(fit, server=server, devices={**fit.devices, **learned})

    def forget(self, epoch: int) -> None:
        """Keep nothing that only epochs up to this one were expected by: a training may have any number of them."""
        self._plans = entries_from(self._plans, epoch + 1)
        self._links = entries_from(self._links, epoch + 1)
        self._fits = entries_from(self._fits, epoch + 1)

    def has_learned(self) -> bool:
        """Return whether machines or links are known to be other, or steadier, than when plans were last chosen."""
        return self._steadiness.has_grown() or self.has_learned_of_machines()

    def has_learned_of_machines(self) -> bool:
        """Return whether machines are known to be other than when plans were last chosen."""
        return self._fits[max(self._fits)].differs(self._planned_with, _NOTICED, _NOTICED_AGAIN)

    def fleet_for(self, epoch: int) -> Fleet:
        """Return the fleet as it was known when an epoch began."""
        links = _at(self._links, epoch) if any(first <= epoch for first in self._links) else {}
        return calibrated(self.fleet, replace(_at(self._fits, epoch), links=links))

    def now(self) -> Fleet:
        """Return the fleet as it is known now: machines as slow as they were, links as last measured."""
        links = self._links[max(self._links)] if self._links else {}
        return calibrated(self.fleet, replace(self._fits[max(self._fits)], links=links))

    def latest(self, links: Mapping[str, Link]) -> Fleet:
        """Return the fleet as it is known now, with these links, to choose plans for."""
        self._planned_with = self._fits[max(self._fits)]
        fleet = calibrated(self.fleet, replace(self._planned_with, links=links))
        return replace(fleet, stable_rounds=self._steadiness.take(), tried_split_points=dict(self._tried))

    def predicted_s(self, epoch: int, devices: Collection[str]) -> float:
        """Return the seconds of an epoch of these devices, as expected when it began."""
        return predict_s(self.fleet_for(epoch).of(devices), _at(self._plans, epoch))


def predict_s(fleet: Fleet, plans: Mapping[str, Plan]) -> float:
    """Return the seconds of an epoch of these plans: all of it simulated, or of a large fleet the part that repeats."""
    everyone = fleet.sampled()
    pieces = sum(plans[m.name].micro_batches * fleet.iterations(m.samples) for m in everyone.members)
    if pieces <= _MOST_MICRO_BATCHES:
        return simulate(everyone, plans).epoch_s
    few = fleet.sampled(_SAMPLE)
    iterations = _MOST_MICRO_BATCHES // sum(plans[member.name].micro_batches for member in few.members)
    return steady_epoch_s(simulate, few, plans, max(FEWEST_ITERATIONS, min(STEADY_ITERATIONS, iterations)))


class _Steadiness:
    """For how many rounds most devices' links stay as they are; unknown before they have changed twice."""

    def __init__(self) -> None:
        self._rounds = self._since = self._changes = 0
        self._links: Mapping[str, Link] = {}  # as the last change left them
        self._believed = math.inf

    def observe(self, before: Mapping[str, Link], now: Mapping[str, Link]) -> None:
        """Take the links as a round has shown them, and as they were believed to be before it."""
        self._rounds, self._since = self._rounds + 1, self._since + 1
        known = {**before, **self._links}
        if 2 * sum(differs(link, known[name]) for name, link in now.items()) > len(now):
            self._changes, self._since, self._links = self._changes + 1, 0, now

    @property
    def stable_rounds(self) -> float:
        """The rounds that are to be expected: as many as between two changes so far, or since the last one."""
        return math.inf if self._changes < 2 else max(self._rounds / self._changes, self._since)

    def take(self) -> float:
        """Return the rounds to be expected, for a choice."""
        self._believed = self.stable_rounds
        return self._believed

    def has_grown(self) -> bool:
        """Return whether twice as many rounds are to be expected as at the last choice."""
        return self._believed < math.inf and self.stable_rounds >= 2 * self._believed


def _at(by_first: Mapping[int, T], epoch: int) -> T:
    return by_first[max(first for first in by_first if first <= epoch)]


def entries_from(by_first: dict[int, T], epoch: int) -> dict[int, T]:
    """Return what holds in an epoch and behind it."""
    newest = max((first for first in by_first if first <= epoch), default=epoch)
    return {first: what for first, what in by_first.items() if first >= newest}


def _learned(machine: MachineHistory, profiled: ComputeLoad, measured_s: float) -> MachineHistory:
    """Return what is known of a machine that has worked for so long."""
    if profiled.seconds <= 0 or measured_s <= 0:
        return machine
    believed = machine.times(profiled.shares)
    surprise = measured_s / (profiled.seconds * believed)
    return machine.learned(profiled.shares, believed * min(_MOST, max(1 / _MOST, surprise)))
