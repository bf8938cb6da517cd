"""Measures the links of devices that have just joined, before plans are made for them.

The server sends PROBE messages, which name the number of PROBE messages that the device is to send back; in its first
answer the device tells when the server's frames have arrived. Frames are as in `transport.link_trial`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from weakref import WeakSet

from pipar.errors import LinkError, ProtocolError
from pipar.server.session import Session
from pipar.settings.links import Link
from pipar.transport.link_trial import FIRST_TRAIN, FRAME_BYTES, LONGEST_TRAIN, MOST_BPS, TrainLength, read_arrivals
from pipar.wire.messages import Body, Kind, Message, read_json

#: After this time a device is planned for with the link as far as it is known.
_LONGEST_S = 3.0
#: The training does not wait longer for measurements, however many devices have joined.
_TOTAL_S = 5.0
#: A device whose measurement took longer is not measured again when it joins again: it would delay every round.
_LONG_S = 1.0
#: Devices that are measured at the same time: they may share a link, as they will in training.
_AT_ONCE = 16
#: Round trips without data, of which the fastest shows the latency.
_ROUND_TRIPS = 3


class LinkMeasurements:
    """Measures links where a direction has no configured rate, once for each session.

    A link that is configured is not measured: it is emulated, or meant.
    """

    def __init__(self) -> None:
        self._measured: WeakSet[Session] = WeakSet()  # as far as possible
        self._slow: set[str] = set()  # devices whose measurement took long

    async def measure(self, joined: Callable[[], Iterable[Session]], known: Callable[[str], Link]) -> dict[str, Link]:
        """Return the links of these devices, also of those that join meanwhile, after five seconds at the latest.

        `known` returns what is configured of a link. A device that cannot be measured, or not in time, is left out.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + _TOTAL_S
        links: dict[str, Link] = {}
        while loop.time() < ends_at and (new := [session for session in joined() if session not in self._measured]):
            self._measured.update(new)
            links |= await self._measure({one: known(one.device) for one in new}, ends_at)
        return links

    async def _measure(self, new: dict[Session, Link], ends_at: float) -> dict[str, Link]:
        here = asyncio.Semaphore(_AT_ONCE)
        wanted = {one: link for one, link in new.items() if self._is_to_measure(one, link)}
        links = await asyncio.gather(*(self._link(one, link, here, ends_at) for one, link in wanted.items()))
        return {one.device: link for one, link in zip(wanted, links, strict=True) if link is not None}

    def _is_to_measure(self, session: Session, known: Link) -> bool:
        is_unknown = not known.cycle and (known.up_bps is None or known.down_bps is None)
        return session.introduction.answers_probes and is_unknown and session.device not in self._slow

    async def _link(self, session: Session, known: Link, here: asyncio.Semaphore, ends_at: float) -> Link | None:
        measurement = _Measurement(session, ends_at)
        try:
            await measurement.find()  # before it takes one of the places: a silent device delays no others
            async with asyncio.timeout_at(ends_at), here:
                await measurement.run()
        except TimeoutError:
            pass
        except LinkError:  # it has left
            return None
        except ProtocolError as error:
            session.fail(error)
            return None
        finally:
            if measurement.took_s > _LONG_S:
                self._slow.add(session.device)
        return measurement.link(known)


class _Measurement:
    """The measurement of one link."""

    def __init__(self, session: Session, ends_at: float) -> None:
        self.took_s = 0.0
        self._session = session
        self._ends_at = ends_at
        self._loop = asyncio.get_running_loop()
        self._passed: list[float] = []  # seconds of round trips
        self._trains_at: float | None = None  # when the first train left
        self._up, self._down = TrainLength(), TrainLength()

    async def find(self) -> None:
        """Return when the device has answered."""
        async with self._in_time(1):
            await self._round_trip()

    async def run(self) -> None:
        """Measure the latency, then both directions."""
        async with self._in_time(LONGEST_TRAIN + 1):
            for _ in range(_ROUND_TRIPS):
                self._passed.append(await self._round_trip())
            self._up.round_trip_s = self._down.round_trip_s = min(self._passed)
            self._trains_at = self._loop.time()
            while not (self._up.is_done and self._down.is_done):
                await self._exchange(self._down, self._up)

    @asynccontextmanager
    async def _in_time(self, most: int) -> AsyncIterator[None]:
        """Let the device send PROBE messages, of which this many may be unread, for what is left of its time."""
        began_at = self._loop.time()
        try:
            with self._session.probing(most):
                async with asyncio.timeout_at(min(self._ends_at, began_at + _LONGEST_S - self.took_s)):
                    yield
        finally:
            self.took_s += self._loop.time() - began_at

    def link(self, known: Link) -> Link | None:
        """Return the link with what was measured so far; None if its latency is unknown.

        A direction whose rate is known keeps it. One whose first train has not passed in time has at most its rate.
        """
        if not self._passed:
            return None
        up_bps, down_bps = (one.rate_bps if one.trains else self._slow_bps() for one in (self._up, self._down))
        latency_s = known.latency_s or min(self._passed) / 2
        return Link(up_bps=known.up_bps or up_bps, down_bps=known.down_bps or down_bps, latency_s=latency_s)

    def _slow_bps(self) -> float | None:
        """Return the rate of a link that takes until now for the first train."""
        waited_s = self.took_s if self._trains_at is None else self._loop.time() - self._trains_at
        bits = 8 * FIRST_TRAIN * FRAME_BYTES
        return bits / waited_s if waited_s * MOST_BPS > bits else None

    async def _round_trip(self) -> float:
        began = self._loop.time()
        self._send(0, 0)
        await self._session.next_probe()
        return self._loop.time() - began

    async def _exchange(self, down: TrainLength, up: TrainLength) -> None:
        """Send a train, and receive one after the times at which ours has arrived."""
        began = self._loop.time()
        self._send(down.frames, up.frames)
        answer, answered = await self._session.next_probe()
        if down.frames:
            arrived = read_arrivals(read_json(answer).get("came"), down.frames, answered - began)
            if arrived is None:
                raise ProtocolError(f"{answer} does not tell when {down.frames} frames can have arrived.")
            down.take(arrived)
        if up.frames:
            up.take([await self._frame() for _ in range(up.frames)])

    async def _frame(self) -> float:
        """Return when the next frame of the device's train arrived."""
        message, arrived = await self._session.next_probe()
        if message.body.size_bytes != FRAME_BYTES or message.body.is_coded:  # a shorter one would seem faster
            raise ProtocolError(f"{message} has another body than the {FRAME_BYTES} bytes that measure a link.")
        return arrived

    def _send(self, frames: int, wanted: int) -> None:
        """Send a train, of which every message says how many there are and how many the device is to send."""
        for number in range(1, max(1, frames) + 1):
            body = Body.of(bytes(FRAME_BYTES)) if frames else Body()
            place = {"micro_batch": number, "samples": max(1, frames), "batch_samples": wanted}
            self._session.channel.post(Message(Kind.PROBE, **place, body=body))
