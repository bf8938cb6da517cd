"""Messages to frames and back: bytes in, messages out, no socket. `docs/wire.md` describes the bytes.

A message longer than a chunk is sent as several frames with the same sequence number, so that control messages can
overtake it and no limit on the size of a frame applies. Each chunk of a coded tensor is encoded separately, so that the
first ones leave before the last ones are encoded. The header has the size before encoding, so that the receiver can
refuse a small message that would need too much memory.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata

from pipar.errors import ProtocolError, VersionError
from pipar.wire.encodings import ALL, OVERHEAD_BYTES
from pipar.wire.messages import (
    DTYPES,
    ENCODINGS,
    ITEM_BYTES,
    PART_DTYPES,
    SEVERAL,
    Body,
    Kind,
    Message,
    TensorPart,
    coded_chunks,
    end_to_end,
    tensor_bytes,
)

VERSION = 4
MAGIC = b"PP"
CHUNK_BYTES = 1_000_000
#: The most chunks that the header can count: more than any known model needs.
MAX_BODY_BYTES = 65535 * CHUNK_BYTES
MAX_DIMENSIONS = 8
#: Of several tensors: the most that the header can count.
MAX_WORDS = 255
#: More than needed: a sender has one message in flight, and one that overtakes it.
MAX_HALF_RECEIVED = 4
#: Enough for a message that is neither a tensor nor a model.
SMALL_BODY_BYTES = 1_000_000
#: A body of this size or more is written into one buffer as its chunks arrive.
LARGE_BODY_BYTES = 32_000_000

_FIXED = struct.Struct("!2sBBIIIIIHIIBBHHBQ")
#: Of every frame; plus four for each dimension of a tensor.
HEADER_BYTES = _FIXED.size
#: At the beginning of a HELLO.
_DEVICE = re.compile(rb'\{"name": ?"([ !#-\[\]-~]{1,64})"')
_PACKAGE = re.compile(rb'"pipar": ?"([0-9A-Za-z.+-]{1,32})"')
_KINDS = {int(kind): kind for kind in Kind}
_DTYPE_NAMES = {number: name for name, number in DTYPES.items()}
_PART_DTYPE_NAMES = {number: name for name, number in PART_DTYPES.items()}
_ENCODING_NAMES = {number: name for name, number in ENCODINGS.items()}


@dataclass(frozen=True, slots=True)
class Frame:
    """One chunk of one message: header fields, and its share of the body's bytes (none in a timing-only run)."""

    message: Message  # its body describes the whole message: size, dtype, shape, encoding
    session: int
    sequence: int  # the message's number; 0 if it has none
    acknowledged: int  # the sender has the receiver's numbered messages up to this one
    chunk: int
    chunks: int
    payload: tuple[memoryview, ...]
    payload_bytes: int
    came_at: float | None = field(default=None, compare=False)  # if the transport measured when it arrived

    @property
    def size_bytes(self) -> int:
        """The size of this frame on the wire."""
        return _FIXED.size + 4 * shape_words(self.message.body) + self.payload_bytes

    def only(self) -> Message:
        """Return the message of a frame that carries all of it."""
        if self.chunks != 1 or self.payload_bytes != self.message.body.size_bytes:
            raise ProtocolError(f"{self.message} came in several frames; it has to fit one.")
        return _with_buffers(self.message, self.payload)


def check_fits(message: Message) -> None:
    """Raise if a message does not fit frames; called when it is posted, so that the caller sees the error."""
    body = message.body
    dimensions = max((len(part.shape) for part in body.parts), default=len(body.shape))
    if body.parts and shape_words(body) > MAX_WORDS:
        raise ProtocolError(f"{message} has {len(body.parts)} tensors, which do not fit the header of a frame.")
    if message.micro_batch > 65535 or body.size_bytes > MAX_BODY_BYTES or dimensions > MAX_DIMENSIONS:
        raise ProtocolError(
            f"{message} with {body.size_bytes} bytes and {dimensions} dimensions does not fit the wire format: at "
            f"most 65535 micro-batches, {MAX_BODY_BYTES} bytes and {MAX_DIMENSIONS} dimensions are allowed."
        )


def cut_message(message: Message, session: int, sequence: int, acknowledged: int = 0) -> Iterator[Frame]:
    """Yield the frames of a message, as far as they are encoded; buffers are shared, not copied."""
    size = message.body.size_bytes
    coded = message.body.chunks
    if coded is not None:
        for chunk in range(coded.count):
            ready = coded.ready[chunk]
            yield Frame(message, session, sequence, acknowledged, chunk, coded.count, ready.buffers, ready.size_bytes)
        return
    chunks = _chunks(size)
    if chunks == 1:
        yield Frame(message, session, sequence, acknowledged, 0, 1, message.body.buffers, size)
        return
    payloads = _payloads(message.body.buffers)
    for chunk in range(chunks):
        payload = () if message.body.is_size_only else next(payloads)
        yield Frame(message, session, sequence, acknowledged, chunk, chunks, payload, _share(size, chunk))


def _chunks(size: int) -> int:
    """Return how many chunks a body of this size has."""
    return max(1, -(-size // CHUNK_BYTES))


def _share(size: int, chunk: int) -> int:
    """Return how many bytes of a body this chunk carries."""
    return min(CHUNK_BYTES, size - chunk * CHUNK_BYTES)


def _payloads(buffers: tuple[memoryview, ...]) -> Iterator[tuple[memoryview, ...]]:
    """Yield the views of each chunk of the buffers, taken as one sequence of bytes."""
    views: list[memoryview] = []
    room = CHUNK_BYTES
    for buffer in buffers:
        at = 0
        while at < buffer.nbytes:
            view = buffer[at : at + room]
            views.append(view)
            at, room = at + view.nbytes, room - view.nbytes
            if room == 0:
                yield tuple(views)
                views, room = [], CHUNK_BYTES
    if views:
        yield tuple(views)


def pack_frame(frame: Frame) -> bytes:
    """Return the bytes of a frame; this is our only copy between a tensor and gRPC."""
    message, body = frame.message, frame.message.body
    words = _words(body)
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        message.kind,
        frame.session,
        frame.sequence,
        frame.acknowledged,
        message.epoch,
        message.iteration,
        message.micro_batch,
        message.samples,
        message.batch_samples,
        DTYPES[body.dtype],
        ENCODINGS[body.encoding],
        frame.chunk,
        frame.chunks,
        len(words),
        body.size_bytes,
    )
    return b"".join((fixed, struct.pack(f"!{len(words)}I", *words), *frame.payload))


def unpack_frame(data: bytes, came_at: float | None = None) -> Frame:
    """Return the frame of these bytes, its payload a view of them; raise ProtocolError if they break the format."""
    if len(data) < _FIXED.size or data[:2] != MAGIC:
        raise ProtocolError("The peer sent bytes that are not a pipar frame.")
    (
        _,
        version,
        kind,
        session,
        sequence,
        acknowledged,
        epoch,
        iteration,
        micro_batch,
        samples,
        batch_samples,
        *rest,
    ) = _FIXED.unpack_from(data)
    dtype, encoding, chunk, chunks, dimensions, body_bytes = rest
    if version != VERSION:
        named = _DEVICE.search(data)
        raise VersionError(_other_version(version, data), named[1].decode("ascii") if named else "")
    if kind not in _KINDS or dtype not in _DTYPE_NAMES or encoding not in _ENCODING_NAMES:
        raise ProtocolError(
            f"The peer sent a frame of kind {kind}, dtype {dtype} and encoding {encoding}, one of which is unknown."
        )
    start, several = _FIXED.size + 4 * dimensions, encoding == ENCODINGS[SEVERAL]
    most = MAX_WORDS if several else MAX_DIMENSIONS
    if len(data) < start or dimensions > most or not chunk < chunks or body_bytes > MAX_BODY_BYTES:
        raise ProtocolError(
            f"The peer sent a frame with a damaged header (chunk {chunk} of {chunks}, {dimensions} dimensions, "
            f"{body_bytes} bytes)."
        )
    shape = struct.unpack_from(f"!{dimensions}I", data, _FIXED.size)
    parts: tuple[TensorPart, ...] = ()
    if several:
        parts, shape = _parts(shape), ()
    else:
        _check_shape(shape, dtype, encoding, body_bytes)
    view = memoryview(data)[start:]
    payload = (view,) if view.nbytes else ()
    body = Body(body_bytes, (), _DTYPE_NAMES[dtype], shape, _ENCODING_NAMES[encoding], parts=parts)
    message = Message(_KINDS[kind], epoch, iteration, micro_batch, samples, batch_samples, body)
    return Frame(message, session, sequence, acknowledged, chunk, chunks, payload, view.nbytes, came_at)


def package_version() -> str:
    """Return the version of pipar that is installed here."""
    return metadata.version("pipar")


def _other_version(theirs: int, data: bytes) -> str:
    """Return the sentence for a peer with another version of the protocol: what each side has, and what to install.

    The peer's package is named if its frame says so as text, in the JSON of HELLO or FAULT: its header is unknown.
    """
    age, own, said = ("an older" if theirs < VERSION else "a newer"), package_version(), _PACKAGE.search(data)
    named = f" ({said[1].decode()})" if said is not None else ""
    return (
        f"The peer uses version {theirs} of the protocol, and this side version {VERSION}: the peer has {age} pipar"
        f"{named} than this side, which has pipar {own}. Install the same on both: 'pip install pipar=={own}' on the "
        "peer, or 'pip install --upgrade pipar' here."
    )


def _check_shape(shape: tuple[int, ...], dtype: int, encoding: int, body_bytes: int) -> None:
    """Raise if a tensor of this shape is empty or larger than the body; its reader checks that it fills the body."""
    if not shape:
        return
    needed = math.prod(shape) * ITEM_BYTES[_DTYPE_NAMES[dtype]]
    if needed == 0 or (encoding == ENCODINGS["raw"] and needed > body_bytes):
        raise ProtocolError(
            f"The peer announces a tensor of shape {shape}, which does not fit its body of {body_bytes} bytes."
        )


# --- several tensors: a word for each, then its shape


def shape_words(body: Body) -> int:
    """Return the numbers of four bytes that a header has for the shapes of a body's tensors."""
    return sum(1 + len(part.shape) for part in body.parts) if body.parts else len(body.shape)


def _words(body: Body) -> tuple[int, ...]:
    if not body.parts:
        return body.shape
    return tuple(word for part in body.parts for word in (_word(part), *part.shape))


def _word(part: TensorPart) -> int:
    flags = part.has_gradient | part.is_rectified << 1
    return PART_DTYPES[part.dtype] << 24 | ENCODINGS[part.encoding] << 16 | flags << 8 | len(part.shape)


def _parts(words: tuple[int, ...]) -> tuple[TensorPart, ...]:
    """Return the tensors that a header describes; raise ProtocolError if it does not describe any."""
    found, at = [], 0
    while at < len(words):
        dtype, encoding, flags, dimensions = words[at].to_bytes(4)
        shape = words[at + 1 : at + 1 + dimensions]
        name, coding = _PART_DTYPE_NAMES.get(dtype), _ENCODING_NAMES.get(encoding)
        is_known = name is not None and coding in ALL and flags < 4 and 1 <= dimensions <= MAX_DIMENSIONS
        if not is_known or len(shape) != dimensions or 0 in shape:
            raise ProtocolError(
                f"The peer announces a tensor of dtype {dtype}, encoding {encoding} and shape {shape}, which is "
                "unknown."
            )
        assert name is not None
        assert coding is not None
        part = TensorPart(shape, name, coding, bool(flags & 1), bool(flags & 2))
        if not part.is_floating_point and (coding != "raw" or flags):
            raise ProtocolError(f"The peer announces {name} values that are encoded as {coding} or have a gradient.")
        found.append(part)
        at += 1 + dimensions
    return tuple(found)


#: Returns how many bytes the body of a message may have, given its header.
BodyLimit = Callable[[Message], int]


def body_limit(by_kind: Mapping[Kind, int], others: int = SMALL_BODY_BYTES) -> BodyLimit:
    """Return a limit for each kind of message; kinds that are not named have a small one."""
    limits = dict(by_kind)
    return lambda message: limits.get(message.kind, others)


class Assembler:
    """Frames in, messages out; frames of other messages may come between the chunks of one.

    Half-received messages are bounded in number, and in total by `max_body_bytes`; this is checked before a frame is
    kept. `limit`, which may be set at any time, bounds each message by its header.
    """

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES, limit: BodyLimit | None = None) -> None:
        self.limit = limit
        self._max_body_bytes = max_body_bytes
        self._begun: dict[int, _Begun] = {}  # by sequence number

    @property
    def held_bytes(self) -> int:
        """How many bytes are held of half-received messages."""
        return sum(part.nbytes for begun in self._begun.values() for part in begun.parts)

    def reset(self) -> None:
        """Forget half-received messages: they will be sent again from their beginning."""
        self._begun.clear()

    def feed(self, frame: Frame) -> Message | None:
        """Return the message that this frame completes, or None if chunks are missing."""
        self._check_size(frame.message)
        begun = self._begun.pop(frame.sequence, None) or _Begun(frame.message)
        in_place = (frame.chunk, frame.message) == (begun.chunk, begun.message)
        is_coded = frame.message.body.is_coded
        fits = _is_coded_chunk(frame) if is_coded else _is_chunk(frame)
        if not in_place or not fits:
            raise ProtocolError(
                f"{frame.message} came with chunk {frame.chunk} of {frame.chunks}, which is out of order or of a wrong "
                "size."
            )
        if frame.chunks == 1 and not is_coded:
            return _with_buffers(frame.message, frame.payload)
        if frame.chunk < frame.chunks - 1:
            self._check_room(frame.message)
        begun.keep(frame)
        if frame.chunk == frame.chunks - 1:
            return _with_buffers(frame.message, tuple(begun.parts))
        begun.chunk += 1
        self._begun[frame.sequence] = begun
        return None

    def _check_size(self, message: Message) -> None:
        size = message.body.size_bytes
        most = self._max_body_bytes if self.limit is None else min(self._max_body_bytes, self.limit(message))
        if size > most:
            raise ProtocolError(f"{message} announces {size} bytes; at most {most} are allowed.")

    def _check_room(self, message: Message) -> None:
        if len(self._begun) >= MAX_HALF_RECEIVED:
            raise ProtocolError(
                f"{message} began while {MAX_HALF_RECEIVED} others were half received; no more are allowed."
            )
        announced = sum(begun.message.body.size_bytes for begun in self._begun.values()) + message.body.size_bytes
        if announced > self._max_body_bytes:
            raise ProtocolError(
                f"{message} and the half-received messages announce {announced} bytes; at most "
                f"{self._max_body_bytes} are allowed."
            )


def _is_chunk(frame: Frame) -> bool:
    """Return whether a frame has the number of chunks and the bytes that its body implies."""
    size = frame.message.body.size_bytes
    return frame.chunks == _chunks(size) and frame.payload_bytes == _share(size, frame.chunk)


def _is_coded_chunk(frame: Frame) -> bool:
    """Return whether a frame can be that chunk of its tensor: not longer than the chunk before encoding."""
    message, body = frame.message, frame.message.body
    labels = body.size_bytes - tensor_bytes(message)
    sizes = coded_chunks(body)
    if frame.chunks != len(sizes) or frame.payload_bytes == 0:
        return False
    at_end = labels if frame.chunk == frame.chunks - 1 else 0
    return at_end <= frame.payload_bytes <= sizes[frame.chunk] + OVERHEAD_BYTES + at_end


@dataclass(slots=True)
class _Begun:
    """A message of which some chunks have arrived."""

    message: Message
    chunk: int = 0  # the next one
    parts: list[memoryview] = field(default_factory=list)

    def keep(self, frame: Frame) -> None:
        """Keep a frame's share of the body: unchanged or, if the body is large, in one buffer for all of it."""
        size = self.message.body.size_bytes
        if self.message.body.is_coded:
            # Each coded chunk is decoded alone and has to be one buffer; the in-memory transport may give several.
            self.parts.extend((end_to_end(frame.payload),) if frame.payload else ())
            return
        if size < LARGE_BODY_BYTES or not frame.payload:
            self.parts.extend(frame.payload)
            return
        if not self.parts:
            # The system allocates it page by page as chunks arrive, and frees it with the last reference.
            self.parts.append(memoryview(mmap.mmap(-1, size)))
        at = frame.chunk * CHUNK_BYTES
        for view in frame.payload:
            self.parts[0][at : at + view.nbytes] = view
            at += view.nbytes


def _with_buffers(message: Message, buffers: tuple[memoryview, ...]) -> Message:
    body = message.body
    if body.buffers == buffers:
        return message
    return Message(
        message.kind,
        message.epoch,
        message.iteration,
        message.micro_batch,
        message.samples,
        message.batch_samples,
        Body(body.size_bytes, buffers, body.dtype, body.shape, body.encoding, parts=body.parts),
    )
