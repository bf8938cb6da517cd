"""Links are measured when devices join, in virtual time: both directions, and the latency."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from pipar.device.link_answer import LinkAnswer
from pipar.errors import LinkError, ProtocolError
from pipar.execution.clock import run_virtually
from pipar.execution.spans import DOWNLINK, UPLINK, Recorder
from pipar.server.device_messages import Introduction
from pipar.server.link_measurement import LinkMeasurements
from pipar.server.session import Session
from pipar.settings.links import Link
from pipar.transport.channel import Channel
from pipar.transport.in_memory import memory_pair
from pipar.transport.link_trial import FRAME_BYTES
from pipar.wire.messages import Body, Kind, Message, json_body

UNKNOWN = Link()


Answers = Callable[[Channel, Message], None]


def silence(_: Channel, __: Message) -> None:
    """Answer nothing."""


@asynccontextmanager
async def joined(
    name: str = "pi", real: Link = UNKNOWN, *, answers: Answers | None = None, probes: bool = True
) -> AsyncIterator[Session]:
    """Let a device with this link join; by default it answers."""
    near, far = memory_pair()
    server, device = Channel(near, Recorder("server"), DOWNLINK), Channel(far, Recorder(name), UPLINK)
    server.shape(real.down_bps, real.latency_s)
    device.shape(real.up_bps, real.latency_s)
    session = Session(Introduction(name, 10, answers_probes=probes), 1, server, Recorder(name))
    answer = LinkAnswer(device)

    async def read() -> None:
        with suppress(LinkError):
            while True:
                session.take_probe(await server.receive())

    async def reply() -> None:
        with suppress(LinkError):
            while True:
                message = await device.receive()
                answer.take(message) if answers is None else answers(device, message)

    tasks = [asyncio.create_task(work) for work in (read(), reply())]
    yield session
    for task in tasks:
        task.cancel()
    await server.close()
    await device.close()


async def timed(
    links: LinkMeasurements, sessions: Iterable[Session], known: Link = UNKNOWN
) -> tuple[dict[str, Link], float]:
    """Return what the server measures of the links of these devices, and how long that takes."""
    began = asyncio.get_running_loop().time()
    found = await links.measure(lambda: sessions, lambda _: known)
    return found, asyncio.get_running_loop().time() - began


def measured(
    real: Link, known: Link = UNKNOWN, *, answers: Answers | None = None, probes: bool = True
) -> tuple[Link | None, float]:
    """Return what the server measures of a link, and how long that takes; by default the device answers."""

    async def main() -> tuple[Link | None, float]:
        async with joined("pi", real, answers=answers, probes=probes) as session:
            found, passed_s = await timed(LinkMeasurements(), [session], known)
        return found.get("pi"), passed_s

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
    link, passed_s = measured(Link(), answers=silence)
    assert link is None
    assert passed_s == pytest.approx(3.0)


def test_many_devices_that_do_not_answer_delay_neither_the_training_nor_the_measurement_of_another_one() -> None:
    async def main() -> tuple[dict[str, Link], float]:
        async with AsyncExitStack() as devices:
            silent = [await devices.enter_async_context(joined(f"a{n}", answers=silence)) for n in range(100)]
            honest = await devices.enter_async_context(joined("pi", Link(up_bps=10e6, down_bps=25e6)))
            return await timed(LinkMeasurements(), [*silent, honest])

    found, passed_s = run_virtually(main())
    assert found.keys() == {"pi"}
    assert passed_s == pytest.approx(3.0)


def test_devices_that_stop_answering_in_the_middle_delay_the_training_by_five_seconds_in_all() -> None:
    def only_round_trips(device: Channel, message: Message) -> None:
        if not message.batch_samples:
            device.post(Message(Kind.PROBE, body=json_body({"came": [1.0]})))

    async def main() -> float:
        async with AsyncExitStack() as devices:
            fleet = [await devices.enter_async_context(joined(f"a{n}", answers=only_round_trips)) for n in range(100)]
            return (await timed(LinkMeasurements(), fleet))[1]

    assert run_virtually(main()) == pytest.approx(5.0)


def test_a_device_that_leaves_while_it_is_measured_is_not_waited_for() -> None:
    async def main() -> tuple[dict[str, Link], float]:
        async with joined(answers=silence) as session:
            asyncio.get_running_loop().call_later(0.5, session.end, LinkError("gone"))
            return await timed(LinkMeasurements(), [session])

    assert run_virtually(main()) == ({}, pytest.approx(0.5))


def test_a_device_that_has_left_before_it_is_measured_is_not_waited_for() -> None:
    async def main() -> tuple[dict[str, Link], float]:
        async with joined(answers=silence) as session:
            session.end(LinkError("gone"))
            return await timed(LinkMeasurements(), [session])

    assert run_virtually(main()) == ({}, 0.0)


def test_a_device_that_did_not_answer_is_not_measured_again_when_it_joins_again() -> None:
    async def main() -> list[float]:
        links, passed_s = LinkMeasurements(), []
        for _ in range(2):
            async with joined(answers=silence) as session:
                passed_s.append((await timed(links, [session]))[1])
        return passed_s

    assert run_virtually(main()) == [pytest.approx(3.0), 0.0]


def test_a_device_that_was_measured_quickly_is_measured_again_when_it_joins_again() -> None:
    async def main() -> list[float | None]:
        links, rates = LinkMeasurements(), []
        for up_bps in (10e6, 20e6):
            async with joined(real=Link(up_bps=up_bps, down_bps=20e6)) as session:
                rates.append((await timed(links, [session]))[0]["pi"].up_bps)
        return rates

    assert run_virtually(main()) == [pytest.approx(10e6, rel=0.02), pytest.approx(20e6, rel=0.02)]


def test_devices_that_join_during_a_measurement_are_measured_before_plans_are_made() -> None:
    async def main() -> dict[str, Link]:
        async with joined("a", Link(up_bps=10e6)) as first, joined("b", Link(up_bps=20e6)) as second:
            present = [first]
            asyncio.get_running_loop().call_later(0.01, present.append, second)
            return (await timed(LinkMeasurements(), present))[0]

    assert run_virtually(main()).keys() == {"a", "b"}


def test_a_link_that_is_too_slow_to_be_measured_is_not_taken_for_an_unlimited_one() -> None:
    link, passed_s = measured(Link(up_bps=50e3, down_bps=10e6))
    assert link is not None
    assert (link.up_bps, link.down_bps) == (pytest.approx(171e3, rel=0.05), pytest.approx(10e6, rel=0.02))
    assert passed_s == pytest.approx(3.0)


def test_a_device_that_answers_with_nonsense_is_not_measured() -> None:
    def nonsense(device: Channel, message: Message) -> None:
        if message.micro_batch == message.samples:
            device.post(Message(Kind.PROBE, body=json_body({"came": ["soon"]})))

    assert measured(Link(up_bps=1e6, down_bps=1e6), answers=nonsense)[0] is None


def test_a_device_cannot_claim_a_downlink_slower_than_the_wait_for_its_answer() -> None:
    def claims(device: Channel, message: Message) -> None:
        if message.micro_batch == message.samples:
            device.post(Message(Kind.PROBE, body=json_body({"came": [0.0] * (message.samples - 1) + [1e9]})))

    link, passed_s = measured(Link(up_bps=1e6, down_bps=1e6), answers=claims)
    assert link is None
    assert passed_s < 1.0


@pytest.mark.parametrize("body", [Body(), Body(FRAME_BYTES - 1)])
def test_a_device_cannot_claim_a_fast_uplink_by_frames_of_other_bytes(body: Body) -> None:
    def cheats(device: Channel, message: Message) -> None:
        if message.micro_batch == message.samples:
            device.post(Message(Kind.PROBE, body=json_body({"came": [1.0] * message.samples})))
            for _ in range(message.batch_samples):
                device.post(Message(Kind.PROBE, body=body))

    assert measured(Link(up_bps=1e6, down_bps=1e6), answers=cheats)[0] is None


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
