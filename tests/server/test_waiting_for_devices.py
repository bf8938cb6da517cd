"""A server without configured timeouts, with its devices, in virtual time: dead ones are lost, slow ones are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.timeouts import METHODS, Case, Outcome, draw_case, run_case

#: The shortest rounds on a fast link, the longest on the slowest one, and something in between.
CORNERS = {"short": (0.6, 1e8), "middle": (10.0, 2e6), "long": (600.0, 1e5)}
BASE = Case(
    seed=0,
    method="pipar",
    round_s=2.0,
    rates_bps={"pi-1": 1e7, "pi-2": 1e7, "pi-3": 1e7},
    latency_s=0.01,
    link_share=0.4,
    model_share=0.3,
    iterations=4,
    speeds=dict.fromkeys(("pi-1", "pi-2", "pi-3"), 1.0),
    dies="pi-2",
    death="stopped",
    dies_in=2.5,
    breaks=None,
    rounds=5,
)


def check(outcome: Outcome) -> None:
    assert outcome.falsely == []
    assert outcome.noticed_rounds <= 2
    assert len(outcome.counted) == outcome.case.rounds
    assert set(outcome.counted[-1]) == set(outcome.case.speeds) - {outcome.case.dies}


@pytest.mark.slow
@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize("method", dict.fromkeys(METHODS))
@pytest.mark.parametrize("death", ["killed", "stopped"])
def test_a_dead_device_is_noticed_within_two_rounds(method: str, death: str, corner: str) -> None:
    round_s, rate_bps = CORNERS[corner]
    rates = dict.fromkeys(BASE.speeds, rate_bps)
    check(run_case(replace(BASE, method=method, death=death, round_s=round_s, rates_bps=rates)))


@pytest.mark.slow
@pytest.mark.parametrize("method", dict.fromkeys(METHODS))
def test_a_device_that_dies_while_it_waits_for_the_others_is_noticed_within_two_rounds(method: str) -> None:
    speeds = {"pi-1": 0.25, "pi-2": 1.0, "pi-3": 1.0}
    check(run_case(replace(BASE, method=method, speeds=speeds, dies_in=2.9, jitter=0.0, straggles=0.0)))


@pytest.mark.slow
def test_devices_that_lose_a_connection_resume_also_if_rounds_are_short() -> None:
    for breaks in BASE.speeds:
        check(run_case(replace(BASE, round_s=0.5, breaks=breaks)))


@pytest.mark.slow
def test_a_device_that_is_slow_for_a_round_is_waited_for() -> None:
    check(run_case(replace(BASE, straggles=0.6, slower=3.0, method="fl")))


@pytest.mark.slow
def test_what_was_chosen_is_reported_at_the_start_and_when_it_changes_much() -> None:
    chosen = run_case(replace(BASE, jitter=0.0, straggles=0.0)).timeouts
    assert "forecast" in chosen[0].reason
    assert "rounds of" in chosen[-1].reason
    assert 2 <= len(chosen) <= 4
    last = chosen[-1]
    assert last.silent_s is not None
    assert last.resume_s is not None
    assert last.limit_s is not None
    assert last.silent_s < last.limit_s


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_drawn_deployments_exclude_no_live_device(seed: int) -> None:
    outcome = run_case(draw_case(seed))
    assert outcome.falsely == []
    assert outcome.noticed_rounds <= 2
