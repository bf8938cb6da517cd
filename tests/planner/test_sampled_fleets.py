"""A sample of a large fleet takes as long as the whole fleet, also where busy cores slow each other down."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.sampled_fleets import FAMILIES, MOST_OFF, drawn_fleet, off
from pipar.methods import METHODS, Plan
from pipar.planner.costs import Costs
from pipar.planner.fleet import Fleet, Member
from pipar.planner.simulator import simulate
from pipar.planner.timing import steady_epoch_s
from pipar.profiling.profile import LayerProfile, Profile
from pipar.settings.links import Link

#: Seconds of a forward pass of 1 and of 50 samples, bytes of an output and of parameters.
LAYERS = tuple(
    LayerProfile(f"layer{place}", (0.001 * work, 0.05 * work), (0.002 * work, 0.1 * work), output, parameters)
    for place, (work, output, parameters) in enumerate([(1, 40_000, 10_000), (2, 20_000, 40_000), (0.3, 400, 400_000)])
)
ALONE = Profile("any", "float32", (1, 50), LAYERS)
FOUR_G, WIFI = Link(up_bps=10e6, down_bps=25e6), Link(up_bps=50e6, down_bps=50e6)


def fleet(devices: int, cores: int, contention: float, links: tuple[Link, ...]) -> Fleet:
    """Return devices of one kind for each link, and a server on which seven busy cores slow the eighth down."""
    crowded = Profile("any", "float32", (1, 50), LAYERS, crowded=(contention, contention), crowd=7)
    costs = Costs(ALONE, 0.05)
    members = [Member(f"d{n:04}", costs, links[n % len(links)], 100) for n in range(devices)]
    return Fleet(METHODS["pipar"], tuple(members), Costs(crowded), cores, 50)


def epoch_s(of: Fleet, plan: Plan) -> float:
    return steady_epoch_s(simulate, of, {member.name: plan for member in of.members}, 2)


@pytest.mark.slow
@pytest.mark.parametrize("contention", [1.0, 1.1, 1.5])
@pytest.mark.parametrize(("devices", "cores"), [(200, 1), (200, 6), (400, 8), (400, 32)])
def test_a_sample_takes_as_long_as_the_whole_fleet(devices: int, cores: int, contention: float) -> None:
    for plan, links in ((Plan(1, 4), (WIFI,)), (Plan(2, 1), (FOUR_G, WIFI))):
        whole = fleet(devices, cores, contention, links)
        sample = whole.sampled()
        assert len(sample.members) < devices
        assert epoch_s(sample, plan) == pytest.approx(epoch_s(whole, plan), rel=0.02), (plan, links)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_sample_takes_as_long_as_the_whole_fleet_whatever_the_sizes_of_its_kinds(name: str) -> None:
    for seed in range(16):
        assert abs(off(*drawn_fleet(FAMILIES[name], seed))) <= MOST_OFF, seed


def test_a_sample_counts_a_rare_kind_with_much_work_for_the_server_as_rarely_as_it_is() -> None:
    rare = [Member(f"a{n:03}", Costs(ALONE, 1.0), WIFI, 100) for n in range(100)]  # each of a kind of its own
    usual = Costs(ALONE, 1.0)
    whole = Fleet(
        METHODS["pipar"],
        (*rare, *(Member(f"b{n:04}", usual, WIFI, 100) for n in range(1100))),
        *(Costs(ALONE), 4, 50),
    )
    plans = {member.name: Plan(1, 4) if member.name < "b" else Plan(3, 1) for member in whole.members}
    assert len(whole.sampled().members) < 250
    whole_s = simulate(whole, plans).epoch_s
    assert simulate(whole.sampled(), plans).epoch_s == pytest.approx(whole_s, rel=0.02)


def test_a_sample_of_a_sample_stands_for_the_cores_of_the_whole() -> None:
    sample = fleet(1024, 64, 1.5, (WIFI,)).sampled().sampled(16)
    assert sample.all_cores == 64
    assert sample.devices == pytest.approx(1024)


def test_no_core_speeds_up_in_a_sample_that_has_more_devices_than_a_round() -> None:
    whole = fleet(3, 1, 8.0, (FOUR_G, WIFI, Link(up_bps=20e6, down_bps=50e6)))  # of three kinds
    sample = replace(whole, per_round=2).sampled()
    assert (len(sample.members), sample.cores, sample.cores_each) == (3, 2, 0.5)
    plans = {member.name: Plan(3, 1) for member in sample.members} | {"d0001": Plan(1, 4)}  # one uses the server
    assert simulate(sample, plans).contention == 1.0
