"""Frames as a broken or hostile peer might send them: valid ones, damaged in many ways."""

from __future__ import annotations

import random
import struct
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipar.wire.encodings import CODED, chunk_sizes, row_values
from pipar.wire.frames import HEADER_BYTES, cut_message, pack_frame
from pipar.wire.lossy import Lossy
from pipar.wire.messages import Body, Chunks, Kind, Message, Payload, json_body
from pipar.wire.model_changes import CHANGED, SAME, WHOLE, encode_changes
from pipar.wire.tensor_codec import encode

_EXTREMES = {1: "!B", 2: "!H", 4: "!I", 8: "!Q"}


#: The model that the receiver of changes has.
BASE: dict[str, NDArray[Any]] = {
    "bias": np.arange(8, dtype=np.float32),
    "count": np.array(3),
    "weight": np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16),
}


def coded_body(values: NDArray[Any], encoding: str, labels: bytes) -> Body:
    """Return a coded tensor with all of its chunks, followed by labels."""
    bounds = [0, *accumulate(chunk_sizes(values.shape, values.itemsize))]
    flat, row, lossy = values.reshape(-1), row_values(values.shape), Lossy()
    payloads = [encode(flat[start:end], encoding, row=row, lossy=lossy) for start, end in pairwise(bounds)]
    payloads[-1] = (*payloads[-1], labels)
    chunks = Chunks(len(payloads), lambda _: Payload(0))
    for buffers in payloads:
        chunks.add(Payload.of(*buffers))
    size = values.nbytes + len(labels)
    return Body(size, dtype=values.dtype.name, shape=values.shape, encoding=encoding, chunks=chunks)


def changes_bodies() -> list[Body]:
    """Return models as changes: an encoded one, and every form followed by zero bytes."""
    changed = {**BASE, "weight": np.nextafter(BASE["weight"], np.float32(2))}
    forms = bytes((WHOLE, SAME, CHANGED))
    return [Body.of(*encode_changes(changed, BASE), encoding="changes"), Body.of(forms + bytes(32), encoding="changes")]


def good_frames() -> list[bytes]:
    """Return frames of messages of every kind, whole ones and, with small chunks, parts of larger ones."""
    rectified = np.maximum(0, np.sin(np.arange(120, dtype=np.float32))).reshape(6, 20)
    tensor = Body.of(struct.pack("<60f", *range(60)), struct.pack("<3i", 1, 2, 3), dtype="float32", shape=(3, 20))
    bodies = [tensor, Body.of(bytes(200), encoding="safetensors"), json_body({"name": "pi", "samples": 3}), Body()]
    messages = [Message(kind, 1, 2, 3, 3, 9, body) for kind in Kind for body in bodies]
    labels = struct.pack("<3i", 1, 2, 3)
    messages += [Message(Kind.ACTIVATION, 1, 2, 3, 3, 9, coded_body(rectified[:3], one, labels)) for one in CODED]
    messages += [Message(Kind.GRADIENT, 1, 2, 3, 3, 9, coded_body(rectified[:3], one, b"")) for one in CODED]
    messages += [Message(Kind.ACTIVATION, 1, 2, 3, 6, 9, coded_body(rectified, "sparse-planes", 2 * labels))]
    messages += [Message(Kind.MODEL, 1, body=body) for body in changes_bodies()]
    return [
        pack_frame(frame)
        for sequence, message in enumerate(messages, start=1)
        for frame in cut_message(message, 7, sequence)
    ]


def damaged(chance: random.Random, frames: list[bytes]) -> bytes:
    """Return one of the frames, damaged in some of the ways, or none."""
    data = bytearray(chance.choice(frames))
    for _ in range(chance.choice((0, 1, 1, 1, 2, 5))):
        chance.choice((_flip, _overwrite, _cut, _grow, _splice))(chance, data, frames)
    return bytes(data)


def _place(chance: random.Random, data: bytearray) -> int:
    """Return a position in the data, most often in the header: most payloads are valid anyway."""
    end = min(len(data), HEADER_BYTES + 32) if chance.random() < 0.8 else len(data)
    return chance.randrange(max(1, end))


def _flip(chance: random.Random, data: bytearray, _: list[bytes]) -> None:
    if data:
        data[_place(chance, data)] ^= 1 << chance.randrange(8)


def _overwrite(chance: random.Random, data: bytearray, _: list[bytes]) -> None:
    """Put a number into the data that is an edge case for a field of its size."""
    size, code = chance.choice(list(_EXTREMES.items()))
    most = (1 << 8 * size) - 1
    number = chance.choice((0, 1, 2, most, most - 1, most // 2, most // 2 + 1, chance.randint(0, most)))
    place = _place(chance, data)
    data[place : place + size] = struct.pack(code, number)


def _cut(chance: random.Random, data: bytearray, _: list[bytes]) -> None:
    del data[_place(chance, data) :]


def _grow(chance: random.Random, data: bytearray, _: list[bytes]) -> None:
    data += chance.randbytes(chance.choice((1, 7, 64, 2000)))


def _splice(chance: random.Random, data: bytearray, frames: list[bytes]) -> None:
    place = _place(chance, data)
    data[place:] = chance.choice(frames)[place:]
