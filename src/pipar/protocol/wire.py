"""Messages to frames and back: bytes in, messages out, no socket. `docs/wire.md` describes the bytes.

A message longer than a chunk goes as several frames with the same sequence number, so that control
messages overtake it and no limit on the size of a frame binds.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from pipar.errors import ProtocolError
from pipar.protocol.messages import DTYPES, ENCODINGS, Body, Kind, Message

VERSION = 1
MAGIC = b"PP"
CHUNK_BYTES = 1_000_000
#: As much as the header can count in chunks: more than any model we know of.
MAX_BODY_BYTES = 65535 * CHUNK_BYTES

_FIXED = struct.Struct("!2sBBIIIIHIIBBHHBQ")
#: Of every frame; four more for each dimension of a tensor.
HEADER_BYTES = _FIXED.size
_KINDS = {int(kind): kind for kind in Kind}
_DTYPE_NAMES = {number: name for name, number in DTYPES.items()}
_ENCODING_NAMES = {number: name for name, number in ENCODINGS.items()}


@dataclass(frozen=True, slots=True)
class Frame:
    """One chunk of one message: header fields, and its share of the body's bytes (none if it is hollow)."""

    message: Message  # its body describes the whole: size, dtype, shape, encoding
    session: int
    sequence: int
    chunk: int
    chunks: int
    payload: tuple[memoryview, ...]
    payload_bytes: int

    @property
    def size_bytes(self) -> int:
        """What this frame puts on the wire."""
        return _FIXED.size + 4 * len(self.message.body.shape) + self.payload_bytes


def cut_message(message: Message, session: int, sequence: int) -> Iterator[Frame]:
    """Return the frames of a message; buffers are shared, not copied."""
    # Here and not where bytes are made: whoever sends the message is told, not a task behind a queue.
    if message.micro_batch > 65535 or message.body.size_bytes > MAX_BODY_BYTES or len(message.body.shape) > 255:
        raise ProtocolError(
            f"{message} does not fit a frame: at most 65535 micro-batches and {MAX_BODY_BYTES} bytes can be sent."
        )
    return _cut(message, session, sequence)


def _cut(message: Message, session: int, sequence: int) -> Iterator[Frame]:
    size = message.body.size_bytes
    chunks = max(1, math.ceil(size / CHUNK_BYTES))
    if chunks == 1:
        yield Frame(message, session, sequence, 0, 1, message.body.buffers, size)
        return
    for chunk in range(chunks):
        start = chunk * CHUNK_BYTES
        length = min(CHUNK_BYTES, size - start)
        payload = () if message.body.hollow else _slice(message.body.buffers, start, length)
        yield Frame(message, session, sequence, chunk, chunks, payload, length)


def _slice(buffers: tuple[memoryview, ...], start: int, length: int) -> tuple[memoryview, ...]:
    """Return the views that hold bytes start..start+length of the buffers laid end to end."""
    views = []
    for buffer in buffers:
        if start < buffer.nbytes and length:
            view = buffer[start : start + length]
            views.append(view)
            length -= view.nbytes
        start = max(0, start - buffer.nbytes)
    return tuple(views)


def pack_frame(frame: Frame) -> bytes:
    """Return the bytes of a frame: the only copy between a tensor and the socket."""
    message, body = frame.message, frame.message.body
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        message.kind,
        frame.session,
        frame.sequence,
        message.epoch,
        message.iteration,
        message.micro_batch,
        message.samples,
        message.batch_samples,
        DTYPES[body.dtype],
        ENCODINGS[body.encoding],
        frame.chunk,
        frame.chunks,
        len(body.shape),
        body.size_bytes,
    )
    return b"".join((fixed, struct.pack(f"!{len(body.shape)}I", *body.shape), *frame.payload))


def unpack_frame(data: bytes) -> Frame:
    """Return the frame that the bytes say, its payload a view of them; a breach of the format is a ProtocolError."""
    if len(data) < _FIXED.size or data[:2] != MAGIC:
        raise ProtocolError("The peer sent bytes that are not a pipar frame.")
    (_, version, kind, session, sequence, epoch, iteration, micro_batch, samples, batch_samples, *rest) = (
        _FIXED.unpack_from(data)
    )
    dtype, encoding, chunk, chunks, dimensions, body_bytes = rest
    if version != VERSION:
        raise ProtocolError(f"The peer speaks version {version} of the protocol; this is version {VERSION}.")
    if kind not in _KINDS or dtype not in _DTYPE_NAMES or encoding not in _ENCODING_NAMES:
        raise ProtocolError(
            f"The peer sent a frame of kind {kind}, dtype {dtype}, encoding {encoding}: one is unknown."
        )
    start = _FIXED.size + 4 * dimensions
    if len(data) < start or not chunk < chunks or body_bytes > MAX_BODY_BYTES:
        raise ProtocolError(f"The peer sent a frame with a damaged header (chunk {chunk} of {chunks}).")
    shape = struct.unpack_from(f"!{dimensions}I", data, _FIXED.size)
    view = memoryview(data)[start:]
    payload = (view,) if view.nbytes else ()
    body = Body(body_bytes, (), _DTYPE_NAMES[dtype], shape, _ENCODING_NAMES[encoding])
    message = Message(_KINDS[kind], epoch, iteration, micro_batch, samples, batch_samples, body)
    return Frame(message, session, sequence, chunk, chunks, payload, view.nbytes)


class Assembler:
    """Frames in, messages out; the chunks of one message may have others between them."""

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._begun: dict[int, _Begun] = {}  # by sequence number

    def feed(self, frame: Frame) -> Message | None:
        """Return the message that this frame completes, or None if chunks are still to come."""
        size = frame.message.body.size_bytes
        if size > self._max_body_bytes:
            raise ProtocolError(f"{frame.message} announces {size} bytes; at most {self._max_body_bytes} are taken.")
        begun = self._begun.pop(frame.sequence, None)
        if frame.chunks == 1 and begun is None and frame.payload_bytes == size:
            return _with_buffers(frame.message, frame.payload)
        begun = begun or _Begun(frame.message, frame.chunks)
        begun.received += frame.payload_bytes
        last = frame.chunk == frame.chunks - 1
        belongs = (frame.chunk, frame.chunks, frame.message) == (begun.chunk, begun.chunks, begun.message)
        if not belongs or begun.received > size or (last and begun.received != size):
            raise ProtocolError(f"{frame.message} came with chunk {frame.chunk} of {frame.chunks} out of place.")
        begun.parts.extend(frame.payload)
        if last:
            return _with_buffers(frame.message, tuple(begun.parts))
        begun.chunk += 1
        self._begun[frame.sequence] = begun
        return None


@dataclass(slots=True)
class _Begun:
    """A message of which some chunks have come."""

    message: Message
    chunks: int
    chunk: int = 0  # the next one
    received: int = 0
    parts: list[memoryview] = field(default_factory=list)


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
        Body(body.size_bytes, buffers, body.dtype, body.shape, body.encoding),
    )
