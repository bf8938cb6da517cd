"""Damaged frames by the ten thousand: each gives a message, nothing yet or a ProtocolError; memory is bounded."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.hostile_frames import BASE, damaged, good_frames
from pipar.errors import ProtocolError
from pipar.wire import encodings
from pipar.wire import frames as wire_format
from pipar.wire.encodings import CODED
from pipar.wire.frames import Assembler, body_limit, pack_frame, unpack_frame
from pipar.wire.messages import Kind, Message, tensor_bytes
from pipar.wire.model_changes import decode_changes
from pipar.wire.tensor_codec import decode

QUICK, MANY = 15_000, 70_000
FRAMES = good_frames()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_format, "CHUNK_BYTES", 128)
    monkeypatch.setattr(encodings, "_CHUNK_BYTES", 256)


def outcome(assembler: Assembler, data: bytes) -> Message | ProtocolError | None:
    """Return the outcome of some bytes; any other error fails the test."""
    try:
        frame = unpack_frame(data)
        assert pack_frame(frame) == data  # an accepted frame was parsed to the last byte
        return assembler.feed(frame)
    except ProtocolError as error:
        return error


def read(message: Message) -> list[str]:
    """Read the content of a message, as its receiver would; return the outcome."""
    body = message.body
    if body.encoding not in CODED:
        assert len(body.contiguous()) == body.size_bytes
    try:
        if body.encoding in CODED:
            read_coded(message)
            return ["coded"]
        if body.encoding == "changes":
            decode_changes(body.contiguous(), BASE)
            return ["changed"]
    except ProtocolError:
        return ["unreadable"]
    return []


def read_coded(message: Message) -> None:
    body, label_bytes = message.body, message.body.size_bytes - tensor_bytes(message)
    sizes = encodings.chunk_sizes(body.shape, np.dtype(body.dtype).itemsize)
    assert len(body.buffers) == len(sizes)
    for number, (size, buffer) in enumerate(zip(sizes, body.buffers, strict=True)):
        assert buffer.nbytes <= size * 8 + encodings.OVERHEAD_BYTES + label_bytes
        payload = buffer[: buffer.nbytes - label_bytes] if number == len(sizes) - 1 else buffer
        decode(payload, body.encoding, np.empty(size, body.dtype), row=encodings.row_values(body.shape))


def bombard(count: int, seed: int) -> Counter[str]:
    """Feed this number of damaged frames to assemblers, a few thousand to each; return the outcomes."""
    chance, frames = random.Random(seed), good_frames()
    limit = body_limit({Kind.ACTIVATION: 600, Kind.MODEL: 100_000}, others=300)
    results: Counter[str] = Counter()
    assembler = Assembler(limit=limit)
    for number in range(count):
        if number % 5000 == 0:
            assembler = Assembler(limit=limit)
        result = outcome(assembler, damaged(chance, frames))
        results["ProtocolError" if isinstance(result, ProtocolError) else type(result).__name__] += 1
        if isinstance(result, Message):
            results.update(read(result))
        assert len(assembler._begun) <= wire_format.MAX_HALF_RECEIVED
    return results


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("count", "seed"), [(QUICK, 1), pytest.param(MANY, 2, marks=pytest.mark.slow)])
def test_damaged_frames_are_messages_or_protocol_errors(count: int, seed: int) -> None:
    results = bombard(count, seed)
    outcomes = {"Message", "NoneType", "ProtocolError"}
    assert min(results[one] for one in outcomes) > count // 100, results  # damage is sometimes detected
    assert results.keys() - outcomes == {"coded", "changed", "unreadable"}
    assert min(results.values()) > count // 2000, results


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_damaged_frames_leak_no_memory() -> None:
    bombard(500, 3)  # objects that are created once
    tracemalloc.start()
    try:
        bombard(5_000, 4)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 2**32), st.integers(0, 200))
def test_any_bytes_in_any_place_of_a_frame_are_a_message_or_a_protocol_error(
    inserted: bytes, seed: int, place: int
) -> None:
    data = damaged(random.Random(seed), FRAMES)
    outcome(Assembler(), data[:place] + inserted + data[place:])


def test_a_peer_that_never_completes_its_messages_stays_within_the_limit() -> None:
    """Headers that announce the maximum cost nothing; at most a full chunk of each is kept."""
    chunk = bytes(wire_format.CHUNK_BYTES)
    assembler, kept = Assembler(limit=body_limit({Kind.MODEL: 3_000_000})), 0
    for sequence in range(100):
        head = wire_format.Frame(Message(Kind.MODEL, body=wire_format.Body(3_000_000)), 1, sequence, 0, 0, 3, (), 0)
        data = pack_frame(head) + chunk
        kept += outcome(assembler, data) is None
    assert kept == wire_format.MAX_HALF_RECEIVED
