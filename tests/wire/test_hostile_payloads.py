"""Payloads that no encoder made: each is a ProtocolError of one sentence or a well-formed tensor, in bounded memory."""

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
from numpy.typing import NDArray
from support import memory_peak

from pipar.errors import ProtocolError
from pipar.wire.encodings import EXACT, LOSSY
from pipar.wire.tensor_codec import decode, encode

ENCODINGS = [*(encoding for encoding in EXACT if encoding != "raw"), *LOSSY]
COUNT, ROW = 1000, 100


def outcome(
    payload: bytes, encoding: str, *, count: int = COUNT, dtype: str = "<f4", kept: NDArray[Any] | None = None
) -> str | None:
    """Return what is wrong with a payload, or None; any other error is a failure of the test."""
    out = np.full(count, -7.5, dtype)
    try:
        decode(memoryview(payload), encoding, out, kept=kept, row=ROW)
    except ProtocolError as error:
        reason = str(error)
    else:
        return None
    assert reason.startswith("The peer sent a coded tensor")
    assert reason.count(".") == 1
    return reason


def values(count: int = COUNT, dtype: str = "<f4") -> NDArray[Any]:
    chance = np.random.default_rng(count)
    return np.where(chance.random(count) < 0.5, 0, chance.standard_normal(count)).astype(dtype)


def payload(encoding: str, dtype: str = "<f4", kept: NDArray[Any] | None = None) -> bytes:
    return b"".join(encode(values(dtype=dtype), encoding, kept=kept, row=ROW))


def zstd(plain: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(plain)


def coded_section(frame: bytes) -> bytes:
    return struct.pack("<BI", 1, len(frame)) + frame


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
@pytest.mark.parametrize("known", [False, True])
def test_a_truncated_or_extended_payload_is_refused(encoding: str, dtype: str, known: bool) -> None:
    kept = np.arange(COUNT) % 3 > 0 if known else None
    good = payload(encoding, dtype, kept)
    assert outcome(good, encoding, dtype=dtype, kept=kept) is None
    for length in {*range(0, len(good), 37), 1, 2, 5, 6, len(good) - 1}:
        assert outcome(good[:length], encoding, dtype=dtype, kept=kept) is not None, length
    for extra in (b"\0", bytes(7), good):
        assert outcome(good + extra, encoding, dtype=dtype, kept=kept) is not None


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_payload_much_longer_than_its_tensor_is_refused_unread(encoding: str) -> None:
    assert "uncoded it has only 4000" in (outcome(bytes(4065), encoding) or "")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_damaged_payloads_are_tensors_or_protocol_errors(encoding: str) -> None:
    chance, results = random.Random(encoding), Counter[bool]()
    goods = [payload(encoding, dtype) for dtype in ("<f4", "<f8")]
    for number in range(400):
        at = number % 2
        data = bytearray(goods[at])
        for _ in range(chance.choice((1, 1, 3))):
            # Most of the damage is where the lengths and the coded bytes are.
            place = chance.randrange(min(len(data), 200) if chance.random() < 0.7 else len(data))
            data[place] = chance.choice((data[place] ^ 1 << chance.randrange(8), 0, 255, chance.randrange(256)))
        results[outcome(bytes(data), encoding, dtype=("<f4", "<f8")[at]) is None] += 1
    assert results[True]  # damage is not always detected: any mantissa is valid


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(ENCODINGS), st.binary(max_size=120), st.integers(0, 30), st.booleans())
def test_any_bytes_are_a_tensor_or_a_protocol_error(encoding: str, data: bytes, count: int, known: bool) -> None:
    outcome(data, encoding, count=count, kept=np.arange(count) % 2 > 0 if known else None)


# ---- payloads with a wrong size ----


def test_a_part_that_holds_more_or_less_than_needed_is_refused() -> None:
    rest = bytes(3 * COUNT)
    for size in (0, COUNT - 1, COUNT + 1, 2**24):
        assert outcome(b"\1" + coded_section(zstd(bytes(size))) + rest, "planes") is not None, size
    assert outcome(b"\1" + coded_section(zstd(bytes(COUNT))) + rest, "planes") is None


def test_a_part_without_its_size_is_refused() -> None:
    silent = zstd(bytes(COUNT), write_content_size=False)
    assert "part of" in (outcome(b"\1" + coded_section(silent) + bytes(3 * COUNT), "planes") or "")


def test_a_part_with_another_size_than_it_announces_is_refused() -> None:
    frame = bytearray(zstd(bytes(60_000)))
    assert frame[4] >> 6 == 1  # its size is a uint16, 256 less than it is
    frame[5 : 5 + 2] = struct.pack("<H", COUNT - 256)
    assert zstandard.get_frame_parameters(bytes(frame)).content_size == COUNT
    assert outcome(b"\1" + coded_section(bytes(frame)) + bytes(3 * COUNT), "planes") is not None


def test_two_frames_in_one_part_are_refused() -> None:
    for second in (zstd(bytes(COUNT)), b"\x50\x2a\x4d\x18\x04\0\0\0abcd"):
        assert outcome(b"\1" + coded_section(zstd(bytes(COUNT)) + second) + bytes(3 * COUNT), "planes") is not None
        assert outcome(b"\1" + coded_section(second + zstd(bytes(COUNT))) + bytes(3 * COUNT), "planes") is not None


@pytest.mark.parametrize("encoding", ["sparse", "sparse-planes", "topk", "fp16"])
def test_a_mask_that_does_not_match_the_number_of_values_is_refused(encoding: str) -> None:
    head = b"" if encoding == "topk" else b"\1"
    item_bytes = 2 if encoding == "fp16" else 4
    mask = np.packbits(np.arange(COUNT) < 10, bitorder="little").tobytes()

    def sent(kept: int) -> str | None:
        first = bytes((0,)) if encoding == "sparse-planes" else b""
        return outcome(head + b"\0" + mask + first + bytes(item_bytes * kept), encoding)

    assert sent(10) is None
    assert sent(9) is not None
    assert sent(11) is not None


def test_a_mask_of_more_values_than_there_are_is_refused() -> None:
    mask = np.packbits(np.arange(16) >= 15, bitorder="little").tobytes()
    assert "a mask of more than 15 values" in (outcome(b"\1\0" + mask + bytes(4), "sparse", count=15) or "")


# ---- memory ----


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
def test_decoding_takes_a_small_multiple_of_the_tensor(encoding: str, dtype: str) -> None:
    tensor = values(50_000, dtype)
    good = b"".join(encode(tensor, encoding, row=ROW))
    outcome(good, encoding, count=tensor.size, dtype=dtype)  # objects that are created once
    assert peak_bytes(good, encoding, tensor) < 7 * tensor.nbytes


@pytest.mark.parametrize("announced", [2**31, 2**40, 2**62])
def test_a_bomb_takes_no_memory(announced: int) -> None:
    frame = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", announced) + b"\x4b\xff\xff\0" * 200  # blocks of repeated bytes
    assert zstandard.get_frame_parameters(frame).content_size == announced
    tensor = values(50_000)
    bomb = b"\1" + coded_section(frame) + bytes(3 * tensor.size)
    assert outcome(bomb, "planes", count=tensor.size) is not None
    assert peak_bytes(bomb, "planes", tensor) < 3 * tensor.nbytes


def test_a_bomb_that_announces_the_right_size_takes_no_memory() -> None:
    """A frame that announces the right size and decompresses to two thousand times as much."""
    tensor = values(50_000)
    frame = b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", tensor.size) + b"\x02\x00\x10\0" * 800
    assert zstandard.get_frame_parameters(frame).content_size == tensor.size
    bomb = b"\1" + coded_section(frame) + bytes(3 * tensor.size)
    assert outcome(bomb, "planes", count=tensor.size) is not None
    assert peak_bytes(bomb, "planes", tensor) < 3 * tensor.nbytes


def peak_bytes(data: bytes, encoding: str, tensor: NDArray[Any]) -> int:
    """Return the most memory that decoding takes beyond the tensor itself."""
    out, view = np.empty_like(tensor), memoryview(data)
    return memory_peak.peak_bytes(lambda: decode(view, encoding, out, row=ROW))
