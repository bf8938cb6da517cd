"""The rate of a real link is estimated from when its frames were ready and when they arrived, for any buffering."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pipar.execution.clock import run_virtually, sleep_until
from pipar.execution.spans import DOWNLINK, UPLINK, Recorder
from pipar.transport.channel import Channel
from pipar.transport.in_memory import MemoryTransport, memory_pair
from pipar.transport.rate_estimate import (
    FrameLog,
    FrameTime,
    FrameTimes,
    estimate_traffic,
    read_frame_times,
    read_traffic,
)
from pipar.transport.shaping import Traffic
from pipar.wire.frames import Frame
from pipar.wire.messages import Body, Kind, Message, json_body, read_json

LATENCY_S = 0.005


class Windowed:
    """One end of a link with a rate, behind a window like gRPC's: it accepts much, then makes room in large steps."""

    def __init__(
        self, end: MemoryTransport, rate_bps: float, window_bytes: int = 1_550_000, lump: int = 500_000
    ) -> None:
        self._end, self._rate_bps, self._room, self._lump = end, rate_bps, window_bytes, lump
        self._read_bytes, self._empty_at, self._news = 0, 0.0, asyncio.Event()
        self._under_way: asyncio.Queue[tuple[float, Frame]] = asyncio.Queue()
        self._pump = asyncio.create_task(self._carry())

    async def write(self, frame: Frame) -> None:
        while self._room < frame.size_bytes:
            self._news.clear()
            await self._news.wait()
        self._room -= frame.size_bytes
        self._empty_at = max(self._empty_at, asyncio.get_running_loop().time()) + frame.size_bytes * 8 / self._rate_bps
        self._under_way.put_nowait((self._empty_at + LATENCY_S, frame))

    async def _carry(self) -> None:
        while True:
            arrives_at, frame = await self._under_way.get()
            await sleep_until(arrives_at)
            await self._end.write(frame)
            self._read_bytes += frame.size_bytes
            if self._read_bytes >= self._lump:
                self._room, self._read_bytes = self._room + self._read_bytes, 0
                self._news.set()

    async def read(self) -> Frame:
        return await self._end.read()

    async def close(self) -> None:
        self._pump.cancel()
        await self._end.close()


async def bursts(
    rate_bps: float, frames: int, size_bytes: int, *, compute_s: float = 0.0, pause_s: float = 0.5, count: int = 4
) -> tuple[FrameTimes, FrameTimes]:
    """Send some bursts of messages over a slow link; return the frame times of the sender and of the receiver."""
    near, far = memory_pair()
    device = Channel(Windowed(near, rate_bps), Recorder("pi"), UPLINK, is_real=True)
    server = Channel(far, Recorder("server"), DOWNLINK, is_real=True)

    async def serve(messages: int) -> Message:
        return [await server.receive() for _ in range(messages)][-1]

    for number in range(1, count + 1):
        serving = asyncio.create_task(serve(frames))
        for n in range(1, frames + 1):
            await asyncio.sleep(compute_s)
            device.post(Message(Kind.ACTIVATION, 1, number, n, body=Body(size_bytes)))
        await serving
        await asyncio.sleep(pause_s)
    device.post(Message(Kind.END_EPOCH, 1, body=json_body(device.frame_times())))
    told = read_frame_times(read_json(await serve(1))["ready"])
    await device.close()
    await server.close()
    assert told is not None
    return told, server.received_frames.times


@pytest.mark.parametrize("rate_bps", [1e6, 7.5e6, 30e6])
@pytest.mark.parametrize(
    ("frames", "size_bytes"), [(6, 140_000), (12, 140_000), (10, 330_000), (3, 20_000), (2, 140_000), (1, 3_200_000)]
)
def test_a_burst_shows_the_rate_of_the_link_with_any_window(frames: int, size_bytes: int, rate_bps: float) -> None:
    ready, came = run_virtually(bursts(rate_bps, frames, size_bytes))
    assert estimate_traffic(ready, came).rate_bps == pytest.approx(rate_bps, rel=0.05)
    skewed = {key: moment._replace(at=moment.at + 1e6) for key, moment in ready.items()}
    assert estimate_traffic(skewed, came).rate_bps == pytest.approx(rate_bps, rel=0.05)


@pytest.mark.parametrize(("frames", "size_bytes"), [(6, 140_000), (12, 140_000), (10, 330_000)])
def test_a_burst_without_a_small_frame_also_shows_the_rate(frames: int, size_bytes: int) -> None:
    ready, came = run_virtually(bursts(7.5e6, frames, size_bytes))
    large = {key: moment for key, moment in ready.items() if came[key].size_bytes > size_bytes}
    assert len(large) < len(ready)
    assert estimate_traffic(large, came).rate_bps == pytest.approx(7.5e6, rel=0.01)


def test_frames_that_never_wait_show_the_rate_by_their_additional_time_over_a_small_one() -> None:
    ready, came = run_virtually(bursts(8e6, 5, 140_000, compute_s=0.5))
    assert estimate_traffic(ready, came).rate_bps == pytest.approx(8e6, rel=0.05)
    large = {key: moment for key, moment in ready.items() if came[key].size_bytes > 140_000}
    assert not estimate_traffic(large, came).is_enough  # the rate of computing is not the rate of the link


def test_a_machine_that_is_slower_than_its_link_does_not_make_the_link_look_slow() -> None:
    ready, came = run_virtually(bursts(100e6, 10, 140_000, compute_s=0.05))
    assert estimate_traffic(ready, came).rate_bps == pytest.approx(100e6, rel=0.1)


def test_the_rate_of_a_link_without_traffic_is_unknown() -> None:
    assert estimate_traffic({}, {}) == Traffic()
    ready, came = run_virtually(bursts(1e6, 6, 140_000))
    assert estimate_traffic(ready, {}) == estimate_traffic({}, came) == Traffic()


def test_frames_that_are_sent_again_are_not_measured() -> None:
    async def main() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        near, far = memory_pair()
        device = Channel(near, Recorder("pi"), UPLINK, is_real=True, on_lost=lambda _: None)
        for n in (1, 2):
            device.post(Message(Kind.ACTIVATION, 1, 1, n, body=Body(1000)))
        await device.drain()
        before = list(device.sent_frames.times)
        await far.close()
        near, far = memory_pair()
        device.attach(near, 1)
        device.post(Message(Kind.ACTIVATION, 1, 1, 3, body=Body(1000)))
        await device.drain()
        after = list(device.sent_frames.times)
        await device.close()
        return before, after

    assert run_virtually(main()) == ([(1, 0), (2, 0)], [(3, 0)])


def test_an_emulated_link_reports_no_frame_times() -> None:
    async def main() -> list[dict[str, Any]]:
        told = []
        for is_real, rate_bps in ((False, None), (True, 8e6)):
            near, _ = memory_pair()
            channel = Channel(near, Recorder("pi"), UPLINK, is_real=is_real)
            channel.shape(rate_bps, 0.0)
            channel.post(Message(Kind.ACTIVATION, 1, body=Body(1000)))
            await channel.drain()
            told.append(channel.frame_times())
            await channel.close()
        return told

    assert run_virtually(main()) == [{}, {}]


def test_a_log_remembers_the_last_frames_only() -> None:
    log = FrameLog()
    for sequence in range(1, 1001):
        log.note(Frame(Message(Kind.ROUND), 1, sequence, 0, 0, 1, (), 0), float(sequence))
    assert (len(log.times), next(iter(log.times))) == (100, (901, 0))
    assert read_frame_times(log.as_json()) == {key: moment._replace(size_bytes=0) for key, moment in log.times.items()}


@pytest.mark.parametrize(
    "told",
    [None, {}, 1, [1], [[1, 0]], [[1, 0, "now"]], [[1, 0, float("nan")]], [[1, 0, 10**400]], [[1.5, 0, 1.0]],
     [[True, 0, 1.0]], [[1, 0, -1.0]], [[1, 0, 1.0]] * 102],
    ids=str,
)  # fmt: skip
def test_invalid_frame_times_are_refused(told: Any) -> None:
    assert read_frame_times(told) is None


def test_impossible_traffic_is_refused() -> None:
    assert read_traffic({}) == Traffic()
    assert read_traffic({"up_bytes": 5, "up_s": 2.0}) == Traffic(5, 2.0)
    assert read_traffic({"up_bytes": -5, "up_s": 2.0}) is read_traffic({"up_bytes": 5, "up_s": "2"}) is None


def late(*delays_s: float, size_bytes: int = 250_000, rate_bps: float | None = None) -> tuple[FrameTimes, FrameTimes]:
    """Return the times of bursts of a small frame and two large ones; each burst arrives this much late.

    The large ones were ready together, and need their time on the link of this rate.
    """
    ready, came = {}, {}
    for number, delay_s in enumerate(delays_s):
        at = 10.0 * number
        ready[number, 0] = FrameTime(at, 100)
        came[number, 0] = FrameTime(at + 0.001, 100)
        for chunk in (1, 2):
            on_link_s = chunk * size_bytes * 8 / rate_bps if rate_bps else chunk * 0.001
            ready[number, chunk] = FrameTime(at + 0.1, size_bytes)
            came[number, chunk] = FrameTime(at + 0.101 + on_link_s + chunk * delay_s, size_bytes)
    return ready, came


def test_a_link_is_as_fast_as_its_best_burst_if_the_machine_was_late_with_the_others() -> None:
    fast = estimate_traffic(*late(0.2, 0.15, 0.0, 0.3, 0.25, 0.2))
    assert fast.size_bytes * 8 / fast.seconds == pytest.approx(250_000 * 8 / 0.001, rel=0.05)
    slow = estimate_traffic(*late(0.2, 0.15, 0.3, 0.25, 0.2))
    assert slow.rate_bps == pytest.approx(8 * 250_000 / 0.151, rel=0.5)  # no burst was punctual


def test_a_late_machine_never_makes_a_link_look_faster_than_it_is() -> None:
    for delays in ([0.0] * 6, [0.5, 0.0, 0.4, 0.0, 0.3, 0.0], [0.01, 0.02, 3.0, 0.01, 2.0, 0.1]):
        rate_bps = estimate_traffic(*late(*delays, rate_bps=30e6)).rate_bps
        assert rate_bps is not None
        assert 30e6 / 3 <= rate_bps <= 30e6 * 1.001


def test_a_link_that_has_become_slow_is_not_taken_for_a_late_machine() -> None:
    fast, slow = late(*[0.0] * 16, rate_bps=30e6), late(*[0.0] * 17, rate_bps=3e6)
    ready, came = (
        before | {(number + 16, chunk): at._replace(at=at.at + 160.0) for (number, chunk), at in after.items()}
        for before, after in zip(fast, slow, strict=True)
    )
    rate_bps = estimate_traffic(ready, came).rate_bps
    assert rate_bps is not None
    assert rate_bps < 6e6


def test_a_burst_that_the_link_lets_pass_after_a_pause_does_not_make_it_look_fast() -> None:
    """A token bucket of 32 kB: the first frames of each burst arrive at once, the others at 8 Mbit/s."""
    ready, came = {}, {}
    for burst in range(5):
        for number in range(6):
            key, at = (6 * burst + number, 0), float(burst)
            ready[key] = FrameTime(at)
            came[key] = FrameTime(at + 0.02 * max(0, number - 1) + 1e-4 * number, 20_000)
    assert estimate_traffic(ready, came).rate_bps == pytest.approx(8e6, rel=0.03)
