"""The plan of one device as if no other used the server: where a search of the whole fleet would take too long."""

from __future__ import annotations

from pipar.methods import Plan
from pipar.planner.candidates import candidates
from pipar.planner.fleet import Fleet
from pipar.planner.search_settings import TIE


def best_plan_alone(fleet: Fleet) -> Plan:
    """Return the plan with the shortest iteration for the only device of a fleet; ties go to the smaller N."""
    (member,) = fleet.members
    options = candidates(fleet, member)
    within = min(option.alone_s for option in options) * (1 + TIE)
    tied = [option.plan for option in options if option.alone_s <= within]
    return min(tied, key=lambda plan: (plan.micro_batches, plan))
