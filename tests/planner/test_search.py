"""The paper's choice is that of its printed rule; the joint choice of a fleet is near the best of all plans."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.recursion import recursion_s, stage_times

from pipar.errors import PlanError
from pipar.job.prepare import unplanned_timing_only_job
from pipar.methods import METHODS, Method, Plan
from pipar.planner import plan_evaluator
from pipar.planner.candidates import Allow, Candidate, candidates, check_given
from pipar.planner.costs import Costs
from pipar.planner.exhaustive import search_all
from pipar.planner.fleet import Fleet, Member, plans_by_device
from pipar.planner.paper_selection import estimate_plans
from pipar.planner.search import search_kinds
from pipar.planner.search_settings import TIE
from pipar.planner.simulator import simulate, simulate_within
from pipar.planner.timing import STEADY_ITERATIONS, Timing, epoch_timing, steady_epoch_s
from pipar.profiling.memory import BASE_BYTES, training_bytes
from pipar.profiling.profile import LayerProfile, Profile
from pipar.settings.config_file import config_from
from pipar.settings.links import Link

MakeProfile = Callable[..., Profile]
Given = int | Literal["auto"]
AUTO: st.SearchStrategy[Literal["auto"]] = st.just("auto")
WIFI = Link(up_bps=50e6, down_bps=50e6)
SLOW = Link(up_bps=8.0, down_bps=8.0)

# Whole numbers: two different estimates then lie much further apart than the tolerance of a tie.
whole = st.integers(0, 200).map(float)
rates = st.one_of(st.none(), st.sampled_from([8.0, 80.0, 800.0, 8000.0]))
links = st.builds(Link, up_bps=rates, down_bps=rates)


def one_device(
    device: Profile,
    link: Link,
    *,
    method: str = "pipar",
    server: Profile | None = None,
    batch: int = 100,
    split_point: Given = "auto",
    micro_batches: Given = "auto",
    speeds: tuple[float, float] = (1.0, 1.0),
) -> Fleet:
    costs = Costs(device, speeds[0])
    phone = Member("phone", costs, link, batch, split_point=split_point, micro_batches=micro_batches)
    return Fleet(METHODS[method], (phone,), Costs(server or device, speeds[1]), 1, batch)


def estimated(fleet: Fleet) -> tuple[Plan, float]:
    return estimate_plans(fleet)["phone"]


# --- the paper's choice: each device alone


@st.composite
def two_profiles(draw: st.DrawFn) -> tuple[Profile, Profile]:
    layers, batch = draw(st.integers(1, 6)), 12
    outputs = draw(st.lists(st.integers(0, 40), min_size=layers, max_size=layers))
    return tuple(  # type: ignore[return-value]
        Profile(
            "any",
            "float32",
            (batch,),
            tuple(LayerProfile(str(q), (draw(whole),), (draw(whole),), size, 0) for q, size in enumerate(outputs)),
        )
        for _ in range(2)
    )


def select_as_printed(
    method: Method, device: Profile, server: Profile, batch: int, link: Link, split_point: Given, micro_batches: Given
) -> tuple[Plan, float]:
    """Return the paper's choice: one N for each P by its formula, and the recursion over its table of stages."""
    layers = len(device.layers)
    cuts = range(1, layers) if layers > 1 else range(1, 2)
    all_p = range(1, layers + 1) if method.pipelines and micro_batches in ("auto", 1) else cuts
    if isinstance(split_point, int):
        all_p = range(split_point, split_point + 1)
    if not method.splits:
        all_p = range(layers, layers + 1)

    def listed(p: int) -> Plan:
        t = stage_times(device, server, Plan(p, 1), batch, link)
        idle, shortest = t.u + t.fs + t.bs + t.d, min(t.fc or t.bc, t.bc or t.fc)
        fills = 1 if idle == 0 else batch if shortest == 0 else min(batch, 1 + math.ceil(idle / shortest))
        n = fills if micro_batches == "auto" else micro_batches
        return Plan(p, n if method.pipelines and p < layers else 1)

    times = {
        plan: recursion_s(stage_times(device, server, plan, batch, link), plan.micro_batches)
        for plan in map(listed, all_p)
    }
    best = min(times, key=lambda plan: (times[plan], plan.micro_batches, plan.split_point))
    return best, times[best]


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(two_profiles(), links, st.sampled_from(sorted(METHODS)), st.data())
def test_plans_by_the_papers_estimate_are_those_of_its_printed_rule(
    profiles: tuple[Profile, Profile], link: Link, method: str, data: st.DataObject
) -> None:
    device, server = profiles
    split_point: Given = data.draw(st.one_of(AUTO, st.integers(1, len(device.layers))))
    micro_batches: Given = data.draw(st.one_of(AUTO, st.integers(1, 12)))
    fleet = one_device(
        device, link, method=method, server=server, batch=12, split_point=split_point, micro_batches=micro_batches
    )
    plan, seconds = estimated(fleet)
    expected = select_as_printed(METHODS[method], device, server, 12, link, split_point, micro_batches)
    assert plan == expected[0]
    assert seconds == pytest.approx(expected[1], rel=1e-12)


def test_a_slow_link_keeps_the_whole_network_on_the_device(make_profile: MakeProfile) -> None:
    profile = make_profile([(1.0, 1.0, 100_000, 0)] * 3)
    fleet = one_device(profile, SLOW)
    assert estimated(fleet) == (Plan(3, 1), 6.0)
    assert search_kinds(fleet, simulate).by_kind == (Plan(3, 1),)


def test_a_fast_server_on_a_fast_link_gets_all_layers_that_it_can(make_profile: MakeProfile) -> None:
    profile = make_profile([(1.0, 1.0, 1000, 0)] * 3)
    plan, seconds = estimated(one_device(profile, WIFI, speeds=(0.01, 1.0)))
    # 200 s on the device; 0.016 s up and down and 4 s on the server overlap with it from N = 2 on:
    # (200 + 4.032 + 100) / 2 < 200.
    assert plan == Plan(1, 2)
    assert seconds == pytest.approx(200.0)


def test_ties_go_to_fewer_micro_batches_and_then_to_the_smaller_split_point(make_profile: MakeProfile) -> None:
    nothing = make_profile([(0.0, 0.0, 0, 0)] * 4)
    fleet = one_device(nothing, Link())
    assert estimated(fleet)[0] == Plan(1, 1)
    assert search_kinds(fleet, simulate).by_kind == (Plan(1, 1),)


@pytest.mark.parametrize("name", ["sl", "sfl", "sfl2"])
def test_methods_that_only_split_never_cut_the_batch_and_always_leave_the_server_a_layer(
    make_profile: MakeProfile, name: str
) -> None:
    profile = make_profile([(1.0, 1.0, 100_000, 0)] * 3)
    assert estimated(one_device(profile, SLOW, method=name, micro_batches=7))[0] == Plan(1, 1)
    assert estimated(one_device(profile, SLOW, method=name, split_point=3))[0] == Plan(3, 1)


def test_federated_learning_ignores_the_plan(make_profile: MakeProfile) -> None:
    profile = make_profile([(1.0, 1.0, 1000, 0)] * 3)
    fleet = one_device(profile, WIFI, method="fl", split_point=99, micro_batches=999)
    assert estimated(fleet)[0] == Plan(3, 1)
    assert search_kinds(fleet, simulate).by_kind == (Plan(3, 1),)


def test_a_network_of_one_layer_has_one_plan_with_every_method(make_profile: MakeProfile) -> None:
    profile = make_profile([(1.0, 1.0, 1000, 0)])
    for method in METHODS:
        assert estimated(one_device(profile, WIFI, method=method))[0] == Plan(1, 1)


def test_a_given_number_of_micro_batches_leaves_out_federated_learning(make_profile: MakeProfile) -> None:
    profile = make_profile([(1.0, 1.0, 100_000, 0)] * 3)
    assert estimated(one_device(profile, SLOW, micro_batches=4))[0] == Plan(1, 4)
    assert estimated(one_device(profile, SLOW, micro_batches=1))[0] == Plan(3, 1)


def test_a_given_whole_network_is_never_cut_into_micro_batches(make_profile: MakeProfile) -> None:
    profile = make_profile([(1.0, 1.0, 1000, 0)] * 3)
    assert estimated(one_device(profile, WIFI, split_point=3, micro_batches=4))[0] == Plan(3, 1)


@pytest.mark.parametrize(
    ("method", "split_point", "micro_batches", "says"),
    [
        ("pipar", 0, "auto", "Split point 0 is outside 1..3"),
        ("pipar", 4, "auto", "Split point 4 is outside 1..3"),
        ("sfl", 4, "auto", "Split point 4 is outside 1..3"),
        ("pipar", "auto", 0, "0 micro-batches are outside 1..100"),
        ("pipar", "auto", 101, "101 micro-batches are outside 1..100"),
    ],
)
def test_a_given_value_outside_its_range_is_refused(
    method: str, split_point: Given, micro_batches: Given, says: str
) -> None:
    with pytest.raises(PlanError, match=says) as raised:
        check_given(METHODS[method], split_point, micro_batches, layers=3, batch_size=100, model="hand")
    assert "\n" not in str(raised.value)


def test_a_given_value_that_the_method_does_not_use_is_not_refused() -> None:
    check_given(METHODS["fl"], 99, 999, layers=3, batch_size=100, model="hand")
    check_given(METHODS["sfl"], 2, 999, layers=3, batch_size=100, model="hand")


def test_profiles_of_two_networks_are_refused(make_profile: MakeProfile) -> None:
    device, server = make_profile([(1.0, 1.0, 1, 0)] * 2), make_profile([(1.0, 1.0, 1, 0)] * 3)
    with pytest.raises(PlanError, match="give two profiles of the same network"):
        estimated(one_device(device, WIFI, server=server))


@pytest.mark.slow
def test_a_device_that_was_profiled_with_its_first_layers_is_given_a_plan_of_these(make_profile: MakeProfile) -> None:
    profile = make_profile([(1.0, 1.0, 100_000, 0)] * 3)
    first = replace(profile, layers=profile.layers[:2], total_layers=3)
    fleet = one_device(first, SLOW, server=profile)  # the whole network on the device would be much faster
    assert estimated(fleet)[0].split_point <= 2
    assert search_kinds(fleet, simulate).by_kind[0].split_point <= 2


@pytest.mark.slow
def test_plans_by_the_papers_estimate_take_milliseconds_for_a_deep_network(
    make_profile: MakeProfile,
) -> None:
    profile = make_profile([(0.01 * q, 0.02 * q, 65536 // q, 0) for q in range(1, 36)])

    def used_s() -> float:
        began = time.thread_time()
        estimated(one_device(profile, WIFI, speeds=(0.05, 1.0)))
        return time.thread_time() - began

    # About 10 ms here: changing bandwidth needs a choice in the middle of training. The fastest of three, because
    # garbage of other tests may be collected meanwhile.
    assert min(used_s() for _ in range(3)) < 0.2


# --- the joint choice: simulations of the whole fleet


def small_fleet(seed: int, *, memory: bool = False, statistics: bool = False) -> Fleet:
    """Return two kinds of up to four devices each, three layers, a batch of 12, and one to three cores."""
    rng, batch = random.Random(seed), 12
    layers = []
    for name in "abc":
        fixed, each = rng.uniform(0, 0.02), rng.uniform(0.001, 0.02)
        forward = tuple(fixed + each * samples for samples in (1, batch))
        backward = tuple(2 * seconds for seconds in forward)
        sizes = (rng.randrange(500, 20_000), rng.randrange(20_000))
        layers.append(LayerProfile(name, forward, backward, *sizes, saved_bytes=10_000, working_bytes=5_000))
    overheads = {"load_s": 1e-4, "encode_s": 1e-4, "decode_s": 1e-4, "step_s": 1e-3, "pack_s": 5e-3, "install_s": 1e-3}
    profile = Profile("any", "float32", (1, batch), tuple(layers), **overheads)  # type: ignore[arg-type]
    members: list[Member] = []
    for _ in range(2):
        up, down, latency = 10 ** rng.uniform(5.5, 8), 10 ** rng.uniform(5.5, 8), rng.choice([0.0, 0.01, 0.03])
        link = rng.choice([Link(), Link(up_bps=up, down_bps=down, latency_s=latency)])
        costs, samples = Costs(profile, 10 ** rng.uniform(-1.3, 0.3)), rng.choice([12, 24, 30, 60])
        limit = BASE_BYTES + rng.randrange(80_000, 400_000) if memory else None
        count = rng.randint(1, 4)
        members += [Member(f"d{len(members) + n}", costs, link, samples, limit) for n in range(count)]
    server = Costs(profile, 10 ** rng.uniform(-0.5, 1))
    return Fleet(METHODS["pipar"], tuple(members), server, rng.randint(1, 3), batch, statistics)


def over_the_best(seed: int) -> float:
    """Return by how much a whole epoch of the choice is longer than one of the plans that the search finds.

    The search uses predictions from the first iterations, so a choice that was confirmed over an epoch may be shorter.
    """
    fleet = small_fleet(seed)
    found = (search_kinds(fleet, simulate, within=simulate_within).by_kind, search_all(fleet, simulate).by_kind)
    chosen_s, best_s = (epoch_timing(simulate, fleet, plans_by_device(fleet, by_kind)).epoch_s for by_kind in found)
    return chosen_s / best_s - 1


@pytest.mark.slow
def test_the_plans_found_are_near_the_best_of_all() -> None:
    over = sorted(over_the_best(seed) for seed in range(100))
    # A choice may give up to 5 % for plans that suffer less from slower machines; the search itself misses up to 6 %.
    assert sum(each <= 0.02 for each in over) >= 95
    assert over[-1] <= 0.07


@pytest.mark.slow
def test_the_plans_found_are_near_the_best_of_all_for_some_fleets() -> None:
    assert max(over_the_best(seed) for seed in range(2)) <= 0.02


@pytest.mark.slow
def test_plans_of_whole_batches_are_no_slower_than_federated_learning() -> None:
    link = {"up": "400Mbit/s", "down": "400Mbit/s", "latency": "3ms"}
    tree = {
        "run": {"batch_size": 100},
        "model": {"name": "mobilenetv3_large", "norm": "batch"},
        "data": {"name": "tiny_imagenet", "samples_per_device": 500, "validation": 0, "test": 0},
        "server": {"profile": "i7-11850h", "speed": 1.8},
        "wire": {"encoding": "raw"},
        "devices": [{"count": 100, "profile": "jetson-orin-nano", "link": link}],
    }
    job = unplanned_timing_only_job(config_from(tree))
    assert job is not None
    fleet = job.fleet()
    choice = search_kinds(fleet, simulate, within=simulate_within)
    uncut = plans_by_device(fleet, (Plan(fleet.layers, 1),))
    assert {plan.micro_batches for plan in choice.plans.values()} == {1}
    assert choice.timing.epoch_s <= epoch_timing(simulate, fleet, uncut).epoch_s * (1 + TIE)


@pytest.mark.slow
def test_not_simulating_far_plans_to_their_end_does_not_change_the_plans_found() -> None:
    for seed in range(4):
        fleet = small_fleet(seed)
        whole, cut_off = search_kinds(fleet, simulate), search_kinds(fleet, simulate, within=simulate_within)
        assert cut_off.by_kind == whole.by_kind, seed
        assert cut_off.epoch_s == whole.epoch_s
        assert bool(cut_off.runners_up) == bool(whole.runners_up)
        assert all(seconds < math.inf for _, seconds in cut_off.runners_up)


def contended_fleet() -> Fleet:
    """Return two fast and six slow devices on one core; alone, each would leave the server all but one layer."""
    layers = tuple(LayerProfile(name, (0.05, 0.6), (0.1, 1.2), 2000, 100) for name in "abcd")
    profile = Profile("any", "float32", (1, 12), layers)
    fast, slow = Costs(profile, 1.0), Costs(profile, 0.3)
    members = [Member(f"fast-{n}", fast, WIFI, 48) for n in range(2)]
    members += [Member(f"slow-{n}", slow, WIFI, 48) for n in range(6)]
    return Fleet(METHODS["pipar"], tuple(members), Costs(profile, 2.0), 1, 12)


@pytest.mark.slow
def test_devices_that_share_a_core_do_not_all_load_it_as_each_alone_would() -> None:
    fleet = contended_fleet()
    alone = {m.name: search_kinds(replace(fleet, members=(m,)), simulate).plans[m.name] for m in fleet.members}
    together = search_kinds(fleet, simulate)
    assert any(together.plans[name].split_point > plan.split_point for name, plan in alone.items())
    # Each device's own best overloads the core: it is more than a fifth slower than the plans found together.
    assert simulate(fleet, alone, None).epoch_s > 1.2 * simulate(fleet, together.plans, None).epoch_s


@pytest.mark.slow
def test_a_tie_goes_to_the_smaller_n_of_each_kind() -> None:
    layers = tuple(LayerProfile(name, (0.05, 1.2), (0.1, 2.4), 20_000, 100) for name in "abcd")
    profile = Profile("any", "float32", (1, 24), layers)
    near, far = Costs(profile, 1.0), Costs(profile, 0.9)
    members = [Member(f"near-{n}", near, WIFI, 48, split_point=2) for n in range(3)]
    members += [Member(f"far-{n}", far, Link(up_bps=1e6, down_bps=1e6), 48, split_point=2) for n in range(2)]
    fleet = Fleet(METHODS["pipar"], tuple(members), Costs(profile, 200.0), 1, 24)
    choice = search_kinds(fleet, simulate)

    def with_far(n: int) -> float:
        plans = {name: Plan(2, n) if name.startswith("far") else plan for name, plan in choice.plans.items()}
        return steady_epoch_s(simulate, fleet, plans)

    # From 4 on, the far devices' computing hides their links: more pieces gain no more than a tie.
    assert choice.plans["far-0"] == Plan(2, 4)
    assert all(abs(with_far(n) / choice.epoch_s - 1) < TIE for n in range(4, 20))
    assert with_far(3) > choice.epoch_s * (1 + TIE)


class Counted:
    """A simulation that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, fleet: Fleet, plans: Mapping[str, Plan], iterations: int | None) -> Timing:
        self.calls += 1
        return simulate(fleet, plans, iterations)


def test_planning_simulates_a_few_iterations_for_any_claimed_number_of_samples(
    make_profile: MakeProfile,
) -> None:
    profile = make_profile([(0.2, 0.4, 2000, 100)] * 3, batch_size=12)
    members = tuple(Member(f"d{n}", Costs(profile, 0.1), WIFI, 100_000_000, micro_batches=4) for n in range(4))
    asked: set[int | None] = set()

    def counting(fleet: Fleet, plans: Mapping[str, Plan], iterations: int | None) -> Timing:
        asked.add(iterations)
        return simulate(fleet, plans, iterations if iterations is not None else 1)

    choice = search_kinds(Fleet(METHODS["pipar"], members, Costs(profile), 2, 12), counting)
    assert asked == {STEADY_ITERATIONS - 1, STEADY_ITERATIONS}
    assert choice.timing.epoch_s == pytest.approx(choice.epoch_s)


@pytest.mark.slow
def test_a_fleet_of_one_kind_is_planned_once_for_any_size(
    make_profile: MakeProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = make_profile([(0.2, 0.4, 2000, 100)] * 3, batch_size=12)
    costs = Costs(profile, 0.1)
    called = []

    def counted(fleet: Fleet, member: Member, only: Allow | None) -> list[Candidate]:
        called.append(member.name)
        return candidates(fleet, member, only)

    monkeypatch.setattr(plan_evaluator, "candidates", counted)
    asked = []
    for count in (1, 5, 20):
        members = tuple(Member(f"d{n:02}", costs, WIFI, 24) for n in range(count))
        counting = Counted()
        choice = search_kinds(Fleet(METHODS["pipar"], members, Costs(profile), count, 12), counting)
        asked.append(counting.calls)
        assert len(set(choice.plans.values())) == 1
        assert len(choice.plans) == count
    assert called == ["d00"] * 3
    assert len(set(asked)) == 1


@pytest.mark.slow
def test_the_same_fleet_gets_the_same_plans_again() -> None:
    assert search_kinds(small_fleet(7), simulate) == search_kinds(small_fleet(7), simulate)


@pytest.mark.slow
def test_the_values_given_for_one_device_are_kept_while_the_others_are_planned() -> None:
    fleet = small_fleet(5)
    first, *others = fleet.members
    free = search_kinds(fleet, simulate).plans
    for p, n in ((2, "auto"), ("auto", 5), (1, 7)):
        asked = replace(first, split_point=p, micro_batches=n)  # type: ignore[arg-type]
        plans = search_kinds(replace(fleet, members=(asked, *others)), simulate).plans
        assert p in ("auto", plans[first.name].split_point)
        assert n in ("auto", plans[first.name].micro_batches)
        assert plans.keys() == free.keys()


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6))
def test_no_chosen_plan_needs_more_memory_than_the_device_has(seed: int) -> None:
    fleet = small_fleet(seed, memory=True)
    try:
        plans = search_kinds(fleet, simulate).plans
    except PlanError:  # some draws leave room for nothing
        return
    for member in fleet.members:
        assert member.memory_bytes is not None
        assert training_bytes(member.costs.profile, plans[member.name], 12) <= member.memory_bytes
    by_paper = estimate_plans(fleet)
    for member in fleet.members:
        assert training_bytes(member.costs.profile, by_paper[member.name][0], 12) <= (member.memory_bytes or 0)


def test_a_window_is_chosen_where_memory_forbids_all_forwards_first_and_nowhere_else() -> None:
    layer = LayerProfile("a", (0.5,), (1.0,), 100, 0, saved_bytes=1000, working_bytes=10)
    profile = Profile("any", "float32", (12,), (layer,) * 3)
    fleet = one_device(profile, Link(up_bps=1e4, down_bps=1e4), batch=12, split_point=1, micro_batches=4)
    (phone,) = fleet.members
    all_forward = training_bytes(profile, Plan(1, 4), 12)
    for memory, window in ((all_forward, 0), (all_forward - 1, 3), (all_forward - 5000, 2)):
        limited = replace(fleet, members=(replace(phone, memory_bytes=memory),))
        assert search_kinds(limited, simulate).plans["phone"] == Plan(1, 4, window)
    assert search_kinds(fleet, simulate).plans["phone"] == Plan(1, 4, 0)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_with_batch_statistics_a_micro_batch_has_two_samples(seed: int) -> None:
    fleet = small_fleet(seed, statistics=True)
    assert all(plan.micro_batches <= 6 for plan in search_kinds(fleet, simulate).plans.values())


@pytest.mark.parametrize("name", ["fl", "sfl"])
def test_methods_get_only_plans_that_they_may_have(name: str) -> None:
    fleet = replace(small_fleet(3), method=METHODS[name])
    plans = search_kinds(fleet, simulate).plans.values()
    assert {plan.micro_batches for plan in plans} == {1}
    assert {plan.split_point for plan in plans} <= ({3} if name == "fl" else {1, 2})


@pytest.mark.slow
def test_runners_up_are_other_plans_and_never_better_than_the_one_before() -> None:
    choice = search_kinds(small_fleet(2), simulate)
    assert choice.by_kind not in [by_kind for by_kind, _ in choice.runners_up]
    seconds = [s for _, s in choice.runners_up]
    assert seconds == sorted(seconds)


@pytest.mark.slow
def test_current_plans_that_are_no_longer_allowed_do_not_stop_a_search() -> None:
    fleet = small_fleet(4)
    assert search_kinds(fleet, simulate, start=(Plan(99, 1), Plan(99, 1))).plans == search_kinds(fleet, simulate).plans
