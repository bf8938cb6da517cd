"""The messages between a device and the server.

device                        server
HELLO          ->                        name, samples, and the device's profile if it has one
               <-          WELCOME       session, plan and the rest of its orders
               <-          MODEL         the device's part of the global model
               <-          ROUND         train this epoch
ACTIVATION     ->                        one micro-batch and its labels
               <-          GRADIENT      of its activations
END_EPOCH      ->                        'stop epoch': samples trained, loss if the device computed it, its uplink
MODEL          ->                        the trained part
               <-          PLAN          a new plan from now on, if there is one
STATE         <->                        momentum of layers that the plan moves, if momentum is kept
               <-          MODEL         the new global model's part
               <-          REPORT        the round is over: send its trace
TRACE          ->                        the epoch's spans
               <-          ROUND | STOP
STOP           ->                        goodbye
               <-          ABANDON       drop this epoch: it ended without the device
ABANDON        ->                        its answer, after which no message of that epoch follows
FAULT         <->                        why the sender closes the connection
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from pipar.errors import ProtocolError
from pipar.json_records import LongNumberError, parse_json
from pipar.wire.encodings import ALL, CODED, chunk_sizes


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


#: These open or end a connection. They have no number, overtake queued messages, and are not sent again.
UNNUMBERED = frozenset({Kind.HELLO, Kind.WELCOME, Kind.FAULT})

DTYPES = {"": 0, "float32": 1, "float64": 2}
ITEM_BYTES = {"": 1, "float32": 4, "float64": 8}
ENCODINGS = {"raw": 0, "json": 1, "safetensors": 2, "trace": 3, "changes": 4} | {
    name: number for number, name in enumerate(CODED, start=16)
}
LABEL_BYTES = 4  # int32, after the activations


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
class Body:
    """What a message carries: some buffers and how to read them.

    In a timing-only run a body has a size but no buffers, and travels like any other. The body of a coded tensor has
    `chunks` instead of buffers at its sender, and one buffer for each chunk at its receiver; its size is that before
    encoding.
    """

    size_bytes: int = 0
    buffers: tuple[memoryview, ...] = ()
    dtype: str = ""
    shape: tuple[int, ...] = ()
    encoding: str = "raw"
    chunks: Chunks | None = field(default=None, compare=False)

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


def chunk_count(body: Body) -> int:
    """Return how many chunks of a tensor a received body has; one if it is not coded."""
    return len(chunk_sizes(body.shape, ITEM_BYTES[body.dtype])) if body.encoding in CODED else 1


def tensor_bytes(message: Message) -> int:
    """Return how many bytes of the body are the tensor; raise ProtocolError if body and header do not agree.

    The tensor of an ACTIVATION is followed by its labels, one int32 per sample.
    """
    body = message.body
    size = math.prod(body.shape) * ITEM_BYTES[body.dtype]
    labels = message.samples * LABEL_BYTES if message.kind is Kind.ACTIVATION else 0
    if not body.dtype or body.encoding not in ALL or size + labels != body.size_bytes:
        raise ProtocolError(
            f"{message} carries {body.size_bytes} bytes, but its header says {body.dtype or 'no dtype'} "
            f"of shape {body.shape} and {message.samples} samples."
        )
    if size == 0 or not body.shape or body.shape[0] != message.samples:
        raise ProtocolError(f"{message} says {message.samples} samples, but its shape is {body.shape}.")
    return size
