"""Messages become the bytes that the wire format's pages describe, and back; anything else is a ProtocolError."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipar.errors import ProtocolError
from pipar.execution import spans
from pipar.wire import frames as wire_format
from pipar.wire.encodings import CODED
from pipar.wire.frames import Assembler, Frame, body_limit, check_fits, cut_message, pack_frame, unpack_frame
from pipar.wire.messages import (
    DTYPES,
    ENCODINGS,
    ITEM_BYTES,
    SEVERAL,
    UNNUMBERED,
    Body,
    Kind,
    Message,
    json_body,
    norm_body,
)

DOCS = Path(__file__).parents[2] / "docs"
WIRE_MD = "".join((DOCS / page).read_text("utf-8") for page in ("wire.md", "reference/wire-messages.md"))

# Header in the order of docs/wire.md: magic version kind | session sequence acknowledged | epoch iteration
# micro_batch | samples batch_samples | dtype encoding | chunk chunks | dimensions body_bytes || shape || payload.
GOLDEN: dict[Kind, tuple[Message, str]] = {
    Kind.HELLO: (
        Message(Kind.HELLO, body=json_body({"name": "pi", "samples": 3})),
        "5050 04 01 00000007 00000000 00000005 00000000 00000000 0000 00000000 00000000 00 01 0000 0001 00"
        "000000000000001c"
        "7b226e616d65223a20227069222c202273616d706c6573223a20337d",
    ),
    Kind.WELCOME: (
        Message(Kind.WELCOME, body=json_body({"window": 3})),
        "5050 04 02 00000007 00000000 00000005 00000000 00000000 0000 00000000 00000000 00 01 0000 0001 00"
        "000000000000000d"
        "7b2277696e646f77223a20337d",
    ),
    Kind.MODEL: (
        Message(Kind.MODEL, 4, body=Body.of(b"\x08\x00", b"{}", encoding="safetensors")),
        "5050 04 03 00000007 00000009 00000005 00000004 00000000 0000 00000000 00000000 00 02 0000 0001 00"
        "0000000000000004"
        "0800 7b7d",
    ),
    Kind.ROUND: (
        Message(Kind.ROUND, 1),
        "5050 04 04 00000007 00000009 00000005 00000001 00000000 0000 00000000 00000000 00 00 0000 0001 00"
        "0000000000000000",
    ),
    Kind.ACTIVATION: (
        Message(
            Kind.ACTIVATION, 1, 2, 3, 2, 100,
            Body.of(struct.pack("<4f", 0, 1, -2, 0.5), struct.pack("<2i", 7, 9), dtype="float32", shape=(2, 2)),
        ),
        "5050 04 05 00000007 00000009 00000005 00000001 00000002 0003 00000002 00000064 01 00 0000 0001 02"
        "0000000000000018"
        "00000002 00000002 00000000 0000803f 000000c0 0000003f 07000000 09000000",
    ),
    Kind.GRADIENT: (
        Message(Kind.GRADIENT, 258, 65536, 65535, 1, 5, Body.of(struct.pack("<d", -1), dtype="float64", shape=(1,))),
        "5050 04 06 00000007 00000009 00000005 00000102 00010000 ffff 00000001 00000005 02 00 0000 0001 01"
        "0000000000000008"
        "00000001 000000000000f0bf",
    ),
    Kind.END_EPOCH: (
        Message(Kind.END_EPOCH, 2, body=json_body({"loss_sum": None})),
        "5050 04 07 00000007 00000009 00000005 00000002 00000000 0000 00000000 00000000 00 01 0000 0001 00"
        "0000000000000012"
        "7b226c6f73735f73756d223a206e756c6c7d",
    ),
    Kind.REPORT: (
        Message(Kind.REPORT, 3),
        "5050 04 08 00000007 00000009 00000005 00000003 00000000 0000 00000000 00000000 00 00 0000 0001 00"
        "0000000000000000",
    ),
    Kind.TRACE: (
        Message(Kind.TRACE, 3, body=Body.of(b"\x00\x00\x00\x00", encoding="trace")),
        "5050 04 09 00000007 00000009 00000005 00000003 00000000 0000 00000000 00000000 00 03 0000 0001 00"
        "0000000000000004"
        "00000000",
    ),
    Kind.STOP: (
        Message(Kind.STOP, 5),
        "5050 04 0a 00000007 00000009 00000005 00000005 00000000 0000 00000000 00000000 00 00 0000 0001 00"
        "0000000000000000",
    ),
    Kind.FAULT: (
        Message(Kind.FAULT, body=json_body({"reason": "no"})),
        "5050 04 0b 00000007 00000000 00000005 00000000 00000000 0000 00000000 00000000 00 01 0000 0001 00"
        "0000000000000010"
        "7b22726561736f6e223a20226e6f227d",
    ),
    Kind.PLAN: (
        Message(Kind.PLAN, 2, body=json_body({"window": 0})),
        "5050 04 0c 00000007 00000009 00000005 00000002 00000000 0000 00000000 00000000 00 01 0000 0001 00"
        "000000000000000d"
        "7b2277696e646f77223a20307d",
    ),
    Kind.STATE: (
        Message(Kind.STATE, 2, body=Body.of(b"\x08\x00", b"{}", encoding="safetensors")),
        "5050 04 0d 00000007 00000009 00000005 00000002 00000000 0000 00000000 00000000 00 02 0000 0001 00"
        "0000000000000004"
        "0800 7b7d",
    ),
    Kind.ABANDON: (
        Message(Kind.ABANDON, 6),
        "5050 04 0e 00000007 00000009 00000005 00000006 00000000 0000 00000000 00000000 00 00 0000 0001 00"
        "0000000000000000",
    ),
    Kind.NORM: (
        Message(Kind.NORM, 2, 3, body=norm_body(0.25)),
        "5050 04 10 00000007 00000009 00000005 00000002 00000003 0000 00000000 00000000 00 00 0000 0001 00"
        "0000000000000008"
        "000000000000d03f",
    ),
    Kind.EVALUATE: (
        Message(Kind.EVALUATE, 2, body=Body.of(b"\x08\x00", b"{}", encoding="safetensors")),
        "5050 04 11 00000007 00000009 00000005 00000002 00000000 0000 00000000 00000000 00 02 0000 0001 00"
        "0000000000000004"
        "0800 7b7d",
    ),
    Kind.SCORES: (
        Message(Kind.SCORES, 2, body=json_body({"samples": 4})),
        "5050 04 12 00000007 00000009 00000005 00000002 00000000 0000 00000000 00000000 00 01 0000 0001 00"
        "000000000000000e"
        "7b2273616d706c6573223a20347d",
    ),
    Kind.ALIVE: (
        Message(Kind.ALIVE),
        "5050 04 0f 00000007 00000000 00000005 00000000 00000000 0000 00000000 00000000 00 00 0000 0001 00"
        "0000000000000000",
    ),
    Kind.PROBE: (
        Message(Kind.PROBE, micro_batch=1, samples=2, batch_samples=3, body=Body.of(b"ab")),
        "5050 04 13 00000007 00000000 00000005 00000000 00000000 0001 00000002 00000003 00 00 0000 0001 00"
        "0000000000000002"
        "6162",
    ),
}  # fmt: skip


def frames_of(message: Message, sequence: int = 1) -> list[Frame]:
    return [unpack_frame(pack_frame(frame)) for frame in cut_message(message, 7, sequence)]


def content_of(message: Message) -> tuple[object, ...]:
    """Everything that must survive the wire; buffers count by their bytes, not by how they are cut."""
    body = message.body
    return (
        replace(message, body=Body()),
        body.size_bytes,
        body.dtype,
        body.shape,
        body.encoding,
        bytes(body.contiguous()),
    )


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(wire_format, "CHUNK_BYTES", 10)
    return 10


# --- bytes


def test_every_kind_has_golden_bytes() -> None:
    assert set(GOLDEN) == set(Kind)


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_a_frame_has_the_bytes_that_version_two_gave_it(kind: Kind) -> None:
    message, golden = GOLDEN[kind]
    sequence = 0 if kind in UNNUMBERED else 9
    (frame,) = cut_message(message, session=7, sequence=sequence, acknowledged=5)
    assert pack_frame(frame).hex() == golden.replace(" ", "")
    read = unpack_frame(bytes.fromhex(golden))
    assert (read.session, read.sequence, read.acknowledged, read.chunk, read.chunks) == (7, sequence, 5, 0, 1)
    received = Assembler().feed(read)
    assert received is not None
    assert content_of(received) == content_of(message)


def test_a_frame_knows_its_size_on_the_wire() -> None:
    for message, golden in GOLDEN.values():
        (frame,) = cut_message(message, 7, 9)
        assert frame.size_bytes == len(bytes.fromhex(golden))


# --- the document


def rows(heading: str, columns: int) -> list[list[str]]:
    """The rows with this many columns of the tables under a heading of the documents."""
    section = WIRE_MD.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines]
    return [row for row in cells if len(row) == columns and row[0].isdigit()]


def layout(packed: struct.Struct) -> list[tuple[int, int]]:
    """(offset, bytes) of every field of a struct."""
    fields = re.findall(r"\d*[a-zA-Z?]", packed.format.lstrip("!"))
    sizes = [struct.calcsize(f"!{field}") for field in fields]
    return [(sum(sizes[:place]), size) for place, size in enumerate(sizes)]


def test_the_documents_table_is_the_headers_struct() -> None:
    table = rows("A frame", 4)
    assert [(int(row[0]), int(row[1])) for row in table] == layout(wire_format._FIXED)
    assert f"has {wire_format._FIXED.size} bytes" in WIRE_MD


def test_the_documents_names_are_at_the_offsets_of_their_fields() -> None:
    values = {
        "kind": 3, "session": 11, "sequence": 12, "acknowledged": 10, "epoch": 13, "iteration": 14,
        "micro_batch": 15, "samples": 16, "batch_samples": 17, "dtype": 2, "encoding": 2,
        "chunk": 1, "chunks": 3, "dimensions": 1, "body_bytes": 2_500_000, "version": 4,
    }  # fmt: skip
    body = Body(2_500_000, dtype="float64", shape=(16,), encoding="safetensors")
    frames = list(cut_message(Message(Kind.MODEL, 13, 14, 15, 16, 17, body), 11, 12, 10))
    packed = pack_frame(frames[1])
    for offset, size, name, _ in rows("A frame", 4):
        found = packed[int(offset) : int(offset) + int(size)]
        if name == "`magic`":
            assert found == wire_format.MAGIC
        else:
            assert int.from_bytes(found, "big") == values[name.strip("`")], name


def test_the_document_names_every_kind_dtype_encoding_and_the_chunk() -> None:
    assert [(int(number), kind) for number, kind, _, _ in rows("Kinds", 4)] == [(int(k), k.name) for k in Kind]
    for names in (DTYPES, ENCODINGS):
        assert ", ".join(f"{number} {name or 'none'}" for name, number in names.items()) in WIRE_MD
    assert f"{wire_format.CHUNK_BYTES:,} bytes" in WIRE_MD
    assert f"version` | {wire_format.VERSION};" in WIRE_MD


def test_the_documents_span_is_the_traces_struct() -> None:
    table = rows("A trace", 4)
    assert [(int(row[0]), int(row[1])) for row in table] == layout(spans._SPAN)
    assert f"| {spans._SPAN.size} each |" in WIRE_MD


# --- round trips

buffers = st.lists(st.integers(0, 35), max_size=5).map(
    lambda sizes: [bytes((place + size) % 251 for place in range(size)) for size in sizes]
)
short, word = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1)


#: Those of bodies that are cut without encoding, and are one tensor or none.
PLAIN = sorted(ENCODINGS.keys() - CODED - {SEVERAL})


@st.composite
def messages(draw: st.DrawFn) -> Message:
    carried = draw(buffers)
    body = Body.of(*carried, dtype=draw(st.sampled_from(list(DTYPES))), encoding=draw(st.sampled_from(PLAIN)))
    room = body.size_bytes // ITEM_BYTES[body.dtype]
    if room and draw(st.booleans()):  # some tensor that the body has room for
        body = replace(body, shape=draw(st.sampled_from([(room,), (1, room), (1,) * 8])))
    counts = (draw(word), draw(word), draw(short), draw(word), draw(word))
    return Message(draw(st.sampled_from(Kind)), *counts, body)


def assemble(assembler: Assembler, frames: Iterator[Frame] | list[Frame]) -> list[Message]:
    return [message for frame in frames if (message := assembler.feed(frame)) is not None]


@pytest.mark.slow
@given(messages(), st.sampled_from([1, 1_000_000]))
def test_a_message_of_any_length_and_any_number_of_buffers_is_restored_equal(message: Message, large: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire_format, "CHUNK_BYTES", 10)
        patch.setattr(wire_format, "LARGE_BODY_BYTES", large)
        frames = frames_of(message)
        (received,) = assemble(Assembler(), frames)
    assert content_of(received) == content_of(message)
    size = message.body.size_bytes
    assert [frame.payload_bytes for frame in frames] == ([10] * (size // 10) + [size % 10] * (size % 10 > 0) or [0])


@pytest.mark.parametrize(
    ("size", "chunks"), [(0, 1), (1, 1), (999_999, 1), (1_000_000, 1), (1_000_001, 2), (2_000_000, 2), (2_000_001, 3)]
)
def test_a_body_is_cut_at_chunk_boundaries(size: int, chunks: int) -> None:
    message = Message(Kind.MODEL, body=Body.of(bytes(size // 2), bytes(size - size // 2), encoding="safetensors"))
    frames = frames_of(message)
    assert len(frames) == chunks
    (received,) = assemble(Assembler(), frames)
    assert content_of(received) == content_of(message)


@pytest.mark.slow
@settings(max_examples=50)
@given(st.lists(messages(), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_messages_whose_chunks_are_interleaved_are_restored(several: list[Message], random: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire_format, "CHUNK_BYTES", 10)
        queues = [frames_of(message, sequence) for sequence, message in enumerate(several, start=1)]
        mixed = []
        while any(queues):
            queue = random.choice([queue for queue in queues if queue])  # type: ignore[attr-defined]
            mixed.append(queue.pop(0))
        received = assemble(Assembler(), mixed)
    assert sorted(map(repr, map(content_of, received))) == sorted(map(repr, map(content_of, several)))


@given(st.integers(1, 3_500_000))
def test_a_sizes_only_message_is_cut_like_a_full_one_and_carries_nothing(size: int) -> None:
    message = Message(Kind.ACTIVATION, body=Body(size, dtype="float32"))
    frames = list(cut_message(message, 1, 1))
    assert sum(frame.payload_bytes for frame in frames) == size
    assert all(frame.payload == () for frame in frames)
    (received,) = assemble(Assembler(), frames)
    assert received.body.is_size_only


def test_a_large_body_is_assembled_as_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_format, "LARGE_BODY_BYTES", 2_500_000)
    for size, buffers in ((2_499_999, 3), (2_500_000, 1)):
        message = Message(Kind.MODEL, body=Body.of(bytes(1_100_000), b"x" * (size - 1_100_000)))
        (received,) = assemble(Assembler(), map(unpack_frame, map(pack_frame, frames_of(message))))
        assert len(received.body.buffers) == buffers
        assert content_of(received) == content_of(message)


def test_a_frame_shares_the_senders_and_the_receivers_memory() -> None:
    source = bytearray(b"0123456789")
    (frame,) = cut_message(Message(Kind.MODEL, body=Body.of(memoryview(source))), 1, 1)
    data = pack_frame(frame)
    received = unpack_frame(data)
    source[0] = ord("x")
    assert bytes(frame.payload[0][:1]) == b"x"
    assert received.payload[0].obj is data


# --- refusals


def damaged(offset: int, packed: bytes) -> bytes:
    """The ACTIVATION of the golden table with other bytes at a place."""
    data = bytes.fromhex(GOLDEN[Kind.ACTIVATION][1])
    return data[:offset] + packed + data[offset + len(packed) :]


BAD_FRAMES = {
    "nothing": (b"", "not a pipar frame"),
    "bad magic": (damaged(0, b"HT"), "not a pipar frame"),
    "another version": (damaged(2, b"\x01"), "version 1 of the protocol, and this side version 4"),
    "unknown kind": (damaged(3, b"\x14"), "kind 20"),
    "kind zero": (damaged(3, b"\x00"), "kind 0"),
    "unknown dtype": (damaged(34, b"\x03"), "dtype 3"),
    "unknown encoding": (damaged(35, b"\x07"), "encoding 7"),
    "chunk after the last": (damaged(36, b"\x00\x01"), "chunk 1 of 1"),
    "no chunks": (damaged(38, b"\x00\x00"), "chunk 0 of 0"),
    "header cut short": (damaged(0, b"")[:48], "not a pipar frame"),
    "shape cut short": (damaged(40, b"\xff"), "damaged header"),
    "nine dimensions": (damaged(40, b"\x09") + bytes(100), "9 dimensions"),
    "a dimension of zero": (damaged(49, bytes(4)), "a tensor of shape (0, 2), which does not fit its body of 24 bytes"),
    "a tensor larger than its body": (damaged(49, b"\xff" * 8), "a tensor of shape (4294967295, 4294967295)"),
    "body larger than any": (damaged(41, struct.pack("!Q", wire_format.MAX_BODY_BYTES + 1)), "damaged header"),
}


@pytest.mark.parametrize("case", BAD_FRAMES)
def test_a_frame_is_refused_for(case: str) -> None:
    data, sentence = BAD_FRAMES[case]
    with pytest.raises(ProtocolError, match=re.escape(sentence)):
        unpack_frame(data)


def three_chunks() -> list[Frame]:
    return frames_of(Message(Kind.MODEL, body=Body.of(bytes(range(25)), encoding="safetensors")))


BAD_ORDERS: dict[str, Callable[[list[Frame]], list[Frame]]] = {
    "begun in the middle": lambda f: [f[1]],
    "a chunk left out": lambda f: [f[0], f[2]],
    "a chunk twice": lambda f: [f[0], f[0]],
    "swapped": lambda f: [f[0], f[2], f[1]],
    "payload too long": lambda f: [f[0], f[1], replace(f[2], payload_bytes=6)],
    "payload too long before the last": lambda f: [replace(f[0], payload_bytes=26)],
    "payload too short": lambda f: [f[0], f[1], replace(f[2], payload_bytes=4)],
    "another kind in the middle": lambda f: [f[0], replace(f[1], message=replace(f[1].message, kind=Kind.TRACE))],
    "another number of chunks in the middle": lambda f: [f[0], replace(f[1], chunks=4)],
    "one whole frame in the middle": lambda f: [f[0], replace(f[0], chunks=1, payload_bytes=25)],
    "a single frame with too little": lambda f: [replace(f[0], chunks=1)],
    "a chunk with nothing in it": lambda f: [replace(f[0], payload=(), payload_bytes=0)],
    "more chunks than the body fills": lambda f: [replace(f[0], chunks=65535)],
}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("case", BAD_ORDERS)
def test_chunks_are_refused_if_they_arrive(case: str) -> None:
    assembler = Assembler()
    with pytest.raises(ProtocolError, match="out of order"):
        assemble(assembler, BAD_ORDERS[case](three_chunks()))


def test_a_message_that_an_assembler_has_dropped_is_received_again_from_its_beginning() -> None:
    message = Message(Kind.MODEL, body=Body.of(bytes(2_500_000), encoding="safetensors"))
    frames, assembler = frames_of(message), Assembler()
    assert assemble(assembler, frames[:2]) == []
    assembler.reset()
    (received,) = assemble(assembler, frames)
    assert content_of(received) == content_of(message)


@pytest.mark.usefixtures("small_chunks")
def test_a_message_that_must_be_one_frame_is_refused_in_pieces() -> None:
    (whole,) = frames_of(Message(Kind.HELLO, body=json_body({})), 0)
    assert content_of(whole.only()) == content_of(Message(Kind.HELLO, body=json_body({})))
    for frame in (three_chunks()[0], replace(whole, payload_bytes=1)):
        with pytest.raises(ProtocolError, match="came in several frames"):
            frame.only()


def test_a_body_larger_than_the_receivers_limit_is_refused_at_its_first_frame() -> None:
    frame = next(iter(cut_message(Message(Kind.MODEL, body=Body(3_000_000)), 1, 1)))
    with pytest.raises(ProtocolError, match="announces 3000000 bytes; at most 2999999"):
        Assembler(max_body_bytes=2_999_999).feed(frame)


def test_limits_by_kind_apply_once_set_and_other_kinds_have_a_small_one() -> None:
    assembler = Assembler()
    frames = {kind: next(iter(cut_message(Message(kind, body=Body(1_500_000)), 1, kind))) for kind in Kind}
    assert assembler.feed(frames[Kind.MODEL]) is None
    assembler.limit = body_limit({Kind.ACTIVATION: 1_499_999, Kind.STATE: 1_500_000})
    assert assembler.feed(frames[Kind.STATE]) is None
    with pytest.raises(ProtocolError, match=r"ACTIVATION.* announces 1500000 bytes; at most 1499999 are allowed"):
        assembler.feed(frames[Kind.ACTIVATION])
    with pytest.raises(ProtocolError, match=r"TRACE.* announces 1500000 bytes; at most 1000000 are allowed"):
        assembler.feed(frames[Kind.TRACE])


@pytest.mark.usefixtures("small_chunks")
def test_a_fifth_message_is_refused_while_four_are_half_received() -> None:
    begun = [frames_of(Message(Kind.MODEL, body=Body.of(bytes(25))), sequence) for sequence in range(1, 6)]
    assembler = Assembler()
    for frames in begun[:4]:
        assert assembler.feed(frames[0]) is None
    assert assembler.feed(frames_of(Message(Kind.FAULT), 9)[0]) == Message(Kind.FAULT)  # a complete one does not count
    with pytest.raises(ProtocolError, match="while 4 others were half received"):
        assembler.feed(begun[4][0])
    assert assemble(assembler, begun[0][1:])
    assert assembler.feed(begun[4][0]) is None


@pytest.mark.usefixtures("small_chunks")
def test_half_received_messages_may_not_announce_more_than_the_limit_together() -> None:
    one, other = (frames_of(Message(Kind.MODEL, body=Body.of(bytes(25))), sequence) for sequence in (1, 2))
    assembler = Assembler(max_body_bytes=49)
    assert assembler.feed(one[0]) is None
    with pytest.raises(ProtocolError, match="announce 50 bytes; at most 49 are allowed"):
        assembler.feed(other[0])


@pytest.mark.parametrize(
    "message",
    [
        Message(Kind.ACTIVATION, micro_batch=65536),
        Message(Kind.MODEL, body=Body(wire_format.MAX_BODY_BYTES + 1)),
        Message(Kind.GRADIENT, body=Body(shape=(1,) * 9)),
    ],
    ids=["micro-batch", "size", "dimensions"],
)
def test_values_that_no_header_can_hold_are_refused(message: Message) -> None:
    with pytest.raises(ProtocolError, match="does not fit the wire format"):
        check_fits(message)


@pytest.mark.slow
def test_the_largest_micro_batch_number_and_the_largest_body_fit_the_header() -> None:
    largest = Message(Kind.MODEL, micro_batch=65535, body=Body(wire_format.MAX_BODY_BYTES))
    *_, last = cut_message(largest, 2**32 - 1, 1)
    read = unpack_frame(pack_frame(replace(last, payload_bytes=0)))
    assert (read.chunk, read.chunks, read.message.body.size_bytes) == (65534, 65535, wire_format.MAX_BODY_BYTES)


GOLDEN_BYTES = [bytes.fromhex(golden) for _, golden in GOLDEN.values()]


@given(st.binary(max_size=120) | st.binary(max_size=90).map(lambda tail: wire_format.MAGIC + b"\x02" + tail))
def test_any_bytes_are_a_frame_or_a_protocol_error(data: bytes) -> None:
    try:
        frame = unpack_frame(data)
    except ProtocolError:
        return
    assert pack_frame(frame) == data


@st.composite
def mutations(draw: st.DrawFn) -> list[bytes]:
    """A few valid frames with some bytes changed, some frames truncated, extended or duplicated."""
    sent = []
    for data in draw(st.lists(st.sampled_from(GOLDEN_BYTES), min_size=1, max_size=4)):
        changed = bytearray(data)
        for _ in range(draw(st.integers(0, 3))):
            changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(0, 255))
        end = draw(st.integers(0, len(changed)) | st.just(len(changed)))
        sent += [bytes(changed[:end]) + draw(st.binary(max_size=8))] * draw(st.integers(1, 2))
    return sent


@pytest.mark.slow
@given(mutations())
@example([GOLDEN_BYTES[0] + b"x"])
def test_damaged_frames_give_messages_of_their_announced_size_or_a_protocol_error(sent: list[bytes]) -> None:
    assembler = Assembler()
    for data in sent:
        try:
            message = assembler.feed(unpack_frame(data))
        except ProtocolError:
            continue
        if message is not None:
            assert len(message.body.contiguous()) == message.body.size_bytes
