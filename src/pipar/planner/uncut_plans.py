"""Devices that train the whole network: a choice that hardly anything can hold up, unlike a pipeline.

Measured epochs of split networks take longer than simulated ones, because threads, interpreters, encryption and radios
make every message later than it seems. Where that matters, whole networks are preferred to a pipeline that seems
hardly better.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipar.methods import Plan
from pipar.planner.candidates import allowed_plans
from pipar.planner.fleet import Fleet
from pipar.planner.simulator import simulate
from pipar.planner.timing import steady_epoch_s

#: How many times as long as simulated an epoch of a split network takes, between real processes, until it is measured.
_REAL_SPLIT = 1.1
#: The same where devices and the server have more lanes than their machine has cores: 1.24 to 1.45 were measured.
_CROWDED_SPLIT = 1.3


def split_times(fleet: Fleet) -> float:
    """Return how many times as long as simulated an epoch of a split network takes, until it is measured."""
    if not fleet.is_real:
        return 1.0
    lanes = 1 + sum(member.host_share * member.stands_for for member in fleet.members)
    return _CROWDED_SPLIT if fleet.host is not None and lanes > fleet.host.cores else _REAL_SPLIT


def whole_plans(fleet: Fleet) -> dict[str, Plan] | None:
    """Return plans with which every device trains the whole network; None if that is not allowed."""
    found: dict[str, Plan] = {}
    for kind in fleet.device_kinds():
        whole = [plan for plan in allowed_plans(fleet, kind[0]) if plan.split_point == fleet.layers]
        if not whole:
            return None
        found |= {member.name: whole[0] for member in kind}
    return found


def surest(fleet: Fleet, plans: Mapping[str, Plan]) -> Mapping[str, Plan]:
    """Return plans for real machines: whole networks on all devices, if others seem hardly better."""
    whole = whole_plans(fleet) if fleet.is_real and fleet.method.splits else None
    if whole is None or all(plan.split_point == fleet.layers for plan in plans.values()):
        return plans
    sample = fleet.sampled()
    seconds, whole_s = (steady_epoch_s(simulate, sample, each) for each in (plans, whole))
    return whole if whole_s <= seconds * split_times(fleet) else plans
