"""What epochs really took, plans by plans: measured times outweigh predictions.

A prediction compares plans well that are alike, and badly plans that are not: what is missing in the simulation (other
programs, the interpreter, a radio) weighs more on a network that is split. So a plan that was measured counts by its
time, and one that was not by its predicted time, corrected by how far predictions of such plans were off. The first
epoch of plans takes longer between real processes: layers move, and memory is allocated. So a second one replaces it.
Epochs scatter: a change has to gain more than that, and each change since the situation last changed doubles what the
next one has to gain, so that plans soon stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from pipar.methods import Plan

#: A set of plans, by device.
PlansKey = tuple[tuple[str, Plan], ...]
#: Returns the predicted seconds of an epoch.
Predict = Callable[[Mapping[str, Plan]], float]

#: Epochs of one set of plans that are remembered: their median counts.
_REMEMBERED = 5
#: A new plan must gain this many times the scatter of epochs; one that was measured this many times that of both means.
_SURE, _SURE_OF_MEASURED = 2.0, 1.5
#: Epochs that the scatter which is assumed at first counts as much as.
_ASSUMED_EPOCHS = 4
#: If the latest two epochs differ from those before by more than this share, the machines are other ones than before.
_DRIFT = 0.25
#: A larger gain is never asked for.
_MOST_GAIN = 0.3


def plans_key(plans: Mapping[str, Plan]) -> PlansKey:
    """Return what identifies plans."""
    return tuple(sorted(plans.items()))


@dataclass(frozen=True)
class MeasuredEpochs:
    """The seconds of epochs since links, devices or machines last changed by much, by their plans."""

    seconds: Mapping[PlansKey, tuple[float, ...]] = field(default_factory=dict)
    scatter: float = 0.0  # of epochs with the same plans: the standard deviation, as a share
    changes: int = 0  # of plans in this situation
    differences: float = _ASSUMED_EPOCHS  # how many the scatter was estimated from
    layers: int = 0  # of the network: a device with all of them has no pipeline
    split: float = 1.0  # how many times as long as predicted an epoch of a split network takes, as far as not measured
    first_epochs: float = 1.0  # the share of the first epoch after a change that is not due to the change
    latest: PlansKey = ()  # the plans of the latest epoch,
    in_a_row: int = 0  # and for how many epochs they have not changed

    def with_epoch(self, plans: Mapping[str, Plan], seconds: float) -> MeasuredEpochs:
        """Return these with one more epoch."""
        key = plans_key(plans)
        before, row = self.seconds.get(key, ()), 1 + (self.in_a_row if key == self.latest else 0)
        here = replace(self, latest=key, in_a_row=row)
        if self.first_epochs < 1.0 and row <= 2:
            # The first epoch of plans is no measure of others; the second takes its place, and begins the comparison.
            known = before if row == 1 else before[:-1]
            share = self.first_epochs if row == 1 else 1.0
            return replace(here, seconds={**self.seconds, key: (*known, seconds * share)[-_REMEMBERED:]})
        times = (*before, seconds)[-_REMEMBERED:]
        if _has_drifted(times):
            return replace(here, seconds={key: times[-2:]}, changes=0)
        found = replace(here, seconds={**self.seconds, key: times})
        return found._with_difference(math.log(seconds / before[-1])) if before else found

    def _with_difference(self, difference: float) -> MeasuredEpochs:
        """Return these with the scatter that follows from one more difference between two epochs of the same plans."""
        squared = (self.scatter**2 * self.differences + difference**2 / 2) / (self.differences + 1)
        return replace(self, scatter=math.sqrt(squared), differences=self.differences + 1)

    def with_change(self) -> MeasuredEpochs:
        """Return these after a change of plans."""
        return replace(self, changes=self.changes + 1)

    def where(self, still_holds: Callable[[Mapping[str, Plan]], bool]) -> MeasuredEpochs:
        """Return these in another situation, in which only the epochs of some plans still hold."""
        left = {key: times for key, times in self.seconds.items() if still_holds(dict(key))}
        return self if len(left) == len(self.seconds) else replace(self, seconds=left, changes=0)

    def forgotten(self) -> MeasuredEpochs:
        """Return these in another situation, in which no plan was measured yet; epochs scatter as before."""
        return self.where(lambda _: False)

    def measured_s(self, plans: Mapping[str, Plan]) -> float | None:
        """Return what an epoch of these plans took; None if they were not tried in this situation."""
        times = self.seconds.get(plans_key(plans))
        return median(times) if times else None

    def plans_of(self, names: Iterable[str]) -> list[Mapping[str, Plan]]:
        """Return the plans of these devices that were measured."""
        wanted = sorted(names)
        return [dict(key) for key in self.seconds if [name for name, _ in key] == wanted]

    def better_than(self, current: Mapping[str, Plan]) -> Mapping[str, Plan] | None:
        """Return plans whose measured epochs were shorter than those of the current plans, by more than chance."""
        now_s = self.measured_s(current)
        if now_s is None:
            return None
        others = [plans for plans in self.plans_of(current) if plans != dict(current)]
        times = [(self.seconds_of(plans), plans) for plans in others]
        sure = [(s, plans) for s, plans in times if 1 - s / now_s >= self.least_gain(current, plans, 0.0)]
        return min(sure, key=lambda item: item[0])[1] if sure else None

    def seconds_of(self, plans: Mapping[str, Plan]) -> float:
        """Return what an epoch of measured plans took."""
        return median(self.seconds[plans_key(plans)])

    def least_gain(self, current: Mapping[str, Plan], plans: Mapping[str, Plan], least: float) -> float:
        """Return the share of an epoch that plans have to gain to replace the current ones: at least `least`."""
        known, now = (self.seconds.get(plans_key(one), ()) for one in (plans, current))
        if known and now:
            if self.first_epochs < 1.0 and self.in_a_row == 1:
                least = max(least, 1.0 - self.first_epochs)
            return max(least, _SURE_OF_MEASURED * self.scatter * math.sqrt(1 / len(known) + 1 / len(now)))
        return min(max(least, _MOST_GAIN), max(least, _SURE * self.scatter) * 2.0**self.changes)

    def expected_s(self, plans: Mapping[str, Plan], predict: Predict) -> float:
        """Return the seconds of an epoch of plans: as measured, or as predicted and corrected."""
        measured = self.measured_s(plans)
        return predict(plans) * self.bias(plans, predict) if measured is None else measured

    def bias(self, plans: Mapping[str, Plan], predict: Predict) -> float:
        """Return by which factor epochs of the same devices with such plans took longer than predicted.

        Whole networks on the devices say something about networks that are split, but not the reverse: a pipeline has
        more that can hold it up.
        """
        by_kind: dict[bool, list[float]] = {True: [], False: []}
        for measured in self.plans_of(plans):  # others may have left: nothing can be predicted for them
            if (predicted_s := predict(measured)) > 0:
                by_kind[self._splits(measured)].append(self.seconds_of(measured) / predicted_s)
        is_split = self._splits(plans)
        if by_kind[is_split]:
            return median(by_kind[is_split])
        return max(self.split, median(by_kind[False])) if is_split and by_kind[False] else self.split**is_split

    def _splits(self, plans: Mapping[str, Plan]) -> bool:
        return any(plan.split_point < self.layers for plan in plans.values())


def _has_drifted(times: tuple[float, ...]) -> bool:
    if len(times) < 4:
        return False
    usual = median(times[:-2])
    off = [math.log(seconds / usual) for seconds in times[-2:]]
    return min(off) > math.log(1 + _DRIFT) or max(off) < -math.log(1 + _DRIFT)
