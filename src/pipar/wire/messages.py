"""The messages between a device and the server.

device                        server
HELLO          ->                        name, samples, and the device's profile if it has one
PROBE         <->                        frames that measure the link, if the device's HELLO allows it
               <-          WELCOME       session, plan and the rest of its orders
               <-          MODEL         the device's part of the global model
               <-          ROUND         train this epoch
ACTIVATION     ->                        one micro-batch and its labels, or the numbers of activations sent before
               <-          GRADIENT      of its activations; empty if the device has nothing to train
NORM          <->                        squared norm of its gradient after a batch, if they are clipped together
END_EPOCH      ->                        'stop epoch': samples trained, loss if the device computed it, its uplink
MODEL          ->                        the trained part
               <-          PLAN          a new plan from now on, if there is one
STATE         <->                        optimiser state of layers that the plan moves, if it is kept
               <-          MODEL         the new global model's part
               <-          EVALUATE      the new global model, as far as the device does not have it
SCORES         ->                        how good it is on the device's own evaluation samples
               <-          REPORT        the round is over: send its trace
TRACE          ->                        the epoch's spans
               <-          ROUND | STOP
STOP           ->                        goodbye
               <-          ABANDON       drop this epoch: it ended without the device
ABANDON        ->                        its answer, after which no message of that epoch follows
FAULT         <->                        why the sender closes the connection
ALIVE          ->                        sent when nothing else is, if ROUND asks for it
               <-          ALIVE         its answer, unless something else was sent
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from pipar.errors import ProtocolError
from pipar.json_records import LongNumberError, parse_json
from pipar.wire.encodings import ALL, CODED, LOSSY, chunk_sizes, dense


class Kind(IntEnum):
    """The kind of a message; its number is sent."""

    HELLO = 1
    WELCOME = 2
    MODEL = 3
    ROUND = 4
    ACTIVATION = 5
    GRADIENT = 6
    END_EPOCH = 7
    REPORT = 8
    TRACE = 9
    STOP = 10
    FAULT = 11
    PLAN = 12
    STATE = 13
    ABANDON = 14
    ALIVE = 15
    NORM = 16
    EVALUATE = 17
    SCORES = 18
    PROBE = 19


#: These open, measure, keep or end a connection. They have no number, overtake queued messages, and are not sent again.
UNNUMBERED = frozenset({Kind.HELLO, Kind.WELCOME, Kind.FAULT, Kind.ALIVE, Kind.PROBE})

DTYPES = {"": 0, "float32": 1, "float64": 2}
ITEM_BYTES = {"": 1, "float32": 4, "float64": 8}
#: The encoding of a body with several tensors, each with a dtype and an encoding of its own.
SEVERAL = "tensors"
#: The dtypes of one of several tensors.
PART_DTYPES = {"float32": 1, "float64": 2, "bool": 3, "uint8": 4, "int8": 5, "int16": 6, "int32": 7, "int64": 8}
PART_ITEM_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float32": 4, "float64": 8}
ENCODINGS = {"raw": 0, "json": 1, "safetensors": 2, "trace": 3, "changes": 4, SEVERAL: 5, "kept": 6} | {
    name: number for number, name in enumerate(CODED, start=16)
}
LABEL_BYTES = 4  # int32, after the activations
COUNT_BYTES = 8  # float64, after the targets: what the whole batch counts, if that depends on its targets
_NORM_BYTES = 8
#: As for tensors of peers: the square of the largest norm that training needs.
_LARGEST_SQUARED_NORM = 1e36
NUMBER_BYTES = 4  # of an activation that was sent before


def _views(buffers: Iterable[memoryview | bytes | bytearray]) -> tuple[memoryview, ...]:
    """Return views of the buffers that are not empty; nothing is copied."""
    return tuple(memoryview(buffer).cast("B") for buffer in buffers if len(buffer))


@dataclass(frozen=True, slots=True)
class Payload:
    """The bytes of one chunk of a coded tensor, ready to be sent since `at`; only a size in timing-only runs."""

    size_bytes: int
    buffers: tuple[memoryview, ...] = ()
    at: float = 0.0

    @classmethod
    def of(cls, *buffers: memoryview | bytes) -> Payload:
        views = _views(buffers)
        return cls(sum(view.nbytes for view in views), views)


class Chunks:
    """The chunks of a coded tensor: those that are ready, and the function that encodes the others.

    A message is posted with its first chunk, and sent while the others are still being encoded.
    """

    __slots__ = ("_encode", "_next", "count", "ready")

    def __init__(self, count: int, encode: Callable[[int], Payload]) -> None:
        self.count = count
        self.ready: list[Payload] = []
        self._encode: Callable[[int], Payload] | None = encode
        self._next = 0  # to be encoded; chunks before it may be encoded but not in `ready` yet

    def encode_next(self) -> Payload:
        """Return the next chunk's bytes; the caller adds them when the time that encoding takes has passed."""
        assert self._encode is not None
        payload = self._encode(self._next)
        self._next += 1
        if self._next == self.count:
            self._encode = None  # frees the tensor
        return payload

    def add(self, payload: Payload, at: float = 0.0) -> None:
        self.ready.append(replace(payload, at=at))


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One of several tensors in a body: how to read it, and what an activation asks of its gradient.

    Only floating-point tensors can be encoded or have a gradient. The gradient of a rectified one, which a ReLU has
    computed, is needed only where it is not zero.
    """

    shape: tuple[int, ...]
    dtype: str
    encoding: str = "raw"
    has_gradient: bool = False
    is_rectified: bool = False

    @property
    def is_floating_point(self) -> bool:
        return self.dtype in ITEM_BYTES

    @property
    def size_bytes(self) -> int:
        """Its bytes before encoding."""
        return math.prod(self.shape) * PART_ITEM_BYTES[self.dtype]

    @property
    def chunk_sizes(self) -> list[int]:
        """The number of values in each of its chunks."""
        return chunk_sizes(self.shape, PART_ITEM_BYTES[self.dtype])

    def encoding_for(self, given: str) -> str:
        """Return the encoding that a plan's encoding means for this tensor, or for its gradient.

        Integers stay as they are, and what has no gradient is never rounded: a mask may have infinite values.
        """
        if not self.is_floating_point or (given in LOSSY and not self.has_gradient):
            return "raw"
        return given if self.is_rectified else dense(given)


@dataclass(frozen=True, slots=True)
class Body:
    """What a message carries: some buffers and how to read them.

    In a timing-only run a body has a size but no buffers, and travels like any other. The body of a coded tensor has
    `chunks` instead of buffers at its sender, and one buffer for each chunk at its receiver; its size is that before
    encoding. So has a body with several tensors, its `parts`, each of which is cut into chunks.
    """

    size_bytes: int = 0
    buffers: tuple[memoryview, ...] = ()
    dtype: str = ""
    shape: tuple[int, ...] = ()
    encoding: str = "raw"
    chunks: Chunks | None = field(default=None, compare=False)
    parts: tuple[TensorPart, ...] = ()

    @property
    def is_coded(self) -> bool:
        """Whether it is sent in the chunks of its tensors."""
        return self.encoding in CODED or self.encoding == SEVERAL

    @property
    def is_size_only(self) -> bool:
        return self.size_bytes > 0 and not self.buffers and self.chunks is None

    @classmethod
    def of(
        cls,
        *buffers: memoryview | bytes | bytearray,
        dtype: str = "",
        shape: tuple[int, ...] = (),
        encoding: str = "raw",
    ) -> Body:
        """Return a body over the given buffers; nothing is copied."""
        views = _views(buffers)
        return cls(sum(view.nbytes for view in views), views, dtype, shape, encoding)

    def contiguous(self) -> memoryview:
        """Return all bytes as one buffer; copies only if there are several."""
        return end_to_end(self.buffers)


def end_to_end(buffers: tuple[memoryview, ...]) -> memoryview:
    """Return buffers as one; copies only if there are several, to writable memory that tensors can use."""
    return buffers[0] if len(buffers) == 1 else memoryview(bytearray().join(buffers))


EMPTY = Body()


@dataclass(frozen=True, slots=True)
class Message:
    """One message: its kind, its micro-batch, and its body."""

    kind: Kind
    epoch: int = 0
    iteration: int = 0
    micro_batch: int = 0
    samples: int = 0  # in this micro-batch
    batch_samples: int = 0  # in the whole batch, so that the server can weight the micro-batch
    body: Body = EMPTY

    def __str__(self) -> str:
        return f"{self.kind.name}(epoch {self.epoch}, iteration {self.iteration}, micro-batch {self.micro_batch})"


@dataclass(frozen=True, slots=True)
class TargetSize:
    """The bytes of the targets after the activations: of each sample, and once in a message."""

    sample_bytes: int = LABEL_BYTES
    message_bytes: int = 0

    def of(self, samples: int) -> int:
        """Return the bytes in a message of this many samples."""
        return samples * self.sample_bytes + self.message_bytes


#: A label for each sample, as in most trainings.
LABELS = TargetSize()


@dataclass(frozen=True, slots=True)
class Reference:
    """A micro-batch of which the server has the activations: the content of its message."""

    samples: int
    batch_samples: int
    body: Body


def numbers_body(numbers: bytes | memoryview, count: bytes = b"") -> Body:
    """Return the content of ACTIVATION that refers to activations sent before: 32-bit numbers, little-endian."""
    return Body.of(numbers, count, encoding="kept")


def read_numbers(message: Message, count_bytes: int = 0) -> tuple[bytes, bytes]:
    """Return the numbers of activations that a message refers to, and what their batch counts, if it says so.

    Raise ProtocolError unless there is one number a sample.
    """
    body, size = message.body, message.samples * NUMBER_BYTES
    if body.encoding != "kept" or message.samples < 1 or body.size_bytes != size + count_bytes:
        raise ProtocolError(f"{message} does not refer to {message.samples} activations.")
    content = bytes(body.contiguous())
    return content[:size], content[size:]


def json_body(content: dict[str, Any]) -> Body:
    """Return a small body for control messages."""
    return Body.of(json.dumps(content, sort_keys=True).encode(), encoding="json")


def read_json(message: Message) -> dict[str, Any]:
    """Return the content of a control message; raise ProtocolError if it is not a JSON object."""
    try:
        content = parse_json(bytes(message.body.contiguous()))
    except LongNumberError as error:
        raise ProtocolError(f"{message} {error}.") from None
    except ValueError:
        raise ProtocolError(f"{message} does not carry valid JSON.") from None
    if not isinstance(content, dict):
        raise ProtocolError(f"{message} carries JSON of type {type(content).__name__}; an object is needed.")
    return content


def norm_body(squared: float) -> Body:
    """Return the content of NORM: the squared norm of one side's gradient."""
    return Body.of(struct.pack("<d", squared))


def read_norm(message: Message) -> float:
    """Return the squared norm in NORM; raise ProtocolError unless it is a number that a gradient may have."""
    content = bytes(message.body.contiguous()) if message.body.buffers else b""
    squared = struct.unpack("<d", content)[0] if len(content) == _NORM_BYTES else math.nan
    if not 0 <= squared <= _LARGEST_SQUARED_NORM:
        raise ProtocolError(
            f"{message} carries no squared norm from 0 to {_LARGEST_SQUARED_NORM:g}. Unless the device is faulty, the "
            "training has diverged: a smaller optimizer.learning_rate may help."
        )
    return float(squared)


def coded_chunks(body: Body) -> list[int]:
    """Return the bytes, before encoding, of each chunk of a body's tensors."""
    if body.encoding == SEVERAL:
        return [size * PART_ITEM_BYTES[part.dtype] for part in body.parts for size in part.chunk_sizes]
    item = ITEM_BYTES[body.dtype]
    return [size * item for size in chunk_sizes(body.shape, item)]


def chunk_count(body: Body) -> int:
    """Return how many chunks of tensors a received body has; one if it is not coded."""
    return len(coded_chunks(body)) if body.is_coded else 1


def tensor_bytes(message: Message) -> int:
    """Return how many bytes of the body are its tensors; raise ProtocolError if body and header do not agree.

    The tensors of an ACTIVATION are followed by its targets, at least a byte for each sample: only the task knows how
    many.
    """
    body = message.body
    if body.encoding == SEVERAL:
        return _several_bytes(message)
    size = math.prod(body.shape) * ITEM_BYTES[body.dtype]
    if not body.dtype or body.encoding not in ALL or not _has_room(message, size):
        raise ProtocolError(
            f"{message} carries {body.size_bytes} bytes, but its header says {body.dtype or 'no dtype'} "
            f"of shape {body.shape} and {message.samples} samples."
        )
    if size == 0 or not body.shape or body.shape[0] != message.samples:
        raise ProtocolError(f"{message} says {message.samples} samples, but its shape is {body.shape}.")
    return size


def _has_room(message: Message, tensors: int) -> bool:
    """Return whether a body has these bytes of tensors and, of an ACTIVATION, its targets."""
    targets = message.body.size_bytes - tensors
    return targets >= message.samples if message.kind is Kind.ACTIVATION else targets == 0


def _several_bytes(message: Message) -> int:
    body = message.body
    size = sum(part.size_bytes for part in body.parts)
    shapes = [part.shape for part in body.parts]
    if not _has_room(message, size):
        raise ProtocolError(
            f"{message} carries {body.size_bytes} bytes, but its header says tensors of shapes {shapes} and "
            f"{message.samples} samples."
        )
    if not shapes or not all(part.size_bytes and part.shape[0] == message.samples for part in body.parts):
        raise ProtocolError(f"{message} says {message.samples} samples, but its tensors have shapes {shapes}.")
    return size
