"""A network in memory on which links are cut, frames arrive late, twice, damaged or never, and peers fall silent."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from pipar.errors import LinkError
from pipar.transport.interface import Transport
from pipar.wire.frames import HEADER_BYTES, Frame, pack_frame, unpack_frame
from simulation.clocks import running_loop
from simulation.imposter import Imposter

UP, DOWN = 0, 1  # directions, and the ends that send in them: the device's and the server's
#: Travel time of a frame without faults.
_TRAVEL_S = 0.001
#: A peer that is silent for this long is gone, as gRPC's keepalive would find.
KEEPALIVE_S = 3.0
#: Timeout of a connection attempt without an answer.
_CONNECT_WITHIN_S = 3.0

Admit = Callable[[Transport, str | None], Awaitable[None]]


@dataclass
class LinkConditions:
    """The faults that one device's link has now."""

    cut_until: float = 0.0
    one_way_until: float = 0.0
    slow_until: float = 0.0
    slow_s: float = 0.0
    late_s: deque[float] = field(default_factory=deque)  # extra delays of the next frames, one each
    duplicates: int = 0  # of the next frames, this many arrive twice
    damages: deque[int] = field(default_factory=deque)  # how the next frames are damaged: seeds


class Network:
    """Connections between devices and the server, if it listens.

    `excuse` is called with a device of which a frame was damaged, or duplicated where the protocol does not allow that.
    """

    def __init__(
        self,
        names: list[str],
        note: Callable[[str, str], None],
        excuse: Callable[[str], None],
        *,
        has_credentials: bool,
    ) -> None:
        self.conditions = {name: LinkConditions() for name in names}
        self.frames = 0
        self._digest = hashlib.blake2b(digest_size=16)  # of every frame and its time
        self._note = note
        self._excuse = excuse
        self.observe_down: Callable[[str, Frame], None] = lambda _, __: None  # frames that the server sends
        self._has_credentials = has_credentials
        self._imposter: tuple[Imposter, float] | None = None  # and when it goes away
        self._loop = running_loop()
        self._connections: list[_Connection] = []
        self._listening: tuple[Admit, contextvars.Context, Callable[[asyncio.Task[None]], None]] | None = None

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    def listen(
        self, admit: Admit, context: contextvars.Context, admitted: Callable[[asyncio.Task[None]], None]
    ) -> None:
        """Let a server accept connections; each is a task in its context, passed to `admitted` when it is done."""
        self._listening = (admit, context, admitted)

    def hang_up(self, *, silently: bool) -> None:
        """The server is gone: its connections are closed, or fall silent."""
        self._listening = None
        for connection in list(self._connections):
            connection.lose_side(DOWN, silently=silently)

    def lose_device(self, name: str, *, silently: bool) -> None:
        """The device is gone: its connections are closed, or fall silent."""
        for connection in [one for one in self._connections if one.device == name]:
            connection.lose_side(UP, silently=silently)

    async def dial(self, name: str) -> Transport:
        """Return a connection to the server, or to a program that answers at its address; or raise LinkError."""
        conditions = self.conditions[name]
        await asyncio.sleep(_TRAVEL_S)
        now = self._loop.true_time()
        if conditions.one_way_until > now:
            await asyncio.sleep(_CONNECT_WITHIN_S)
            raise LinkError("The server did not answer.")
        if conditions.cut_until > now:
            raise LinkError("The server cannot be reached.")
        if self._imposter is not None and now < self._imposter[1]:
            self._excuse(name)  # what it says is no breach by the device
            self._note(name, f"meets an imposter: {self._imposter[0].answer}")
            return self._imposter[0].accept()
        return self.connect(name, name if self._has_credentials else None)

    def connect(self, link: str, peer: str | None) -> Transport:
        """Return a connection to the server over a link; `peer` is the name in the credential that is shown."""
        if self._listening is None:
            raise LinkError("The server cannot be reached.")
        self.conditions.setdefault(link, LinkConditions())
        connection = _Connection(link, self)
        self._connections.append(connection)
        admit, context, admitted = self._listening
        admission = admit(connection.ends[DOWN], peer)
        self._loop.create_task(admission, context=context).add_done_callback(admitted)  # type: ignore[arg-type]
        return connection.ends[UP]

    # --- faults

    def replace_server(self, imposter: Imposter, seconds: float) -> None:
        """Let another program answer at the server's address for this time; connections that exist stay."""
        self._imposter = (imposter, self._loop.true_time() + seconds)

    def cut(self, name: str, seconds: float, noticed_by: int | None = None) -> None:
        """Cut the link for this time; both ends notice now, or one does and the other by its keepalive."""
        self.conditions[name].cut_until = self._loop.true_time() + seconds
        for connection in [one for one in self._connections if one.device == name]:
            if noticed_by is None:
                connection.die()
            else:
                connection.lose_side(noticed_by, silently=True)

    def lose_one_way(self, name: str, seconds: float, direction: int) -> None:
        """Lose all frames of one direction; both ends notice by their keepalive."""
        self.conditions[name].one_way_until = self._loop.true_time() + max(seconds, KEEPALIVE_S)
        for connection in [one for one in self._connections if one.device == name]:
            connection.lose_direction(direction)
            self._loop.call_later(KEEPALIVE_S, connection.die)

    # --- for the ends

    def forget(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)

    def transmit(self, device: str, frame: Frame, direction: int) -> tuple[float, list[Frame | bytes]]:
        """Return the travel time of a frame and what arrives: the frame, damaged bytes, or the frame twice."""
        self.frames += 1
        if direction == DOWN:
            self.observe_down(device, frame)
        where = (frame.message.kind, frame.message.epoch, frame.message.iteration, frame.message.micro_batch)
        self._digest.update(
            repr(
                (self._loop.true_time(), device, direction, where, frame.sequence, frame.acknowledged, frame.chunk)
            ).encode()
        )
        conditions = self.conditions[device]
        travel_s = _TRAVEL_S + (conditions.slow_s if conditions.slow_until > self._loop.true_time() else 0.0)
        if conditions.late_s:
            travel_s += conditions.late_s.popleft()
        if conditions.damages and conditions.damages[0] & 1 == direction:
            self._excuse(device)
            damaged = damage(frame, random.Random(conditions.damages.popleft()))
            self._note(device, f"{frame.message} was damaged on its way {'down' if direction else 'up'}")
            return travel_s, [damaged]
        if conditions.duplicates:
            conditions.duplicates -= 1
            if frame.sequence == 0 or frame.chunks > 1:
                self._excuse(device)  # only whole messages with a number are recognised as duplicates
            return travel_s, [frame, frame]
        return travel_s, [frame]


def damage(frame: Frame, rng: random.Random) -> bytes:
    """Return the bytes of a frame, truncated or with a few bits of its header changed."""
    data = bytearray(pack_frame(frame))
    if rng.random() < 0.3:
        return bytes(data[: rng.randrange(len(data))])
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(HEADER_BYTES)] ^= 1 << rng.randrange(8)
    return bytes(data)


class _Connection:
    """One connection of a device: two ends, each of which may disappear without a message."""

    def __init__(self, device: str, network: Network) -> None:
        self.device = device
        self.network = network
        self.ends = (End(self, UP), End(self, DOWN))
        self._lost: set[int] = set()  # directions in which nothing arrives any more

    def die(self) -> None:
        """Tell both ends that the connection is lost; frames in flight are lost with it."""
        self._lost |= {UP, DOWN}
        for end in self.ends:
            end.lose()
        self.network.forget(self)

    def lose_direction(self, direction: int) -> None:
        self._lost.add(direction)

    def lose_side(self, side: int, *, silently: bool) -> None:
        """Lose one end immediately; the other is notified, or notices by its keepalive if this happens `silently`."""
        self._lost |= {UP, DOWN}
        self.ends[side].lose()
        self.network._loop.call_later(KEEPALIVE_S if silently else _TRAVEL_S, self.die)

    def send(self, direction: int, items: list[Frame | bytes | None], arrives_at: float) -> None:
        if direction not in self._lost:
            self.network._loop.call_at_true(arrives_at, self._arrive, direction, items)

    def _arrive(self, direction: int, items: list[Frame | bytes | None]) -> None:
        if direction not in self._lost:
            for item in items:
                self.ends[1 - direction].take(item)


class End:
    """A transport over this network."""

    def __init__(self, connection: _Connection, side: int) -> None:
        self._connection = connection
        self._side = side
        self._inbox: asyncio.Queue[Frame | bytes | None] = asyncio.Queue()
        self._is_over = False
        self._last_arrival = 0.0

    async def write(self, frame: Frame) -> None:
        if self._is_over:
            raise LinkError("The connection is lost.")
        network = self._connection.network
        travel_s, items = network.transmit(self._connection.device, frame, self._side)
        self._last_arrival = max(self._last_arrival, network._loop.true_time() + travel_s)  # frames stay in order
        self._connection.send(self._side, list(items), self._last_arrival)

    async def read(self) -> Frame:
        item = await self._inbox.get()
        if item is None:
            self._is_over = True
            self._inbox.put_nowait(None)
            raise LinkError("The connection is lost.")
        return unpack_frame(item) if isinstance(item, bytes) else item

    async def close(self) -> None:
        if not self._is_over:
            now = self._connection.network._loop.true_time()
            self._connection.send(self._side, [None], max(self._last_arrival, now + _TRAVEL_S))
            self.lose()
        self._connection.network.forget(self._connection)

    def take(self, item: Frame | bytes | None) -> None:
        self._inbox.put_nowait(item)

    def lose(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._inbox.put_nowait(None)
