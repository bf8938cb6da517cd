"""Many times in few characters."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipar.recording.compact_times import Series
from pipar.recording.micro_batch_sizes import Places

TIMES = st.lists(st.floats(min_value=1e-6, max_value=1e3), min_size=1, max_size=60)


@pytest.mark.slow
@given(TIMES)
def test_the_mean_survives_and_the_series_reads_back(times: list[float]) -> None:
    series = Series.of(times)
    again = Series.read(json.loads(json.dumps(series.to_json())))
    assert again == series
    total = math.fsum(again.at(place) for place in range(len(times)))
    assert total == pytest.approx(math.fsum(times), rel=1e-4)


@pytest.mark.slow
@given(st.lists(st.floats(min_value=0.5, max_value=2.0), min_size=1, max_size=16))
def test_up_to_sixteen_times_are_kept_one_by_one(times: list[float]) -> None:
    series = Series.of(times)
    for place, seconds in enumerate(times):
        assert series.at(place) == pytest.approx(seconds, rel=0.05)


def test_times_that_vary_wildly_are_kept_one_by_one_up_to_64() -> None:
    times = [1.0, 5.0] * 32
    assert [Series.of(times).at(place) for place in range(64)] == pytest.approx(times, rel=0.05)
    assert len(Series.of([1.0, 1.1] * 32).shape) == 16


def test_equal_times_are_kept_to_twelve_digits() -> None:
    series = Series.of([1 / 3] * 40)
    assert series.shape == ""
    assert series.at(39) == pytest.approx(1 / 3, rel=1e-11)


def test_beyond_the_last_time_the_mean_is_expected() -> None:
    assert Series.of([1.0, 3.0]).at(7) == 2.0


@pytest.mark.parametrize("value", [[], [1], [0, 1.0], [1, -1.0], [1, float("nan")], [1, 1.0, "AA"], [1, 1.0, "\n"], 3])
def test_what_is_not_a_series_is_refused(value: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        Series.read(value)


def test_places_count_the_micro_batches_of_each_size() -> None:
    places = Places.of(45, 3, 20, batch_statistics=False)
    assert places.find("fc", 2, 1) == (7, 2)  # 7 + 7 + 6 samples a batch: the third of seven
    assert places.find("fc", 2, 3) == (6, 1)
    assert places.find("load", 3, 0) == (5, 0)
    assert places.find("step", 2, 3) == (20, 1)
    assert places.find("pack", 0, 0) == (0, 0)
