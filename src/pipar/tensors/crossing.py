"""What crosses a cut if it is more than one tensor: each is encoded separately, and some have no gradient.

A single tensor crosses as `tensors` sends it. Of several, integers travel as integers, the output of a ReLU is sent
sparse if the plan says so, and only tensors that the device's weights have an effect on get their gradients back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipar.errors import ProtocolError
from pipar.execution.work import Place
from pipar.tensors.bodies import EncodingErrors, not_zero
from pipar.tensors.relu_outputs import is_rectified
from pipar.tensors.torch_device import to_host
from pipar.wire.encodings import is_sparse, row_values
from pipar.wire.lossy import Lossy
from pipar.wire.messages import (
    PART_DTYPES,
    PART_ITEM_BYTES,
    SEVERAL,
    Body,
    Chunks,
    Message,
    Payload,
    TensorPart,
    coded_chunks,
    tensor_bytes,
)
from pipar.wire.tensor_codec import decode, encode

CROSSING_DTYPES = {name: getattr(torch, name) for name in PART_DTYPES}
_DTYPE_NAMES = {dtype: name for name, dtype in CROSSING_DTYPES.items()}


@dataclass(frozen=True)
class Received:
    """The tensors of one micro-batch at the server, and how the device described them."""

    tensors: tuple[Tensor, ...]
    parts: tuple[TensorPart, ...]


def part_of(tensor: Tensor) -> TensorPart:
    """Return the description of a tensor that a device computed."""
    has_gradient = tensor.requires_grad
    return TensorPart(
        tuple(tensor.shape),
        _DTYPE_NAMES[tensor.dtype],
        has_gradient=has_gradient,
        is_rectified=has_gradient and is_rectified(tensor),
    )


def chunk_bytes(parts: Sequence[TensorPart]) -> list[int]:
    """Return the bytes of each chunk of several tensors before encoding."""
    return coded_chunks(Body(encoding=SEVERAL, parts=tuple(parts)))


def activation_body(
    tensors: Sequence[Tensor], targets: Sequence[memoryview], encoding: str, errors: EncodingErrors, place: Place
) -> Body:
    """Return a body with several tensors and, after them, their targets; its first chunk is encoded."""
    encoders = []
    for number, tensor in enumerate(tensors):
        part = part_of(tensor)
        part = replace(part, encoding=part.encoding_for(encoding))
        encoders.append(_Encoder.of(tensor, part, None, errors.of(tensor, part.encoding, place, number)))
    return _body(encoders, targets)


def read_activations(message: Message, encoding: str) -> Received:
    """Return the tensors of a message; raise ProtocolError unless they have the agreed encodings."""
    _check(message, encoding)
    tensors = _read(message, [None] * len(message.body.parts))
    for tensor, part in zip(tensors, message.body.parts, strict=True):
        tensor.requires_grad_(part.has_gradient)
    return Received(tuple(tensors), message.body.parts)


def gradient_parts(parts: Sequence[TensorPart]) -> list[TensorPart]:
    """Return the descriptions of the activations whose gradients go back; raise ProtocolError if there are none."""
    wanted = [part for part in parts if part.has_gradient]
    if not wanted:
        raise ProtocolError("The device sent several tensors, and asks for the gradient of none of them.")
    return wanted


def gradient_body(received: Received, encoding: str, errors: EncodingErrors, place: Place) -> Body:
    """Return a body with the gradients of the tensors that have one."""
    encoders = []
    for number, (tensor, part) in enumerate(zip(received.tensors, received.parts, strict=True)):
        if not part.has_gradient:
            continue
        coding = part.encoding_for(encoding)
        # A tensor that has no effect on the loss of this micro-batch has no gradient.
        gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        kept = not_zero(tensor) if is_sparse(coding) else None
        lossy = errors.of(tensor, coding, place, number)
        encoders.append(_Encoder.of(gradient, replace(part, encoding=coding), kept, lossy))
    return _body(encoders, [])


def read_gradients(message: Message, encoding: str, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the outputs that have one; raise ProtocolError if the message has others."""
    wanted = [output for output in outputs if output.requires_grad]
    expected = [replace(part, encoding=part.encoding_for(encoding)) for part in map(part_of, wanted)]
    if list(message.body.parts) != expected:
        raise ProtocolError(f"{message} has other tensors than the gradients of its activations.")
    kept = [
        not_zero(output).numpy() if is_sparse(part.encoding) else None
        for output, part in zip(wanted, expected, strict=True)
    ]
    return _read(message, kept)


def _check(message: Message, encoding: str) -> None:
    for part in message.body.parts:
        if part.encoding != part.encoding_for(encoding):
            raise ProtocolError(f"{message} has a tensor that is encoded as {part.encoding}, not as {encoding}.")


# --- bodies


@dataclass(frozen=True)
class _Encoder:
    """One tensor of a body, encoded chunk by chunk."""

    values: np.ndarray[Any, Any]
    part: TensorPart
    kept: np.ndarray[Any, Any] | None
    lossy: Lossy | None

    @classmethod
    def of(cls, tensor: Tensor, part: TensorPart, kept: Tensor | None, lossy: Lossy | None) -> _Encoder:
        values = to_host(tensor).contiguous().numpy().reshape(-1)
        return cls(values, part, None if kept is None else kept.numpy().reshape(-1), lossy)

    def chunk(self, start: int, end: int) -> tuple[memoryview | bytes, ...]:
        values = self.values[start:end]
        if self.part.encoding == "raw":
            return (values.data.cast("B"),)
        if start == 0 and self.lossy is not None:
            self.lossy.begin()
        kept = None if self.kept is None else self.kept[start:end]
        return encode(values, self.part.encoding, kept=kept, row=row_values(self.part.shape), lossy=self.lossy)


def _body(encoders: Sequence[_Encoder], trailing: Sequence[memoryview]) -> Body:
    places = [
        (encoder, bounds) for encoder in encoders for bounds in pairwise([0, *accumulate(encoder.part.chunk_sizes)])
    ]
    chunks = Chunks(len(places), partial(_payload, places, trailing))
    chunks.add(chunks.encode_next())
    parts = tuple(encoder.part for encoder in encoders)
    size = sum(part.size_bytes for part in parts) + sum(view.nbytes for view in trailing)
    return Body(size, encoding=SEVERAL, chunks=chunks, parts=parts)


def _payload(places: list[tuple[_Encoder, tuple[int, int]]], trailing: Sequence[memoryview], number: int) -> Payload:
    encoder, bounds = places[number]
    return Payload.of(*encoder.chunk(*bounds), *(trailing if number == len(places) - 1 else []))


def _read(message: Message, kept: Sequence[np.ndarray[Any, Any] | None]) -> list[Tensor]:
    """Return the tensors of a body; memory for each is allocated only after the one before it was correct."""
    body = message.body
    trailing = body.size_bytes - tensor_bytes(message)
    *payloads, last = body.buffers
    left = iter([*payloads, last[: last.nbytes - trailing]])
    return [_decoded(part, left, keeps) for part, keeps in zip(body.parts, kept, strict=True)]


def _decoded(part: TensorPart, payloads: Any, kept: np.ndarray[Any, Any] | None) -> Tensor:
    pieces = []
    flat = None if kept is None else kept.reshape(-1)
    start = 0
    for size in part.chunk_sizes:
        end = start + size
        pieces.append(_decoded_chunk(part, next(payloads), size, None if flat is None else flat[start:end]))
        start = end
    values = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return torch.from_numpy(values.reshape(part.shape))


def _decoded_chunk(
    part: TensorPart, payload: memoryview, size: int, kept: np.ndarray[Any, Any] | None
) -> np.ndarray[Any, Any]:
    if part.encoding != "raw":
        out = np.empty(size, part.dtype)
        decode(payload, part.encoding, out, kept=kept, row=row_values(part.shape))
        return out
    if payload.nbytes != size * PART_ITEM_BYTES[part.dtype]:
        raise ProtocolError(f"The peer sent {payload.nbytes} bytes for {size} values of {part.dtype}.")
    read = np.frombuffer(payload, np.uint8).copy()
    # Any byte but 0 and 1 would be no boolean.
    return read != 0 if part.dtype == "bool" else read.view(part.dtype)
