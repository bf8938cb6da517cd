"""Hostile but well-formed devices: the real program, over a link that changes what it says."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pipar.transport.interface import Transport
from pipar.wire.frames import Frame, cut_message
from pipar.wire.messages import LABEL_BYTES, Body, Kind, Message, json_body, norm_body

#: Returns the message that a hostile device sends instead of its own; the same one if it leaves it alone.
Tamper = Callable[[Message], Message]
#: Finite in float64, and beyond any number that a training needs.
HUGE = 1e200
LARGE = 1e12
_TRICKLE_S = 1.5


class TamperedLink:
    """A device's end of a link; while `tamper` returns a function, messages of one frame are replaced by it.

    `sent` is called with each frame of the device's own program.
    """

    def __init__(
        self,
        link: Transport,
        tamper: Callable[[], Tamper | None],
        tampered: Callable[[Message], None],
        sent: Callable[[Frame], None],
    ) -> None:
        self._link = link
        self._tamper = tamper
        self._tampered = tampered
        self._sent = sent

    async def read(self) -> Frame:
        return await self._link.read()

    async def close(self) -> None:
        await self._link.close()

    async def write(self, frame: Frame) -> None:
        self._sent(frame)
        tamper = self._tamper()
        if tamper is trickles:
            self._tampered(frame.message)
            await asyncio.sleep(_TRICKLE_S)
        elif tamper is not None and frame.chunks == 1 and frame.message.body.chunks is None:
            own = frame.only()
            said = tamper(own)
            if said is not own:
                self._tampered(own)
                frames = list(cut_message(said, frame.session, frame.sequence, frame.acknowledged))
                frame = frames[0] if len(frames) == 1 else frame
        await self._link.write(frame)


def _raw_activation(message: Message) -> tuple[np.ndarray, np.ndarray] | None:
    """Return copies of raw activations and their labels; None for another message."""
    if message.kind is not Kind.ACTIVATION or message.body.encoding != "raw":
        return None
    content = bytes(message.body.contiguous())
    cut = len(content) - LABEL_BYTES * message.samples
    values = np.frombuffer(content[:cut], message.body.dtype).reshape(message.body.shape)
    return values.copy(), np.frombuffer(content[cut:], "int32").copy()


def _with_activation(message: Message, values: np.ndarray, labels: np.ndarray) -> Message:
    body = Body.of(values.tobytes(), labels.tobytes(), dtype=message.body.dtype, shape=values.shape)
    return replace(message, samples=len(labels), body=body)


def computes_huge_activations(message: Message) -> Message:
    """Send finite activations with which no model can be trained; the device's part computes them."""
    return message


def sends_one_sample(message: Message) -> Message:
    """Send only one sample of each micro-batch: batch normalisation needs two."""
    found = _raw_activation(message)
    if found is None or message.samples == 1:
        return message
    return _with_activation(message, found[0][:1], found[1][:1])


def sends_impossible_labels(message: Message) -> Message:
    """Send labels of classes that do not exist."""
    found = _raw_activation(message)
    return message if found is None else _with_activation(message, found[0], found[1] + 1_000_000)


def claims_samples(message: Message) -> Message:
    """Claim to have trained on more samples than the server saw."""
    if message.kind is not Kind.END_EPOCH:
        return message
    said = json.loads(bytes(message.body.contiguous()))
    return replace(message, body=json_body({**said, "samples": said["samples"] + 10**7}))


def sends_huge_models(message: Message) -> Message:
    """Return weights that are finite, and far beyond those of any training."""
    return _with_weights(message, HUGE)


def sends_large_models(message: Message) -> Message:
    """Return weights that can be computed with, but with which no other device could train any more."""
    return _with_weights(message, LARGE)


def _with_weights(message: Message, value: float) -> Message:
    if message.kind is not Kind.MODEL or message.body.encoding != "safetensors":
        return message
    content = bytearray(message.body.contiguous())
    start = 8 + int.from_bytes(content[:8], "little")
    weights = np.frombuffer(content, "float64", count=(len(content) - start) // 8, offset=start)
    weights.flags.writeable = True
    weights[:] = value
    return replace(message, body=Body.of(content, encoding="safetensors"))


def sends_impossible_norms(message: Message) -> Message:
    """Send a norm of the gradient with which nothing can be clipped."""
    return replace(message, body=norm_body(math.nan)) if message.kind is Kind.NORM else message


def repeats_itself(message: Message) -> Message:
    """Send the start of an epoch again and again: a valid message at the wrong time."""
    if message.kind is not Kind.ACTIVATION:
        return message
    return replace(message, iteration=1, micro_batch=1) if message.iteration > 1 else message


def trickles(message: Message) -> Message:
    """Send everything, one frame at a time, with long pauses."""
    return message


TAMPERS: tuple[Tamper, ...] = (
    computes_huge_activations,
    computes_huge_activations,
    sends_one_sample,
    sends_impossible_labels,
    claims_samples,
    sends_huge_models,
    sends_large_models,
    sends_impossible_norms,
    repeats_itself,
    trickles,
)


def choose_tamper(choice: int) -> Tamper:
    """Return how a device of this choice attacks."""
    return random.Random(choice).choice(TAMPERS)
