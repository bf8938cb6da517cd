"""The paper's estimate, by hand: each lane as the bottleneck, one micro-batch, and the whole network on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.recursion import closed_form_s, recursion_s, stage_times

from pipar.errors import PlanError
from pipar.methods import METHODS, Plan
from pipar.planner.costs import Costs
from pipar.planner.fleet import Fleet, Member
from pipar.planner.paper_selection import StageTimes, batches_to_fill_idle_time, estimate_plans, iteration_s
from pipar.profiling.memory import training_bytes
from pipar.profiling.profile import Profile
from pipar.settings.links import Link

MakeProfile = Callable[..., Profile]
SLOW = Link(up_bps=8000.0, down_bps=16000.0)

floats = st.floats(0, 1e3)
times_of_stages = st.builds(StageTimes, floats, floats, floats, floats, floats, floats)
whole_times = st.builds(StageTimes, *[st.integers(0, 1000).map(float)] * 6)


@pytest.mark.parametrize(
    ("times", "n", "seconds", "why"),
    [
        (StageTimes(1, 2, 3, 4, 5, 6), 1, 21, "one micro-batch: the sum of all six"),
        (StageTimes(1, 1, 0.5, 0.5, 1, 1), 3, 7, "balanced: 5 lanes + 2 more steps of 1"),
        (StageTimes(1, 10, 1, 1, 1, 1), 4, 45, "the uplink never rests: 1 + 40 + 1 + 1 + 1 + 1"),
        (StageTimes(1, 1, 4, 6, 1, 1), 4, 44, "the server never rests: 1 + 1 + 40 + 1 + 1"),
        (StageTimes(1, 1, 1, 1, 10, 1), 4, 45, "the downlink never rests: 1 + 1 + 2 + 40 + 1"),
        (StageTimes(10, 1, 1, 1, 1, 2), 4, 48, "device, forward: 40, the last gradient at 44, but 40 + 4 x 2 is later"),
        (StageTimes(10, 1, 1, 1, 1, 1), 4, 45, "device, forward: 40 + 1 + 2 + 1 and the last backward"),
        (StageTimes(2, 1, 1, 1, 1, 10), 4, 48, "device, backward: the last forward at 8, then 4 backwards"),
        (StageTimes(5, 1, 1, 1, 1, 5), 4, 40, "all idle time is filled: N (f_c + b_c)"),
        (StageTimes(3, 0, 0, 0, 0, 4), 1, 7, "federated learning: forward and backward"),
        (StageTimes(0, 0, 0, 0, 0, 0), 9, 0, "nothing takes no time"),
    ],
)
def test_an_iteration_takes_the_time_computed_by_hand(times: StageTimes, n: int, seconds: float, why: str) -> None:
    assert iteration_s(times, n) == recursion_s(times, n) == seconds, why
    assert closed_form_s(times, n) == seconds, why


# Seconds of a batch of 100 and bytes of a sample. On a link of 8 kbit/s, 100 samples of 1000 bytes take 100 s.
ON_DEVICE = [(4.0, 8.0, 1000, 0), (2.0, 4.0, 500, 0), (2.0, 2.0, 10, 0)]
ON_SERVER = [(0.4, 0.8, 1000, 0), (0.2, 0.4, 500, 0), (0.2, 0.2, 10, 0)]
FAST = Link(up_bps=8e6, down_bps=8e6)


@pytest.mark.parametrize(
    ("plan", "link", "speeds", "seconds"),
    [
        # Device: f_c = 6/2, b_c = 12/2, u = d = 0.05/2, f_s = b_s = 0.2/2. Its 2 (3 + 6) outlast 9.25 + 6.
        pytest.param(Plan(2, 2), FAST, (1.0, 1.0), 18.0, id="device-bound"),
        # Uplink: 800,000 bit at 80 kbit/s are 10 s, u = 2.5; f_c = 1, f_s + b_s = 0.4/4 + 0.6/4, d = 0.1/4, b_c = 2.
        # 1 + 2.5 + 0.25 + 0.025 + 2 = 5.775, and 3 x 2.5 more; the device alone would take 4 (1 + 2) = 12.
        pytest.param(Plan(1, 4), Link(up_bps=8e4, down_bps=8e6), (1.0, 1.0), 13.275, id="uplink-bound"),
        # Downlink: the same with u and d exchanged.
        pytest.param(Plan(1, 4), Link(up_bps=8e6, down_bps=8e4), (1.0, 1.0), 13.275, id="downlink-bound"),
        # Server, twenty times slower: f_s = 8/4, b_s = 12/4. 1 + 0.025 + 5 + 0.025 + 2 = 8.05, and 3 x 5 more.
        pytest.param(Plan(1, 4), FAST, (1.0, 0.05), 23.05, id="server-bound"),
        # One micro-batch goes through everything once: 4 + 10 + 0.4 + 0.6 + 5 + 8.
        pytest.param(Plan(1, 1), Link(up_bps=8e4, down_bps=1.6e5), (1.0, 1.0), 28.0, id="N=1"),
        # The whole network on the device: 4 + 2 + 2 and 8 + 4 + 2, whatever the link.
        pytest.param(Plan(3, 1), Link(up_bps=8.0, down_bps=8.0), (1.0, 1.0), 22.0, id="P=Q"),
        # Three seconds of latency change nothing of the uplink-bound example.
        pytest.param(
            Plan(1, 4), Link(up_bps=8e4, down_bps=8e6, latency_s=3.0), (1.0, 1.0), 13.275, id="latency not counted"
        ),
        # No limit, no time: 2 (2 + 4) outlast 2 + 0.5 + 4 and 4 more.
        pytest.param(Plan(1, 2), Link(), (1.0, 1.0), 12.0, id="unlimited"),
        # A device of half the speed takes twice as long; the server's 0.5 stay hidden.
        pytest.param(Plan(1, 2), Link(), (0.5, 1.0), 24.0, id="half the speed"),
        # f_s sums layers 2..3, 0.4 s, and b_s 0.6 s. With f_s over 1..P as printed for N, P = 2 would have 0.6 for 0.2.
        # f_c = 6, u = 4, f_s = 0.2, b_s = 0.2, d = 1.6, b_c = 12.
        pytest.param(Plan(2, 1), Link(up_bps=1e5, down_bps=2.5e5), (1.0, 1.0), 24.0, id="server sums P+1..Q"),
    ],
)
def test_an_iteration_of_a_profiled_network_takes_the_time_computed_by_hand(
    make_profile: MakeProfile, plan: Plan, link: Link, speeds: tuple[float, float], seconds: float
) -> None:
    times = stage_times(make_profile(ON_DEVICE), make_profile(ON_SERVER), plan, 100, link, speeds)
    n = plan.micro_batches
    assert iteration_s(times, n) == pytest.approx(seconds, rel=1e-12)
    assert closed_form_s(times, n) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.slow
@given(times_of_stages, st.integers(1, 40))
def test_one_sweep_gives_the_recursion_over_the_table_of_stages_to_the_last_bit(times: StageTimes, n: int) -> None:
    assert iteration_s(times, n) == recursion_s(times, n)


@pytest.mark.slow
@given(times_of_stages, st.integers(1, 40))
def test_the_closed_form_is_the_recursion_up_to_rounding(times: StageTimes, n: int) -> None:
    assert closed_form_s(times, n) == pytest.approx(iteration_s(times, n), rel=1e-12)


@pytest.mark.slow
@given(whole_times, st.integers(1, 40))
def test_cutting_finer_never_makes_the_estimate_longer(times: StageTimes, n: int) -> None:
    coarse, fine = (iteration_s(times.divided_by(pieces), pieces) for pieces in (n, n + 1))
    assert fine <= coarse * (1 + 1e-12)


def test_stage_times_are_sums_over_layers_and_bytes_over_bandwidth(make_profile: MakeProfile) -> None:
    device = make_profile([(4.0, 8.0, 1000, 0), (2.0, 4.0, 100, 0), (1.0, 1.0, 10, 0)])
    server = make_profile([(0.4, 0.8, 1000, 0), (0.25, 0.5, 100, 0), (0.125, 0.25, 10, 0)])
    times = stage_times(device, server, Plan(1, 4), 100, SLOW, speeds=(0.5, 2.0))
    # 100 samples of 1000 bytes are 800,000 bits: 100 s up, 50 s down; all of it by N = 4.
    assert times == StageTimes(fc=4.0 / 0.5 / 4, u=25.0, fs=0.375 / 2 / 4, bs=0.75 / 2 / 4, d=12.5, bc=8.0 / 0.5 / 4)


def test_a_link_without_a_limit_takes_no_time(make_profile: MakeProfile) -> None:
    profile = make_profile([(1.0, 1.0, 1000, 0), (1.0, 1.0, 10, 0)])
    times = stage_times(profile, profile, Plan(1, 2), 100, Link())
    assert (times.u, times.d) == (0.0, 0.0)
    half = stage_times(profile, profile, Plan(1, 2), 100, Link(up_bps=8000.0))
    assert (half.u, half.d) == (50.0, 0.0)


def test_latency_is_not_part_of_the_papers_estimate(make_profile: MakeProfile) -> None:
    profile = make_profile([(1.0, 1.0, 1000, 0), (1.0, 1.0, 10, 0)])
    far = Link(up_bps=8000.0, down_bps=16000.0, latency_s=3.0)
    assert stage_times(profile, profile, Plan(1, 2), 100, far) == stage_times(profile, profile, Plan(1, 2), 100, SLOW)


def test_overheads_are_not_part_of_the_papers_estimate(make_profile: MakeProfile) -> None:
    layers = [(1.0, 1.0, 1000, 10), (1.0, 1.0, 10, 10)]
    plain, costly = make_profile(layers), make_profile(layers, load_s=9.0, encode_s_per_byte=9.0, step_s_per_byte=9.0)
    assert stage_times(plain, plain, Plan(1, 2), 100, SLOW) == stage_times(costly, costly, Plan(1, 2), 100, SLOW)


def test_the_whole_network_on_the_device_communicates_nothing(make_profile: MakeProfile) -> None:
    profile = make_profile([(1.0, 2.0, 1000, 0), (3.0, 4.0, 10, 0)])
    times = stage_times(profile, profile, Plan(2, 1), 100, SLOW, speeds=(0.5, 1.0))
    assert times == StageTimes(8.0, 0.0, 0.0, 0.0, 0.0, 12.0)


def test_profiles_of_two_networks_are_refused(make_profile: MakeProfile) -> None:
    device, server = make_profile([(1.0, 1.0, 1, 0)] * 2), make_profile([(1.0, 1.0, 1, 0)] * 3)
    with pytest.raises(PlanError, match="2 layers, the server's of hand with 3"):
        stage_times(device, server, Plan(1, 1), 100, SLOW)


# --- the selection


@pytest.mark.parametrize(
    ("times", "n", "why"),
    [
        (StageTimes(4, 1, 0.4, 0.6, 0.5, 8), 2, "2.5 s of idle time fit into one more forward of 4 s"),
        (StageTimes(8, 1, 0.4, 0.6, 0.5, 2), 3, "the backward is shorter: 2.5 s need two of 2 s"),
        (StageTimes(2, 2, 1, 1, 2, 3), 4, "6 s are exactly three forwards of 2 s"),
        (StageTimes(3, 0, 0, 0, 0, 4), 1, "federated learning: no idle time to fill"),
        (StageTimes(0, 0, 0, 0, 0, 0), 1, "no idle time, and nothing to fill it with"),
        (StageTimes(1, 98, 0, 0, 0, 1), 99, "99 micro-batches of a batch of 100"),
        (StageTimes(1, 99, 0, 0, 0, 1), 100, "as many as samples"),
        (StageTimes(1, 500, 0, 0, 0, 1), 100, "501 would be more than samples: B / N is no less than 1"),
        (StageTimes(0, 1, 0, 0, 0, 0), 100, "nothing on the device takes time: no number fills the idle time"),
        (StageTimes(1, 3, 0, 0, 0, 0), 4, "only frozen layers on the device: there is no backward"),
    ],
)
def test_the_number_of_micro_batches_fills_the_idle_time_computed_by_hand(times: StageTimes, n: int, why: str) -> None:
    assert batches_to_fill_idle_time(times, 100) == n, why


def alone(device: Profile, server: Profile, link: Link, *, speed: float = 1.0, **given: int | None) -> Fleet:
    phone = Member("phone", Costs(device), link, 100, **given)  # type: ignore[arg-type]
    return Fleet(METHODS["pipar"], (phone,), Costs(server, speed), 1, 100)


@pytest.mark.parametrize(
    ("link", "server_speed", "plan", "seconds"),
    [
        # P=1: idle 1 + 1 + 0.5 = 2.5 of min(4, 8), N = 2, T = 2 (2 + 4) = 12. P=2: idle 0.5 + 0.4 + 0.25 of min(6, 12),
        # N = 2, T = 2 (3 + 6) = 18. P=3: N = 1, T = 8 + 14 = 22.
        pytest.param(Link(up_bps=8e5, down_bps=1.6e6), 1.0, Plan(1, 2), 12.0, id="quick link"),
        # P=1: idle 10 + 1 + 5 = 16 of 4, N = 5, T = (4 + 16 + 8) / 5 + 4 x 10 / 5 = 13.6; the device needs only 12.
        # P=2: idle 5 + 0.4 + 2.5 = 7.9 of 6, N = 3, T = 3 (2 + 4) = 18.
        pytest.param(Link(up_bps=8e4, down_bps=1.6e5), 1.0, Plan(1, 5), 13.6, id="slow link"),
        # P=1: N = 1 + ceil(151 / 4) = 39, T = 163 / 39 + 38 x 100 / 39 = 101.6. P=2: N = 1 + ceil(75.4 / 6) = 14,
        # T = 93.4 / 14 + 13 x 50 / 14 = 53.1. P=3: 22.
        pytest.param(Link(up_bps=8e3, down_bps=1.6e4), 1.0, Plan(3, 1), 22.0, id="slowest link"),
        # The server takes 20 times as long. P=1: f_s = 8, b_s = 12, N = 1 + ceil(20 / 4) = 6,
        # T = (4 + 20 + 8) / 6 + 5 x 20 / 6 = 22. P=2: f_s = b_s = 4, N = 1 + ceil(8 / 6) = 3, T = 3 (2 + 4) = 18.
        # With f_s over layers 1..P, as printed, P=2 would have f_s = 12 and N = 4.
        pytest.param(Link(), 0.05, Plan(2, 3), 18.0, id="slow server"),
    ],
)
def test_the_selected_plan_is_the_best_of_one_n_for_each_p_computed_by_hand(
    make_profile: MakeProfile, link: Link, server_speed: float, plan: Plan, seconds: float
) -> None:
    fleet = alone(make_profile(ON_DEVICE), make_profile(ON_SERVER), link, speed=server_speed)
    selected, estimate = estimate_plans(fleet)["phone"]
    assert selected == plan
    assert estimate == pytest.approx(seconds, rel=1e-12)


def test_another_n_may_be_better_but_is_not_on_the_list(make_profile: MakeProfile) -> None:
    fleet = alone(make_profile(ON_DEVICE), make_profile(ON_SERVER), Link(up_bps=8e4, down_bps=1.6e5))
    (_, listed), (plan, finer) = (
        estimate_plans(each)["phone"]
        for each in (fleet, replace(fleet, members=(replace(fleet.members[0], split_point=1, micro_batches=100),)))
    )
    assert plan == Plan(1, 100)
    assert finer < listed


def test_a_split_point_whose_listed_n_does_not_fit_into_memory_is_left_out(make_profile: MakeProfile) -> None:
    layers = [replace(layer, saved_bytes=9) for layer in make_profile(ON_DEVICE).layers]
    device = replace(make_profile(ON_DEVICE), layers=tuple(layers))
    slow_server = alone(device, make_profile(ON_SERVER), Link(), speed=0.05)
    needed = training_bytes(device, Plan(2, 3), 100)
    for memory, p in ((needed, 2), (needed - 1, 1)):
        (phone,) = slow_server.members
        limited = replace(slow_server, members=(replace(phone, memory_bytes=memory),))
        assert estimate_plans(limited)["phone"][0].split_point == p


def test_a_device_in_whose_memory_no_listed_plan_fits_gets_any_plan_that_does(make_profile: MakeProfile) -> None:
    layers = [replace(layer, saved_bytes=1000) for layer in make_profile(ON_DEVICE).layers]
    device = replace(make_profile(ON_DEVICE), layers=tuple(layers))
    fleet = alone(device, make_profile(ON_SERVER), Link(up_bps=8e4, down_bps=1.6e5))
    (phone,) = fleet.members
    limited = replace(phone, memory_bytes=training_bytes(device, Plan(1, 5, 1), 100))
    plan, _ = estimate_plans(replace(fleet, members=(limited,)))["phone"]
    assert plan.window
    assert training_bytes(device, plan, 100) <= (limited.memory_bytes or 0)
