"""The choice equals a search of every {P, N}, and keeps what was given as far as the method lets it count."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipar.config import Link
from pipar.errors import PlanError
from pipar.methods import METHODS, Method, Plan
from pipar.planner.estimate import iteration_s, stage_times
from pipar.planner.profile import LayerProfile, Profile
from pipar.planner.select import TIE, Choice, choose_plan

MakeProfile = Callable[..., Profile]
Given = int | Literal["auto"]
AUTO: st.SearchStrategy[Literal["auto"]] = st.just("auto")
WIFI = Link(up_bps=50e6, down_bps=50e6)

# Whole numbers: two different estimates then lie much further apart than the tolerance of a tie.
whole = st.integers(0, 200).map(float)
rates = st.one_of(st.none(), st.sampled_from([8.0, 80.0, 800.0, 8000.0]))
links = st.builds(Link, up_bps=rates, down_bps=rates)


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


def search_every_plan(
    method: Method, device: Profile, server: Profile, batch: int, link: Link, split_point: Given, micro_batches: Given
) -> Choice:
    """Return the choice by trying all of them, with the recursion itself."""
    layers = len(device.layers)
    cuts = range(1, layers) if layers > 1 else range(1, 2)
    all_p = range(1, layers + 1) if method.pipelines else cuts
    all_n = range(1, batch + 1) if method.pipelines and micro_batches == "auto" else [1]
    if method.pipelines and isinstance(micro_batches, int):
        all_n = [micro_batches]
        all_p = all_p if micro_batches == 1 else cuts
    if isinstance(split_point, int):
        all_p = range(split_point, split_point + 1)
    if not method.splits:
        all_p, all_n = range(layers, layers + 1), [1]
    plans = {Plan(p, 1 if p == layers else n) for p in all_p for n in all_n}
    times = {plan: iteration_s(stage_times(device, server, plan, batch, link), plan.micro_batches) for plan in plans}
    tied = [plan for plan in plans if times[plan] <= min(times.values()) * (1 + TIE)]
    best = min(tied, key=lambda plan: (plan.micro_batches, plan.split_point))
    return Choice(best, times[best])


@settings(deadline=None)
@given(two_profiles(), links, st.sampled_from(list(METHODS.values())), st.data())
def test_the_choice_is_that_of_a_search_of_every_plan(
    profiles: tuple[Profile, Profile], link: Link, method: Method, data: st.DataObject
) -> None:
    device, server = profiles
    split_point: Given = data.draw(st.one_of(AUTO, st.integers(1, len(device.layers))))
    micro_batches: Given = data.draw(st.one_of(AUTO, st.integers(1, 12)))
    choice = choose_plan(method, device, server, 12, link, split_point=split_point, micro_batches=micro_batches)
    assert choice == search_every_plan(method, device, server, 12, link, split_point, micro_batches)


def test_a_slow_link_keeps_the_whole_network_on_the_device(make_profile: MakeProfile) -> None:
    profile = make_profile([(1.0, 1.0, 100_000, 0)] * 3)
    choice = choose_plan(METHODS["pipar"], profile, profile, 100, Link(up_bps=8.0, down_bps=8.0))
    assert choice == Choice(Plan(3, 1), 6.0)


def test_a_fast_server_behind_a_fast_link_gets_all_it_can(make_profile: MakeProfile) -> None:
    profile = make_profile([(1.0, 1.0, 1000, 0)] * 3)
    choice = choose_plan(METHODS["pipar"], profile, profile, 100, WIFI, 0.01, 1.0)
    assert choice.plan.split_point == 1
    # 200 s on the device; 0.016 s up and down and 4 s on the server hide behind it from N = 2 on:
    # (200 + 4.032 + 100) / 2 < 200.
    assert choice.plan.micro_batches == 2
    assert choice.predicted_iteration_s == pytest.approx(200.0)


def test_ties_go_to_fewer_micro_batches_and_then_to_the_smaller_split_point(make_profile: MakeProfile) -> None:
    nothing = make_profile([(0.0, 0.0, 0, 0)] * 4)
    assert choose_plan(METHODS["pipar"], nothing, nothing, 100, Link()).plan == Plan(1, 1)


def test_a_bottleneck_on_the_link_is_cut_no_finer_than_the_estimate_can_tell_apart(make_profile: MakeProfile) -> None:
    profile = make_profile([(1.0, 1.0, 1000, 0), (90.0, 90.0, 10, 0)])
    link = Link(up_bps=80_000.0)
    choice = choose_plan(METHODS["pipar"], profile, profile, 100, link, 1.0, 100.0)
    seconds = {
        n: iteration_s(stage_times(profile, profile, Plan(1, n), 100, link, (1.0, 100.0)), n) for n in range(1, 101)
    }
    # The estimate falls all the way to N = 100; the first N within 1 % of that is taken.
    assert min(seconds, key=lambda n: seconds[n]) == 100
    assert choice.plan == Plan(1, min(n for n in seconds if seconds[n] <= seconds[100] * 1.01))
    assert choice.plan.micro_batches < 50


@pytest.mark.parametrize("name", ["sl", "sfl", "sfl2"])
def test_methods_that_only_split_never_cut_the_batch_and_always_leave_the_server_a_layer(
    make_profile: MakeProfile, name: str
) -> None:
    profile = make_profile([(1.0, 1.0, 100_000, 0)] * 3)
    slow = Link(up_bps=8.0, down_bps=8.0)
    choice = choose_plan(METHODS[name], profile, profile, 100, slow, split_point="auto", micro_batches=7)
    assert choice.plan == Plan(1, 1)
    assert choose_plan(METHODS[name], profile, profile, 100, slow, split_point=3).plan == Plan(3, 1)


def test_federated_learning_ignores_the_plan(make_profile: MakeProfile) -> None:
    profile = make_profile([(1.0, 1.0, 1000, 0)] * 3)
    choice = choose_plan(METHODS["fl"], profile, profile, 100, WIFI, split_point=99, micro_batches=999)
    assert choice.plan == Plan(3, 1)


def test_a_network_of_one_layer_has_one_plan_whatever_the_method(make_profile: MakeProfile) -> None:
    profile = make_profile([(1.0, 1.0, 1000, 0)])
    for method in METHODS.values():
        assert choose_plan(method, profile, profile, 100, WIFI).plan == Plan(1, 1)


def test_a_given_number_of_micro_batches_leaves_out_federated_learning(make_profile: MakeProfile) -> None:
    profile = make_profile([(1.0, 1.0, 100_000, 0)] * 3)
    slow = Link(up_bps=8.0, down_bps=8.0)
    assert choose_plan(METHODS["pipar"], profile, profile, 100, slow, micro_batches=4).plan == Plan(1, 4)
    assert choose_plan(METHODS["pipar"], profile, profile, 100, slow, micro_batches=1).plan == Plan(3, 1)


def test_a_given_whole_network_is_never_cut_into_micro_batches(make_profile: MakeProfile) -> None:
    profile = make_profile([(1.0, 1.0, 1000, 0)] * 3)
    choice = choose_plan(METHODS["pipar"], profile, profile, 100, WIFI, split_point=3, micro_batches=4)
    assert choice.plan == Plan(3, 1)


@pytest.mark.parametrize(
    ("split_point", "micro_batches", "says"),
    [
        (0, "auto", "Split point 0 is outside 1..3"),
        (4, "auto", "Split point 4 is outside 1..3"),
        ("auto", 0, "0 micro-batches are outside 1..100"),
        ("auto", 101, "101 micro-batches are outside 1..100"),
    ],
)
def test_a_given_value_outside_its_range_is_refused(
    make_profile: MakeProfile, split_point: Given, micro_batches: Given, says: str
) -> None:
    profile = make_profile([(1.0, 1.0, 1000, 0)] * 3)
    with pytest.raises(PlanError, match=says):
        choose_plan(METHODS["pipar"], profile, profile, 100, WIFI, split_point=split_point, micro_batches=micro_batches)


def test_profiles_of_two_networks_are_refused(make_profile: MakeProfile) -> None:
    device, server = make_profile([(1.0, 1.0, 1, 0)] * 2), make_profile([(1.0, 1.0, 1, 0)] * 3)
    with pytest.raises(PlanError, match="give two profiles of the same network"):
        choose_plan(METHODS["pipar"], device, server, 100, WIFI)


def test_choosing_for_a_deep_network_takes_milliseconds(make_profile: MakeProfile) -> None:
    profile = make_profile([(0.01 * q, 0.02 * q, 65536 // q, 0) for q in range(1, 36)])
    used = time.thread_time()
    choose_plan(METHODS["pipar"], profile, profile, 100, WIFI, 0.05)
    # About 4 ms here; changing bandwidth calls for a choice per device in the middle of training.
    assert time.thread_time() - used < 0.2
