"""A program that answers at the server's address while the server is away: not the server, or not this training's.

A hostile one admits devices, orders what no device agrees to, and sends more than they need.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque

from pipar.errors import CredentialError, LinkError, VersionError
from pipar.methods import Plan
from pipar.transport.interface import Transport
from pipar.wire.frames import Frame, cut_message, unpack_frame
from pipar.wire.messages import Body, Kind, Message, json_body, read_json
from pipar.wire.orders import Orders
from simulation.scenario import BATCH, LAYERS

#: A device that proves its server's certificate never gets further than these.
_BEFORE_TLS = ("garbage before TLS", "other authority", "closes")
_SESSION = 77
_ORDERS = Orders(_SESSION, Plan(1, 1), LAYERS, BATCH, batch_statistics=False, keep_state=False)
_WELCOME = Message(Kind.WELCOME, body=_ORDERS.to_body())
#: More than any part of the network has.
_TOO_MUCH = 5_000_000


def _welcome(**changes: int) -> Message:
    return Message(Kind.WELCOME, body=json_body(read_json(_WELCOME) | changes))


#: What a hostile server says to a device that joins.
HOSTILE = {
    "orders of another network": [_welcome(layers=LAYERS + 1)],
    "a split point beyond the network": [_welcome(split_point=10**9)],
    "batches beyond all limits": [_welcome(batch_size=10**12)],
    "a session that no header can name": [_welcome(session=2**40)],
    "too large a model": [_WELCOME, Message(Kind.MODEL, body=Body.of(bytes(_TOO_MUCH), encoding="safetensors"))],
    "too large a state": [_WELCOME, Message(Kind.STATE, body=Body.of(bytes(_TOO_MUCH), encoding="safetensors"))],
    "a model of nothing": [_WELCOME, Message(Kind.MODEL, body=Body.of(b"none", encoding="safetensors"))],
    "a round at the end of time": [_WELCOME, Message(Kind.ROUND, 2**31)],
    "a gradient of no activation": [_WELCOME, Message(Kind.GRADIENT, 1, 1, 1, 4, 4, Body.of(bytes(64)))],
    "a plan beyond the network": [_WELCOME, Message(Kind.PLAN, body=json_body({"split_point": 9}))],
}
_WELL_FORMED = ("garbage frame", "other version", "silent", "session is over", "wrong acknowledgement", "false promise")


class Imposter:
    """Answers one way, drawn from its choice."""

    def __init__(self, choice: int, *, is_verified: bool) -> None:
        rng = random.Random(f"imposter {choice}")
        self.answer = rng.choice(_BEFORE_TLS if is_verified else (*_BEFORE_TLS, *_WELL_FORMED))
        if not is_verified and rng.random() < 0.5:
            self.answer = rng.choice(list(HOSTILE))

    def accept(self) -> Transport:
        """Return a connection to it, or raise what a device's transport raises."""
        match self.answer:
            case "garbage before TLS":
                raise CredentialError("What answers at the server's address is not a pipar server.")
            case "other authority":
                raise CredentialError("The server's certificate is of another authority.")
            case "closes":
                raise LinkError("The connection was closed.")
        return _ImposterEnd(self.answer)


class _ImposterEnd:
    """The device's end of a connection to an imposter, which lasts for a second after its answer."""

    def __init__(self, answer: str) -> None:
        self._answer = answer
        self._frames: deque[Frame] = deque()
        self._has_hello = asyncio.Event()

    async def write(self, frame: Frame) -> None:
        if frame.message.kind is not Kind.HELLO:
            return
        if frame.session == 0 and self._answer in HOSTILE:
            self._frames.extend(_frames_of(HOSTILE[self._answer]))
        elif frame.session == 0 or self._answer == "session is over" or self._answer in HOSTILE:
            reason = {"reason": "That session is over.", "again": True}
            self._frames.extend(cut_message(Message(Kind.FAULT, body=json_body(reason)), 0, 0))
        else:
            acknowledged = {"wrong acknowledgement": 2**31, "false promise": 3}.get(self._answer, 0)
            self._frames.extend(cut_message(Message(Kind.WELCOME), frame.session, 0, acknowledged))
        self._has_hello.set()

    async def read(self) -> Frame:
        await self._has_hello.wait()
        if self._answer == "garbage frame":
            return unpack_frame(bytes(range(64)))
        if self._answer == "other version":
            raise VersionError("The server uses version 99 of the protocol.")
        if self._answer != "silent" and self._frames:
            return self._frames.popleft()
        await asyncio.sleep(1.0)
        raise LinkError("The connection is lost.")

    async def close(self) -> None:
        self._has_hello.set()


def _frames_of(messages: list[Message]) -> list[Frame]:
    """Return the frames of a welcome and of numbered messages; the last frame of a large one never comes."""
    frames: list[Frame] = []
    for number, message in enumerate(messages):
        cut = list(cut_message(message, _SESSION if number else 0, number))
        frames += cut[:-1] if len(cut) > 1 else cut
    return frames
