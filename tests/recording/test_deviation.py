"""A replay that differs much from its recording says so, with the likely cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from support.recorded import record, recorded_job

from pipar.recording.deviation import distrust
from pipar.recording.flight import Flight
from pipar.recording.stage_times import Sent


@pytest.fixture(scope="module")
def flight(tmp_path_factory: pytest.TempPathFactory) -> Flight:
    folder: Path = tmp_path_factory.mktemp("recorded")
    return record(folder, recorded_job(epochs=2)).flight


def times(flight: Flight, *shares: float) -> Mapping[int, float]:
    return {one.number: one.seconds * (1 + share) for one, share in zip(flight.rounds, shares, strict=True)}


def test_a_replay_that_is_close_to_its_recording_is_trusted(flight: Flight) -> None:
    assert distrust(flight, times(flight, 0.0, 0.0)) == ""
    assert distrust(flight, times(flight, 0.05, -0.05)) == ""  # one round for the other


def test_a_replay_that_differs_says_by_how_much_and_where(flight: Flight) -> None:
    sentence = distrust(flight, times(flight, 7.17, 0.0))
    assert sentence.startswith("Do not trust what-if answers from this recording: its replay differs by +")
    assert "+717.0 % in round 1. Likely cause: the machines were busy" in sentence
    assert "something that is not recorded" in distrust(flight, times(flight, 0.0, -0.3))
    assert distrust(flight, times(flight, 0.04, 0.04))


def test_links_are_the_likely_cause_where_their_rates_account_for_the_difference(flight: Flight) -> None:
    first, *others = flight.rounds
    name = next(iter(first.plans))
    sent = replace(first.times, up={name: Sent(0, 1_000_000)}, down={})
    slow = replace(first, times=sent, rates={name: (8e6 / (6 * first.seconds), None)})
    sentence = distrust(replace(flight, rounds=(slow, *others)), times(flight, 7.0, 0.0))
    assert "the measured rates of links are too low" in sentence
