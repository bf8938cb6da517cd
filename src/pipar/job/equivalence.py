"""Whether a training gives the weights of plain training, and if not, why: one table for every place that shows it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from pipar.methods import Plan
from pipar.wire.encodings import LOSSY


@dataclass(frozen=True)
class EquivalenceFacts:
    """What decides whether the weights are exact: the network, the privacy, and what rounds were trained with."""

    layers: int
    plans: Collection[Plan]  # with which rounds were trained
    averaged: int = 1  # the most models that a round has averaged
    batch_statistics: bool = False
    counts_forwards: bool = False  # each forward changes a buffer, or decides by values
    dropout: bool = False
    adapters: bool = False  # of low rank: a product of two trained matrices
    noisy_updates: bool = False
    noisy_inputs: bool = False
    randomised_labels: bool = False
    device_autocast: bool = False  # a device computes in bfloat16
    server_autocast: bool = False
    clips_by_side: bool = False  # gradients are clipped by the norm of each side of the cut

    @property
    def cuts(self) -> list[Plan]:
        """The plans that cut the network: with P = Q, nothing but models leaves a device."""
        return [plan for plan in self.plans if plan.split_point < self.layers]


#: Each reason, in the order in which they are listed, and when it holds.
_REASONS: Mapping[str, Callable[[EquivalenceFacts], bool]] = {
    "batch statistics": lambda facts: facts.batch_statistics and any(plan.micro_batches > 1 for plan in facts.plans),
    "forward per micro-batch": lambda facts: (
        facts.counts_forwards and any(plan.micro_batches > 1 for plan in facts.plans)
    ),
    "dropout": lambda facts: facts.dropout,
    "noise on updates": lambda facts: facts.noisy_updates,
    "noise on inputs": lambda facts: facts.noisy_inputs,
    "randomised labels": lambda facts: facts.randomised_labels and bool(facts.cuts),
    "lossy encoding": lambda facts: any({plan.up, plan.down} & set(LOSSY) for plan in facts.cuts),
    "clipping by side": lambda facts: facts.clips_by_side and bool(facts.cuts),
    "bfloat16": lambda facts: facts.device_autocast or (facts.server_autocast and bool(facts.cuts)),
    "LoRA averaging": lambda facts: facts.adapters and facts.averaged > 1,
}
REASONS = tuple(_REASONS)


def equivalence_reasons(facts: EquivalenceFacts) -> tuple[str, ...]:
    """Return why the weights are not exact, each reason in two or three words; nothing if they are."""
    return tuple(reason for reason, holds in _REASONS.items() if holds(facts))


class EquivalenceLog:
    """The reasons so far of a training whose plans and devices change: those of each round that is over, together.

    Before the first round is over, they are those of the plans to start with.
    """

    def __init__(self, plans: Mapping[str, Plan]) -> None:
        self._plans: dict[int, Mapping[str, Plan]] = {0: plans}  # by the first epoch that they are for
        self._used: set[Plan] = set()
        self._averaged = 0
        self._before: frozenset[str] = frozenset()

    def resume(self, plans: Mapping[str, Plan], reasons: Iterable[str]) -> None:
        """Continue a training that has had these reasons."""
        self._plans, self._before = {0: plans}, frozenset(reasons)

    def replan(self, epoch: int, plans: Mapping[str, Plan]) -> None:
        """These are the plans from an epoch on."""
        self._plans[epoch] = plans

    def end_round(self, epoch: int, devices: Collection[str]) -> None:
        """Take a round that these devices have trained."""
        last = max(first for first in self._plans if first <= epoch)
        self._used |= {plan for name, plan in self._plans[last].items() if name in devices}
        self._averaged = max(self._averaged, len(devices))
        self._plans = {first: plans for first, plans in self._plans.items() if first >= last}

    def reasons(self, facts: EquivalenceFacts) -> tuple[str, ...]:
        """Return the reasons of all rounds so far; `facts` are those of the training as it was to start."""
        if self._averaged:
            facts = replace(facts, plans=self._used, averaged=self._averaged)
        found = {*equivalence_reasons(facts), *self._before}
        return tuple(reason for reason in REASONS if reason in found)
