"""Small fleets with profiles made by hand, for tests of what is planned and foreseen."""

from __future__ import annotations

from pipar.config import Link
from pipar.link.shaping import Traffic
from pipar.methods import METHODS, Plan
from pipar.planner.costs import Costs
from pipar.planner.fleet import Fleet, Member
from pipar.planner.profile import LayerProfile, Profile
from pipar.replanning import MeasuredLink

LAYERS = tuple(LayerProfile(name, (0.001, 0.04), (0.002, 0.08), 25_000, 4_000) for name in "abcd")
PROFILE = Profile("any", "float32", (1, 50), LAYERS)
LINK = Link(up_bps=10e6, down_bps=20e6)
PLAN = Plan(2, 5)


def fleet(devices: int = 4, speed: float = 0.2) -> Fleet:
    costs = Costs(PROFILE, speed)
    members = tuple(Member(f"d{number:02}", costs, LINK, 200) for number in range(devices))
    return Fleet(METHODS["pipar"], members, Costs(PROFILE, 0.5), 2, 50)


def plans(of: Fleet, plan: Plan = PLAN) -> dict[str, Plan]:
    return {member.name: plan for member in of.members}


def measured(up_bps: float, down_bps: float) -> MeasuredLink:
    return MeasuredLink(Traffic(1_000_000, 8e6 / up_bps), Traffic(1_000_000, 8e6 / down_bps))
