"""The server's measurement of a device's link, from the frame times of both sides."""

from __future__ import annotations

import pytest

from pipar.execution.clock import run_virtually
from pipar.execution.spans import DOWNLINK, UPLINK, Recorder
from pipar.planner.replanner import MeasuredLink
from pipar.server.device_messages import EndOfEpoch, Introduction
from pipar.server.session import Session
from pipar.transport.channel import Channel
from pipar.transport.in_memory import memory_pair
from pipar.transport.rate_estimate import FrameTime
from pipar.transport.shaping import Traffic
from pipar.wire.messages import Kind, Message, read_json


def burst(at: float, each_s: float, size_bytes: int = 0) -> dict[tuple[int, int], FrameTime]:
    return {(number, 0): FrameTime(at + number * each_s, size_bytes) for number in range(1, 7)}


def test_a_real_link_is_measured_in_both_directions_and_the_device_gets_its_uplink_rate() -> None:
    async def main() -> tuple[MeasuredLink, float | None, list[Message]]:
        near, far = memory_pair()
        device = Channel(far, Recorder("pi"), UPLINK)
        channel = Channel(near, Recorder("server"), DOWNLINK, is_real=True)
        session = Session(Introduction("pi", 10), 1, channel, Recorder("pi"))
        session.begin_round(1)
        channel.received_frames.times |= burst(1000.0, 0.1, 100_000)  # as fast as 8 Mbit/s
        channel.sent_frames.times |= burst(2000.0, 0.0, 100_000)
        end = EndOfEpoch(10, None, Traffic(5, 1.0), ready=burst(70.0, 0.0), came=burst(80.0, 0.05))
        measured = session.measure(end, 1)
        session.begin_round(2)
        rounds = [await device.receive() for _ in range(2)]
        rate_bps = channel.rate_bps(1)
        await channel.close()
        await device.close()
        return measured, rate_bps, rounds

    measured, down_bps, (first, second) = run_virtually(main())
    assert measured.up.rate_bps == pytest.approx(8e6)
    assert measured.down.rate_bps == down_bps == pytest.approx(16e6)
    assert (first.kind, first.body.size_bytes) == (Kind.ROUND, 0)
    told = read_json(second)
    assert told["up_bytes"] * 8 / told["up_s"] == pytest.approx(8e6)


def test_without_frame_times_the_devices_own_measurement_counts() -> None:
    async def main() -> MeasuredLink:
        near, _ = memory_pair()
        channel = Channel(near, Recorder("server"), DOWNLINK)
        session = Session(Introduction("pi", 10), 1, channel, Recorder("pi"))
        measured = session.measure(EndOfEpoch(10, None, Traffic(100_000, 0.5)), 1)
        await channel.close()
        return measured

    assert run_virtually(main()) == MeasuredLink(Traffic(100_000, 0.5), Traffic())
