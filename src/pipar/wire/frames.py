"""Messages to frames and back: bytes in, messages out, no socket. `docs/wire.md` describes the bytes.

A message longer than a chunk goes as several frames with the same sequence number, so that control
messages overtake it and no limit on the size of a frame binds. Each chunk of a coded tensor is coded for itself, so
that the first ones leave before the last ones are encoded; the header has the size before encoding, so that nothing
that is small on the wire is larger in memory than it may be.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from pipar.errors import ProtocolError, VersionError
from pipar.wire.encodings import CODED, OVERHEAD_BYTES, chunk_sizes
from pipar.wire.messages import DTYPES, ENCODINGS, ITEM_BYTES, Body, Kind, Message, end_to_end, tensor_bytes

VERSION = 3
MAGIC = b"PP"
CHUNK_BYTES = 1_000_000
#: As much as the header can count in chunks: more than any model we know of.
MAX_BODY_BYTES = 65535 * CHUNK_BYTES
MAX_DIMENSIONS = 8
#: A sender has one message under way, and one that overtakes it.
MAX_HALF_RECEIVED = 4
#: Enough for what is neither a tensor nor a model.
SMALL_BODY_BYTES = 1_000_000
#: From here on a body is put together as its chunks come.
LARGE_BODY_BYTES = 32_000_000

_FIXED = struct.Struct("!2sBBIIIIIHIIBBHHBQ")
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
    sequence: int  # of the sender's numbered messages; 0 if it has no number
    acknowledged: int  # up to here the sender has the receiver's numbered messages
    chunk: int
    chunks: int
    payload: tuple[memoryview, ...]
    payload_bytes: int
    came_at: float | None = field(default=None, compare=False)  # where a transport knows it better than its reader

    @property
    def size_bytes(self) -> int:
        """What this frame puts on the wire."""
        return _FIXED.size + 4 * len(self.message.body.shape) + self.payload_bytes

    def only(self) -> Message:
        """Return the message that this frame alone carries."""
        if self.chunks != 1 or self.payload_bytes != self.message.body.size_bytes:
            raise ProtocolError(f"{self.message} came in pieces where one frame is to hold it.")
        return _with_buffers(self.message, self.payload)


def check_fits(message: Message) -> None:
    """Raise if a message does not fit frames: where it is posted, not in a task behind a queue."""
    body = message.body
    if message.micro_batch > 65535 or body.size_bytes > MAX_BODY_BYTES or len(body.shape) > MAX_DIMENSIONS:
        raise ProtocolError(
            f"{message} does not fit a frame: at most 65535 micro-batches, {MAX_BODY_BYTES} bytes and "
            f"{MAX_DIMENSIONS} dimensions can be sent."
        )


def cut_message(message: Message, session: int, sequence: int, acknowledged: int = 0) -> Iterator[Frame]:
    """Yield the frames of a message that fits, as far as they are encoded; buffers are shared, not copied."""
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
    """Return into how many chunks a body of so many bytes is cut."""
    return max(1, -(-size // CHUNK_BYTES))


def _share(size: int, chunk: int) -> int:
    """Return how many bytes of a body one of its chunks carries."""
    return min(CHUNK_BYTES, size - chunk * CHUNK_BYTES)


def _payloads(buffers: tuple[memoryview, ...]) -> Iterator[tuple[memoryview, ...]]:
    """Yield the views that hold each chunk of the buffers laid end to end."""
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
    """Return the bytes of a frame: our only copy between a tensor and gRPC."""
    message, body = frame.message, frame.message.body
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
        len(body.shape),
        body.size_bytes,
    )
    return b"".join((fixed, struct.pack(f"!{len(body.shape)}I", *body.shape), *frame.payload))


def unpack_frame(data: bytes, came_at: float | None = None) -> Frame:
    """Return the frame that the bytes say, its payload a view of them; a breach of the format is a ProtocolError."""
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
        raise VersionError(f"The peer speaks version {version} of the protocol; this is version {VERSION}.")
    if kind not in _KINDS or dtype not in _DTYPE_NAMES or encoding not in _ENCODING_NAMES:
        raise ProtocolError(
            f"The peer sent a frame of kind {kind}, dtype {dtype}, encoding {encoding}: one is unknown."
        )
    start = _FIXED.size + 4 * dimensions
    if len(data) < start or dimensions > MAX_DIMENSIONS or not chunk < chunks or body_bytes > MAX_BODY_BYTES:
        raise ProtocolError(
            f"The peer sent a frame with a damaged header (chunk {chunk} of {chunks}, {dimensions} dimensions, "
            f"{body_bytes} bytes)."
        )
    shape = struct.unpack_from(f"!{dimensions}I", data, _FIXED.size)
    _check_shape(shape, dtype, encoding, body_bytes)
    view = memoryview(data)[start:]
    payload = (view,) if view.nbytes else ()
    body = Body(body_bytes, (), _DTYPE_NAMES[dtype], shape, _ENCODING_NAMES[encoding])
    message = Message(_KINDS[kind], epoch, iteration, micro_batch, samples, batch_samples, body)
    return Frame(message, session, sequence, acknowledged, chunk, chunks, payload, view.nbytes, came_at)


def _check_shape(shape: tuple[int, ...], dtype: int, encoding: int, body_bytes: int) -> None:
    """Raise if a tensor of this shape is empty, or cannot be in the body; that it fills it is checked by its reader."""
    if not shape:
        return
    needed = math.prod(shape) * ITEM_BYTES[_DTYPE_NAMES[dtype]]
    if needed == 0 or (encoding == ENCODINGS["raw"] and needed > body_bytes):
        raise ProtocolError(f"The peer announces a tensor of shape {shape} in a body of {body_bytes} bytes.")


#: Returns how many bytes the body of a message may have, from what its header says.
BodyLimit = Callable[[Message], int]


def body_limit(by_kind: Mapping[Kind, int], others: int = SMALL_BODY_BYTES) -> BodyLimit:
    """Return a limit for each kind of message; those that are not named are small."""
    limits = dict(by_kind)
    return lambda message: limits.get(message.kind, others)


class Assembler:
    """Frames in, messages out; the chunks of one message may have others between them.

    What it holds of half-received messages is bounded, and looked at before anything is kept: in number, and together
    by `max_body_bytes`. `limit`, which may be set at any time, bounds each message by its header.
    """

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES, limit: BodyLimit | None = None) -> None:
        self.limit = limit
        self._max_body_bytes = max_body_bytes
        self._begun: dict[int, _Begun] = {}  # by sequence number

    @property
    def held_bytes(self) -> int:
        """How many bytes of half-received messages are here."""
        return sum(part.nbytes for begun in self._begun.values() for part in begun.parts)

    def reset(self) -> None:
        """Forget messages of which only a part has come: they come again from their beginning."""
        self._begun.clear()

    def feed(self, frame: Frame) -> Message | None:
        """Return the message that this frame completes, or None if chunks are still to come."""
        self._check_size(frame.message)
        begun = self._begun.pop(frame.sequence, None) or _Begun(frame.message)
        in_place = (frame.chunk, frame.message) == (begun.chunk, begun.message)
        is_coded = frame.message.body.encoding in CODED
        fits = _is_coded_chunk(frame) if is_coded else _is_chunk(frame)
        if not in_place or not fits:
            raise ProtocolError(f"{frame.message} came with chunk {frame.chunk} of {frame.chunks} out of place.")
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
            raise ProtocolError(f"{message} announces {size} bytes; at most {most} are taken.")

    def _check_room(self, message: Message) -> None:
        if len(self._begun) >= MAX_HALF_RECEIVED:
            raise ProtocolError(
                f"{message} was begun with {MAX_HALF_RECEIVED} others half received, which is the most."
            )
        announced = sum(begun.message.body.size_bytes for begun in self._begun.values()) + message.body.size_bytes
        if announced > self._max_body_bytes:
            raise ProtocolError(
                f"{message} and those half received announce {announced} bytes; "
                f"at most {self._max_body_bytes} are held."
            )


def _is_chunk(frame: Frame) -> bool:
    """Return whether a frame holds the share of its body that such a chunk has."""
    size = frame.message.body.size_bytes
    return frame.chunks == _chunks(size) and frame.payload_bytes == _share(size, frame.chunk)


def _is_coded_chunk(frame: Frame) -> bool:
    """Return whether a frame may hold that chunk of its tensor: no more bytes than the chunk has before encoding."""
    message, body = frame.message, frame.message.body
    labels = body.size_bytes - tensor_bytes(message)
    item = ITEM_BYTES[body.dtype]
    sizes = chunk_sizes(body.shape, item)
    if frame.chunks != len(sizes) or frame.payload_bytes == 0:
        return False
    at_end = labels if frame.chunk == frame.chunks - 1 else 0
    return at_end <= frame.payload_bytes <= sizes[frame.chunk] * item + OVERHEAD_BYTES + at_end


@dataclass(slots=True)
class _Begun:
    """A message of which some chunks have come."""

    message: Message
    chunk: int = 0  # the next one
    parts: list[memoryview] = field(default_factory=list)

    def keep(self, frame: Frame) -> None:
        """Keep the share of the body that a frame carries: as it came or, of a large body, in one buffer for all."""
        size = self.message.body.size_bytes
        if self.message.body.encoding in CODED:
            # A coded chunk is read alone, so it is one buffer; in memory it may come in several.
            self.parts.extend((end_to_end(frame.payload),) if frame.payload else ())
            return
        if size < LARGE_BODY_BYTES or not frame.payload:
            self.parts.extend(frame.payload)
            return
        if not self.parts:
            # The system gives it page by page as chunks come, and has it again as soon as nobody holds it.
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
        Body(body.size_bytes, buffers, body.dtype, body.shape, body.encoding),
    )
