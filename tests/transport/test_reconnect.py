"""A device's connection: retried with pauses, made again when it is lost, and given up after a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from pipar.errors import (
    CredentialError,
    DeviceRefusedError,
    InputError,
    LinkError,
    PiparError,
    ProtocolError,
    SessionOverError,
    TrainingError,
    VersionError,
)
from pipar.events import Connected, Connecting, Event, Reconnecting
from pipar.execution.clock import run_virtually
from pipar.execution.spans import UPLINK, Recorder
from pipar.server.session import fault
from pipar.transport.backoff import Backoff
from pipar.transport.channel import Channel
from pipar.transport.in_memory import MemoryTransport, memory_pair
from pipar.transport.interface import Transport
from pipar.transport.reconnect import PatientDialer, Reconnector, resume
from pipar.wire.frames import cut_message
from pipar.wire.messages import Kind, Message, json_body, read_json


@dataclass
class Road:
    """The connection attempts to a server, by a script: each is an error, or what the server does."""

    answers: list[PiparError | Callable[[MemoryTransport], Awaitable[None]]]
    dialled_at: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    servers: list[asyncio.Task[Any]] = field(default_factory=list)

    async def dial(self) -> Transport:
        self.dialled_at.append(asyncio.get_running_loop().time())
        answer = self.answers.pop(0)
        if isinstance(answer, PiparError):
            raise answer
        near, far = memory_pair()
        self.servers.append(asyncio.create_task(answer(far)))  # type: ignore[arg-type]
        return near

    def reconnector(self, gives_up_s: float | None = None) -> Reconnector:
        backoff = Backoff(lambda: 1.0, asyncio.get_running_loop().time, gives_up_s, first_s=1.0, most_s=8.0)
        return Reconnector("pi", "server:1", self.dial, backoff, self.events.append)

    @property
    def attempts(self) -> list[tuple[int, float]]:
        return [(event.attempt, event.wait_s) for event in self.events if isinstance(event, Reconnecting)]


async def nothing(_: MemoryTransport) -> None:
    """A server that accepts a connection and sends nothing."""


def says(message: Message, acknowledged: int = 0) -> Callable[[MemoryTransport], Awaitable[None]]:
    async def answer(far: MemoryTransport) -> None:
        heard.append(await far.read())
        for frame in cut_message(message, 7, 0, acknowledged):
            await far.write(frame)

    heard: list[Any] = []
    answer.heard = heard  # type: ignore[attr-defined]
    return answer


UNREACHABLE = LinkError("No server answered.")


# --- the first connection


def test_a_server_is_dialled_with_increasing_pauses_until_it_answers() -> None:
    road = Road([UNREACHABLE] * 5 + [nothing])

    async def main() -> None:
        async def take_part(_: Transport) -> None:
            return

        await road.reconnector().run(take_part)

    run_virtually(main())
    assert road.attempts == [(1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (5, 8.0)]
    assert road.dialled_at == [0.0, 1.0, 3.0, 7.0, 15.0, 23.0]


def test_a_server_that_never_answers_is_given_up_with_the_last_reason() -> None:
    road = Road([UNREACHABLE] * 99)

    async def main() -> None:
        await road.reconnector(gives_up_s=10.0).run(nothing)  # type: ignore[arg-type]

    with pytest.raises(LinkError, match=r"Gave up connecting to server:1: No server answered\."):
        run_virtually(main())
    assert road.dialled_at == [0.0, 1.0, 3.0, 7.0, 9.0]


@pytest.mark.parametrize("answers_before", [0, 3])
def test_an_attempt_that_hangs_is_given_up_with_the_others(answers_before: int) -> None:
    async def main() -> float:
        loop, road = asyncio.get_running_loop(), Road([UNREACHABLE] * answers_before)

        async def dial() -> Transport:
            if road.answers:
                return await road.dial()
            await asyncio.sleep(3600.0)
            raise AssertionError("it was waited for")

        backoff = Backoff(lambda: 1.0, loop.time, 10.0, first_s=1.0, most_s=8.0)
        with pytest.raises(LinkError, match=r"Gave up connecting to server:1: No server answered at server:1 within"):
            await Reconnector("pi", "server:1", dial, backoff, road.events.append).run(nothing)  # type: ignore[arg-type]
        return loop.time()

    assert run_virtually(main()) == 10.0


def test_a_long_wait_for_the_training_to_start_does_not_count_towards_giving_up() -> None:
    road = Road([nothing] * 2)

    async def main() -> None:
        lives = []

        async def take_part(transport: Transport) -> None:
            lives.append(transport)
            if len(lives) == 1:
                await asyncio.sleep(500.0)  # connected, but not admitted before others have joined
                raise LinkError("The peer closed the connection.")

        await road.reconnector(gives_up_s=10.0).run(take_part)

    run_virtually(main())
    assert road.attempts == [(1, 1.0)]


def test_connecting_is_reported_first_and_connected_after_every_connection() -> None:
    road = Road([UNREACHABLE, nothing])

    async def main() -> None:
        async def take_part(_: Transport) -> None:
            return

        await road.reconnector().run(take_part)

    run_virtually(main())
    refused = Reconnecting("server:1", 1, 1.0, str(UNREACHABLE))
    assert road.events == [Connecting("server:1"), refused, Connected("server:1")]


def test_a_server_that_accepts_connections_but_admits_no_device_is_not_flooded() -> None:
    road = Road([nothing] * 99)

    async def main() -> None:
        async def refused(_: Transport) -> None:
            raise SessionOverError("A device called 'pi' has joined already.")

        await road.reconnector(gives_up_s=60.0).run(refused)

    with pytest.raises(LinkError, match="joined already"):
        run_virtually(main())
    assert road.dialled_at == [0.0, 1.0, 3.0, 7.0, 15.0, 23.0, 31.0, 39.0, 47.0, 55.0, 59.0]


def test_an_error_that_is_not_the_links_is_not_retried() -> None:
    road = Road([nothing, nothing])

    async def main() -> None:
        async def take_part(_: Transport) -> None:
            raise InputError("no such file")

        await road.reconnector().run(take_part)

    with pytest.raises(InputError, match="no such file"):
        run_virtually(main())
    assert road.dialled_at == [0.0]


def lives(road: Road, *ends: PiparError | None, lasts_s: float = 0.0) -> None:
    """Let a device take part in one session after another, which end with these errors."""

    async def main() -> None:
        left, reconnector = list(ends), road.reconnector()

        async def take_part(transport: Transport) -> None:
            channel = Channel(transport, Recorder("pi"), UPLINK, on_lost=reconnector.lost)
            keeping = asyncio.create_task(reconnector.keep_attached(channel))
            await asyncio.sleep(lasts_s)
            channel.session = 7 if lasts_s else 0
            try:
                if (end := left.pop(0)) is not None:
                    raise end
            finally:
                keeping.cancel()
                await channel.close()

        await reconnector.run(take_part)

    run_virtually(main())


DAMAGED = ProtocolError("The peer sent bytes that are not a pipar frame.")


def test_a_breach_by_the_server_ends_a_session_and_not_the_device() -> None:
    road = Road([nothing] * 3)
    lives(road, DAMAGED, DAMAGED, None, lasts_s=100.0)
    assert road.attempts == [(1, 1.0), (1, 1.0)]
    assert [event.reason for event in road.events if isinstance(event, Reconnecting)] == [str(DAMAGED)] * 2


def test_a_server_that_breaks_the_protocol_immediately_is_not_flooded() -> None:
    for lasts_s in (0.0, 5.0):
        road = Road([nothing] * 5)
        lives(road, *[DAMAGED] * 4, None, lasts_s=lasts_s)
        assert road.attempts == [(1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0)]


@pytest.mark.parametrize("final", [TrainingError("The server refused this device: no."), VersionError("version 9")])
def test_an_error_that_the_server_sends_and_another_version_end_the_device(final: PiparError) -> None:
    road = Road([nothing, nothing])
    with pytest.raises(type(final)):
        lives(road, final, None)
    assert road.attempts == []


# --- a program other than the server answers at its address

STRANGERS = [
    CredentialError("The server has a certificate that cannot be verified with the device's ca.pem."),
    CredentialError("The server has a certificate that has expired."),
    CredentialError("The server does not use TLS, but the device does."),
    InputError("pi.pem does not belong to pi.key."),  # while a person replaces the two files
]
LOST = LinkError("The peer closed the connection.")


def reasons(road: Road) -> list[str]:
    return [event.reason for event in road.events if isinstance(event, Reconnecting)]


def test_a_device_that_was_admitted_outlasts_strangers_at_the_address_of_its_server() -> None:
    road = Road([nothing, *STRANGERS, nothing])
    lives(road, LOST, None, lasts_s=100.0)
    assert road.attempts == [(1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (5, 8.0)]
    assert reasons(road) == [str(error) for error in (LOST, *STRANGERS)]


def test_a_device_that_was_admitted_outlasts_a_server_of_another_version() -> None:
    async def main() -> None:
        reconnector = road.reconnector()
        ends: list[PiparError | None] = [LOST, VersionError("version 9"), VersionError("version 9"), None]

        async def take_part(transport: Transport) -> None:
            channel = Channel(transport, Recorder("pi"), UPLINK, on_lost=reconnector.lost)
            keeping = asyncio.create_task(reconnector.keep_attached(channel))
            await asyncio.sleep(1.0)
            channel.session = 7 if len(ends) == 4 else 0  # only the first server admits it
            try:
                if (end := ends.pop(0)) is not None:
                    raise end
            finally:
                keeping.cancel()
                await channel.close()

        await reconnector.run(take_part)

    road = Road([nothing] * 4)
    run_virtually(main())
    assert reasons(road) == [str(LOST), "version 9", "version 9"]


@pytest.mark.parametrize("stranger", STRANGERS, ids=str)
def test_a_device_that_was_never_admitted_ends_with_the_reason(stranger: PiparError) -> None:
    road = Road([stranger, nothing])
    with pytest.raises(type(stranger), match=str(stranger)):
        lives(road, None)
    assert road.attempts == []


@pytest.mark.parametrize("admitted", [True, False])
def test_a_device_that_its_verified_server_refuses_ends(admitted: bool) -> None:
    refused = DeviceRefusedError("This certificate was revoked.")
    road = Road([nothing, refused, nothing] if admitted else [refused, nothing])
    with pytest.raises(DeviceRefusedError, match="was revoked"):
        lives(road, LOST, None, lasts_s=100.0)


def test_a_session_is_resumed_after_strangers_have_answered() -> None:
    async def scenario(channel: Channel) -> bool:
        receiving = asyncio.create_task(channel.receive())
        await asyncio.sleep(60.0)
        receiving.cancel()
        return channel.is_attached

    road = Road([*STRANGERS, says(Message(Kind.WELCOME))])
    assert with_a_channel(road, scenario)
    assert reasons(road)[1:] == [str(error) for error in STRANGERS]


def test_a_session_of_a_device_that_its_verified_server_refuses_is_not_resumed() -> None:
    refused = DeviceRefusedError("This certificate was revoked.")
    assert with_a_channel(Road([refused]), failure) is refused


# --- a session that is resumed


def with_a_channel(road: Road, scenario: Callable[[Channel], Awaitable[Any]], *, session: int = 7, **how: Any) -> Any:
    """Run a scenario with a channel whose first link is lost at 10 s and kept by a reconnector."""

    async def main() -> Any:
        near, far = memory_pair()
        reconnector = road.reconnector(**how)
        channel = Channel(near, Recorder("pi"), UPLINK, on_lost=reconnector.lost)
        channel.session = session
        keeping = asyncio.create_task(reconnector.keep_attached(channel))
        asyncio.get_running_loop().call_later(10.0, lambda: far._outbox.put_nowait(None))
        try:
            return await scenario(channel)
        finally:
            keeping.cancel()
            await channel.close()
            await asyncio.gather(keeping, *road.servers, return_exceptions=True)
            assert len(asyncio.all_tasks()) == 1

    return run_virtually(main())


async def failure(channel: Channel) -> LinkError:
    with pytest.raises(LinkError) as caught:
        await channel.receive()
    return caught.value


def test_a_lost_link_is_replaced_and_messages_posted_meanwhile_are_sent_over_the_new_one() -> None:
    async def server(far: MemoryTransport) -> None:
        hello = await far.read()
        assert (hello.message.kind, hello.session, hello.sequence, hello.acknowledged) == (Kind.HELLO, 7, 0, 0)
        assert read_json(hello.only()) == {"name": "pi"}
        (welcome,) = cut_message(Message(Kind.WELCOME), 7, 0)
        await far.write(welcome)
        numbers.extend([(await far.read()).sequence, (await far.read()).sequence])
        (round_,) = cut_message(Message(Kind.ROUND, 3), 7, 1, 2)
        await far.write(round_)

    async def scenario(channel: Channel) -> int:
        channel.post(Message(Kind.ACTIVATION, 1))  # lost with the first link, which is not read
        waiting = asyncio.create_task(channel.receive())
        await asyncio.sleep(12.0)
        channel.post(Message(Kind.ACTIVATION, 2))
        return (await waiting).epoch

    numbers: list[int] = []
    road = Road([UNREACHABLE, UNREACHABLE, server])
    assert with_a_channel(road, scenario) == 3
    assert numbers == [1, 2]
    assert road.attempts == [(1, 1.0), (2, 2.0), (3, 4.0)]
    assert road.events[-1] == Connected("server:1")


def test_a_session_that_is_over_ends_the_channel_so_that_the_device_joins_again() -> None:
    road = Road([says(fault("That session is over.", again=True))])
    error = with_a_channel(road, failure)
    assert isinstance(error, SessionOverError)
    assert "That session is over." in str(error)
    assert len(road.dialled_at) == 1


@pytest.mark.parametrize(
    ("answers", "reason", "is_over"),
    [
        ([UNREACHABLE] * 9, "Gave up connecting to server:1: No server answered.", False),
        ([nothing] * 9, "Gave up connecting to server:1: The server did not answer.", False),
        ([says(Message(Kind.FAULT))], "does not carry valid JSON", True),
        ([says(Message(Kind.WELCOME), acknowledged=5)], "but only 0 messages were sent", True),
        ([InputError("The certificate has expired.")] * 9, "The certificate has expired.", False),
    ],
    ids=["unreachable", "silent", "damaged", "miscounts", "another error"],
)
def test_a_link_that_cannot_be_replaced_ends_the_channel(answers: list[Any], reason: str, is_over: bool) -> None:
    error = with_a_channel(Road(answers), failure, gives_up_s=20.0)
    assert reason in str(error)
    assert isinstance(error, SessionOverError) is is_over


def test_after_a_session_was_not_resumed_in_time_joining_gets_only_the_time_left() -> None:
    road = Road([nothing] + [UNREACHABLE] * 99)

    async def main() -> float:
        reconnector = road.reconnector(gives_up_s=20.0)

        async def take_part(transport: Transport) -> None:
            channel = Channel(transport, Recorder("pi"), UPLINK, on_lost=reconnector.lost)
            channel.session = 7
            keeping = asyncio.create_task(reconnector.keep_attached(channel))
            reconnector.lost(UNREACHABLE)
            channel._retire()
            try:
                await channel.receive()
            finally:
                keeping.cancel()
                await channel.close()

        with pytest.raises(LinkError, match="Gave up connecting to server:1"):
            await reconnector.run(take_part)
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) <= 20.0


def test_before_a_session_has_begun_there_is_nothing_to_resume() -> None:
    road = Road([])
    assert "closed the connection" in str(with_a_channel(road, failure, session=0))
    assert road.dialled_at == []


def test_a_device_that_was_admitted_begins_with_short_pauses_when_it_joins_again() -> None:
    async def main() -> None:
        reconnector, lives = road.reconnector(), []

        async def take_part(transport: Transport) -> None:
            lives.append(transport)
            channel = Channel(transport, Recorder("pi"), UPLINK, on_lost=reconnector.lost)
            keeping = asyncio.create_task(reconnector.keep_attached(channel))
            await asyncio.sleep(5.0)
            try:
                if len(lives) < 3:
                    channel.session = len(lives)
                    reconnector.lost(LinkError("late news of this link"))  # which the next session must not receive
                    raise SessionOverError("The server ended the session.")
                assert channel.is_attached
            finally:
                keeping.cancel()
                await channel.close()

        await reconnector.run(take_part)

    road = Road([UNREACHABLE, UNREACHABLE, nothing, nothing, nothing])
    run_virtually(main())
    assert road.attempts == [(1, 1.0), (2, 2.0), (1, 1.0), (1, 1.0)]


def test_resuming_closes_a_connection_that_it_does_not_use() -> None:
    async def main() -> None:
        near, far = memory_pair()
        channel = Channel(memory_pair()[0], Recorder("pi"), UPLINK, on_lost=lambda _: None)
        answering = asyncio.create_task(says(fault("over"))(far))
        with pytest.raises(SessionOverError, match="over"):
            await resume(channel, "pi", near)
        with pytest.raises(LinkError):
            await far.read()
        await answering
        await channel.close()

    run_virtually(main())


def test_the_body_of_a_greeting_is_not_taken_for_orders() -> None:
    async def scenario(channel: Channel) -> int:
        receiving = asyncio.create_task(channel.receive())
        await asyncio.sleep(20.0)
        assert channel.is_attached
        receiving.cancel()
        return channel.received

    road = Road([says(Message(Kind.WELCOME, body=json_body({"session": 9})))])
    assert with_a_channel(road, scenario) == 0


def test_an_attempt_to_connect_may_take_longer_after_one_that_took_too_long() -> None:
    async def main() -> list[float]:
        allowed = []

        async def connect(timeout_s: float) -> Transport:
            allowed.append(timeout_s)
            await asyncio.sleep(timeout_s)
            raise LinkError("no answer")

        dialer = PatientDialer(connect, asyncio.get_running_loop().time)
        for _ in range(5):
            with pytest.raises(LinkError):
                await dialer.dial()
        return allowed

    assert run_virtually(main()) == [10.0, 20.0, 40.0, 80.0, 80.0]


def test_a_slow_path_has_four_times_as_long_as_it_took() -> None:
    async def main() -> float:
        async def connect(_: float) -> Transport:
            await asyncio.sleep(8.0)
            return memory_pair()[0]

        dialer = PatientDialer(connect, asyncio.get_running_loop().time)
        await dialer.dial()
        return dialer.timeout_s

    assert run_virtually(main()) == 32.0


def test_no_attempt_takes_longer_than_the_time_for_giving_up() -> None:
    async def connect(_: float) -> Transport:
        raise LinkError("never called")

    assert PatientDialer(connect, lambda: 0.0, most_s=3.0).timeout_s == 3.0
