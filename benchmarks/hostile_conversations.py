"""Hostile conversations: well-formed messages of a device with a real credential, in any order and with any numbers.

No conversation completes a round as an honest device would, so none of them may count in one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from benchmarks.hostile_frames import changes_bodies, coded_body
from pipar.errors import PiparError
from pipar.execution.spans import COMPUTE, IO, EpochTrace, Totals, pack_trace
from pipar.wire.frames import Assembler, cut_message, pack_frame, unpack_frame
from pipar.wire.messages import UNNUMBERED, Body, Kind, Message, json_body, norm_body, numbers_body, read_json

#: What a device that trains says about itself; its batches have two micro-batches of five samples.
SAMPLES, BATCH, PIECE = 20, 10, 5
#: A device waits this long for an answer; while the honest devices are held back, none comes.
_ANSWER_S = 1.0
_LONG_NUMBER = "9" * 5000
_EXTREMES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**39, -(10**39), 1e308, -1e308, 5e-324, float("nan"), float("inf"),
    _LONG_NUMBER, "", "x" * 100_000, "\x00\n\x1b[2J", "é" * 64, [], [[[]]], {}, [0] * 1000, {"a": {"b": []}},
)  # fmt: skip


_NORMS = (0.0, 1.0, -1.0, 1e36, 1e300, float("nan"), float("inf"))


class RefusedError(Exception):
    """The server accepts no stream of this peer now."""


@dataclass(frozen=True)
class Target:
    """What the peers know of the server that they attack."""

    address: str
    profile: Mapping[str, Any]
    honest: tuple[str, ...]


@dataclass(frozen=True)
class Peer:
    """A device with a certificate of the server's authority."""

    name: str
    credentials: grpc.ChannelCredentials

    @asynccontextmanager
    async def connected(self, target: Target) -> AsyncIterator[Line]:
        """Yield a stream over a connection of its own, or raise RefusedError if the server does not accept it."""
        # A server that ends streams unread may leave a connection without free streams: each stream has its own.
        alone = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(target.address, self.credentials, options=alone) as channel:
            call: Any = channel.stream_stream("/pipar.Link/Connect")()
            try:
                is_accepted = ("pipar", "welcome") in tuple(await call.initial_metadata() or ())
            except grpc.RpcError:
                is_accepted = False
            if not is_accepted:
                raise RefusedError
            line = Line(call)
            try:
                yield line
            finally:
                await line.close()


class Line:
    """A peer's end of a stream: it says anything, and remembers what it needs of the answers."""

    def __init__(self, call: Any) -> None:
        self.session = self.sequence = self.received = self.epoch = self.gradients = 0
        self.kinds: set[Kind] = set()
        self.model = b""
        self._call = call
        self._assembler = Assembler()
        self._news = asyncio.Event()
        self._listening = asyncio.ensure_future(self._listen())

    async def say(self, message: Message, **numbers: int) -> None:
        """Send a message; its session, sequence number and acknowledgement are right unless they are given."""
        if message.kind not in UNNUMBERED and "sequence" not in numbers:
            self.sequence += 1
        sequence = numbers.get("sequence", 0 if message.kind in UNNUMBERED else self.sequence)
        acknowledged = numbers.get("acknowledged", self.received)
        for frame in cut_message(message, numbers.get("session", self.session), sequence, acknowledged):
            await self._call.write(pack_frame(frame))

    async def write(self, data: bytes) -> None:
        """Send bytes in place of a frame."""
        await self._call.write(data)

    async def until(self, is_so: Callable[[], bool]) -> bool:
        """Return whether something becomes true soon."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                while not is_so() and not self._listening.done():
                    self._news.clear()
                    await self._news.wait()
        return is_so()

    async def round_begins(self) -> bool:
        return await self.until(lambda: Kind.ROUND in self.kinds)

    async def _listen(self) -> None:
        try:
            while (data := await self._call.read()) is not grpc.aio.EOF:
                frame = unpack_frame(data)
                self.received = max(self.received, frame.sequence)
                message = self._assembler.feed(frame)
                if message is not None:
                    self._take(message)
                self._news.set()
        except (grpc.RpcError, asyncio.InvalidStateError, PiparError):
            pass
        finally:
            self._news.set()

    def _take(self, message: Message) -> None:
        self.kinds.add(message.kind)
        if message.kind is Kind.WELCOME and message.body.size_bytes:
            self.session = read_json(message)["session"]
        elif message.kind is Kind.MODEL:
            self.model = bytes(message.body.contiguous())
        elif message.kind is Kind.ROUND:
            self.epoch = message.epoch
        self.gradients += message.kind is Kind.GRADIENT

    async def close(self) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._call.done_writing()
        self._call.cancel()
        await asyncio.wait([self._listening], timeout=_ANSWER_S)


# --- messages


def hello(name: str, profile: Mapping[str, Any], **more: Any) -> Message:
    return Message(Kind.HELLO, body=json_body({"name": name, "samples": SAMPLES, "profile": profile, **more}))


def _raw_json(content: Any) -> Body:
    """Return JSON in which a text of digits is a number."""
    text = json.dumps(content).replace(f'"{_LONG_NUMBER}"', _LONG_NUMBER)
    return Body.of(text.encode(), encoding="json")


def activation(chance: random.Random, epoch: int, iteration: int, piece: int, **odd: Any) -> Message:
    """Return a micro-batch; `odd` has other values, labels or sizes than an honest one."""
    size = odd.get("samples", PIECE)
    values = odd.get("factor", 1.0) * np.maximum(0.0, np.sin(np.arange(size * 64) + chance.random()))
    labels = struct.pack(f"<{size}i", *([odd["label"]] * size if "label" in odd else [chance.randrange(10)] * size))
    shaped = values.reshape(size, 4, 4, 4)
    body = coded_body(shaped, odd.get("encoding", "sparse-planes"), labels)
    return Message(Kind.ACTIVATION, epoch, iteration, piece, size, odd.get("batch", BATCH), body)


def _end(epoch: int, **odd: Any) -> Message:
    content = {"samples": SAMPLES, "loss_sum": None, "up_bytes": 1000, "up_s": 0.1, **odd}
    return Message(Kind.END_EPOCH, epoch, body=_raw_json(content))


def _trace(epoch: int) -> Message:
    totals = {lane: Totals(1.0, 0.0, 0.0, 1.0) for lane in (COMPUTE, IO)}
    return Message(Kind.TRACE, epoch, body=Body.of(pack_trace(EpochTrace("x", epoch, totals)), encoding="trace"))


def _norm(epoch: int, iteration: int, squared: float = 0.5) -> Message:
    return Message(Kind.NORM, epoch, iteration, body=norm_body(squared))


def _kept(chance: random.Random, epoch: int, iteration: int, piece: int) -> Message:
    """Return a micro-batch that refers to activations which the server has never kept."""
    numbers = struct.pack(f"<{PIECE}I", *(chance.choice((0, 1, 7, 2**32 - 1)) for _ in range(PIECE)))
    return Message(Kind.ACTIVATION, epoch, iteration, piece, PIECE, BATCH, numbers_body(numbers))


def _spoilt_model(chance: random.Random, model: bytes) -> Body:
    """Return a model that must never count: not finite, far from all others, of another shape, or cut off."""
    spoilt = bytearray(model or bytes(200))
    way = chance.randrange(6)
    if way == 0:
        spoilt[-64:] = struct.pack("<d", float("nan")) * 8
    elif way == 1:
        spoilt[-64:] = struct.pack("<d", 1e300) * 8
    elif way == 5:
        spoilt[-64:] = struct.pack("<d", chance.choice((1e6, -1e12, 1e17))) * 8
    elif way == 2:
        del spoilt[chance.randrange(len(spoilt)) :]
    elif way == 3:
        return chance.choice(changes_bodies())
    else:
        spoilt = bytearray(chance.randbytes(chance.choice((0, 8, 200, 4000))))
    return Body.of(bytes(spoilt), encoding="safetensors")


def any_message(chance: random.Random, line: Line) -> Message:
    """Return a message of any kind, of an honest device or not, with numbers that may be right."""

    def number(most: int) -> int:
        return chance.choice((0, 1, 2, line.epoch, line.epoch + 1, chance.randint(0, most), most))

    kind = chance.choice([*Kind, Kind.ACTIVATION, Kind.ACTIVATION, Kind.END_EPOCH, Kind.MODEL])
    if kind is Kind.ACTIVATION and chance.random() < 0.7:
        make = chance.choice((activation, activation, _kept))
        return make(chance, line.epoch, chance.randint(1, 3), chance.randint(1, 3))
    if kind is Kind.NORM and chance.random() < 0.7:
        return _norm(line.epoch, chance.randint(1, 3), chance.choice(_NORMS))
    if kind is Kind.END_EPOCH and chance.random() < 0.7:
        return _end(line.epoch, **{chance.choice(("samples", "loss_sum", "up_s", "ready")): chance.choice(_EXTREMES)})
    if kind is Kind.TRACE and chance.random() < 0.7:
        return _trace(number(2**32 - 1))
    bodies = (
        Body(), _raw_json({"reason": chance.choice(_EXTREMES)}), _raw_json(chance.choice(_EXTREMES)),
        _spoilt_model(chance, line.model), *changes_bodies(), Body.of(chance.randbytes(40), encoding="trace"),
    )  # fmt: skip
    numbers = [number(most) for most in (2**32 - 1, 2**32 - 1, 65535, 2**32 - 1, 2**32 - 1)]
    return Message(kind, *numbers, body=chance.choice(bodies))


# --- conversations


async def disorder(peer: Peer, target: Target, chance: random.Random) -> None:
    """Join, maybe wait for a round, and send messages in any order."""
    async with peer.connected(target) as line:
        await line.say(hello(peer.name, target.profile))
        if chance.random() < 0.7:
            await line.round_begins()
        for _ in range(chance.randint(1, 20)):
            numbers = {}
            if chance.random() < 0.1:
                numbers[chance.choice(("session", "sequence", "acknowledged"))] = chance.choice((0, 1, 7, 2**32 - 1))
            await line.say(any_message(chance, line), **numbers)


async def claims(peer: Peer, target: Target, chance: random.Random) -> None:
    """Say hello with claims that no device could make, some of them about the machine."""
    about: dict[str, Any] = {"name": peer.name, "samples": SAMPLES, "profile": _changed(chance, target.profile)}
    for _ in range(chance.randrange(3)):
        about[chance.choice(("samples", "releases", "spent", "profile", "name", "more"))] = chance.choice(_EXTREMES)
    async with peer.connected(target) as line:
        await line.say(Message(Kind.HELLO, body=_raw_json(about)))
        if await line.round_begins():
            await line.say(activation(chance, line.epoch, 1, 1))


def _changed(chance: random.Random, content: Any) -> Any:
    """Return JSON with one extreme value somewhere."""
    if isinstance(content, Mapping) and content:
        key = chance.choice(sorted(content))
        return {**content, key: _changed(chance, content[key])}
    if isinstance(content, list | tuple) and content:
        place = chance.randrange(len(content))
        return [_changed(chance, one) if at == place else one for at, one in enumerate(content)]
    return chance.choice(_EXTREMES)


async def half(peer: Peer, target: Target, chance: random.Random) -> None:
    """Begin a conversation and end it somewhere: silent, after a part of a hello, or in the middle of a batch."""
    async with peer.connected(target) as line:
        stage = chance.randrange(5)
        if stage == 0:
            await asyncio.sleep(chance.random())
            return
        if stage == 1:
            long = Message(Kind.HELLO, body=json_body({"name": "x" * 1_500_000}))
            await line.write(pack_frame(next(cut_message(long, 0, 0))))
            return
        await line.say(hello(peer.name, target.profile))
        if stage > 2 and await line.round_begins():
            await line.say(activation(chance, line.epoch, 1, 1))
            await asyncio.sleep(chance.choice((0.0, 0.3)))


async def clash(peer: Peer, target: Target, chance: random.Random) -> None:
    """Claim the name or the session of another device, or join twice with one credential."""
    way = chance.randrange(4)
    async with peer.connected(target) as line:
        if way == 0:
            await line.say(hello(chance.choice(target.honest), target.profile))
            await line.until(lambda: Kind.FAULT in line.kinds)
            return
        if way == 1:
            name = chance.choice((*target.honest, peer.name))
            session = chance.choice((1, 2, 3, chance.randint(1, 2**32 - 1)))
            await line.say(hello(name, target.profile), session=session, acknowledged=chance.choice((0, 5, 2**32 - 1)))
            await line.until(lambda: Kind.FAULT in line.kinds)
            return
        await line.say(hello(peer.name, target.profile))
        begun = await line.round_begins()
        async with peer.connected(target) as other:
            mine = line.session if way == 2 else 0
            acknowledged = chance.choice((0, line.received, line.received + 9))
            await other.say(hello(peer.name, target.profile), session=mine, acknowledged=acknowledged)
            await other.until(lambda: bool(other.kinds))
            if begun:
                await other.say(activation(chance, line.epoch, 1, 1), session=line.session, sequence=1)


async def almost(peer: Peer, target: Target, chance: random.Random) -> None:
    """Train a round as an honest device does, up to one thing that is wrong."""
    wrong = chance.choice(
        (
            "values",
            "nan",
            "label",
            "samples",
            "batch",
            "encoding",
            "repeat",
            "early",
            "norm",
            "kept",
            "end",
            "model",
            "model",
            "model",
        )
    )
    at = chance.randint(1, 2)
    odd: dict[str, dict[str, Any]] = {
        "values": {"factor": 1e200}, "nan": {"factor": float("nan")},
        "label": {"label": chance.choice((-1, 10, 2**31 - 1))},
        "samples": {"samples": 7}, "batch": {"batch": 11}, "encoding": {"encoding": "fp16"},
    }  # fmt: skip
    async with peer.connected(target) as line:
        await line.say(hello(peer.name, target.profile))
        if not await line.round_begins():
            return
        for iteration in (1, 2):
            for piece in (1, 2):
                is_wrong = iteration == at and piece == 2
                make = _kept if is_wrong and wrong == "kept" else activation
                await line.say(make(chance, line.epoch, iteration, piece, **odd.get(wrong, {}) if is_wrong else {}))
                if is_wrong and wrong == "repeat":
                    await line.say(activation(chance, line.epoch, iteration, piece))
            if not await line.until(lambda due=2 * iteration: line.gradients >= due) or (
                wrong == "early" and iteration == at
            ):
                break
            is_wrong = iteration == at and wrong == "norm"
            await line.say(_norm(line.epoch, iteration, chance.choice((-1.0, 1e37, float("nan"))) if is_wrong else 0.5))
        samples = chance.choice((1, SAMPLES + 1, 10**8)) if wrong == "end" else SAMPLES
        await line.say(_end(line.epoch, samples=samples))
        await line.say(Message(Kind.MODEL, line.epoch, body=_spoilt_model(chance, line.model)))
        await line.until(lambda: Kind.FAULT in line.kinds)


async def flood(peer: Peer, target: Target, chance: random.Random) -> None:
    """Send the same message again and again."""
    async with peer.connected(target) as line:
        await line.say(hello(peer.name, target.profile))
        await line.round_begins()
        message = any_message(chance, line)
        for _ in range(chance.choice((50, 300))):
            await line.say(message, **({"sequence": 1} if chance.random() < 0.3 else {}))


Conversation = Callable[[Peer, Target, random.Random], Awaitable[None]]
CONVERSATIONS: tuple[Conversation, ...] = (disorder, claims, half, clash, almost, flood)
_WEIGHTS = (30, 25, 15, 10, 15, 5)


async def converse(peer: Peer, target: Target, chance: random.Random) -> str:
    """Have one conversation; return its kind, or "refused" if the server accepted no stream for it."""
    (chosen,) = chance.choices(CONVERSATIONS, _WEIGHTS)
    try:
        await chosen(peer, target, chance)
    except RefusedError:
        return "refused"
    except (grpc.RpcError, asyncio.InvalidStateError):
        pass  # the server has ended the stream
    return str(getattr(chosen, "__name__", chosen))
