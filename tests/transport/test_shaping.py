"""A pacer sends as many bits as its rate allows, also while the rate changes."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipar.execution.clock import run_virtually
from pipar.execution.spans import DOWNLINK, UPLINK, Recorder
from pipar.transport.channel import Channel
from pipar.transport.in_memory import memory_pair
from pipar.transport.shaping import Meter, Pacer, Rates, Traffic
from pipar.wire.messages import Body, Kind, Message

rates = st.floats(1e3, 1e9)
frames = st.lists(st.tuples(st.floats(0, 50), st.integers(1, 10**6)), min_size=1, max_size=20)
moments = st.floats(0, 1e4)


def sent_bits(rates: Rates, start: float, end: float) -> float:
    """Return the integral of the rate, interval by interval."""
    bits, number = 0.0, int((start - rates.since) // rates.every_s)
    while (begins := rates.since + number * rates.every_s) < end:
        rate = rates.cycle[number % len(rates.cycle)]
        assert rate is not None
        bits += max(0.0, min(end, begins + rates.every_s) - max(start, begins)) * rate
        number += 1
    return bits


@pytest.mark.slow
@given(st.lists(rates, min_size=2, max_size=4), st.floats(0.5, 100), moments, frames)
def test_bits_sent_are_the_integral_of_the_rate(
    cycle: list[float], every_s: float, since: float, posted: list[tuple[float, int]]
) -> None:
    pacer = Pacer(Rates(tuple(cycle), every_s, since), since)
    for after_s, size_bytes in posted:
        before = pacer.free_at
        start, end = pacer.reserve(since + after_s, size_bytes)
        assert start == max(before, since + after_s)
        # A time of 1e4 s is known to 1e-12 s, in which the fastest link sends a thousandth of a bit.
        assert sent_bits(pacer.rates, start, end) == pytest.approx(size_bytes * 8, rel=1e-9, abs=1e-2)


@pytest.mark.parametrize("start", [0.0, 2.099548063714771, 5.0, 5.7])
@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0, 2.9, 3.0, 40.25, 1000.1])
@pytest.mark.parametrize("every_s", [0.5, 0.1, 0.9708782249734275])
def test_the_bits_between_two_times_are_the_integral_of_the_rate(start: float, seconds: float, every_s: float) -> None:
    rates = Rates((1e6, 2e6, 5e6), every_s)
    expected = sent_bits(rates, start, start + seconds)
    assert rates.bits(start, start + seconds) == pytest.approx(expected, rel=1e-9, abs=1e-2)


def test_the_bits_of_three_hundred_years_are_known_at_once() -> None:
    rates = Rates((1e6, None, 3e6), 0.05, since=7.0)
    assert rates.bits(0.0, 9e9) == pytest.approx(4e6 / 3 * 9e9, rel=1e-6)


@pytest.mark.slow
@given(rates, st.integers(2, 4), st.floats(0.5, 100), frames)
def test_a_cycle_of_equal_rates_is_the_constant_rate(
    rate: float, count: int, every_s: float, posted: list[tuple[float, int]]
) -> None:
    steady, changing = Pacer(Rates((rate,))), Pacer(Rates((rate,) * count, every_s))
    for ready_at, size_bytes in posted:
        assert changing.reserve(ready_at, size_bytes) == pytest.approx(steady.reserve(ready_at, size_bytes), rel=1e-12)


def test_a_frame_in_flight_when_the_rate_changes_is_sent_partly_at_each() -> None:
    pacer = Pacer(Rates((80.0, 8.0, 800.0), 10.0, since=5.0), 5.0)
    assert pacer.reserve(13.0, 21) == (13.0, 16.0)  # 20 bytes in 2 s, the last one in a further second
    assert pacer.reserve(14.0, 9 + 100) == (16.0, 26.0)
    assert pacer.reserve(34.0, 200) == (34.0, 45.0)  # 100 bytes in the last second, 100 at the first rate again


def test_bits_that_are_unsent_when_a_limit_ends_take_no_more_time() -> None:
    rates = Rates((8.0, None), 10.0)
    assert rates.end(5.0, 100 * 8) == 10.0
    assert rates.end(15.0, 100 * 8) == 15.0
    assert rates.end(20.0, 5 * 8) == 25.0
    assert [rates.at(moment) for moment in (0.0, 9.9, 10.0, 20.0)] == [8.0, 8.0, None, 8.0]


def test_a_cycle_begins_when_the_channel_is_shaped() -> None:
    async def main() -> list[float]:
        near, far = memory_pair()
        device, server = Channel(near, Recorder("pi"), UPLINK), Channel(far, Recorder("server"), DOWNLINK)
        loop, arrivals = asyncio.get_running_loop(), []
        await asyncio.sleep(100.0)
        device.shape(800.0, 0.0, cycle=[800.0, 80.0], every_s=10.0)  # 100 bytes per second, then 10
        await asyncio.sleep(8.0)
        for _ in range(2):
            device.post(Message(Kind.ACTIVATION, 1, 1, 1, 1, 1, Body(201)))  # 250 bytes with the header
            await server.receive()
            arrivals.append(loop.time())
        await device.close()
        await server.close()
        return arrivals

    # The first: 2 s at 100 bytes a second and 5 s at 10. The second: 5 s at 10 and 2 s at 100.
    assert run_virtually(main()) == [115.0, 122.0]


# --- measuring


def test_a_meter_reads_bytes_and_seconds_of_an_epoch() -> None:
    meter = Meter()
    meter.count(1, 40_000, 2.0)
    meter.count(2, 50_000, 1.0)
    meter.count(2, 50_000, 1.5)
    assert meter.read(2) == Traffic(100_000, 2.5)
    assert Traffic(100_000, 2.5).rate_bps == 320_000


def test_a_meter_reads_the_recent_rate_of_a_link() -> None:
    meter = Meter()
    for rate_bps in (8e6, 80e6):
        for _ in range(100):  # each for 20 seconds
            meter.count(1, round(rate_bps * 0.2 / 8), 0.2)
    late = meter.read(1)
    assert late.rate_bps == pytest.approx(80e6, rel=0.03)
    assert late.seconds == pytest.approx(5.0)


def test_a_meter_of_a_very_slow_link_keeps_enough_traffic_for_a_rate() -> None:
    meter = Meter()
    for _ in range(100):
        meter.count(1, 1_000, 1.0)
    assert meter.read(1) == Traffic(64_000, 64.0)


def test_a_meter_reads_the_previous_epoch_if_one_has_too_little_traffic() -> None:
    meter = Meter()
    meter.count(1, 70_000, 2.0)
    meter.count(2, 63_999, 1.0)
    assert meter.read(2) == Traffic(70_000, 2.0)
    assert meter.read(3) == Traffic()  # traffic of two epochs ago is ignored
    assert meter.read(2) == Traffic(63_999, 1.0)


def test_a_meter_takes_the_traffic_of_an_epoch_if_it_is_enough_for_a_rate() -> None:
    meter = Meter()
    meter.take(1, Traffic(100_000, 2.0))
    meter.take(1, Traffic(100, 2.0))
    assert meter.read(1) == meter.read(2) == Traffic(100_000, 2.0)


def test_a_channel_measures_its_rate_from_its_own_frames() -> None:
    async def main() -> Traffic:
        near, far = memory_pair()
        device, server = Channel(near, Recorder("pi"), UPLINK), Channel(far, Recorder("server"), DOWNLINK)
        device.shape(8e6, 0.5)
        for number in range(1, 4):
            await asyncio.sleep(1.0)  # a lane that waits is not slow
            device.post(Message(Kind.ACTIVATION, 1, number, 1, 1, 1, Body(400_000)))
            await server.receive()
        device.post(Message(Kind.STATE, 1, body=Body(100_000, encoding="safetensors")))  # travels in epoch 2
        await server.receive()
        await device.close()
        await server.close()
        return device.meter.read(1)

    traffic = run_virtually(main())
    assert traffic.size_bytes == 3 * (400_000 + 49)
    assert traffic.rate_bps == pytest.approx(8e6, rel=1e-12)


def test_a_rate_beyond_any_devices_link_counts_as_unlimited() -> None:
    assert Traffic(10**9, 1.0).rate_bps is None
    assert Traffic(10**8, 1.0).rate_bps == 8e8
