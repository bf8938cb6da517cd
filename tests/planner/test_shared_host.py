"""A server and devices on one machine slow each other down; plans are made for the cores that they share."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.fleets import fleet, plans

from pipar.methods import Plan
from pipar.planner.costs import Costs
from pipar.planner.fleet import Fleet, SharedHost
from pipar.planner.search import search_plans
from pipar.planner.simulator import simulate, simulate_within
from pipar.planner.uncut_plans import split_times
from pipar.profiling.profile import LayerProfile, Profile
from pipar.settings.links import Link

Q = 4  # layers of the fleet's network


def on_one_machine(of: Fleet, cores: float, *, share: float = 1.0) -> Fleet:
    """Return the fleet on the server's machine, without limits of links."""
    members = tuple(replace(member, host_share=share, link=Link()) for member in of.members)
    return replace(of, members=members, host=SharedHost(cores))


def epoch_s(of: Fleet, plan: Plan) -> float:
    return simulate(of, plans(of, plan)).epoch_s


def apart(of: Fleet) -> Fleet:
    return replace(of, host=None)


@pytest.mark.parametrize("plan", [Plan(1, 4), Plan(2, 2), Plan(Q, 1)])
def test_with_a_core_for_every_lane_nothing_changes(plan: Plan) -> None:
    here = on_one_machine(fleet(2, speed=1.0), cores=8)
    assert epoch_s(here, plan) == pytest.approx(epoch_s(apart(here), plan))


@pytest.mark.parametrize(("devices", "cores"), [(4, 2), (8, 2), (6, 3)])
def test_devices_that_compute_all_layers_share_the_cores_evenly(devices: int, cores: int) -> None:
    here = on_one_machine(fleet(devices, speed=1.0), cores)
    slower = epoch_s(here, Plan(Q, 1)) / epoch_s(apart(here), Plan(Q, 1))
    assert slower == pytest.approx(devices / cores, rel=0.05)


@pytest.mark.parametrize("plan", [Plan(1, 1), Plan(1, 8), Plan(2, 4), Plan(3, 1), Plan(Q, 1)])
@pytest.mark.parametrize("devices", [2, 4])
def test_no_epoch_is_shorter_than_all_work_over_all_cores(plan: Plan, devices: int) -> None:
    here = on_one_machine(fleet(devices, speed=1.0), cores=2)
    timing = simulate(apart(here), plans(here, plan))
    work_s = sum(own[0] for own in timing.own_s.values()) + 2 * timing.busy_s["server"]
    assert epoch_s(here, plan) >= 0.97 * work_s / 2


def test_an_emulated_slow_device_leaves_the_cores_to_the_server() -> None:
    slow = on_one_machine(fleet(4, speed=0.05), cores=2, share=0.05)
    assert epoch_s(slow, Plan(2, 4)) == pytest.approx(epoch_s(apart(slow), Plan(2, 4)), rel=0.05)


def test_devices_on_machines_of_their_own_are_not_slowed_down() -> None:
    here = on_one_machine(fleet(4, speed=1.0), cores=2)
    elsewhere = replace(here, members=tuple(replace(member, host_share=0.0) for member in here.members))
    # The server's cores are its machine's: it has them to itself.
    assert epoch_s(elsewhere, Plan(2, 4)) == pytest.approx(epoch_s(apart(here), Plan(2, 4)))


def test_devices_as_fast_as_the_server_on_its_own_machine_keep_the_whole_network() -> None:
    as_fast = replace(fleet(2, speed=1.0), server=fleet(2, speed=1.0).members[0].costs)
    here = on_one_machine(as_fast, cores=2)
    shared, alone = (search_plans(one, simulate, within=simulate_within).plans for one in (here, apart(here)))
    assert {plan.split_point for plan in shared.values()} == {Q}
    assert {plan.split_point for plan in alone.values()} != {Q}


def test_slow_devices_leave_layers_to_the_server_of_their_machine() -> None:
    here = on_one_machine(fleet(4, speed=0.05), cores=2, share=0.05)
    found = search_plans(here, simulate, within=simulate_within).plans
    assert {plan.split_point for plan in found.values()} == {1}


def test_a_pipeline_has_to_gain_more_where_lanes_share_cores() -> None:
    here = on_one_machine(fleet(2, speed=1.0), cores=2)
    roomy, slow = on_one_machine(fleet(2, speed=1.0), cores=8), on_one_machine(fleet(2), cores=2, share=0.05)
    assert split_times(here) > split_times(roomy) == split_times(slow) > split_times(apart(here)) == 1.0


@pytest.mark.parametrize("plan", [Plan(1, 4), Plan(Q, 1)])
def test_devices_of_a_sample_use_the_machine_for_those_that_they_stand_for(plan: Plan) -> None:
    here = on_one_machine(fleet(64, speed=1.0), cores=8)
    assert epoch_s(here.sampled(16), plan) == pytest.approx(epoch_s(here, plan), rel=0.02)


def test_work_too_small_for_its_profile_takes_no_time() -> None:
    layers = (LayerProfile("layer", (0.0, 0.0), (0.0, 0.0), output_bytes=4096, parameter_bytes=4096),) * Q
    nothing = Costs(Profile("small", "float32", (1, 10), layers))
    alone = fleet(2, speed=1.0)
    members = tuple(replace(member, costs=nothing) for member in alone.members)
    here = on_one_machine(replace(alone, members=members, server=nothing), cores=2)
    assert epoch_s(here, Plan(1, 4)) == 0.0
