"""What the server expects of the next epochs, and what it learns from past ones.

An epoch's trace arrives during the next epoch, so its measurements take effect two epochs later. Links are measured by
the round itself, and take effect in the next one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from statistics import median_low
from typing import TypeVar

from pipar.methods import METHODS, Plan
from pipar.planner.calibration import Calibration, MachineHistory, calibrated
from pipar.planner.compute_load import ComputeLoad, compute_loads, slowdown
from pipar.planner.fleet import Fleet
from pipar.planner.measured_epochs import MeasuredEpochs
from pipar.planner.replanner import MeasuredLink, differs
from pipar.planner.simulator import simulate
from pipar.planner.timing import FEWEST_ITERATIONS, STEADY_ITERATIONS, steady_epoch_s
from pipar.planner.uncut_plans import split_times
from pipar.settings.links import Link

T = TypeVar("T")

#: Less work than this shows nothing about the speed of the server.
_TELLING_S = 0.02
#: Plans are searched again if machines differ from their calibration by more than this, as a logarithm: for work that
#: is new since the last search, and for work that is not, because its epochs scatter.
_NOTICED, _NOTICED_AGAIN = 0.002, 0.03
#: Plans are searched again if epochs take longer or shorter than predicted by more than this, as a logarithm.
_NOTICED_BIAS = 0.05
#: Measured epochs hold no longer if other links change their prediction by more than this, as a logarithm.
_NOTICED_ON_LINKS = 0.1
#: Between real processes the first epoch after a change of plans takes longer: this share of it is left.
_FIRST_EPOCHS = 0.9
#: A machine that seems to differ by a larger factor was disturbed, not profiled wrongly.
_MOST_FACTOR = 5.0


#: A prediction is made in the middle of a training, and the server's messages wait for it. So a large fleet is
#: predicted by a sample of this size,
_SAMPLE = 32
#: and of at most this many micro-batches, which take less than a tenth of a second.
_MOST_MICRO_BATCHES = 4000
#: A device is named if it differs from the others by more than this share.
_TELLING = 0.1
#: Devices describe themselves. One that claims to compute for longer than this many times the median of all is forecast
#: to need this many times as long as the others, so that its claim does not lengthen their rounds.
_CREDIBLE = 25.0


class Predictor:
    """Predicts each epoch's seconds by what was known when it began, and calibrates the cost model after each."""

    def __init__(self, fleet: Fleet, plans: Mapping[str, Plan], *, scatter: float = 0.0) -> None:
        self.fleet = fleet  # as profiled
        first = _FIRST_EPOCHS if fleet.is_real else 1.0
        self._measured = MeasuredEpochs(
            scatter=scatter, layers=fleet.layers, split=split_times(fleet), first_epochs=first
        )
        self._measured_on: Mapping[str, Link] = {}  # links on which epochs were measured
        self._believed_bias = 1.0  # of the current plans' predictions, in the last search for plans
        self._plans: dict[int, Mapping[str, Plan]] = {1: plans}  # by the first epoch that they apply to
        self._links: dict[int, Mapping[str, Link]] = {}
        self._fits: dict[int, Calibration] = {1: Calibration()}
        self._planned_with = Calibration()
        self._stability = _LinkStability()
        self._tried: dict[str, frozenset[int]] = {}
        self._recalled: dict[int, frozenset[str]] = {}  # by epoch: devices that refer to activations kept before
        self._remember(plans)

    @property
    def plans(self) -> Mapping[str, Plan]:
        """The current plans, or those that take effect next."""
        return self._plans[max(self._plans)]

    def _plans_of_latest(self) -> Mapping[str, Plan]:
        """Return the current plans of the devices that the latest measured epoch had: others may have left."""
        names = {name for name, _ in self._measured.latest}
        return {name: plan for name, plan in self.plans.items() if name in names}

    def replan(self, first_epoch: int, plans: Mapping[str, Plan]) -> None:
        """Note that devices train with these plans from this epoch on."""
        if first_epoch > 1 and {**self.plans, **plans} != self.plans:
            self._measured = self._measured.with_change()
        self._plans[first_epoch] = {**_at(self._plans, first_epoch), **plans}
        self._remember(plans)

    def _remember(self, plans: Mapping[str, Plan]) -> None:
        for name, plan in plans.items():
            self._tried[name] = self._tried.get(name, frozenset()) | {plan.split_point}

    def recall(self, epoch: int, devices: Collection[str]) -> None:
        """Note that these devices refer to activations that the server has kept, in this epoch."""
        self._recalled[epoch] = self._recalled.get(epoch, frozenset()) | frozenset(devices)

    def _as_recalled(self, fleet: Fleet, epoch: int | None = None) -> Fleet:
        """Return the fleet with the share of devices that refer to kept activations in an epoch, or in the last one."""
        devices = self._recalled.get(max(self._recalled, default=0) if epoch is None else epoch, frozenset())
        share = sum(member.name in devices for member in fleet.members) / max(1, len(fleet.members))
        return replace(fleet, recalled=share)

    def measure_links(self, epoch: int, measured: Mapping[str, MeasuredLink]) -> None:
        """Take the links that an epoch's traffic showed; a direction with little traffic keeps its known rate."""
        before = self._links[max(self._links)] if self._links else {m.name: m.link for m in self.fleet.members}
        known = {member.name: member.link for member in self.fleet.members}
        now = {name: one.over(before.get(name, known[name])) for name, one in measured.items()}
        self._links[epoch + 1] = {**before, **now}
        self._forget_epochs_on_other_links({**known, **before})
        self._stability.observe({**known, **before}, self._links[epoch + 1])

    def _forget_epochs_on_other_links(self, before: Mapping[str, Link]) -> None:
        """Forget measured epochs that would take another time on the links that are known now."""
        reference, links = {**before, **self._measured_on}, {**before, **self._links[max(self._links)]}
        self._measured_on = reference
        if not any(differs(link, reference[name]) for name, link in links.items()):
            return
        fleets = [calibrated(self.fleet, replace(self._fits[max(self._fits)], links=of)) for of in (reference, links)]
        noticed = max(_NOTICED_ON_LINKS, 2 * self._measured.scatter)

        def still_holds(plans: Mapping[str, Plan]) -> bool:
            then_s, now_s = (predict_s(fleet.of(plans), plans) for fleet in fleets)
            return max(then_s, now_s) <= min(then_s, now_s) * math.exp(noticed)

        found = self._measured.where(still_holds)
        if found != self._measured or not self._measured.seconds:
            self._measured, self._measured_on = found, links

    def learn(self, epoch: int, device_s: Mapping[str, float], server_s: float) -> None:
        """Take how long the devices and the server's cores computed in an epoch, and calibrate."""
        fit, plans = self._fits[max(self._fits)], _at(self._plans, epoch)
        fleet = self._as_recalled(self.fleet.of(device_s), epoch)
        # From the profiles, each device by itself: with factors shared by a group, single devices could diverge.
        profiled, served = compute_loads(fleet, plans)
        slower = slowdown(self.fleet_for(epoch).of(device_s), plans)
        shares = {member.name: member.host_share for member in fleet.members}
        learned = {
            name: _learned(fit.of(name), busy, device_s[name] / slower.of(shares[name]))
            for name, busy in profiled.items()
            if name in device_s and not fleet.recalled
        }
        server = fit.server
        if served.seconds * server.latest > _TELLING_S:
            server = _learned(server, served, server_s / slower.server)
        self._fits[epoch + 2] = replace(fit, server=server, devices={**fit.devices, **learned})

    def learn_seconds(self, epoch: int, seconds: float, devices: Collection[str]) -> None:
        """Take how long an epoch of these devices really took."""
        plans = _at(self._plans, epoch)
        if self.fleet.recalled or self.fleet.per_round is not None or seconds <= 0:
            return  # epochs with the same plans differ
        self._measured = self._measured.with_epoch({name: plans[name] for name in devices}, seconds)

    def forget(self, epoch: int) -> None:
        """Drop what only epochs up to this one needed: a training may have any number of them."""
        self._plans = entries_from(self._plans, epoch + 1)
        self._links = entries_from(self._links, epoch + 1)
        self._fits = entries_from(self._fits, epoch + 1)
        self._recalled = {number: devices for number, devices in self._recalled.items() if number >= epoch}

    def has_learned(self) -> bool:
        """Return whether machines differ, or links are more stable, than in the last search for plans."""
        return bool(self.reason())

    def reason(self) -> str:
        """Return why plans may be chosen better than in the last search for them; empty if nothing says so."""
        if self._stability.has_grown():
            return "links change less often than before"
        return self._reason_of_epochs() or (self._reason_of_machines() if self.has_learned_of_machines() else "")

    def has_learned_of_machines(self) -> bool:
        """Return whether machines are known to differ from the last search for plans."""
        sure = 2 * self._measured.scatter
        noticed, again = max(_NOTICED, sure), max(_NOTICED_AGAIN, sure)
        return self._fits[max(self._fits)].differs(self._planned_with, noticed, again) or bool(self._reason_of_epochs())

    def _reason_of_machines(self) -> str:
        return machines_text(self._fits[max(self._fits)])

    def _reason_of_epochs(self) -> str:
        """Return what measured epochs say about the current plans: others were better, or predictions are wrong."""
        current = self._plans_of_latest()
        better, now_s = self._measured.better_than(current), self._measured.measured_s(current)
        if now_s is None:
            return ""
        if better is not None:
            before_s = self._measured.seconds_of(better)
            return f"an epoch takes {now_s:.3g} s, and took {before_s:.3g} s with earlier plans"
        if not self._measured.scatter:  # epochs take exactly what machines and links say
            return ""
        factor = self._bias()
        if abs(math.log(factor / self._believed_bias)) <= max(_NOTICED_BIAS, 2 * self._measured.scatter):
            return ""
        return f"an epoch takes {now_s:.3g} s, {times_text(factor, 'longer', 'shorter')} than predicted"

    def _bias(self) -> float:
        """Return how many times as long as predicted epochs with the current plans take."""
        current = self._plans_of_latest()
        now_s = self._measured.measured_s(current)
        predicted_s = 0.0 if now_s is None else predict_s(self.now().of(current), current)
        return now_s / predicted_s if now_s and predicted_s else 1.0

    def fleet_for(self, epoch: int) -> Fleet:
        """Return the fleet as known when an epoch began."""
        links = _at(self._links, epoch) if any(first <= epoch for first in self._links) else {}
        return self._as_recalled(calibrated(self.fleet, replace(_at(self._fits, epoch), links=links)), epoch)

    def now(self) -> Fleet:
        """Return the fleet as known now: calibrated machines, and links as last measured."""
        links = self._links[max(self._links)] if self._links else {}
        return self._as_recalled(calibrated(self.fleet, replace(self._fits[max(self._fits)], links=links)))

    def latest(self, links: Mapping[str, Link]) -> Fleet:
        """Return the fleet as known now, with these links, to search plans for."""
        self._planned_with, self._believed_bias = self._fits[max(self._fits)], self._bias()
        fleet = calibrated(self.fleet, replace(self._planned_with, links=links))
        tried = dict(self._tried)
        return replace(fleet, stable_rounds=self._stability.take(), tried_split_points=tried, measured=self._measured)

    def predicted_s(self, epoch: int, devices: Collection[str]) -> float:
        """Return the seconds of an epoch of these devices, as expected when it began."""
        return predict_s(self.fleet_for(epoch).of(devices), _at(self._plans, epoch))


def predict_s(fleet: Fleet, plans: Mapping[str, Plan]) -> float:
    """Return the seconds of an epoch of these plans: simulated, or for a large fleet extrapolated from a sample."""
    everyone = fleet.sampled()
    pieces = sum(plans[m.name].micro_batches * fleet.iterations(m.samples) for m in everyone.members)
    if pieces <= _MOST_MICRO_BATCHES:
        return simulate(everyone, plans).epoch_s
    few = fleet.sampled(_SAMPLE)
    iterations = _MOST_MICRO_BATCHES // sum(plans[member.name].micro_batches for member in few.members)
    return steady_epoch_s(simulate, few, plans, max(FEWEST_ITERATIONS, min(STEADY_ITERATIONS, iterations)))


def forecast_rounds(fleet: Fleet, plans: Mapping[str, Plan], slowest_bps: float) -> dict[str, tuple[float, float]]:
    """Return the seconds of a round for each device: with the links that are known, and over the slowest links.

    Devices that train one at a time are forecast each by itself. Where they share a server-side model otherwise, these
    are the sums over all devices, each by itself: how they take turns is not simulated. What a device claims about
    itself changes the forecasts of the others by a bounded factor.
    """
    loads, _ = compute_loads(fleet, plans)
    most_s = _CREDIBLE * median_low(load.seconds for load in loads.values())
    usual = fleet.of([name for name, load in loads.items() if load.seconds <= most_s])
    slow = replace(usual, members=tuple(replace(one, link=_slower(one.link, slowest_bps)) for one in usual.members))
    known_s, slowest_s = (_rounds_s(of, plans) for of in (usual, slow))
    longest_s, slowest = max(known_s.values()), max(slowest_s.values())
    doubtful = (_CREDIBLE * longest_s, _CREDIBLE * longest_s + slowest)
    return {name: (known_s[name], slowest_s[name]) if name in known_s else doubtful for name in loads}


def _rounds_s(fleet: Fleet, plans: Mapping[str, Plan]) -> dict[str, float]:
    names = [member.name for member in fleet.members]
    if not fleet.method.shares_server_model:
        return dict.fromkeys(names, predict_s(fleet, plans))
    alone = replace(fleet, method=METHODS["sfl"])
    each_s = {
        member.name: seconds
        for kind in fleet.device_kinds()
        for seconds in [predict_s(replace(alone, members=kind[:1]), plans)]
        for member in kind
    }
    return each_s if fleet.method.one_device_at_a_time else dict.fromkeys(names, sum(each_s.values()))


def _slower(link: Link, most_bps: float) -> Link:
    up_bps, down_bps = (min(rate or math.inf, most_bps) for rate in (link.up_bps, link.down_bps))
    return Link(up_bps=up_bps, down_bps=down_bps, latency_s=link.latency_s)


class _LinkStability:
    """For how many rounds most devices' links stay unchanged; unknown before they have changed twice."""

    def __init__(self) -> None:
        self._rounds = self._since = self._changes = 0
        self._links: Mapping[str, Link] = {}  # as the last change left them
        self._believed = math.inf

    def observe(self, before: Mapping[str, Link], now: Mapping[str, Link]) -> None:
        """Take the links that a round has shown, and those that were expected before it."""
        self._rounds, self._since = self._rounds + 1, self._since + 1
        known = {**before, **self._links}
        if 2 * sum(differs(link, known[name]) for name, link in now.items()) > len(now):
            self._changes, self._since, self._links = self._changes + 1, 0, now

    @property
    def stable_rounds(self) -> float:
        """The expected rounds without a change: the mean between changes so far, or those since the last one."""
        return math.inf if self._changes < 2 else max(self._rounds / self._changes, self._since)

    def take(self) -> float:
        """Return the expected rounds, and note that a search for plans uses them."""
        self._believed = self.stable_rounds
        return self._believed

    def has_grown(self) -> bool:
        """Return whether twice as many rounds are expected as in the last search."""
        return self._believed < math.inf and self.stable_rounds >= 2 * self._believed


def machines_text(fit: Calibration) -> str:
    """Return in a few words which machine differs most from its profile."""
    devices = {name: machine.latest for name, machine in fit.devices.items() if machine.seen}
    usual = median_low(devices.values()) if devices else 1.0
    name, own = max(devices.items(), key=lambda item: abs(math.log(item[1] / usual)), default=("", 1.0))
    if name and abs(math.log(own / usual)) > math.log(1 + _TELLING):
        return f"{name} is {times_text(own, 'slower', 'faster')} than its profile"
    if abs(math.log(usual)) >= abs(math.log(fit.server.latest)):
        return f"devices are {times_text(usual, 'slower', 'faster')} than their profiles"
    return f"the server is {times_text(fit.server.latest, 'slower', 'faster')} than its profile"


def times_text(factor: float, more: str, less: str) -> str:
    """Return a factor in words, as in "1.4x slower"."""
    return f"{factor:.3g}x {more}" if factor >= 1 else f"{1 / factor:.3g}x {less}"


def _at(by_first: Mapping[int, T], epoch: int) -> T:
    return by_first[max(first for first in by_first if first <= epoch)]


def entries_from(by_first: dict[int, T], epoch: int) -> dict[int, T]:
    """Return the entries that apply to an epoch and later ones."""
    newest = max((first for first in by_first if first <= epoch), default=epoch)
    return {first: what for first, what in by_first.items() if first >= newest}


def _learned(machine: MachineHistory, profiled: ComputeLoad, measured_s: float) -> MachineHistory:
    """Return a machine's history with an epoch in which it computed for `measured_s`."""
    if profiled.seconds <= 0 or measured_s <= 0:
        return machine
    believed = machine.times(profiled.shares)
    surprise = measured_s / (profiled.seconds * believed)
    return machine.learned(profiled.shares, believed * min(_MOST_FACTOR, max(1 / _MOST_FACTOR, surprise)))
