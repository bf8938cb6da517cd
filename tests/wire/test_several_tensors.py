"""A message with several tensors: its header, its chunks, and what is refused."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from pipar.errors import ProtocolError
from pipar.wire.frames import HEADER_BYTES, Assembler, check_fits, cut_message, pack_frame, shape_words, unpack_frame
from pipar.wire.messages import (
    SEVERAL,
    Body,
    Chunks,
    Kind,
    Message,
    Payload,
    TensorPart,
    chunk_count,
    coded_chunks,
    tensor_bytes,
)

SKIP = TensorPart((3, 2, 4), "float32", has_gradient=True, is_rectified=True)
MASK = TensorPart((3, 5), "bool")
PARTS = (SKIP, MASK)


def message(parts: tuple[TensorPart, ...] = PARTS, samples: int = 3, kind: Kind = Kind.ACTIVATION) -> Message:
    labels = 4 * samples if kind is Kind.ACTIVATION else 0
    sizes = coded_chunks(Body(encoding=SEVERAL, parts=parts))
    payloads = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    payloads[-1] += bytes(labels)
    chunks = Chunks(len(sizes), lambda number: Payload.of(payloads[number]))
    for _ in sizes:
        chunks.add(chunks.encode_next())
    body = Body(sum(sizes) + labels, encoding=SEVERAL, chunks=chunks, parts=parts)
    return Message(kind, 1, 1, 1, samples, 10, body)


def arrived(sent: Message) -> Message:
    assembler, result = Assembler(), None
    for frame in cut_message(sent, 7, 1):
        packed = pack_frame(frame)
        assert len(packed) == frame.size_bytes
        result = assembler.feed(unpack_frame(packed))
    assert result is not None
    return result


def test_each_tensor_is_a_chunk_of_its_own_and_its_form_is_in_every_header() -> None:
    received = arrived(message())
    assert received.body.parts == PARTS
    assert (tensor_bytes(received), chunk_count(received.body)) == (96 + 15, 2)
    assert [view.nbytes for view in received.body.buffers] == [96, 15 + 12]
    frame = next(cut_message(message(), 7, 1))
    words = struct.unpack_from("!7I", pack_frame(frame), HEADER_BYTES)
    assert words == (0x01_00_03_03, 3, 2, 4, 0x03_00_00_02, 3, 5)
    assert shape_words(message().body) == 7


def test_a_large_tensor_is_cut_into_chunks() -> None:
    large = TensorPart((4, 50_000), "float32", "planes", has_gradient=True)
    received = arrived(message((large, replace(MASK, shape=(4, 5))), 4))
    assert chunk_count(received.body) == 5
    assert coded_chunks(received.body)[-1] == 20


@pytest.mark.parametrize("word", [0x09_00_00_02, 0x01_05_00_02, 0x01_00_04_02, 0x01_00_00_00, 0x01_00_00_09,
                                  0x03_10_00_02, 0x03_00_01_02])  # fmt: skip
def test_a_tensor_that_is_described_wrongly_is_refused(word: int) -> None:
    packed = bytearray(pack_frame(next(cut_message(message((MASK,)), 7, 1))))
    struct.pack_into("!I", packed, HEADER_BYTES, word)
    with pytest.raises(ProtocolError, match="The peer announces"):
        unpack_frame(bytes(packed))


def test_an_empty_or_a_torn_description_is_refused() -> None:
    packed = bytearray(pack_frame(next(cut_message(message((MASK,)), 7, 1))))
    struct.pack_into("!I", packed, HEADER_BYTES + 8, 0)
    with pytest.raises(ProtocolError, match="The peer announces"):
        unpack_frame(bytes(packed))
    struct.pack_into("!B", packed, 40, 2)
    with pytest.raises(ProtocolError, match="The peer announces"):
        unpack_frame(bytes(packed))
    struct.pack_into("!B", packed, 40, 0)
    with pytest.raises(ProtocolError, match="its tensors have shapes"):
        Assembler().feed(unpack_frame(bytes(packed)))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (replace(message(), samples=2), "its tensors have shapes"),
        (message((SKIP, TensorPart((2, 5), "bool"))), "its tensors have shapes"),
        (replace(message(), kind=Kind.GRADIENT), "says tensors of shapes"),
    ],
)
def test_tensors_that_contradict_the_header_are_refused(wrong: Message, sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence):
        arrived(wrong)


def test_more_tensors_than_a_header_can_describe_are_refused_when_posted() -> None:
    check_fits(message((MASK,) * 85))
    with pytest.raises(ProtocolError, match="86 tensors"):
        check_fits(message((MASK,) * 86))


@pytest.mark.parametrize(
    ("part", "given", "own"),
    [
        (SKIP, "sparse-planes", "sparse-planes"),
        (replace(SKIP, is_rectified=False), "sparse-planes", "planes"),
        (replace(SKIP, is_rectified=False), "sparse", "raw"),
        (SKIP, "int8", "int8"),
        (replace(SKIP, has_gradient=False, is_rectified=False), "int8", "raw"),
        (replace(SKIP, has_gradient=False, is_rectified=False), "planes", "planes"),
        (MASK, "planes", "raw"),
    ],
)
def test_each_tensor_has_the_encoding_that_suits_it(part: TensorPart, given: str, own: str) -> None:
    assert part.encoding_for(given) == own
