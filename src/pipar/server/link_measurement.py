"""Measures the links of devices that have just joined, before plans are made for them.

The server sends PROBE messages, which name the number of PROBE messages that the device is to send back; in its first
answer the device tells when the server's frames have arrived. Frames are as in `transport.link_trial`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from pipar.errors import ProtocolError
from pipar.server.session import Session
from pipar.settings.links import Link
from pipar.transport.link_trial import FIRST_TRAIN, FRAME_BYTES, TrainLength, read_arrivals
from pipar.wire.messages import Body, Kind, Message, read_json

#: After this time a device is planned for with the link as far as it is known.
_LONGEST_S = 3.0
#: A link that has not carried the first train by then has at most this rate.
_SLOW_BPS = 8 * FIRST_TRAIN * FRAME_BYTES / _LONGEST_S
#: Devices that are measured at the same time: they may share a link, as they will in training.
_AT_ONCE = 16
#: Round trips without data, of which the fastest shows the latency.
_ROUND_TRIPS = 3


async def measure_links(sessions: Iterable[Session], known: dict[str, Link]) -> dict[str, Link]:
    """Return the links of these devices, measured where a direction has no configured rate; `known` has the others.

    A device that cannot be measured is left out. A link that is configured is not measured: it is emulated, or meant.
    """
    here = asyncio.Semaphore(_AT_ONCE)

    async def measured(session: Session) -> Link | None:
        async with here:
            return await _measured(session, known[session.device])

    wanted = [one for one in sessions if one.introduction.answers_probes and _is_unknown(known[one.device])]
    links = await asyncio.gather(*map(measured, wanted))
    return {one.device: link for one, link in zip(wanted, links, strict=True) if link is not None}


def _is_unknown(link: Link) -> bool:
    return not link.cycle and (link.up_bps is None or link.down_bps is None)


async def _measured(session: Session, known: Link) -> Link | None:
    measurement = _Measurement(session)
    try:
        with session.probing():
            async with asyncio.timeout(_LONGEST_S):
                await measurement.run()
    except TimeoutError:
        pass
    except ProtocolError as error:
        session.fail(error)
        return None
    return measurement.link(known)


class _Measurement:
    """The measurement of one link."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._passed: list[float] = []  # seconds of round trips
        self._up, self._down = TrainLength(), TrainLength()

    async def run(self) -> None:
        """Measure the latency, then both directions."""
        for _ in range(_ROUND_TRIPS):
            self._passed.append(await self._round_trip())
        self._up.round_trip_s = self._down.round_trip_s = min(self._passed)
        while not (self._up.is_done and self._down.is_done):
            await self._exchange(self._down, self._up)

    def link(self, known: Link) -> Link | None:
        """Return the link with what was measured so far; None if the device has not answered.

        A direction whose rate is known keeps it. One whose first train has not passed in time has at most its rate.
        """
        if not self._passed:
            return None
        up_bps, down_bps = (one.rate_bps if one.trains else _SLOW_BPS for one in (self._up, self._down))
        latency_s = known.latency_s or min(self._passed) / 2
        return Link(up_bps=known.up_bps or up_bps, down_bps=known.down_bps or down_bps, latency_s=latency_s)

    async def _round_trip(self) -> float:
        began = self._loop.time()
        self._send(0, 0)
        await self._session.next_probe()
        return self._loop.time() - began

    async def _exchange(self, down: TrainLength, up: TrainLength) -> None:
        """Send a train, and receive one after the times at which ours has arrived."""
        self._send(down.frames, up.frames)
        answer, _ = await self._session.next_probe()
        if down.frames:
            arrived = read_arrivals(read_json(answer).get("came"), down.frames)
            if arrived is None:
                raise ProtocolError(f"{answer} does not tell when {down.frames} frames have arrived.")
            down.take(arrived)
        if up.frames:
            up.take([(await self._session.next_probe())[1] for _ in range(up.frames)])

    def _send(self, frames: int, wanted: int) -> None:
        """Send a train, of which every message says how many there are and how many the device is to send."""
        for number in range(1, max(1, frames) + 1):
            body = Body.of(bytes(FRAME_BYTES)) if frames else Body()
            place = {"micro_batch": number, "samples": max(1, frames), "batch_samples": wanted}
            self._session.channel.post(Message(Kind.PROBE, **place, body=body))
