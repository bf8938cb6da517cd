"""The plans of a job: given or chosen, one cut for a shared model, and a sample for a large fleet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipar.errors import PlanError
from pipar.events import Event, Preparing, ignore
from pipar.job.job import Job, shared_costs
from pipar.job.plans import make_plans, search_job_plans, simulation, with_plans
from pipar.launch.rehearsal import rehearse
from pipar.methods import METHODS, Plan
from pipar.planner.bounds import LowerBound
from pipar.planner.candidates import candidates
from pipar.planner.costs import Costs, Work
from pipar.planner.fleet import Fleet, Member
from pipar.planner.simulator import simulate
from pipar.profiling.profile import CodingTimes, LayerProfile, Profile
from pipar.settings.config import device_specs
from pipar.settings.config_file import config_from
from pipar.settings.links import Link

LAYERS = tuple(
    LayerProfile(name, (0.01, 0.1), (0.02, 0.2), size, 400) for name, size in zip("abc", (9000, 3000, 40), strict=True)
)
PROFILE = Profile("any", "float32", (1, 12), LAYERS, pack_s=5e-3, aggregate_s_per_byte=1e-9)


def make_job(method: str, *devices: dict[str, Any], plan: dict[str, Any] | None = None, samples: int = 24) -> Job:
    config = config_from(
        {
            "run": {"method": method, "epochs": 3, "batch_size": 12},
            "plan": plan or {},
            "server": {"cores": 1},
            "devices": [{"name": f"d{n}", "link": "wifi", "speed": 0.2, **own} for n, own in enumerate(devices)],
        }
    )
    specs = device_specs(config)
    names = [spec.name for spec in specs]
    return Job(
        config=config,
        specs=specs,
        sizes=dict.fromkeys(names, samples),
        server_profile=PROFILE,
        device_profiles=dict.fromkeys(names, PROFILE),
        batch_statistics=False,
        dropout=False,
        plans={},
        dataset="none",
        model="any",
    )


def test_given_plans_are_used_without_a_search() -> None:
    job = make_job("pipar", {"split_point": 1, "micro_batches": 4}, {"split_point": 2, "micro_batches": 3})
    seen: list[Event] = []
    assert make_plans(job, rehearse, seen.append) == {"d0": Plan(1, 4), "d1": Plan(2, 3)}
    assert seen == []
    assert with_plans(job, rehearse).plans == make_plans(job, rehearse)


def test_a_search_reports_its_progress() -> None:
    seen: list[Event] = []
    make_plans(make_job("pipar", {}), rehearse, seen.append)
    shares = [event.share for event in seen if isinstance(event, Preparing)]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def with_coding(job: Job, encoding: str) -> Job:
    """Return the job with a profile in which encodings halve the bytes in little time."""
    times = dict.fromkeys(("planes", "sparse", "sparse-planes", "changes"), CodingTimes(1e-5, 2e-9, 1e-5, 2e-9))
    layers = tuple(replace(layer, rectified=True, shares=dict.fromkeys(times, (0.5, 0.5))) for layer in LAYERS)
    profile = replace(PROFILE, layers=layers, coding=times, changes_share=0.5)
    config = job.config.model_copy(update={"wire": job.config.wire.model_copy(update={"encoding": encoding})})
    profiles = dict.fromkeys(job.device_profiles, profile)
    return with_plans(replace(job, config=config, server_profile=profile, device_profiles=profiles), rehearse)


@pytest.mark.parametrize("method", ["fl", "sfl", "pipar"])
def test_on_unlimited_links_auto_gives_the_orders_of_raw(method: str) -> None:
    # Devices get the same orders, to the last field, so everything after that costs the same.
    job = make_job(method, {"link": "unlimited"}, {"link": "unlimited"})
    assert with_coding(job, "auto").orders() == with_coding(job, "raw").orders()
    limited = make_job(method, {"link": "4g"})
    assert with_coding(limited, "auto").orders() != with_coding(limited, "raw").orders()


@pytest.mark.parametrize("estimate", ["paper", "simulation"])
@pytest.mark.parametrize("method", ["sl", "sfl2"])
def test_a_shared_model_has_one_cut(method: str, estimate: str) -> None:
    devices = ({"speed": 0.02, "link": {"up": "1Mbit/s", "down": "1Mbit/s"}}, {"speed": 5.0, "link": "unlimited"})
    job = make_job(method, *devices, plan={"estimate": estimate})
    plans = make_plans(job, rehearse)
    assert len({plan.split_point for plan in plans.values()}) == 1
    assert {plan.micro_batches for plan in plans.values()} == {1}
    given = make_job(method, {**devices[0], "split_point": 2}, devices[1], plan={"estimate": estimate})
    assert {plan.split_point for plan in make_plans(given, rehearse).values()} == {2}


@pytest.mark.parametrize("estimate", ["paper", "simulation"])
@pytest.mark.parametrize("others", [(), ({},)], ids=["all given", "one to choose"])
def test_two_split_points_for_a_shared_model_are_refused_in_one_sentence(
    estimate: str, others: tuple[dict[str, Any], ...]
) -> None:
    job = make_job("sfl2", {"split_point": 1}, {"split_point": 2}, *others, plan={"estimate": estimate})
    with pytest.raises(PlanError, match=r"shares one server-side model") as raised:
        make_plans(job, rehearse)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sl", "sfl2"])
def test_a_shared_models_cut_is_the_best_of_whole_epochs_in_the_virtual_world(method: str) -> None:
    job = make_job(method, {"speed": 0.3}, {"speed": 1.0, "link": "4g"}, samples=60)
    seconds = {}
    for cut in (1, 2):
        plans = {name: Plan(cut, 1) for name in job.sizes}
        seconds[cut] = rehearse(replace(job, plans=plans), None).epoch_s
        foretold = rehearse(replace(job, plans=plans), 2).extrapolated_epoch_s(job.fleet())
        assert foretold == pytest.approx(seconds[cut], rel=0.02)
    chosen = {plan.split_point for plan in make_plans(job, rehearse).values()}
    assert chosen == {min(seconds, key=lambda cut: seconds[cut])}


def test_methods_with_replicas_are_timed_by_the_simulator() -> None:
    job = make_job("pipar", {})
    plans = {"d0": Plan(1, 2)}
    assert simulation(job, rehearse)(job.fleet(), plans, 1) == simulate(job.fleet(), plans, iterations=1)


def test_a_fleet_is_planned_with_the_links_that_it_has_now() -> None:
    for method in ("pipar", "sfl2"):
        job = make_job(method, {})
        (member,) = job.fleet().members
        slow = replace(job.fleet(), members=(replace(member, link=Link(up_bps=1e5, down_bps=1e5)),))
        before, now = search_job_plans(job, job.fleet(), rehearse), search_job_plans(job, slow, rehearse)
        assert now.epoch_s > before.epoch_s
        assert now.by_kind[0].split_point > before.by_kind[0].split_point


@pytest.mark.slow
def test_a_search_may_start_from_the_plans_in_use() -> None:
    job = make_job("pipar", {}, {"speed": 1.0})
    first = search_job_plans(job, job.fleet(), rehearse)
    assert search_job_plans(job, job.fleet(), rehearse, start=first.plans).epoch_s <= first.epoch_s * 1.05


# --- a sample of a large fleet


def large_fleet(*counts: int, cores: int = 8) -> Fleet:
    kinds = [Costs(PROFILE, speed) for speed in (0.1, 0.5, 2.0)][: len(counts)]
    members = [
        Member(f"{place}-{n:04}", costs, Link(up_bps=1e7, down_bps=1e7), 24)
        for place, (costs, count) in enumerate(zip(kinds, counts, strict=True))
        for n in range(count)
    ]
    return Fleet(METHODS["pipar"], tuple(members), Costs(PROFILE, 3.0), cores, 12)


def test_a_sample_has_every_kind_in_proportion_and_stands_for_all_devices_and_cores() -> None:
    fleet = large_fleet(600, 300, 1)
    sample = fleet.sampled()
    assert [len(kind) for kind in sample.device_kinds()] == [85, 43, 1]
    assert [kind[0].kind for kind in sample.device_kinds()] == [kind[0].kind for kind in fleet.device_kinds()]
    assert [m.name for m in sample.members] == sorted(m.name for m in sample.members)
    counted = [sum(member.stands_for for member in kind) for kind in sample.device_kinds()]
    assert counted == pytest.approx([600, 300, 1])
    assert sample.cores == 1
    assert sample.all_cores == fleet.cores


def test_a_fleet_that_is_not_large_is_its_own_sample() -> None:
    fleet = large_fleet(100, 28)
    assert fleet.sampled() is fleet


@pytest.mark.slow
def test_a_sample_takes_about_as_long_as_the_fleet_that_it_represents() -> None:
    fleet = large_fleet(400, 200, cores=24)
    plans = {member.name: Plan(1, 3) for member in fleet.members}
    assert simulate(fleet.sampled(), plans).epoch_s == pytest.approx(simulate(fleet, plans).epoch_s, rel=0.1)


def test_one_core_averages_the_models_of_all_devices_that_a_sample_represents() -> None:
    fleet = large_fleet(2000, cores=8)
    sample = fleet.sampled()

    def average_s(of: Fleet) -> float:
        return of.server.seconds(Work("aggregate", size_bytes=of.averaged_bytes))

    assert len(sample.members) < 200
    assert average_s(sample) == pytest.approx(average_s(fleet), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pipar", "sfl2"])
def test_all_devices_of_a_large_fleet_get_a_plan(method: str) -> None:
    job = make_job(method, {"count": 150}, {"count": 50, "speed": 1.0})
    plans = make_plans(job, rehearse, ignore)
    assert plans.keys() == job.sizes.keys()
    assert len(set(plans.values())) <= 2


@pytest.mark.slow
def test_a_lower_bound_holds_for_devices_with_different_amounts_of_data() -> None:
    costs = Costs(PROFILE, 0.2)
    sizes = [200 + 8 * number for number in range(50)]
    members = tuple(Member(f"d{n:02}", costs, Link(up_bps=10e6, down_bps=20e6), size) for n, size in enumerate(sizes))
    fleet = Fleet(METHODS["pipar"], members, Costs(PROFILE, 0.5), 2, 50)
    kinds = fleet.device_kinds()
    assert all(max(m.samples for m in kind) <= 1.05 * min(m.samples for m in kind) for kind in kinds)
    for plan in (Plan(1, 4), Plan(2, 10), Plan(len(PROFILE.layers), 1)):
        chosen = [next(c for c in candidates(fleet, kind[0]) if c.plan == plan) for kind in kinds]
        takes_s = simulate(fleet, {m.name: plan for m in members}).epoch_s
        assert LowerBound(fleet).alone_s(chosen) <= takes_s
        assert LowerBound(fleet).lanes_s(chosen) <= takes_s


def test_boards_whose_own_profiles_hardly_differ_are_planned_once() -> None:
    def measured(factor: float) -> Profile:
        times = [(tuple(s * factor for s in layer.forward_s), layer) for layer in PROFILE.layers]
        return replace(PROFILE, layers=tuple(replace(layer, forward_s=forward) for forward, layer in times))

    make = shared_costs(merge=True)
    same, other = measured(1.03), measured(1.5)
    assert make(PROFILE, 1.0) is make(same, 1.0)
    assert make(PROFILE, 1.0) is not make(other, 1.0)
    assert shared_costs()(same, 1.0).profile is same
