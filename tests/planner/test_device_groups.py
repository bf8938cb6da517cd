"""Fleets of many kinds: merged into groups that are as slow as their slowest device, and planned by these."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pipar.errors import TooLittleMemoryError
from pipar.job.prepare import unplanned_timing_only_job
from pipar.methods import Plan
from pipar.planner import plan_evaluator
from pipar.planner.candidates import Candidate, allowed_plans
from pipar.planner.device_groups import merge_kinds
from pipar.planner.fleet import Fleet
from pipar.planner.search import search_kinds, search_plans
from pipar.planner.search_settings import QUICK
from pipar.planner.simulator import simulate, simulate_within
from pipar.planner.timing import steady_epoch_s
from pipar.settings.config_file import config_from
from pipar.settings.links import Link

MIB = 2**20


def fleet_of(model: str, data: str, count: int, **settings: object) -> Fleet:
    """Return `count` Raspberry Pi 3B, each on a different link from 5 to 100 Mbit/s, and an i7-11850H."""
    board = {"count": count, "profile": "raspberry-pi-3b", "link": "wifi"}
    tree = {
        "model": {"name": model},
        "data": {"name": data, "samples_per_device": 500, "validation": 0, "test": 0},
        "wire": {"encoding": "raw"},
        "server": {"profile": "i7-11850h", "cores": 2},
        "devices": [{**board, **settings}],
    }
    fleet = unplanned_timing_only_job(config_from(tree)).fleet()
    rates = [5e6 * 20 ** (n / max(1, count - 1)) for n in range(count)]
    links = [Link(up_bps=rate, down_bps=2 * rate, latency_s=0.01) for rate in rates]
    members = zip(fleet.members, links, strict=True)
    return replace(fleet, members=tuple(replace(member, link=link) for member, link in members))


@pytest.mark.parametrize("most", [1, 2, 5, 8])
def test_a_group_is_as_slow_as_its_slowest_device_and_has_the_least_memory_of_all(most: int) -> None:
    fleet = fleet_of("vgg5", "cifar10", 30)
    limited = tuple(replace(m, memory_bytes=(400 + n) * MIB) for n, m in enumerate(fleet.members))
    fleet = replace(fleet, members=limited)
    few = merge_kinds(fleet, most)
    assert len(few.device_kinds()) == most
    assert [member.name for member in few.members] == [member.name for member in fleet.members]
    own = {member.name: member for member in fleet.members}
    for kind in few.device_kinds():
        alone = [own[member.name] for member in kind]
        assert kind[0].link.up_bps == min(member.link.up_bps or math.inf for member in alone)
        assert kind[0].memory_bytes == min(member.memory_bytes or 0 for member in alone)


def test_a_fleet_of_few_kinds_stays_unchanged() -> None:
    fleet = fleet_of("vgg5", "cifar10", 4)
    assert merge_kinds(fleet, 4) is fleet


@pytest.mark.slow
def test_devices_with_different_configured_values_are_never_in_one_group() -> None:
    fleet = fleet_of("vgg5", "cifar10", 9)
    given = tuple(replace(m, split_point=1 + n % 3) for n, m in enumerate(fleet.members))
    kinds = merge_kinds(replace(fleet, members=given), 2).device_kinds()
    assert sorted(kind[0].split_point for kind in kinds) == [1, 2, 3]
    plans = search_plans(replace(fleet, members=given), simulate).plans
    assert [plans[member.name].split_point for member in given] == [member.split_point for member in given]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "data"), [("vgg5", "cifar10"), ("resnet18", "cifar10")])
def test_the_plans_of_many_kinds_are_better_than_any_that_all_have_in_common(model: str, data: str) -> None:
    fleet = fleet_of(model, data, 12)
    assert len(fleet.device_kinds()) == 12
    choice = search_plans(fleet, simulate, within=simulate_within)
    chosen_s = steady_epoch_s(simulate, fleet, choice.plans)
    assert choice.epoch_s == pytest.approx(chosen_s)
    for p in range(1, fleet.layers + 1):
        for n in (1, 2, 3, 4, 8) if p < fleet.layers else (1,):
            common = {member.name: Plan(p, n) for member in fleet.members}
            assert chosen_s <= steady_epoch_s(simulate, fleet, common) * 1.01, f"P={p} N={n}"


@pytest.mark.slow
def test_plans_of_many_kinds_are_hardly_worse_than_those_of_a_search_of_all_kinds_together() -> None:
    fleet = fleet_of("resnet18", "cifar10", 6)
    in_groups, at_once = search_plans(fleet, simulate), search_kinds(fleet, simulate)
    assert in_groups.epoch_s <= at_once.epoch_s * 1.02


@pytest.mark.slow
def test_every_device_may_have_the_plan_of_its_group() -> None:
    fleet = fleet_of("vgg5", "cifar10", 10)
    memory = tuple(replace(m, memory_bytes=(380 + 20 * n) * MIB) for n, m in enumerate(fleet.members))
    fleet = replace(fleet, members=memory)
    choice = search_plans(fleet, simulate)
    for member in fleet.members:
        plan = choice.plans[member.name]
        allowed = {(of.split_point, of.micro_batches): of.window for of in allowed_plans(fleet, member)}
        widest = allowed[plan.split_point, plan.micro_batches]
        assert plan.window == widest or 0 < plan.window <= (widest or plan.micro_batches)
    assert len(choice.by_kind) == len(fleet.device_kinds())
    assert all(len(by_kind) == len(fleet.device_kinds()) for by_kind, _ in choice.runners_up)


@pytest.mark.slow
def test_a_device_with_too_little_memory_is_named() -> None:
    fleet = fleet_of("vgg5", "cifar10", 6)
    poor = fleet.members[4]
    members = tuple(replace(m, memory_bytes=(300 if m is poor else 800) * MIB) for m in fleet.members)
    with pytest.raises(TooLittleMemoryError, match=f"{poor.name} has 300 MiB"):
        search_plans(replace(fleet, members=members), simulate)


@pytest.mark.slow
def test_a_hundred_kinds_are_searched_by_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []

    def counted(*arguments: object) -> list[Candidate]:
        searched.append(arguments[1])
        return original(*arguments)  # type: ignore[arg-type]

    original = plan_evaluator.candidates
    monkeypatch.setattr(plan_evaluator, "candidates", counted)
    search_plans(fleet_of("vgg5", "mnist", 100), simulate, within=simulate_within, settings=QUICK)
    assert 2 < len(searched) <= 2 + 8


def test_devices_that_take_no_time_are_merged_too() -> None:
    fleet = fleet_of("vgg5", "cifar10", 4)
    at_once = fleet.members[0].costs.varied(lambda: 0.0)
    members = tuple(replace(member, costs=at_once, samples=0) for member in fleet.members)
    assert len(merge_kinds(replace(fleet, members=members), 2).device_kinds()) == 2
