"""Messages to frames and back: bytes in, messages out, no socket. `docs/wire.md` describes the bytes.

A message longer than a chunk goes as several frames with the same sequence number, so that control
messages overtake it and no limit on the size of a frame binds.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from pipar.errors import ProtocolError
from pipar.protocol.messages import DTYPES, ENCODINGS, Body, Kind, Message

VERSION = 1
MAGIC = b"PP"
CHUNK_BYTES = 1_000_000
#: More than any model we know of; a peer cannot make us reserve more.
MAX_BODY_BYTES = 64 * 2**30

_FIXED = struct.Struct("!2sBBIIIIHIIBBHHBQ")
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
    """Yield the frames of a message; buffers are shared, not copied."""
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
        self._parts: dict[int, list[memoryview]] = {}
        self._received: dict[int, tuple[int, int]] = {}  # sequence -> (next chunk, bytes so far)

    def feed(self, frame: Frame) -> Message | None:
        """Return the message that this frame completes, or None if chunks are still to come."""
        size = frame.message.body.size_bytes
        if size > self._max_body_bytes:
            raise ProtocolError(f"{frame.message} announces {size} bytes; at most {self._max_body_bytes} are taken.")
        chunk, received = self._received.pop(frame.sequence, (0, 0))
        received += frame.payload_bytes
        last = frame.chunk == frame.chunks - 1
        if frame.chunk != chunk or received > size or (last and received != size):
            raise ProtocolError(f"{frame.message} came with chunk {frame.chunk} of {frame.chunks} out of place.")
        parts = self._parts.pop(frame.sequence, [])
        parts.extend(frame.payload)
        if last:
            return _with_buffers(frame.message, tuple(parts))
        self._parts[frame.sequence] = parts
        self._received[frame.sequence] = (chunk + 1, received)
        return None


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
