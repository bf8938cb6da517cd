"""Models as changes: every bit is restored, and a payload that no encoder made is an error at worst."""

from __future__ import annotations

import random
import struct
from collections import Counter
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hn
from numpy.typing import NDArray
from support import memory_peak

from pipar.errors import ProtocolError
from pipar.wire.model_changes import CHANGED, SAME, WHOLE, Tensors, decode_changes, encode_changes

FLOATS = ("<f2", "<f4", "<f8")
DTYPES = (*FLOATS, "|i1", "<i2", "<i4", "<i8", "|u1", "|b1")
STRETCH = 65_536
#: Values that are not equal to themselves, or equal to values with other bits.
ODD = {
    "<f2": [0x0000, 0x8000, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFFFF, 0x0001, 0x83FF],
    "<f4": [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF, 1, 0x807FFFFF],
    "<f8": [0, 1 << 63, 0x7FF << 52, 0xFFF << 52, (0x7FF << 52) + 1, 0x7FF8 << 48, (1 << 64) - 1, 1, (1 << 63) + 9],
}


def sent(tensors: Tensors, base: Tensors) -> bytes:
    return b"".join(encode_changes(tensors, base))


def bits_of(tensors: Tensors) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (tensor.dtype.str, tensor.shape, tensor.tobytes()) for name, tensor in tensors.items()}


def comes_back(tensors: Tensors, base: Tensors) -> int:
    """Check that every bit is restored; return the size of the payload."""
    before = bits_of(base)
    payload = sent(tensors, base)
    got = decode_changes(memoryview(payload), base)
    assert bits_of(got) == bits_of(tensors)
    assert bits_of(base) == before
    assert all(array.flags.writeable and array.flags.aligned for array in got.values())
    assert not any(np.shares_memory(got[name], base[name]) for name in got if name in base and got[name].size)
    return len(payload)


def weights(count: int, dtype: str = "<f4") -> NDArray[Any]:
    return (np.random.default_rng(count).standard_normal(count) / 10).astype(dtype)


def stepped(before: NDArray[Any], size: float = 1e-3) -> NDArray[Any]:
    step = np.random.default_rng(before.size + 1).standard_normal(before.shape) * size
    stepped: NDArray[Any] = (before * (1 + step)).astype(before.dtype)
    return stepped


# ---- every bit ----


@st.composite
def arrays(draw: st.DrawFn, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return any values by their bits: numbers, NaNs, and values that are equal with different bits."""
    if dtype == "|b1":
        return draw(hn.arrays(np.bool_, shape))
    unsigned = f"<u{np.dtype(dtype).itemsize}"
    any_bits = hn.from_dtype(np.dtype(unsigned))
    odd = st.sampled_from(ODD[dtype]) if dtype in ODD else any_bits
    return draw(hn.arrays(unsigned, shape, elements=odd | any_bits)).view(dtype).reshape(shape)


SHAPES = st.sampled_from(((), (0,), (1,), (3,), (2, 0, 4), (2, 3), (1, 2, 1, 3)))


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Return a model and the one that the receiver has: the same, or with other values."""
    model, base = {}, {}
    for name in draw(st.lists(st.text(max_size=3), unique=True, max_size=4)):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
        model[name] = draw(arrays(dtype, shape))
        base[name] = model[name].copy() if draw(st.booleans()) else draw(arrays(dtype, shape))
    return model, base


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(models())
def test_every_bit_is_restored_from_any_base(
    pair: tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]],
) -> None:
    comes_back(*pair)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_special_value_is_restored_from_every_other(dtype: str) -> None:
    odd = np.array(ODD[dtype], f"<u{dtype[2]}").view(dtype)
    many = np.tile(np.repeat(odd, len(odd)), 40)
    base = np.tile(odd, 40 * len(odd))
    size = comes_back({"w": many}, {"w": base})
    assert size < many.nbytes  # these differences repeat: their planes were sent
    assert sent({"w": many}, {"w": base})[0] == CHANGED


@pytest.mark.parametrize("count", [1, STRETCH - 1, STRETCH, STRETCH + 1, 2 * STRETCH + 3])
@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<i8", "|u1"])
def test_tensors_of_sizes_around_a_block_are_restored(count: int, dtype: str) -> None:
    base = (weights(count, "<f8") * 1000).astype(dtype)
    after = base.copy()
    after[-1] += 1  # in the last block only
    assert comes_back({"w": after}, {"w": base}) < 100 + (count * base.itemsize if count == 1 else 500)
    comes_back({"w": stepped(base)}, {"w": base})


def test_tensors_that_are_not_contiguous_are_restored() -> None:
    base = weights(600).reshape(20, 30)
    comes_back({"w": stepped(base).T, "v": base[::2, ::-1]}, {"w": base.T, "v": base[1::2, ::-1]})


# ---- how many bytes ----


def test_an_unchanged_tensor_costs_a_byte() -> None:
    odd = {dtype: np.array(ODD[dtype], f"<u{dtype[2]}").view(dtype) for dtype in FLOATS}
    model = {"w": weights(200_000), "n": np.array(7), "none": np.zeros((0, 3)), **odd}
    assert comes_back(model, {name: tensor.copy() for name, tensor in model.items()}) == len(model)


@pytest.mark.parametrize(("dtype", "most"), [("<f4", 0.8), ("<f8", 0.92)])
def test_small_changes_are_shorter_than_the_weights(dtype: str, most: float) -> None:
    base = {"w": weights(150_000, dtype)}
    shares = [comes_back({"w": stepped(base["w"], size)}, base) / base["w"].nbytes for size in (1e-2, 1e-3, 1e-4)]
    assert shares == sorted(shares, reverse=True)
    assert shares[1] < most


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_changes_are_much_longer_than_the_weights(dtype: str) -> None:
    chance = np.random.default_rng(5)
    base, after = (chance.integers(0, 2 if dtype == "|b1" else 256, 70_000 * 8, np.uint8) for _ in range(2))
    assert comes_back({"w": after.view(dtype)}, {"w": base.view(dtype)}) <= after.nbytes + 60


# ---- payloads that no encoder made ----

BASE = {
    "w": weights(1000).reshape(10, 100),
    "n": np.array(3),
    "b": np.array([True, False]),
    "none": np.zeros((0, 4), "<f4"),
}
MODEL = {
    "w": stepped(BASE["w"]),
    "n": np.array(4),
    "b": np.array([True, True]),
    "none": BASE["none"],
}


def outcome(payload: bytes, base: Tensors = BASE) -> str | None:
    """Return what is wrong with a payload, or None if it is a well-formed model; any other error fails the test."""
    try:
        got = decode_changes(memoryview(payload), base)
    except ProtocolError as error:
        reason = str(error)
        assert reason.startswith("The peer sent ")
        assert len(reason) < 500
        return reason
    for name, array in got.items():
        assert isinstance(name, str)
        assert array.dtype.str in DTYPES
        assert array.flags.writeable
    return None


def peak_bytes(payload: bytes, base: Tensors = BASE) -> int:
    view = memoryview(payload)
    return memory_peak.peak_bytes(lambda: decode_changes(view, base))


def test_a_truncated_or_extended_payload_is_refused() -> None:
    good = sent(MODEL, BASE)
    assert outcome(good) is None
    for length in {*range(0, len(good), 13), *range(8), len(good) - 1}:
        assert outcome(good[:length]) is not None, length
    for extra in (b"\0", bytes(7), good):
        assert outcome(good + extra) is not None


@pytest.mark.slow
def test_damaged_payloads_are_models_or_protocol_errors() -> None:
    chance, results, good = random.Random(3), Counter[bool](), sent(MODEL, BASE)
    for _ in range(1500):
        data = bytearray(good)
        for _ in range(chance.choice((1, 1, 3))):
            place = chance.randrange(260 if chance.random() < 0.7 else len(data))
            data[place] = chance.choice((data[place] ^ 1 << chance.randrange(8), 0, 255, chance.randrange(256)))
        results[outcome(bytes(data)) is None] += 1
    assert min(results[True], results[False]) > 100


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=120))
def test_any_bytes_are_a_model_or_a_protocol_error(data: bytes) -> None:
    outcome(data)
    outcome(bytes((SAME, SAME, SAME)) + data)


@pytest.mark.parametrize("forms", [b"", bytes(3), bytes(5), bytes((SAME, SAME, SAME, 3)), bytes((WHOLE,) * 4)])
def test_impossible_forms_are_refused(forms: bytes) -> None:
    assert outcome(bytes(4)) is None  # all the same
    assert outcome(forms) is not None


def test_an_invalid_boolean_is_refused_or_corrected() -> None:
    """Of `b`, the first by name: its bytes, or their differences."""
    for payload in (bytes((WHOLE, SAME, SAME, SAME)) + b"\x02\xff", bytes((CHANGED, SAME, SAME, SAME)) + b"\0\x0e\x0e"):
        try:
            got = decode_changes(memoryview(payload), BASE)
        except ProtocolError:
            continue
        assert got["b"].view(np.uint8).max() <= 1


# ---- memory ----

LARGE = {"w": weights(300_000)}


def test_decoding_takes_a_small_multiple_of_the_model() -> None:
    good = sent({"w": stepped(LARGE["w"])}, LARGE)
    assert outcome(good, LARGE) is None
    assert peak_bytes(good, LARGE) < 2.5 * LARGE["w"].nbytes


@pytest.mark.parametrize("announced", [2**31, 2**40, 2**62])
def test_a_bomb_takes_no_memory(announced: int) -> None:
    frame = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", announced) + b"\x4b\xff\xff\0" * 200
    assert zstandard.get_frame_parameters(frame).content_size == announced
    bomb = bytes((CHANGED,)) + struct.pack("<BI", 1, len(frame)) + frame
    assert outcome(bomb, LARGE) is not None
    assert peak_bytes(bomb, LARGE) < 0.5 * LARGE["w"].nbytes  # a block and its parts, not the whole tensor


def test_a_bomb_that_announces_the_right_size_takes_no_memory() -> None:
    frame = b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", STRETCH) + b"\x02\x00\x10\0" * 800
    assert zstandard.get_frame_parameters(frame).content_size == STRETCH
    bomb = bytes((CHANGED,)) + struct.pack("<BI", 1, len(frame)) + frame
    assert outcome(bomb, LARGE) is not None
    assert peak_bytes(bomb, LARGE) < 0.5 * LARGE["w"].nbytes  # a block and its parts, not the whole tensor


HUGE = {"w": np.zeros(10_000_000, np.float32), "z": np.zeros(8, np.float32)}


@pytest.mark.parametrize(
    "payload",
    [
        bytes((CHANGED, SAME)),
        bytes((CHANGED, SAME)) + bytes(10_000),  # an empty section, and then nothing valid
        bytes((CHANGED, SAME)) + b"\1" * 10_000,
        bytes((SAME, WHOLE)) + bytes(31),
        bytes((SAME, 3)) + bytes(10_000),
        bytes((WHOLE, WHOLE)) + bytes(40_000_000),
    ],
    ids=["forms only", "zeros", "ones", "too short", "an unknown form", "too short by a tensor"],
)
def test_a_payload_that_cannot_have_its_announced_parts_is_refused_unread(payload: bytes) -> None:
    assert outcome(payload, HUGE) is not None
    assert peak_bytes(payload, HUGE) < 1_000_000
