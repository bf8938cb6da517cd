"""Links are measured when devices join, in virtual time: both directions, and the latency."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pipar.device.link_answer import LinkAnswer
from pipar.errors import ProtocolError
from pipar.execution.clock import run_virtually
from pipar.execution.spans import DOWNLINK, UPLINK, Recorder
from pipar.server.device_messages import Introduction
from pipar.server.link_measurement import measure_links
from pipar.server.session import Session
from pipar.settings.links import Link
from pipar.transport.channel import Channel
from pipar.transport.in_memory import memory_pair
from pipar.wire.messages import Body, Kind, Message, json_body

UNKNOWN = Link()


def measured(
    real: Link, known: Link = UNKNOWN, *, answers: Callable[[Channel, Message], None] | None = None, probes: bool = True
) -> tuple[Link | None, float]:
    """Return what the server measures of a link, and how long that takes; by default the device answers."""

    async def main() -> tuple[Link | None, float]:
        near, far = memory_pair()
        server, device = Channel(near, Recorder("server"), DOWNLINK), Channel(far, Recorder("pi"), UPLINK)
        server.shape(real.down_bps, real.latency_s)
        device.shape(real.up_bps, real.latency_s)
        session = Session(Introduction("pi", 10, answers_probes=probes), 1, server, Recorder("pi"))
        answer = LinkAnswer(device)

        async def read() -> None:
            while True:
                session.take_probe(await server.receive())

        async def reply() -> None:
            while True:
                message = await device.receive()
                answer.take(message) if answers is None else answers(device, message)

        tasks = [asyncio.create_task(work) for work in (read(), reply())]
        began = asyncio.get_running_loop().time()
        links = await measure_links([session], {"pi": known})
        passed_s = asyncio.get_running_loop().time() - began
        for task in tasks:
            task.cancel()
        await server.close()
        await device.close()
        return links.get("pi"), passed_s

    return run_virtually(main())


@pytest.mark.parametrize(("up", "down"), [(10e6, 25e6), (50e6, 50e6), (1e6, 5e6), (100e6, 20e6)])
def test_both_directions_and_the_latency_are_measured_within_a_second(up: float, down: float) -> None:
    link, passed_s = measured(Link(up_bps=up, down_bps=down, latency_s=0.005))
    assert link is not None
    assert link.up_bps == pytest.approx(up, rel=0.02)
    assert link.down_bps == pytest.approx(down, rel=0.02)
    assert link.latency_s == pytest.approx(0.005, abs=0.5e-3)
    assert passed_s < 1.0


def test_a_link_without_a_limit_is_measured_as_that() -> None:
    link, passed_s = measured(Link())
    assert link == Link()
    assert passed_s < 0.1


def test_a_configured_rate_is_kept_and_only_the_other_direction_measured() -> None:
    link, _ = measured(Link(up_bps=10e6, down_bps=25e6), Link(up_bps=8e6))
    assert link is not None
    assert link.up_bps == 8e6
    assert link.down_bps == pytest.approx(25e6, rel=0.02)


def test_a_link_that_is_configured_is_not_measured() -> None:
    assert measured(Link(), Link(up_bps=8e6, down_bps=8e6)) == (None, 0.0)


def test_a_device_that_does_not_say_that_it_answers_is_not_measured() -> None:
    assert measured(Link(), probes=False) == (None, 0.0)


def test_a_device_that_does_not_answer_delays_the_training_by_seconds_at_most() -> None:
    link, passed_s = measured(Link(), answers=lambda *_: None)
    assert link is None
    assert passed_s == pytest.approx(3.0)


def test_a_link_that_is_too_slow_to_be_measured_is_not_taken_for_an_unlimited_one() -> None:
    link, passed_s = measured(Link(up_bps=50e3, down_bps=10e6))
    assert link is not None
    assert (link.up_bps, link.down_bps) == (pytest.approx(171e3, rel=0.01), pytest.approx(10e6, rel=0.02))
    assert passed_s == pytest.approx(3.0)


def test_a_device_that_answers_with_nonsense_is_not_measured() -> None:
    def nonsense(device: Channel, message: Message) -> None:
        if message.micro_batch == message.samples:
            device.post(Message(Kind.PROBE, body=json_body({"came": ["soon"]})))

    assert measured(Link(up_bps=1e6, down_bps=1e6), answers=nonsense)[0] is None


def test_a_device_refuses_to_send_without_end() -> None:
    async def main() -> None:
        _, far = memory_pair()
        device = Channel(far, Recorder("pi"), UPLINK)
        answer = LinkAnswer(device)
        asking = Message(Kind.PROBE, micro_batch=1, samples=1, batch_samples=64, body=Body())
        for _ in range(7):
            answer.take(asking)
        with pytest.raises(ProtocolError, match="more than"):
            answer.take(asking)
        await device.close()

    run_virtually(main())
