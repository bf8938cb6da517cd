"""A peer that only attacks: it joins by any name and claim, and sends well-formed messages in a random order."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from pipar.errors import LinkError, ProtocolError
from pipar.profiling.profile import Profile
from pipar.transport.interface import Transport
from pipar.wire.frames import cut_message
from pipar.wire.messages import Body, Kind, Message, json_body
from pipar.wire.orders import Orders
from simulation.scenario import Scenario
from simulation.tampering import HUGE
from simulation.tiny_training import HIDDEN

STRANGER = "stranger"
_MOST_MESSAGES = 12
_PATIENCE = 16  # quarters of a second
#: Numbers that a HELLO may have by the rules of JSON.
_SAMPLES: tuple[Any, ...] = (1, 7, 900, 10**8, 10**30, 0, -3, 1e200, "many", None, True)
_SPENT: tuple[tuple[Any, Any], ...] = ((0, 0.0), (10**9, 1e300), (10**40, 1.0), (-1, 0.0), (5, -1.0), ("all", 1e400))


class Intruder:
    """Attacks a server over one connection after another, until its time is over."""

    def __init__(
        self,
        scenario: Scenario,
        profile: Profile,
        victim: str,
        choice: int,
        dial: Callable[[str], Any],
    ) -> None:
        self._scenario = scenario
        self._profile = json.loads(profile.to_json())
        self._victim = victim
        self._rng = random.Random(f"intruder {choice}")
        self._dial = dial
        self._orders: Orders | None = None
        self._sequence = 0
        #: By the name of a device that exists, or by its own. Only a member can have the credential of one.
        self.poses_as = victim if self._rng.random() < 0.4 else STRANGER

    async def attack(self) -> None:
        """Connect again and again; a task that runs until it is cancelled."""
        while True:
            with suppress(LinkError, ProtocolError):
                transport = await self._dial(self.poses_as)
                try:
                    await self._attack_over(transport)
                finally:
                    await transport.close()
            await asyncio.sleep(self._rng.uniform(0.05, 1.0))

    async def _attack_over(self, transport: Transport) -> None:
        self._orders, self._sequence = None, 0
        reading = asyncio.ensure_future(self._read(transport))
        try:
            if self._rng.random() < 0.2:  # anything but a HELLO comes first
                await self._send(transport, self._message())
            await self._send(transport, Message(Kind.HELLO, body=json_body(self._hello())))
            if self._rng.random() < 0.6:
                await self._wait_for_orders()
            for _ in range(self._rng.randint(0, _MOST_MESSAGES)):
                await asyncio.sleep(self._rng.choice((0.0, 0.1, 1.0)))
                await self._send(transport, self._message())
            await asyncio.sleep(self._rng.choice((0.0, 2.0, 6.0)))
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _wait_for_orders(self) -> None:
        """Behave until the server lets it take part, or for a while."""
        for _ in range(_PATIENCE):
            if self._orders is None:
                await asyncio.sleep(0.25)

    async def _read(self, transport: Transport) -> None:
        while True:
            frame = await transport.read()
            if frame.message.kind is Kind.WELCOME and frame.message.body.size_bytes:
                self._orders = Orders.read(frame.only())

    async def _send(self, transport: Transport, message: Message) -> None:
        is_numbered = message.kind not in (Kind.HELLO, Kind.WELCOME, Kind.FAULT)
        self._sequence += is_numbered
        session = 0 if self._orders is None else self._orders.session
        for frame in cut_message(message, session, self._sequence if is_numbered else 0):
            await transport.write(frame)

    def _hello(self) -> dict[str, Any]:
        """Return what it says about itself; about a device that exists, only what that device says."""
        rng = self._rng
        if self.poses_as != STRANGER:
            samples = self._scenario.samples[self._victim]
            return {"name": self._victim, "samples": samples, "profile": self._profile}
        name = STRANGER if rng.random() < 0.7 else rng.choice((self._victim, "x" * 1000, "a\nb", "", 7))
        hello = {"name": name, "samples": 7 if rng.random() < 0.6 else rng.choice(_SAMPLES), "profile": self._profile}
        if rng.random() < 0.4:
            hello["releases"], hello["spent"] = rng.choice(_SPENT)
        if rng.random() < 0.2:
            hello["profile"] = rng.choice(
                (None, {}, {**self._profile, "load_s": 1e308}, {**self._profile, "layers": []})
            )
        return hello

    def _message(self) -> Message:
        """Return a message that the protocol has, of any kind; none of its models and batches can be used."""
        rng = self._rng
        kind = rng.choice([kind for kind in Kind if kind is not Kind.FAULT or rng.random() < 0.1])
        epoch, iteration, number = rng.choice((0, 1, 2, 3, 2**31)), rng.randint(0, 3), rng.randint(0, 3)
        if kind is Kind.ACTIVATION:
            samples = rng.choice((1, 2, 4))
            values = np.full((samples, HIDDEN), HUGE)
            body = Body.of(values.tobytes(), np.zeros(samples, "int32").tobytes(), dtype="float64", shape=values.shape)
            return Message(kind, epoch, max(iteration, 1), max(number, 1), samples, rng.choice((samples, 4)), body)
        return Message(kind, epoch, iteration, number, body=self._body(kind))

    def _body(self, kind: Kind) -> Body:
        rng = self._rng
        if kind is Kind.END_EPOCH:
            samples = rng.choice(_SAMPLES)
            return json_body(
                {"samples": samples, "loss_sum": rng.choice((None, HUGE, 1.0)), "up_bytes": 1, "up_s": 0.1}
            )
        if kind in (Kind.MODEL, Kind.STATE):
            return Body.of(rng.randbytes(rng.choice((8, 100, 800))), encoding="safetensors")
        if kind is Kind.TRACE:
            return Body.of(rng.randbytes(100), encoding="trace")
        return json_body({"name": STRANGER, "reason": "none", "again": rng.random() < 0.5})
