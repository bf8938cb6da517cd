"""What can go wrong with a real connection becomes an error of ours, and never ends the server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from multiprocessing import get_context

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.waiting import PATIENCE_S

from pipar.errors import InputError, LinkError, ProtocolError
from pipar.execution.spans import Recorder
from pipar.transport.channel import Channel
from pipar.transport.grpc_connect import connect
from pipar.transport.grpc_listener import Listener
from pipar.transport.interface import Transport
from pipar.wire.frames import cut_message, pack_frame
from pipar.wire.messages import Kind, Message

Outcome = asyncio.Queue[BaseException | Message]


def serve(scenario: Callable[[str, Outcome], Awaitable[None]]) -> None:
    """Run a scenario against a listener that reports the outcome of each connection."""

    async def main() -> None:
        outcome: Outcome = asyncio.Queue()

        async def accept(transport: Transport, _: str | None) -> None:
            channel = Channel(transport, Recorder("server"), "downlink")
            try:
                while True:
                    outcome.put_nowait(await channel.receive())
            except BaseException as error:
                outcome.put_nowait(error)
                if not isinstance(error, LinkError | ProtocolError):
                    raise
            finally:
                channel.post(Message(Kind.FAULT))  # the device is gone, or still reads earlier messages
                await channel.close()

        listener = Listener(accept)
        port = await listener.start("127.0.0.1:0")
        try:
            await scenario(f"127.0.0.1:{port}", outcome)
        finally:
            await listener.stop()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


async def good_connection(address: str, outcome: Outcome) -> None:
    """A device that sends one message and leaves in order."""
    channel = Channel(await connect(address, timeout_s=PATIENCE_S), Recorder("pi"), "uplink")
    channel.post(Message(Kind.STOP, 5))
    assert await outcome.get() == Message(Kind.STOP, 5)
    await channel.close()
    assert isinstance(await outcome.get(), LinkError)


def test_a_device_that_leaves_in_order_is_a_link_error_after_its_last_message() -> None:
    serve(good_connection)


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1", b"PP\x02" + bytes(200)], ids=["empty", "http", "header"])
def test_garbage_is_a_protocol_error_for_its_connection_and_the_next_device_is_served(garbage: bytes) -> None:
    async def scenario(address: str, outcome: Outcome) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_stream("/pipar.Link/Connect")()
            await call.write(garbage)
            assert isinstance(await outcome.get(), ProtocolError)
            assert (await call.read())[3] == Kind.FAULT
            assert await call.read() is grpc.aio.EOF
        await good_connection(address, outcome)

    serve(scenario)


def test_a_frame_longer_than_any_we_send_ends_its_connection_only() -> None:
    async def scenario(address: str, outcome: Outcome) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_stream("/pipar.Link/Connect")()
            await call.write(bytes(3_000_000))
            assert isinstance(await outcome.get(), LinkError)
        await good_connection(address, outcome)

    serve(scenario)


def test_a_device_that_disappears_without_a_message_is_a_link_error() -> None:
    async def scenario(address: str, outcome: Outcome) -> None:
        channel = grpc.aio.insecure_channel(address)
        call = channel.stream_stream("/pipar.Link/Connect")()
        await call.write(pack_frame(next(cut_message(Message(Kind.STOP), 0, 1))))
        assert isinstance(await outcome.get(), Message)
        await channel.close()  # cancels the call, as the end of a process does
        assert isinstance(await outcome.get(), LinkError)
        await good_connection(address, outcome)

    serve(scenario)


def test_a_port_in_use_is_an_input_error_that_names_it() -> None:
    async def main() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            listener = Listener(_nobody)
            with pytest.raises(InputError, match=f"Cannot listen on {address}"):
                await listener.start(address)
            await listener.stop()

    asyncio.run(main())


def test_two_listeners_do_not_share_a_port() -> None:
    async def main() -> None:
        one, other = Listener(_nobody), Listener(_nobody)
        port = await one.start("127.0.0.1:0")
        with pytest.raises(InputError, match="Cannot listen"):
            await other.start(f"127.0.0.1:{port}")
        await one.stop()
        await other.stop()

    asyncio.run(main())


async def _stop_with_an_open_call(steps: int) -> None:
    released = asyncio.Event()

    async def accept(*_: object) -> None:
        await released.wait()

    listener = Listener(accept)
    device = await connect(f"127.0.0.1:{await listener.start('127.0.0.1:0')}")
    await listener.stop()
    await asyncio.sleep(0.1)  # gRPC learns that the call is cancelled
    released.set()
    for _ in range(steps):  # for a step or two, gRPC does not know yet that the session is over
        await asyncio.sleep(0)
    del device


async def _stop_with_a_watcher(number: int) -> None:
    del number  # it is a race
    listener = Listener(_nobody)
    address = f"127.0.0.1:{await listener.start('127.0.0.1:0')}"
    async with grpc.aio.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await listener.stop()


def _with_short_grace(program: Callable[[int], Awaitable[None]], number: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipar.transport.grpc_listener._GRACE_S", 0.05)
        asyncio.run(program(number))


@pytest.mark.slow
@pytest.mark.parametrize("program", [_stop_with_an_open_call, _stop_with_a_watcher])
@pytest.mark.parametrize("number", range(3))
def test_a_stopped_listener_leaves_nothing_open(
    program: Callable[[int], Awaitable[None]], number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    # In a process of its own: gRPC shares its poller, and events for the closed loops of earlier tests are errors, too.
    process = get_context("spawn").Process(target=_with_short_grace, args=(program, number))
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    assert capfd.readouterr().err == ""


def test_connecting_without_a_server_is_a_link_error_after_the_timeout() -> None:
    async def main() -> None:
        with socket.socket() as bound:  # bound without listening, so that no other program gets the port
            bound.bind(("127.0.0.1", 0))
            with pytest.raises(LinkError, match=r"No server answered at .* within 0\.2 s"):
                await connect(f"127.0.0.1:{bound.getsockname()[1]}", timeout_s=0.2)

    asyncio.run(main())


async def _nobody(transport: Transport, _: str | None) -> None:
    raise AssertionError(transport)
