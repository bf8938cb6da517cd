"""The plan of a device that joins a training, until the plans of all devices are chosen together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pipar.methods import METHODS, Plan
from pipar.planner.candidates import candidates
from pipar.planner.costs import Costs
from pipar.planner.fleet import Fleet, Member
from pipar.planner.single_device_plan import best_plan_alone
from pipar.profiling.memory import training_bytes
from pipar.profiling.profile import Profile
from pipar.settings.links import Link

MakeProfile = Callable[..., Profile]


def fleet_of_one(profile: Profile, link: Link) -> Fleet:
    return Fleet(METHODS["pipar"], (Member("phone", Costs(profile), link, 100),), Costs(profile), 1, 100)


def test_a_plan_alone_counts_what_the_papers_estimate_leaves_out(make_profile: MakeProfile) -> None:
    layers = [(1.0, 1.0, 1000, 0), (2.0, 2.0, 10, 0)]
    near = fleet_of_one(make_profile(layers), Link())
    assert best_plan_alone(near).split_point == 1
    far = fleet_of_one(make_profile(layers), Link(latency_s=100.0))
    assert best_plan_alone(far) == Plan(2, 1)


def test_of_plans_alone_that_tie_the_one_with_the_fewest_micro_batches_wins(make_profile: MakeProfile) -> None:
    fleet = fleet_of_one(make_profile([(1.0, 1.0, 0, 0), (0.5, 0.5, 10, 0)]), Link())
    plan = best_plan_alone(fleet)
    least = min(option.alone_s for option in candidates(fleet, fleet.members[0]))
    better = [option for option in candidates(fleet, fleet.members[0]) if option.alone_s < least * 1.002]
    assert plan.micro_batches == min(option.plan.micro_batches for option in better)


def test_a_plan_alone_fits_into_the_devices_memory(make_profile: MakeProfile) -> None:
    profile = make_profile([(1.0, 1.0, 1000, 0), (2.0, 2.0, 10, 0)])
    profile = replace(profile, layers=tuple(replace(layer, saved_bytes=1000) for layer in profile.layers))
    fleet = fleet_of_one(profile, Link(up_bps=8e5))
    memory = training_bytes(profile, Plan(1, 4, 1), 100)
    limited = replace(fleet, members=(replace(fleet.members[0], memory_bytes=memory),))
    assert training_bytes(profile, best_plan_alone(limited), 100) <= memory
