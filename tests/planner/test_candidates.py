"""Candidates are all allowed plans, and no epoch is shorter than their least times."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipar.errors import PlanError, TooLittleMemoryError
from pipar.methods import METHODS, Plan
from pipar.planner.candidates import allowed_plans, candidates
from pipar.planner.costs import Costs
from pipar.planner.fleet import Fleet, Member
from pipar.planner.simulator import simulate
from pipar.profiling.memory import BASE_BYTES, replica_bytes, training_bytes
from pipar.profiling.profile import LayerProfile, Profile
from pipar.settings.links import Link

LAYER = LayerProfile("a", (0.1, 0.7), (0.2, 1.4), 4000, 100, saved_bytes=1000, working_bytes=100)
PROFILE = Profile("any", "float32", (1, 12), (LAYER,) * 4)
PHONE = Member("phone", Costs(PROFILE), Link(up_bps=1e6, down_bps=2e6, latency_s=0.01), 24)
FLEET = Fleet(METHODS["pipar"], (PHONE,), Costs(PROFILE), 1, 12)


def plans(fleet: Fleet = FLEET, **changes: object) -> list[Plan]:
    return allowed_plans(fleet, replace(PHONE, **changes))  # type: ignore[arg-type]


def with_method(name: str) -> Fleet:
    return replace(FLEET, method=METHODS[name])


def test_a_pipeline_has_every_cut_with_every_n_and_the_whole_network_once() -> None:
    assert plans() == [Plan(p, n) for p in (1, 2, 3) for n in range(1, 13)] + [Plan(4, 1)]


@pytest.mark.parametrize(
    ("method", "expected"),
    [("fl", [Plan(4, 1)]), *((name, [Plan(1, 1), Plan(2, 1), Plan(3, 1)]) for name in ("sl", "sfl", "sfl2"))],
)
def test_other_methods_have_the_plans_of_their_definitions(method: str, expected: list[Plan]) -> None:
    assert plans(with_method(method)) == expected


def test_with_batch_statistics_n_ends_where_micro_batches_have_two_samples() -> None:
    assert max(plan.micro_batches for plan in plans(replace(FLEET, batch_statistics=True))) == 6
    odd = replace(FLEET, batch_statistics=True, batch_size=13)
    assert max(plan.micro_batches for plan in plans(odd)) == 6


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"split_point": 2, "micro_batches": 5}, [Plan(2, 5)]),
        ({"split_point": 4, "micro_batches": 5}, [Plan(4, 1)]),
        ({"micro_batches": 5}, [Plan(1, 5), Plan(2, 5), Plan(3, 5)]),
        ({"micro_batches": 1}, [Plan(1, 1), Plan(2, 1), Plan(3, 1), Plan(4, 1)]),
        ({"split_point": 1, "micro_batches": 5, "window": 2}, [Plan(1, 5, 2)]),
    ],
)
def test_configured_values_are_kept(given: dict[str, int], expected: list[Plan]) -> None:
    assert plans(FLEET, **given) == expected


def test_a_window_is_as_large_as_memory_allows_and_a_configured_one_stays() -> None:
    needs = training_bytes(PROFILE, Plan(1, 4, 2), 12)
    assert plans(split_point=1, micro_batches=4, memory_bytes=needs) == [Plan(1, 4, 2)]
    assert plans(split_point=1, micro_batches=4, memory_bytes=needs, window=2) == [Plan(1, 4, 2)]
    assert plans(split_point=1, micro_batches=4, memory_bytes=10 * needs) == [Plan(1, 4)]
    with pytest.raises(PlanError, match="P=1 N=4"):
        plans(split_point=1, micro_batches=4, memory_bytes=needs, window=3)


@pytest.mark.slow
@given(st.integers(BASE_BYTES + 1600, BASE_BYTES + 40_000))
def test_every_plan_fits_into_memory_and_no_plan_that_fits_without_a_window_is_missing(memory: int) -> None:
    found = plans(memory_bytes=memory)
    assert all(training_bytes(PROFILE, plan, 12) <= memory for plan in found)
    fitting = [plan for plan in plans() if training_bytes(PROFILE, plan, 12) <= memory]
    assert set(fitting) <= set(found)


MIB = 2**20
#: As PHONE's layers, but in MiB: a sample keeps 10 and works with 1, in each of four layers.
LARGE = replace(
    PROFILE, layers=(replace(LAYER, saved_bytes=10 * MIB, working_bytes=MIB, parameter_bytes=MIB // 10),) * 4
)


@pytest.mark.parametrize(
    ("method", "memory", "given", "says"),
    [
        ("pipar", 360.7, {}, "phone has 360 MiB of memory, but its smallest allowed plan, P=1 N=12 1f1b(1), needs "),
        ("pipar", 360, {}, "needs 380 MiB, 368 of them for Python and torch: give devices.memory at least 380MiB."),
        ("pipar", 390, {"split_point": 3}, "P=3 N=12 1f1b(1), needs 400 MiB"),
        ("pipar", 390, {"split_point": 3}, "at least 400MiB, or leave split_point to 'auto'."),
        ("pipar", 390, {"window": 3}, "or leave schedule to 'auto'."),
        ("pipar", 390, {"split_point": 1, "micro_batches": 2}, "or a smaller run.batch_size, or leave split_point and"),
        ("fl", 420, {}, "P=4 N=1, needs 862 MiB"),
        ("fl", 420, {}, "at least 862MiB, or a smaller run.batch_size, or use the method pipar."),
        ("sfl", 370, {}, "P=1 N=1, needs 501 MiB, 368 of them for Python and torch: give devices.memory at least"),
        ("sfl", 370, {}, "at least 501MiB."),
    ],
)
def test_the_error_for_a_device_that_fits_nothing_says_what_it_needs_and_only_what_would_help(
    method: str, memory: float, given: dict[str, object], says: str
) -> None:
    with pytest.raises(PlanError) as raised:
        plans(with_method(method), costs=Costs(LARGE), memory_bytes=int(memory * MIB), **given)
    text = str(raised.value)
    assert says in text
    assert "MB" not in text.replace("MiB", "")
    assert "\n" not in text


def test_the_memory_that_the_error_names_is_enough_and_more_than_there_is() -> None:
    needs = training_bytes(PROFILE, Plan(1, 12, 1), 12)  # a few bytes more than the base
    with pytest.raises(TooLittleMemoryError, match=r"has 368 MiB of memory, but .* needs 369 MiB"):
        plans(memory_bytes=needs - 1)
    assert plans(memory_bytes=369 * MIB)


def test_a_device_that_was_profiled_with_its_first_layers_holds_no_more_of_them() -> None:
    first = replace(PROFILE, layers=PROFILE.layers[:2], total_layers=4)
    costs = Costs(first)
    assert {plan.split_point for plan in plans(costs=costs)} == {1, 2}
    for fleet, split_point in ((with_method("fl"), "auto"), (FLEET, 3)):
        for memory in (None, 10 * BASE_BYTES):
            with pytest.raises(PlanError, match="phone was profiled with the first 2 of 4 layers"):
                plans(fleet, costs=costs, split_point=split_point, memory_bytes=memory)


def random_fleet(rng: random.Random) -> Fleet:
    layers = tuple(
        LayerProfile(
            name,
            (rng.uniform(0, 0.1), rng.uniform(0.1, 1)),
            (rng.uniform(0, 0.1), rng.uniform(0.1, 1)),
            rng.randrange(20_000),
            rng.randrange(5000),
        )
        for name in "abc"
    )
    overheads = {"load_s": rng.choice([0, 1e-3]), "encode_s": rng.choice([0, 1e-3]), "step_s": rng.choice([0, 1e-2])}
    profile = replace(Profile("any", "float32", (1, 12), layers), **overheads)  # type: ignore[arg-type]
    rates = [None, 1e5, 1e6, 1e8]
    link = Link(up_bps=rng.choice(rates), down_bps=rng.choice(rates), latency_s=rng.choice([0, 0.05]))
    costs = Costs(profile, rng.uniform(0.1, 2))
    members = tuple(Member(f"d{n}", costs, link, 36) for n in range(rng.randint(1, 3)))
    return Fleet(METHODS["pipar"], members, Costs(profile, rng.uniform(0.3, 3)), rng.randint(1, 2), 12)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([0, 1, 3]))
def test_no_epoch_beats_the_least_times_of_its_plans(rng: random.Random, window: int) -> None:
    fleet = random_fleet(rng)
    fleet = replace(fleet, members=tuple(replace(m, window=window) for m in fleet.members))
    for option in rng.sample(candidates(fleet, fleet.members[0]), 4):
        timing = simulate(fleet, dict.fromkeys([m.name for m in fleet.members], option.plan))
        rounding = 1 + 1e-12
        assert option.lane_s <= option.alone_s * rounding
        assert 3 * option.alone_s <= timing.epoch_s * rounding
        assert 3 * option.server_s * len(fleet.members) / fleet.cores <= timing.epoch_s * rounding


# --- cuts that leak too much


def leaking(*cuts: int, method: str = "pipar") -> Fleet:
    return replace(with_method(method), leaky_cuts=frozenset(cuts))


def test_every_plan_fits_into_the_memory_of_the_servers_accelerator() -> None:
    # Weights, gradients and momentum of two layers, one gradient more, and what 12 samples keep in both.
    assert replica_bytes(PROFILE, Plan(2, 1), 12) == 2 * 100 * 3 + 100 + 12 * (2 * 1000 + 100)
    assert replica_bytes(PROFILE, Plan(4, 1), 12) == 0
    for memory in (0, 5_000, 20_000, 60_000):
        fitting = [plan for plan in plans() if replica_bytes(PROFILE, plan, 12) <= memory]
        assert plans(replace(FLEET, replica_memory_bytes=memory)) == fitting
    assert plans(replace(FLEET, replica_memory_bytes=0)) == [Plan(4, 1)]  # nothing is at the server


def test_the_error_for_an_accelerator_that_is_too_small_says_what_would_help() -> None:
    small = replace(with_method("sfl"), replica_memory_bytes=5 << 10)
    says = "The server's accelerator has 0 MiB of memory .* P=3 N=1.* needs 1 MiB: .* server.torch_device = 'cpu'"
    with pytest.raises(PlanError, match=says):
        plans(small)


def test_no_plan_has_a_cut_that_leaks_too_much() -> None:
    assert {plan.split_point for plan in plans(leaking(1, 3))} == {2, 4}
    assert plans(leaking(1, 2, 3)) == [Plan(4, 1)]
    assert plans(leaking(1, method="sfl")) == [Plan(2, 1), Plan(3, 1)]
    assert plans(leaking(1, 2, 3, method="fl")) == [Plan(4, 1)]


@pytest.mark.parametrize(
    ("fleet", "given", "says"),
    [
        (leaking(1, 2, 3, method="sfl"), {}, "With sfl, phone can only have P = 1, 2, 3, which leaks more than "),
        (leaking(1, 2, 3, method="sfl"), {}, "privacy.max_leakage allows: raise the limit, or use the method fl."),
        (leaking(2), {"split_point": 2}, "or leave split_point and micro_batches to 'auto'."),
        (leaking(1, 2, 3), {"micro_batches": 5}, "With pipar, phone can only have P = 1, 2, 3, which leaks more"),
        (leaking(1, 2), {"costs": Costs(replace(PROFILE, layers=(LAYER,) * 2, total_layers=4))}, "but has to train 3, "
         "because all earlier cuts leak more than privacy.max_leakage allows: raise the limit."),
    ],
)  # fmt: skip
def test_the_error_for_a_device_with_only_leaky_cuts_says_so(fleet: Fleet, given: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError) as raised:
        plans(fleet, **given)
    assert says in str(raised.value)
