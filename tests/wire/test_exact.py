"""The exact encodings restore every bit of every value, and no payload is longer than its values."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipar.wire.encodings import EXACT, OVERHEAD_BYTES, chunk_sizes, row_values
from pipar.wire.tensor_codec import decode, encode

CODED = [encoding for encoding in EXACT if encoding != "raw"]
#: NaNs with and without a payload, infinities, both zeros, the smallest and largest subnormals, ordinary values.
SPECIAL = {
    4: [0, 0, 0, 1 << 31, 1, 0x007F_FFFF, 0x7F80_0000, 0xFF80_0000, 0x7FC0_0001, 0xFFA5_A5A5, 0x3F80_0000, 0xBF80_0001],
    8: [0, 0, 0, 1 << 63, 1, (1 << 52) - 1, 0x7FF << 52, 0xFFF << 52, (0x7FF << 52) + 1, (1 << 64) - 1, 0x3FF << 52],
}


def of_bits(bits: list[int] | NDArray[Any], item_bytes: int) -> NDArray[Any]:
    return np.array(bits, f"<u{item_bytes}").view(f"<f{item_bytes}")


def round_trip(values: NDArray[Any], encoding: str, kept: NDArray[np.bool_] | None = None) -> bytes:
    """Return the payload, after checking that it restores the values bit by bit, zeros where they are not kept."""
    before = values.tobytes()
    payload = b"".join(encode(values, encoding, kept=kept))
    assert values.tobytes() == before
    assert len(payload) <= values.nbytes + OVERHEAD_BYTES
    out = np.full_like(values, -7.5)
    decode(memoryview(payload), encoding, out, kept=kept)
    wanted = (
        values
        if kept is None
        else np.where(kept, values.view(f"<u{values.itemsize}"), 0).astype(f"<u{values.itemsize}")
    )
    assert out.tobytes() == wanted.tobytes()
    return payload


def relu(count: int, zeros: float, seed: int = 0, dtype: str = "<f4") -> NDArray[Any]:
    """Return values as after a ReLU, of which about this share is zero."""
    chance = np.random.default_rng(seed)
    values = np.abs(chance.standard_normal(count))
    return np.where(chance.random(count) < zeros, 0, values).astype(dtype)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(CODED), st.sampled_from([4, 8]), st.binary(max_size=300), st.integers(0, 2**32), st.booleans())
def test_any_bits_are_restored(encoding: str, item_bytes: int, data: bytes, seed: int, known: bool) -> None:
    values = np.frombuffer(data[: len(data) // item_bytes * item_bytes], f"<f{item_bytes}").copy()
    chance = np.random.default_rng(seed)
    some = chance.random(values.size) < chance.random()
    values[some] = chance.choice(of_bits(SPECIAL[item_bytes], item_bytes), np.count_nonzero(some))
    round_trip(values, encoding, chance.random(values.size) < 0.5 if known else None)


@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
@pytest.mark.parametrize("encoding", CODED)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 63, 64, 65, 1023, 40_960, 65_536])
def test_values_of_sizes_around_boundaries_are_restored(count: int, encoding: str, dtype: str) -> None:
    chance = np.random.default_rng(count)
    for zeros in (0.0, 0.5, 0.95, 1.0):
        values = relu(count, zeros, count, dtype)
        round_trip(values, encoding)
        round_trip(values - values.dtype.type(0.5), encoding, chance.random(count) < zeros)
    round_trip(of_bits(chance.integers(0, 2**63, count), values.itemsize), encoding)  # practically incompressible


@pytest.mark.parametrize("encoding", CODED)
@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
def test_noise_costs_one_byte_more_than_itself(encoding: str, dtype: str) -> None:
    noise = np.frombuffer(np.random.default_rng(1).bytes(80_000), dtype)
    assert len(round_trip(noise, encoding)) == noise.nbytes + 1


@pytest.mark.parametrize("encoding", CODED)
def test_a_known_mask_is_not_sent(encoding: str) -> None:
    values, kept = relu(50_000, 0), np.random.default_rng(2).random(50_000) < 0.3
    others = np.where(kept, values, np.float32(99))
    assert round_trip(others, encoding, kept) == round_trip(values, encoding, kept)
    assert len(round_trip(values, encoding, kept)) <= 1 + 4 * np.count_nonzero(kept)


def test_each_encoding_saves_the_bytes_that_it_is_made_for() -> None:
    half, dense = relu(65_536, 0.5), relu(65_536, 0.0) - np.float32(0.3)
    size = {encoding: len(round_trip(half, encoding)) / half.nbytes for encoding in CODED}
    assert size["sparse"] == pytest.approx(0.5 + 1 / 32, abs=0.01)
    assert size["sparse-planes"] < 0.45  # half of the values at some 26 of 32 bits, and a mask
    assert 0.8 < len(round_trip(dense, "planes")) / dense.nbytes < 0.88
    assert len(round_trip(dense, "sparse")) == dense.nbytes + 1
    assert len(round_trip(relu(65_536, 1.0), "sparse-planes")) < 64


def test_float64_has_a_second_coded_byte() -> None:
    values = relu(30_000, 0.0, dtype="<f8")
    assert len(round_trip(values, "planes")) / values.nbytes < 0.87


@pytest.mark.slow
def test_threads_do_not_share_a_coder() -> None:
    failed: list[BaseException] = []

    def many(seed: int) -> None:
        try:
            for at in range(30):
                round_trip(relu(20_000, 0.4, seed * 100 + at), "sparse-planes")
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=many, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# ---- chunks ----


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=4), st.sampled_from([4, 8]))
def test_chunks_are_whole_samples_of_the_tensor_or_whole_rows(dimensions: list[int], item_bytes: int) -> None:
    shape = tuple(dimensions)
    sizes, sample, most = chunk_sizes(shape, item_bytes), math.prod(shape[1:]), 2**18 // item_bytes
    assert sum(sizes) == math.prod(shape)
    assert all(0 < size <= most for size in sizes)
    unit = sample if sample <= most else row_values(shape)
    if sizes and unit <= most:
        assert all(size % unit == 0 for size in sizes)
        assert max(sizes) - min(sizes) <= unit


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((10, 32, 16, 16), [40_960, 40_960]),
        ((4, 128), [512]),
        ((1, 1, 256, 256), [65_536]),
        ((1, 1, 256, 257), [32_896, 32_896]),  # a row that is too long is cut anywhere
        ((4, 64, 56, 56), [20 * 3_136] * 9 + [19 * 3_136] * 4),  # a sample that is too long is cut between its rows
        ((3,), [3]),
        ((), [1]),
        ((5, 0, 3), []),
    ],
)
def test_known_shapes_have_these_chunks(shape: tuple[int, ...], sizes: list[int]) -> None:
    assert chunk_sizes(shape, 4) == sizes


@pytest.mark.slow
def test_cutting_a_tensor_of_terabytes_takes_time_in_proportion_to_its_chunks() -> None:
    sizes = chunk_sizes((2**20, 2**10, 16, 16), 4)
    assert len(sizes) == 2**22
    assert set(sizes) == {2**16}
