"""The paper's estimate, by hand: each lane as the bottleneck, one micro-batch, and the whole network on a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.recursion import iteration_s, stage_times

from pipar.errors import PlanError
from pipar.methods import Plan
from pipar.planner.paper_estimate import StageTimes, closed_form_s
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
    assert iteration_s(times, n) == seconds, why
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
    assert closed_form_s(times, n) == pytest.approx(seconds, rel=1e-12)
    assert iteration_s(times, n) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.slow
@given(times_of_stages, st.integers(1, 40))
def test_the_closed_form_is_the_recursion_up_to_rounding(times: StageTimes, n: int) -> None:
    assert closed_form_s(times, n) == pytest.approx(iteration_s(times, n), rel=1e-12)


@pytest.mark.slow
@given(whole_times, st.integers(1, 40))
def test_cutting_finer_never_makes_the_estimate_longer(times: StageTimes, n: int) -> None:
    coarse, fine = (closed_form_s(times.divided_by(pieces), pieces) for pieces in (n, n + 1))
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
