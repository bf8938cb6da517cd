"""Frames as a broken or hostile peer might send them: good ones, damaged in every way that we could think of."""

from __future__ import annotations

import random
import struct

from pipar.protocol.messages import Body, Kind, Message, json_body
from pipar.protocol.wire import HEADER_BYTES, cut_message, pack_frame

_EXTREMES = {1: "!B", 2: "!H", 4: "!I", 8: "!Q"}


def good_frames() -> list[bytes]:
    """Return frames of messages of every kind, whole ones and, with small chunks, parts of larger ones."""
    tensor = Body.of(struct.pack("<60f", *range(60)), struct.pack("<3i", 1, 2, 3), dtype="float32", shape=(3, 20))
    bodies = [tensor, Body.of(bytes(200), encoding="safetensors"), json_body({"name": "pi", "samples": 3}), Body()]
    messages = [Message(kind, 1, 2, 3, 3, 9, body) for kind in Kind for body in bodies]
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
    """Return a place in the data, most often in the header: the payload is taken as it is anyway."""
    end = min(len(data), HEADER_BYTES + 32) if chance.random() < 0.8 else len(data)
    return chance.randrange(max(1, end))


def _flip(chance: random.Random, data: bytearray, _: list[bytes]) -> None:
    if data:
        data[_place(chance, data)] ^= 1 << chance.randrange(8)


def _overwrite(chance: random.Random, data: bytearray, _: list[bytes]) -> None:
    """Put a number into the data that a field of its size may be taken aback by."""
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
