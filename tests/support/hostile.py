"""Hostile but well-formed devices: the real program, over a link that changes what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pipar.transport.interface import Transport
from pipar.wire.frames import Frame, cut_message
from pipar.wire.messages import Body, Kind, Message, json_body

#: Returns what a device sends in place of one of its messages.
Tamper = Callable[[Message], Message]


class TamperedLink:
    """A device's end of a link on which its messages of one frame are replaced."""

    def __init__(self, link: Transport, tamper: Tamper) -> None:
        self._link = link
        self._tamper = tamper
        self.read, self.close = link.read, link.close

    async def write(self, frame: Frame) -> None:
        if frame.chunks == 1:
            said = self._tamper(frame.only())
            (frame,) = cut_message(said, frame.session, frame.sequence, frame.acknowledged)
        await self._link.write(frame)


def says(kind: Kind, epoch: int = 0, **content: object) -> Tamper:
    """Replace these keys in the JSON of a kind of message; a raw string of digits stands for a number."""

    def tamper(message: Message) -> Message:
        if message.kind is not kind or message.epoch != epoch:
            return message
        said = json.loads(bytes(message.body.contiguous()))
        return replace(message, body=json_body({**said, **content}))

    return tamper


def at_iteration(number: int, change: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]) -> Tamper:
    """Change the activations and labels of one iteration of every epoch."""

    def tamper(message: Message) -> Message:
        if message.kind is not Kind.ACTIVATION or message.iteration != number:
            return message
        values, labels = read_activation(message)
        values, labels = change(values, labels)
        body = Body.of(values.tobytes(), labels.tobytes(), dtype=message.body.dtype, shape=values.shape)
        return replace(message, samples=len(labels), body=body)

    return tamper


def read_activation(message: Message) -> tuple[np.ndarray, np.ndarray]:
    """Return copies of the raw activations of a message, and of its labels."""
    content = bytes(message.body.contiguous())
    cut = len(content) - 4 * message.samples
    values = np.frombuffer(content[:cut], message.body.dtype).reshape(message.body.shape)
    return values.copy(), np.frombuffer(content[cut:], "int32").copy()


def only_one_sample(values: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return values[:1], labels[:1]


def times(factor: float) -> Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return a change that multiplies the activations."""
    return lambda values, labels: (values * values.dtype.type(factor), labels)
