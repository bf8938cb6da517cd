"""Rates are read from the arrivals of a train of frames."""

from __future__ import annotations

import pytest

from pipar.transport.link_trial import FRAME_BYTES, LONGEST_TRAIN, TrainLength, rate_of, read_arrivals

EACH_S = FRAME_BYTES * 8 / 10e6  # at 10 Mbit/s


def test_a_burst_at_the_start_of_a_train_does_not_count() -> None:
    assert rate_of([0.0, 0.0, 0.0, EACH_S, 2 * EACH_S, 3 * EACH_S]) == pytest.approx(10e6)


def test_frames_that_arrive_as_fast_as_machines_can_send_show_no_rate() -> None:
    assert rate_of([0.0, 0.0001, 0.0002, 0.0003]) is None
    assert rate_of([1.0, 1.0, 1.0, 1.0]) is None


def test_trains_grow_until_one_takes_long_enough() -> None:
    length = TrainLength()
    length.take([number * EACH_S for number in range(4)])
    assert (length.frames, length.is_done) == (8, False)
    length.take([number * EACH_S for number in range(8)])
    assert (length.frames, length.is_done) == (0, True)
    assert length.rate_bps == pytest.approx(10e6)


def test_a_train_that_is_no_longer_than_the_start_of_a_connection_does_not_count_on_a_link_with_high_latency() -> None:
    length = TrainLength(round_trip_s=0.1)
    length.take([0.0, 0.1, 0.1, 0.2])  # the sender has waited for acknowledgements
    assert not length.is_done
    length.take([number * 10 * EACH_S for number in range(8)])
    assert length.is_done
    assert length.rate_bps == pytest.approx(1e6)


def test_trains_do_not_grow_for_ever() -> None:
    length, sent = TrainLength(), 0
    while not length.is_done:
        sent += length.frames
        length.take([0.0] * length.frames)
    assert sent < 2 * LONGEST_TRAIN


@pytest.mark.parametrize("told", [None, [1.0], [2.0, 1.0], [1.0, "x"], [1.0, float("nan")], {"0": 1.0}, [-1.0, 2.0]])
def test_times_that_cannot_be_those_of_two_frames_are_refused(told: object) -> None:
    assert read_arrivals(told, 2, within_s=10.0) is None


def test_told_times_further_apart_than_the_wait_for_them_are_refused() -> None:
    assert read_arrivals([0, 0, 0, 1e9], 4, within_s=1.0) is None
    assert read_arrivals([7.0, 7.5, 7.8, 8.1], 4, within_s=1.0) is None
    assert read_arrivals([7.0, 7.5, 7.8, 8.0], 4, within_s=1.0) == [7.0, 7.5, 7.8, 8.0]
