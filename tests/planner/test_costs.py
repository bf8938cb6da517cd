"""The cost model: layers at the micro-batch's own size, overheads by their own measure, all of it by the speed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipar.execution.work import Work
from pipar.planner.costs import Costs, interpolate
from pipar.profiling.profile import CodingTimes, LayerProfile, Profile

PROFILE = Profile(
    model="hand",
    dtype="float32",
    batch_sizes=(4, 10, 100),
    layers=(
        LayerProfile("a", (2.0, 5.0, 50.0), (4.0, 7.0, 97.0), 1000, 100),
        LayerProfile("b", (3.0, 3.0, 12.0), (6.0, 6.0, 24.0), 500, 10),
        LayerProfile("c", (1.0, 1.0, 1.0), (1.0, 1.0, 1.0), 40, 1),
    ),
    load_s=0.5,
    encode_s_per_byte=0.25,
    decode_s_per_byte=0.125,
    step_s_per_byte=2.0,
    pack_s_per_byte=4.0,
    install_s_per_byte=8.0,
    aggregate_s_per_byte=16.0,
    noise_s_per_byte=32.0,
)
NO_OVERHEADS = replace(
    PROFILE,
    load_s=0.0,
    encode_s_per_byte=0.0,
    decode_s_per_byte=0.0,
    step_s_per_byte=0.0,
    pack_s_per_byte=0.0,
    install_s_per_byte=0.0,
    aggregate_s_per_byte=0.0,
    noise_s_per_byte=0.0,
)


@pytest.mark.parametrize(
    ("samples", "seconds"),
    [
        (0, 0.0),
        (4, 5.0),  # as measured
        (10, 11.0),
        (100, 101.0),
        (7, 8.0),  # in the middle of the first segment
        (55, 56.0),  # in the middle of the second
        (2, 3.0),  # along the first segment
        (1, 2.0),
        (200, 202.0),  # in proportion
    ],
)
def test_a_time_is_interpolated_between_measured_batch_sizes(samples: int, seconds: float) -> None:
    assert interpolate((4, 10, 100), (5.0, 11.0, 101.0), samples) == seconds


@pytest.mark.parametrize(
    ("times", "samples", "seconds", "why"),
    [
        ((4.0, 28.0), 1, 1.0, "a steep first segment would go below zero: in proportion instead"),
        ((4.0, 2.0), 1, 4.0, "a falling first segment would make one sample dearer than four: the same instead"),
        ((4.0, 4.0), 1, 4.0, "fixed cost only"),
        ((0.0, 0.0), 1, 0.0, "nothing stays nothing"),
    ],
)
def test_below_the_smallest_measured_size_a_time_stays_between_its_share_and_itself(
    times: tuple[float, float], samples: int, seconds: float, why: str
) -> None:
    assert interpolate((4, 8), times, samples) == seconds, why


@pytest.mark.parametrize(("samples", "seconds"), [(1, 0.5), (8, 4.0), (10, 5.0), (25, 12.5)])
def test_one_measured_size_is_all_proportion(samples: int, seconds: float) -> None:
    assert interpolate((10,), (5.0,), samples) == seconds


@pytest.mark.slow
@given(st.lists(st.floats(1e-6, 10), min_size=4, max_size=4), st.integers(1, 300))
def test_a_time_is_always_positive_and_never_far_from_a_measured_one(times: list[float], samples: int) -> None:
    time_s = interpolate((3, 6, 25, 100), tuple(times), samples)
    assert 0 < time_s <= max(times) * max(1.0, samples / 100) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Work("fc", first_layer=1, last_layer=1, samples=10), 5.0),
        (Work("fc", first_layer=1, last_layer=2, samples=10), 8.0),
        (Work("fs", first_layer=2, last_layer=3, samples=100), 13.0),
        (Work("bs", first_layer=2, last_layer=3, samples=55), 16.0),
        (Work("bc", first_layer=1, last_layer=1, samples=55), 52.0),
        (Work("bc", first_layer=1, last_layer=3, samples=4), 11.0),
        (Work("load", samples=10), 5.0),
        (Work("noise", size_bytes=2), 64.0),
        (Work("encode", size_bytes=1000), 250.0),
        (Work("decode", size_bytes=1000), 125.0),
        (Work("step", first_layer=1, last_layer=2), 220.0),
        (Work("protect", size_bytes=10), 320.0),
        (Work("pack", size_bytes=10), 40.0),
        (Work("install", size_bytes=10), 80.0),
        (Work("aggregate", size_bytes=10), 160.0),
        (Work("validate", samples=100), 63.0),
        (Work("validate", samples=210), 2 * 63.0 + 9.0),
        (Work("validate", samples=10), 9.0),
        (Work("validate"), 0.0),
    ],
    ids=lambda cell: cell.kind if isinstance(cell, Work) else str(cell),
)
def test_each_kind_of_work_has_the_cost_of_the_profile(work: Work, seconds: float) -> None:
    assert Costs(PROFILE).seconds(work) == seconds
    assert Costs(PROFILE, speed=0.25).seconds(work) == 4 * seconds


@pytest.mark.parametrize(
    "kind", ["load", "noise", "encode", "decode", "step", "protect", "pack", "install", "aggregate"]
)
def test_an_overhead_of_zero_costs_exactly_zero_at_any_speed(kind: str) -> None:
    work = Work(kind, first_layer=1, last_layer=3, samples=17, size_bytes=12345)
    assert Costs(NO_OVERHEADS, speed=0.05).seconds(work) == 0.0


def test_the_same_work_costs_the_same_and_other_work_does_not() -> None:
    costs = Costs(PROFILE)
    work = Work("fc", epoch=1, iteration=2, micro_batch=3, last_layer=1, samples=10)
    again = replace(work, epoch=9, iteration=8, micro_batch=7)
    assert costs.seconds(work) == costs.seconds(again) == costs.seconds(work)
    for other in (replace(work, kind="bc"), replace(work, last_layer=2), replace(work, samples=11)):
        assert costs.seconds(other) != costs.seconds(work)


@pytest.mark.slow
@given(st.integers(1, 3), st.integers(1, 150))
def test_two_halves_of_the_layers_cost_as_much_as_the_whole(cut: int, samples: int) -> None:
    costs = Costs(PROFILE)
    whole = costs.seconds(Work("fc", last_layer=3, samples=samples))
    front = costs.seconds(Work("fc", last_layer=cut, samples=samples))
    back = costs.seconds(Work("fs", first_layer=cut + 1, last_layer=3, samples=samples)) if cut < 3 else 0.0
    assert math.isclose(front + back, whole, rel_tol=1e-12)


@pytest.mark.parametrize(
    "work", [Work("fc", samples=4), Work("step"), Work("fs", last_layer=4), Work("fly", last_layer=1)]
)
def test_impossible_work_is_an_error_not_a_free_stage(work: Work) -> None:
    with pytest.raises(AssertionError):
        Costs(PROFILE).seconds(work)


def test_remembered_shapes_do_not_grow_with_sizes_in_bytes() -> None:
    costs = Costs(PROFILE)
    for size in range(1000):
        costs.seconds(Work("encode", size_bytes=size))
        costs.seconds(Work("noise", size_bytes=size))
        costs.seconds(Work("fc", last_layer=1, samples=10, size_bytes=size))
    assert len(costs._known) == 1


def test_a_bound_takes_the_fastest_pass_of_each_layer_or_the_usual_one_if_it_is_unknown() -> None:
    quick = replace(PROFILE.layers[0], least_s=(5.0, 10.0, 100.0))
    profile = replace(PROFILE, layers=(quick, *PROFILE.layers[1:]))
    assert Costs(profile).least_s(1, 2, 10) == 10.0 + (3.0 + 6.0)
    assert Costs(profile, speed=0.5).least_s(1, 1, 100) == 200.0
    assert Costs(PROFILE).least_s(1, 3, 4) == (2.0 + 4.0) + (3.0 + 6.0) + (1.0 + 1.0)


def test_a_coded_tensor_is_one_message_and_decoded_chunk_by_chunk() -> None:
    coding = {"planes": CodingTimes(2.0, 0.5, 3.0, 0.25)}
    costs = Costs(replace(NO_OVERHEADS, decode_s=10.0, decode_s_per_byte=1.0, coding=coding), 0.5)
    decode = Work("decode", size_bytes=8, encoding="planes", chunks=4)
    assert costs.seconds(decode) == costs.coding_s("decode", "planes", 8, 4) == (10.0 + 4 * 3.0 + 0.25 * 8) / 0.5
    assert costs.seconds(Work("decode", size_bytes=8)) == (10.0 + 8) / 0.5
    # Each chunk is encoded by itself, and leaves before the next one is.
    assert costs.coding_s("encode", "planes", 8, 4) == 4 * costs.seconds(
        Work("encode", size_bytes=2, encoding="planes")
    )


def test_a_call_costs_time_in_addition_to_its_bytes_and_a_backward_at_a_cut_in_addition_to_its_layers() -> None:
    costs = Costs(replace(NO_OVERHEADS, encode_s=2.0, encode_s_per_byte=0.5, step_s=3.0, backward_at_cut_s=1.5), 0.5)
    assert costs.seconds(Work("encode", size_bytes=4)) == (2.0 + 0.5 * 4) / 0.5
    assert costs.seconds(Work("step", first_layer=1, last_layer=2)) == 3.0 / 0.5
    assert costs.seconds(Work("bc", first_layer=1, last_layer=2, samples=10)) == (7.0 + 6.0 + 1.5) / 0.5
    assert costs.seconds(Work("bc", first_layer=1, last_layer=3, samples=10)) == (7.0 + 6.0 + 1.0) / 0.5
