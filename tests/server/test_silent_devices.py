"""A device without a network is reported silent long before its connection is lost, and a slow one is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest
from support.server_world import LINK, Named, World, _equipment, honest, train

from pipar.events import Event, Heard, Silent, ignore
from pipar.launch.assemble import run_device
from pipar.server.silent_devices import SILENT_AFTER_S, SilentDeviceMonitor
from pipar.transport.interface import Transport
from pipar.wire.frames import Frame

Seen = list[tuple[float, Silent | Heard]]


class DarkFor:
    """A link that delivers nothing between two times; no side is informed, and nothing is lost."""

    def __init__(self, link: Transport, *times_s: float) -> None:
        self._link = link
        self._times_s = times_s  # since when, until when, and again

    async def write(self, frame: Frame) -> None:
        await self._passed()
        await self._link.write(frame)

    async def read(self) -> Frame:
        frame = await self._link.read()
        await self._passed()
        return frame

    async def close(self) -> None:
        await self._link.close()

    async def _passed(self) -> None:
        now = asyncio.get_running_loop().time()
        for since_s, until_s in zip(self._times_s[::2], self._times_s[1::2], strict=True):
            if since_s <= now < until_s:
                await asyncio.sleep(until_s - now)


def cut_off(name: str, *times_s: float) -> Named:
    async def live(world: World) -> None:
        link = DarkFor(world.dial(), *times_s)
        await run_device(name, LINK, _equipment(200, 10.0, None), link, observe=ignore)

    return name, live


def watched(seen: Seen, for_s: float = 500.0) -> Named:
    """A monitor that watches the server's devices in virtual time."""

    async def live(world: World) -> None:
        clock: Callable[[], float] = asyncio.get_running_loop().time

        def observe(event: Event) -> None:
            assert isinstance(event, Silent | Heard)
            seen.append((clock(), event))

        monitor = SilentDeviceMonitor(lambda: world.server.sessions, observe)
        with suppress(TimeoutError):
            async with asyncio.timeout(for_s):
                await monitor.watch()

    return "the watch", live


def test_a_device_whose_network_is_gone_is_silent_within_two_seconds_and_heard_when_it_is_back() -> None:
    seen: Seen = []
    outcome = train([cut_off("a", 10.0, 25.0), honest("b", 200, speed=10.0), watched(seen)])
    assert (outcome.failure, outcome.counted) == (None, [{"a": 200, "b": 200}])
    # Its trace is on this slow link for seconds, in one frame: until then nothing else is to be seen of it.
    (silent_at, silent), (heard_at, heard), *_ = [(at, event) for at, event in seen if event.device == "a"]
    assert (type(silent), type(heard)) == (Silent, Heard)
    assert 10.0 + SILENT_AFTER_S <= silent_at <= 12.0
    assert silent.seconds == pytest.approx(SILENT_AFTER_S, abs=0.25)
    assert 25.0 <= heard_at <= 25.5


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pipar", "fl", "sl", "sfl2"])
def test_a_slow_device_is_not_reported_silent_repeatedly(method: str) -> None:
    seen: Seen = []
    lives = [honest("a", 100, speed=0.2), honest("b", 100, speed=0.1), watched(seen, 2000.0)]
    outcome = train(lives, epochs=2, method=method)
    assert outcome.failure is None
    # At first the monitor does not know the usual time.
    for name in ("a", "b"):
        assert len([event for _, event in seen if isinstance(event, Silent) and event.device == name]) <= 2, seen


@pytest.mark.slow
def test_an_outage_is_not_taken_for_the_devices_habit() -> None:
    seen: Seen = []
    train([cut_off("a", 10.0, 25.0, 30.0, 45.0), honest("b", 200, speed=10.0), watched(seen)])
    silent = [at for at, event in seen if event.device == "a" and isinstance(event, Silent)]
    assert 30.0 < silent[1] < 35.0, seen


@pytest.mark.slow
def test_a_device_that_waits_for_the_others_is_not_silent() -> None:
    seen: Seen = []
    outcome = train([honest("a", 20, speed=10.0), honest("b", 200, speed=1.0), watched(seen)], epochs=2)
    assert outcome.failure is None
    assert [event for _, event in seen if event.device == "a"] == []
