"""Cutting drops no sample, pieces are nearly equal, and the device's order is data."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipar.execution.schedule import (
    count_batches,
    count_pieces,
    cut_batch,
    cut_epoch,
    device_order,
)

samples = st.integers(1, 500)
sizes = st.integers(1, 120)


@pytest.mark.parametrize(
    ("epoch", "batch", "statistics", "iterations"),
    [
        (500, 100, False, [100] * 5),
        (250, 100, False, [100, 100, 50]),
        (201, 100, False, [100, 100, 1]),
        (201, 100, True, [100, 101]),
        (202, 100, True, [100, 100, 2]),
        (101, 100, True, [101]),
        (1, 100, True, [1]),
        (99, 100, False, [99]),
        (0, 100, False, []),
    ],
)
def test_an_epoch_is_cut_into_iterations(epoch: int, batch: int, statistics: bool, iterations: list[int]) -> None:
    assert cut_epoch(epoch, batch, batch_statistics=statistics) == iterations


@pytest.mark.slow
@given(samples, sizes, st.booleans())
def test_an_epoch_trains_every_sample_once(epoch: int, batch: int, statistics: bool) -> None:
    cut = cut_epoch(epoch, batch, batch_statistics=statistics)
    assert sum(cut) == epoch
    assert count_batches(epoch, batch, batch_statistics=statistics) == Counter(cut)
    assert cut_epoch(epoch, batch, batch_statistics=statistics, most=2) == cut[:2]


def test_counting_the_batches_of_any_claimed_number_of_samples_takes_constant_memory() -> None:
    assert count_batches(10**15 + 3, 32) == {32: (10**15 + 3) // 32, (10**15 + 3) % 32: 1}
    assert cut_epoch(10**15, 32, most=2) == [32, 32]
    assert count_pieces(100, 12) == {9: 4, 8: 8}


@pytest.mark.slow
@given(st.integers(2, 500), st.integers(2, 120))
def test_with_batch_statistics_no_iteration_has_a_single_sample(epoch: int, batch: int) -> None:
    cut = cut_epoch(epoch, batch, batch_statistics=True)
    assert min(cut) >= 2
    assert max(cut) <= batch + 1


@pytest.mark.parametrize(
    ("batch", "n", "statistics", "pieces"),
    [
        (100, 12, False, [9] * 4 + [8] * 8),
        (100, 1, False, [100]),
        (100, 100, False, [1] * 100),
        (3, 5, False, [1, 1, 1]),
        (3, 5, True, [3]),
        (7, 5, True, [3, 2, 2]),
        (100, 100, True, [2] * 50),
        (1, 4, True, [1]),
    ],
)
def test_a_batch_is_cut_into_micro_batches(batch: int, n: int, statistics: bool, pieces: list[int]) -> None:
    assert cut_batch(batch, n, batch_statistics=statistics) == pieces


@pytest.mark.slow
@given(samples, sizes, st.booleans())
def test_pieces_add_up_to_the_batch_differ_by_at_most_one_and_are_never_more_than_n(
    batch: int, n: int, statistics: bool
) -> None:
    pieces = cut_batch(batch, n, batch_statistics=statistics)
    assert sum(pieces) == batch
    assert max(pieces) - min(pieces) <= 1
    assert pieces == sorted(pieces, reverse=True)
    assert 1 <= len(pieces) <= n


@pytest.mark.slow
@given(samples, sizes)
def test_a_batch_is_cut_into_n_pieces_whenever_it_has_n_samples(batch: int, n: int) -> None:
    assert len(cut_batch(batch, n)) == min(batch, n)


@pytest.mark.slow
@given(st.integers(2, 500), sizes)
def test_with_batch_statistics_each_piece_has_at_least_two_samples(batch: int, n: int) -> None:
    assert min(cut_batch(batch, n, batch_statistics=True)) >= 2


@pytest.mark.parametrize(
    ("n", "window", "line"),
    [
        (1, 0, "fc1 bc1"),
        (4, 0, "fc1 fc2 fc3 fc4 bc1 bc2 bc3 bc4"),
        (1, 3, "fc1 bc1"),
        (2, 3, "fc1 fc2 bc1 bc2"),
        (5, 1, "fc1 bc1 fc2 bc2 fc3 bc3 fc4 bc4 fc5 bc5"),
        (5, 3, "fc1 fc2 fc3 bc1 fc4 bc2 fc5 bc3 bc4 bc5"),
    ],
)
def test_the_device_works_in_this_order(n: int, window: int, line: str) -> None:
    assert " ".join(map(str, device_order(n, window))) == line


@pytest.mark.slow
@given(sizes, st.integers(1, 8))
def test_a_window_bounds_the_micro_batches_whose_activations_are_held(n: int, window: int) -> None:
    held = most = 0
    for stage in device_order(n, window):
        held += 1 if stage.kind == "fc" else -1
        most = max(most, held)
    assert most == min(n, window)


@pytest.mark.slow
@given(sizes, st.integers(0, 8))
def test_every_micro_batch_goes_forward_and_backward_once_each_in_order(n: int, window: int) -> None:
    order = device_order(n, window)
    for kind in ("fc", "bc"):
        assert [stage.micro_batch for stage in order if stage.kind == kind] == list(range(1, n + 1))
