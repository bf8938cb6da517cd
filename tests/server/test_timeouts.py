"""The timeouts that a server chooses are functions of what is known: forecasts, past rounds, silences, links."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pipar.server.timeouts import (
    SLOWEST_BPS,
    Forecast,
    Knowledge,
    resume_window,
    round_limit,
    signs_of_life,
    silent_after,
)

NOTHING = Knowledge()
LENGTHS_S = (0.5, 2.0, 10.0, 60.0, 600.0)
RATES_BPS = (1e5, 1e6, 1e7, 1e8, None)


def after_rounds(seconds: float, rate_bps: float | None = None, **more: object) -> Knowledge:
    known = Knowledge(rounds_s=(seconds,) * 3, own_s=(seconds,) * 3, up_bps=rate_bps, down_bps=rate_bps)
    return replace(known, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("round_s", LENGTHS_S)
@pytest.mark.parametrize("rate_bps", RATES_BPS)
def test_a_dead_device_costs_less_than_two_normal_rounds(round_s: float, rate_bps: float | None) -> None:
    known = after_rounds(round_s, rate_bps, frame_bytes=1_000_000)
    assert silent_after(known).seconds < 2 * round_s
    assert resume_window(known).seconds < 2 * round_s


def test_a_dead_device_costs_long_rounds_half_a_minute_or_a_quarter_of_one() -> None:
    assert resume_window(after_rounds(60.0)).seconds == 30.0
    assert resume_window(after_rounds(600.0)).seconds == 150.0


def test_a_frame_that_needs_minutes_is_not_taken_for_silence() -> None:
    frame_s = 1_000_000 * 8 / SLOWEST_BPS
    known = after_rounds(3 * frame_s, SLOWEST_BPS, frame_bytes=1_000_000)
    assert silent_after(known).seconds == pytest.approx(3 * frame_s)
    assert signs_of_life(known)["silent_after_s"] >= 3 * frame_s, "the device does not give up its downlink, either"


def test_before_the_first_round_a_link_of_unknown_rate_has_the_time_of_the_slowest_one() -> None:
    known = replace(NOTHING, forecast=Forecast(0.4, 100.0), frame_bytes=500_000, model_bytes=500_000)
    frame_s = 500_000 * 8 / SLOWEST_BPS
    assert silent_after(known).seconds >= 2 * frame_s
    assert round_limit(known).seconds >= 2 * 2 * frame_s, "the model travels down and up"


def test_before_the_first_round_the_window_follows_from_the_forecast_within_bounds() -> None:
    windows = [resume_window(replace(NOTHING, forecast=Forecast(s, s))).seconds for s in (0.1, 2.0, 100.0)]
    assert windows == [5.0, 20.0, 30.0]
    assert resume_window(NOTHING).seconds == 30.0


def test_longer_silences_than_expected_are_learned() -> None:
    known = after_rounds(10.0, silences_s=(1.0, 4.0, 0.5))
    assert silent_after(known).seconds == 15.0
    shorter = replace(known, rounds_s=(4.0,) * 3, own_s=(4.0,) * 3)
    assert silent_after(shorter).seconds == pytest.approx(1.85 * 4.0)


def test_one_long_round_among_normal_ones_changes_nothing() -> None:
    known = after_rounds(1.0)
    assert silent_after(replace(known, rounds_s=(1.0, 1.0, 60.0))) == silent_after(known)


def test_a_device_that_was_wrongly_taken_for_dead_gets_twice_the_time() -> None:
    known = after_rounds(2.0)
    for choose in (silent_after, resume_window):
        assert choose(replace(known, wait_factor=2.0)).seconds == 2 * choose(known).seconds


def test_a_device_is_not_judged_by_signs_that_it_was_not_asked_for_yet() -> None:
    assert silent_after(after_rounds(1.0, sign_every_s=5.0)).seconds == 20.0


@pytest.mark.parametrize("round_s", LENGTHS_S)
def test_several_signs_of_life_are_due_before_a_device_counts_as_dead(round_s: float) -> None:
    known = after_rounds(round_s)
    assert 5 * signs_of_life(known)["alive_every_s"] < silent_after(known).seconds


def test_a_device_may_take_four_times_as_long_as_before_and_at_least_five_seconds() -> None:
    assert round_limit(after_rounds(10.0)).seconds == 40.0
    assert round_limit(after_rounds(0.5)).seconds == 5.0


def test_progress_extends_the_time_of_a_device_by_its_own_rate() -> None:
    known = after_rounds(10.0)
    assert round_limit(known, elapsed_s=40.0, progress=0.5).seconds == pytest.approx(120.0)
    assert round_limit(known, elapsed_s=40.0, progress=0.9).seconds == pytest.approx(40.0 / 0.9 * 1.5)


@pytest.mark.parametrize("known", [after_rounds(10.0), replace(NOTHING, forecast=Forecast(1.0, 50.0))])
def test_a_device_that_trickles_is_not_waited_for_without_bound(known: Knowledge) -> None:
    elapsed_s = 0.0
    while elapsed_s < (limit_s := round_limit(known, elapsed_s, progress=1e-6 * elapsed_s).seconds):
        elapsed_s += 1.0
    assert limit_s <= 200.0


def test_a_device_that_misses_rounds_in_a_row_holds_up_the_others_less_and_less() -> None:
    known = after_rounds(10.0)
    limits = [round_limit(replace(known, misses=misses)).seconds for misses in range(6)]
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] == 10.0, "a normal round"


def test_without_a_forecast_a_first_round_has_no_limit() -> None:
    assert round_limit(NOTHING).seconds == math.inf


def test_a_choice_says_what_it_follows_from() -> None:
    assert silent_after(after_rounds(0.5)).reason == "rounds of 0.5 s"
    assert resume_window(replace(NOTHING, forecast=Forecast(2.0, 9.0))).reason == (
        "rounds of 2 s forecast, links not measured yet"
    )
    assert "frames that take up to 8 s" in silent_after(after_rounds(13.0, 1e6, frame_bytes=1_000_000)).reason


# --- what a device claims, and how long it takes, costs the others a bounded time


def test_a_claim_of_slowness_does_not_count_once_the_others_have_finished() -> None:
    claimed = replace(NOTHING, forecast=Forecast(18_000.0, 20_000.0), usual_s=10.0)
    assert round_limit(claimed).seconds == 250.0
    assert round_limit(replace(claimed, usual_s=1.0)).seconds == 60.0
    assert round_limit(replace(claimed, usual_s=None)).seconds == 180_000.0, "alone, it delays no other device"


def test_a_device_that_always_uses_up_its_time_does_not_get_more_and_more() -> None:
    own_s = [10.0]
    for _ in range(20):
        known = after_rounds(10.0, own_s=tuple(own_s[-5:]), shortest_s=min(own_s), usual_s=10.0)
        own_s.append(0.95 * max(round_limit(known).seconds, round_limit(known, 9000.0, progress=0.9).seconds))
    assert max(own_s) <= 25 * 10.0


def test_a_device_that_is_twenty_times_slower_than_the_others_keeps_its_time() -> None:
    slow = after_rounds(20.0, shortest_s=19.0, usual_s=1.0)
    assert round_limit(slow).seconds >= 3 * 20.0
    assert round_limit(slow, elapsed_s=70.0, progress=0.5).seconds >= 200.0
    first = replace(NOTHING, forecast=Forecast(200.0, 300.0), usual_s=10.0)
    assert round_limit(first).seconds >= 25 * 10.0


def test_a_link_that_has_become_slow_has_the_time_of_the_slowest_one_while_it_makes_progress() -> None:
    known = after_rounds(90.0, shortest_s=1.0, usual_s=1.0, forecast=Forecast(1.0, 400.0))
    assert round_limit(known, elapsed_s=100.0, progress=0.5).seconds == 300.0


def test_a_slow_device_that_joins_a_fast_fleet_is_not_taken_for_dead() -> None:
    frame_s = 80.0
    joins = replace(NOTHING, rounds_s=(1.0,) * 5, forecast=Forecast(1.0, 400.0), frame_bytes=1_000_000)
    assert silent_after(joins).seconds > 2 * frame_s
    second = replace(joins, rounds_s=(1.0,) * 4 + (250.0,), own_s=(250.0,), up_bps=SLOWEST_BPS)
    assert silent_after(second).seconds > 2 * frame_s, "rounds are not normally that long yet"


def test_a_first_round_has_no_less_than_a_normal_one() -> None:
    known = replace(NOTHING, forecast=Forecast(1.0, 50.0), rounds_s=(50.0,) * 3, misses=9)
    assert round_limit(known).seconds == 50.0
