"""Lossy encodings: the size of the error, that it is counted, and that it is compensated later."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipar.wire import lossy
from pipar.wire.encodings import LOSSY, OVERHEAD_BYTES, chunk_sizes, row_values
from pipar.wire.lossy import Lossy, Residual
from pipar.wire.tensor_codec import decode, encode


def sent(
    tensor: NDArray[Any], encoding: str, lossy: Lossy | None = None, kept: NDArray[np.bool_] | None = None
) -> tuple[NDArray[Any], int]:
    """Return a tensor as its receiver gets it, chunk by chunk, and the bytes of the payloads."""
    values, out, start, size = tensor.ravel(), np.full(tensor.size, -7.5, tensor.dtype), 0, 0
    if lossy is not None:
        lossy.begin()
    for length in chunk_sizes(tensor.shape, tensor.itemsize):
        part = slice(start, start + length)
        known = None if kept is None else kept.ravel()[part]
        payload = b"".join(encode(values[part], encoding, kept=known, row=row_values(tensor.shape), lossy=lossy))
        assert len(payload) <= 4 * length + OVERHEAD_BYTES
        decode(memoryview(payload), encoding, out[part], kept=known, row=row_values(tensor.shape))
        start, size = start + length, size + len(payload)
    return out.reshape(tensor.shape), size


def activations(samples: int = 10, seed: int = 0, dtype: str = "<f4") -> NDArray[Any]:
    chance = np.random.default_rng(seed)
    return np.maximum(chance.standard_normal((samples, 16, 12, 12)) * 0.7, 0).astype(dtype)


# ---- halves ----


def any_bits(count: int, seed: int) -> NDArray[np.float32]:
    """Return float32 values of all exponents, and of those at which half precision has to round."""
    chance = np.random.default_rng(seed)
    every = chance.integers(0, 2**32, count, np.uint32).view(np.float32)
    near = chance.standard_normal(count) * 2.0 ** chance.integers(-27, 17, count)
    ties = chance.integers(0, 2**16, count).astype(np.uint16).view(np.float16).astype(np.float32)
    between = (ties.view(np.uint32) + np.uint32(0x1000)).view(np.float32)
    return np.concatenate([every, near.astype(np.float32), ties, between])


def test_fp16_rounds_as_numpy_does() -> None:
    values = any_bits(20_000, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = values.astype(np.float16)
    largest = np.copysign(np.float16(65504), wanted)
    saturated = np.where(np.isinf(wanted) & np.isfinite(values), largest, wanted)
    given = lossy.to_fp16(values).view(np.float16)
    np.testing.assert_array_equal(given, saturated)
    assert (np.signbit(given) == np.signbit(values)).all()
    np.testing.assert_array_equal(lossy.from_fp16(given.view(np.uint16)), given.astype(np.float32))


def test_bf16_rounds_to_nearest_with_ties_to_even() -> None:
    values = any_bits(20_000, 2)
    given = lossy.from_bf16(lossy.to_bf16(values))
    finite = np.isfinite(values)
    np.testing.assert_array_equal(np.isnan(given), np.isnan(values))
    np.testing.assert_array_equal(given[np.isinf(values)], values[np.isinf(values)])
    assert np.isfinite(given[finite]).all()
    bits = values[finite].view(np.uint32)
    below = (bits & np.uint32(0xFFFF_0000)).view(np.float32).astype(np.float64)
    above = ((bits & np.uint32(0xFFFF_0000)).astype(np.uint64) + 0x1_0000).astype(np.uint32).view(np.float32)
    exact, got = values[finite].astype(np.float64), given[finite].astype(np.float64)
    least = np.minimum(np.abs(exact - below), np.abs(np.where(np.isfinite(above), above, np.inf) - exact))
    np.testing.assert_array_equal(np.abs(got - exact), least)
    even = np.array([0x3F80_8000, 0x3F81_8000], np.uint32).view(np.float32)
    assert [hex(half) for half in lossy.to_bf16(even)] == ["0x3f80", "0x3f82"]


@pytest.mark.parametrize(("encoding", "most"), [("fp16", 2**-11), ("bf16", 2**-8)])
@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
def test_halves_are_exact_to_their_last_place_and_leave_zeros_out(encoding: str, most: float, dtype: str) -> None:
    tensor = activations(dtype=dtype)
    got, size = sent(tensor, encoding)
    np.testing.assert_allclose(got, tensor, rtol=most, atol=1e-7)
    assert size < 0.6 * 2 * tensor.size  # half of them are zero


# ---- int8 ----


def test_int8_has_an_error_below_a_step_of_its_row_and_none_on_average() -> None:
    tensor = activations() - np.float32(0.2)
    chance = np.random.default_rng(3)
    tensor *= (10.0 ** chance.integers(-6, 6, (10, 16, 1, 1))).astype(np.float32)  # rows of every size
    step = np.abs(tensor).max(axis=(2, 3), keepdims=True) / 127
    got = [sent(tensor, "int8", Lossy(np.random.default_rng(seed)))[0] for seed in range(100)]
    assert (np.abs(got[0] - tensor) <= step * 1.001).all()
    assert (np.abs(np.mean(got, axis=0) - tensor) < 0.27 * step).all()  # 100 draws: more than five times its deviation
    nearest, size = sent(tensor, "int8")
    assert (np.abs(nearest - tensor) <= step * 0.501).all()
    assert size < 1.05 * tensor.size


@pytest.mark.parametrize("shape", [(7, 3), (50, 5, 1, 1), (9, 7, 2, 2), (3, 5, 9, 9), (1, 1), (4, 1000), (11,)])
def test_int8_encodes_rows_of_any_length(shape: tuple[int, ...]) -> None:
    tensor = np.random.default_rng(4).standard_normal(shape).astype(np.float32)
    got, size = sent(tensor, "int8")
    np.testing.assert_allclose(got, tensor, atol=np.abs(tensor).max() / 127)
    assert size <= 1.1 * tensor.size + 16


def test_a_row_of_int8_that_is_not_finite_is_noticed() -> None:
    tensor = activations()
    tensor[2, 3, 4, 4], tensor[5, 6, 1, 1] = np.inf, np.nan
    got, _ = sent(tensor, "int8", Lossy(np.random.default_rng(5), Residual(tensor[0].size)))
    wrong = np.isnan(got).all(axis=(2, 3))
    assert np.argwhere(wrong).tolist() == [[2, 3], [5, 6]]
    assert np.isfinite(got[~wrong]).all()


# ---- the largest ----


def test_topk_keeps_the_largest_tenth_unchanged() -> None:
    tensor = activations()[:1] - np.float32(0.4)
    got, size = sent(tensor, "topk")
    kept = got != 0
    assert np.count_nonzero(kept) == -(-tensor.size // 10)
    np.testing.assert_array_equal(got[kept], tensor[kept])
    assert np.abs(tensor[kept]).min() >= np.abs(tensor[~kept]).max()
    assert size < 0.14 * tensor.nbytes


def test_topk_keeps_values_that_are_not_a_number() -> None:
    tensor = activations()[:1]
    tensor[0, 0, 0, 0] = np.nan
    assert np.isnan(sent(tensor, "topk")[0][0, 0, 0, 0])


# ---- all of them ----


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(LOSSY),
    st.sampled_from(["<f4", "<f8"]),
    st.lists(st.floats(allow_subnormal=True), max_size=80),
    st.sampled_from([0, 1, 7, 64]),
    st.booleans(),
)
def test_any_values_can_be_coded(encoding: str, dtype: str, given: list[float], row: int, known: bool) -> None:
    with np.errstate(over="ignore"):
        values = np.array(given, np.float64).astype(dtype)
    kept = np.arange(values.size) % 3 > 0 if known else None
    payload = b"".join(encode(values, encoding, kept=kept, row=row))
    assert len(payload) <= values.nbytes + OVERHEAD_BYTES
    out = np.full_like(values, -7.5)
    decode(memoryview(payload), encoding, out, kept=kept, row=row)
    if kept is not None:
        assert not out[~kept].any()


@pytest.mark.parametrize("encoding", LOSSY)
def test_values_that_are_not_kept_are_neither_sent_nor_an_error(encoding: str) -> None:
    tensor = activations() + np.float32(0.5)
    kept = np.random.default_rng(6).random(tensor.shape) < 0.4
    others = np.where(kept, tensor, np.float32(1000))
    one, two = (Lossy(np.random.default_rng(7), Residual(tensor[0].size)) for _ in range(2))
    got, size = sent(others, encoding, one, kept)
    same, _ = sent(np.where(kept, tensor, np.float32(0)), encoding, two, kept)
    np.testing.assert_array_equal(got, same)
    assert not got[~kept].any()
    assert (one.squared_error, one.squared_norm) == (two.squared_error, two.squared_norm)
    assert one.squared_norm > 0
    assert size < 0.45 * 2 * tensor.size


@pytest.mark.parametrize("encoding", LOSSY)
def test_the_error_is_counted(encoding: str) -> None:
    tensor, lossy = activations(), Lossy(np.random.default_rng(8))
    assert (lossy.squared_error, lossy.squared_norm) == (0, 0)
    got, _ = sent(tensor, encoding, lossy)
    wanted = np.linalg.norm(got.astype(float) - tensor) / np.linalg.norm(tensor.astype(float))
    assert math.sqrt(lossy.squared_error / lossy.squared_norm) == pytest.approx(wanted, rel=1e-5)
    assert 0 < wanted < (0.7 if encoding == "topk" else 0.02)


@pytest.mark.parametrize("encoding", ["int8", "topk"])
def test_the_loss_of_one_micro_batch_is_sent_with_later_ones(encoding: str) -> None:
    """The same values repeatedly: with a residual the mean of the received values converges to their mean."""
    tensor = activations(4)
    tensor[:] = tensor[:1]  # the mean over the samples is each of them

    def missing(residual: Residual | None) -> float:
        lossy = Lossy(None, residual)
        got = np.mean([sent(tensor, encoding, lossy)[0].mean(axis=0, dtype=float) for _ in range(40)], axis=0)
        return float(np.abs(got - tensor[0]).mean())

    assert missing(Residual(tensor[0].size)) < 0.2 * missing(None)


def test_a_residual_is_the_mean_loss_of_a_sample() -> None:
    tensor = np.random.default_rng(9).standard_normal((3, 200)).astype(np.float32)
    residual = Residual(200)
    got, _ = sent(tensor, "topk", Lossy(None, residual))
    residual.begin()
    np.testing.assert_allclose(residual.carried, (tensor - got).mean(axis=0, dtype=float), atol=1e-7)


def test_a_residual_has_the_same_positions_for_any_chunks() -> None:
    tensor = np.random.default_rng(10).standard_normal(1200).astype(np.float32)
    carried = []
    for cuts in ([1200], [100, 500, 600], [300] * 4, [1] * 10 + [1190]):
        residual = Residual(300)
        residual.begin()
        for part in np.split(tensor, np.cumsum(cuts)[:-1]):
            residual.collect(part)
        residual.begin()
        carried.append(residual.carried)
        np.testing.assert_allclose(residual.add_to(np.zeros(300, np.float32)), carried[0], rtol=1e-6)
    np.testing.assert_allclose(carried[1:], [carried[0]] * 3)
    np.testing.assert_allclose(carried[0], tensor.reshape(4, 300).mean(axis=0, dtype=float))


def test_large_samples_have_a_scale_for_each_channel() -> None:
    """A chunk never ends within a channel, so one with large values does not coarsen the steps of its neighbours."""
    tensor = np.random.default_rng(0).standard_normal((2, 64, 56, 56)).astype(np.float32)
    tensor *= np.where(np.arange(64) % 2, 1e-4, 1e4).astype(np.float32)[:, None, None]
    received, _ = sent(tensor, "int8")
    lost = np.abs(received - tensor).max(axis=(2, 3))
    assert (lost <= np.abs(tensor).max(axis=(2, 3)) / 127).all()
