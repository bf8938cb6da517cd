"""A program that answers at the server's address while the server is away: not the server, or not this training's."""

from __future__ import annotations

import asyncio
import random
from collections import deque

from pipar.errors import CredentialError, LinkError, VersionError
from pipar.transport.interface import Transport
from pipar.wire.frames import Frame, cut_message, unpack_frame
from pipar.wire.messages import Kind, Message, json_body

#: A device that proves its server's certificate never gets further than these.
_BEFORE_TLS = ("garbage before TLS", "other authority", "closes")
_WELL_FORMED = ("garbage frame", "other version", "silent", "session is over", "wrong acknowledgement", "false promise")


class Imposter:
    """Answers one way, drawn from its choice."""

    def __init__(self, choice: int, *, is_verified: bool) -> None:
        rng = random.Random(f"imposter {choice}")
        self.answer = rng.choice(_BEFORE_TLS if is_verified else (*_BEFORE_TLS, *_WELL_FORMED))

    def accept(self) -> Transport:
        """Return a connection to it, or raise what a device's transport raises."""
        match self.answer:
            case "garbage before TLS":
                raise CredentialError("What answers at the server's address is no pipar server.")
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
        if frame.session == 0 or self._answer == "session is over":
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
