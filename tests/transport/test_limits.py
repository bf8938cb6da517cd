"""The resources that one peer can use of a server are bounded, and a dead peer is noticed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.credentials import Folder
from support.waiting import PATIENCE_S

from pipar.errors import CredentialError, LinkError, ProtocolError
from pipar.transport.backoff import Backoff
from pipar.transport.grpc_connect import connect
from pipar.transport.grpc_listener import Listener
from pipar.transport.interface import Transport
from pipar.transport.limits import Keepalive, Limits, RateLimit, TokenBucket
from pipar.transport.tls import ServerSecurity
from pipar.wire.frames import CHUNK_BYTES, Frame, cut_message
from pipar.wire.messages import Body, Kind, Message

QUICK = Keepalive(every_s=1.0, timeout_s=4.0)  # within which a busy machine answers, too
PATIENT = Keepalive(every_s=10 * PATIENCE_S, timeout_s=10 * PATIENCE_S)


def frame(number: int = 1, size: int = 0) -> Frame:
    (cut,) = cut_message(Message(Kind.MODEL, number, body=Body.of(bytes(size))), 0, number)
    return cut


class Doorman:
    """Accepts every stream and hands it to the test."""

    def __init__(self) -> None:
        self.address = ""
        self.came: asyncio.Queue[Transport] = asyncio.Queue()
        self._leave = asyncio.Event()

    async def accept(self, transport: Transport, _: str | None) -> None:
        self.came.put_nowait(transport)
        with contextlib.suppress(LinkError, ProtocolError):
            await self._leave.wait()

    def leave(self) -> None:
        self._leave.set()


@contextlib.asynccontextmanager
async def listening(**options: Any) -> AsyncIterator[Doorman]:
    doorman = Doorman()
    listener = Listener(doorman.accept, **options)
    doorman.address = f"127.0.0.1:{await listener.start('127.0.0.1:0')}"
    try:
        yield doorman
    finally:
        doorman.leave()
        await listener.stop()


def run(main: Awaitable[None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(main, PATIENCE_S)

    asyncio.run(limited())


def test_streams_that_have_sent_nothing_yet_hold_a_gigabyte_at_most() -> None:
    granted = Limits()
    assert granted.newcomers * (granted.window_bytes + CHUNK_BYTES + 4096) < 1.1e9


@pytest.mark.slow
def test_unread_data_stays_with_the_sender() -> None:
    """Of fifty megabytes only a few are read ahead, and all of them arrive when they are read."""

    async def main() -> None:
        async with listening() as server:
            device = await connect(server.address)
            reader = await server.came.get()
            await device.write(frame(1, 1_000_000))
            await reader.read()
            written = 1
            with contextlib.suppress(TimeoutError):
                for number in range(2, 52):
                    await asyncio.wait_for(
                        asyncio.shield(write := asyncio.ensure_future(device.write(frame(number, 1_000_000)))), 3.0
                    )
                    written = number
            assert 4 <= written < 30
            assert reader._held_bytes <= Limits().read_ahead_bytes + 1_100_000  # type: ignore[attr-defined]
            for number in range(2, written + 2):  # and the frame that was held back
                assert (await reader.read()).message.epoch == number
            await write
            server.leave()
            await device.close()

    run(main())


def test_at_most_one_frame_of_a_newcomer_is_held_before_it_is_read() -> None:
    async def main() -> None:
        async with listening() as server:
            device = await connect(server.address)
            reader = await server.came.get()
            for number in range(20):
                await device.write(frame(number))
            for number in range(20):
                assert len(reader._arrived) <= 1 or number > 0  # type: ignore[attr-defined]
                assert (await reader.read()).message.epoch == number
            server.leave()
            await device.close()

    run(main())


def test_empty_messages_count_too() -> None:
    async def main() -> None:
        async with (
            listening(limits=Limits(read_ahead_bytes=2560)) as server,
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            call = channel.stream_stream("/pipar.Link/Connect")()
            for _ in range(500):
                await call.write(b"")
            reader = await server.came.get()
            for _ in range(3):
                with pytest.raises(ProtocolError):
                    await reader.read()
                await asyncio.sleep(0.02)
            assert len(reader._arrived) == 10  # type: ignore[attr-defined]
            call.cancel()

    run(main())


def test_a_credential_holds_two_streams_and_no_third(tmp_path: Path) -> None:
    folder = Folder.make(tmp_path / "certs")

    async def main() -> None:
        async with listening(security=folder.by_token) as server:
            first, second = [await connect(server.address, security=folder.bearer()) for _ in range(2)]
            with pytest.raises(LinkError, match="pi-1 is connected 2 times already") as refused:
                await connect(server.address, security=folder.bearer())
            assert not isinstance(refused.value, CredentialError)  # a later attempt succeeds
            other = await connect(server.address, security=folder.bearer("pi-2"))
            server.leave()
            for transport in (first, second, other):
                await transport.close()
            again = await connect(server.address, security=folder.bearer())
            await again.close()

    run(main())


def test_the_number_of_streams_that_have_sent_nothing_is_limited() -> None:
    async def main() -> None:
        async with listening(limits=Limits(newcomers=2)) as server:
            silent = [await connect(server.address) for _ in range(2)]
            with pytest.raises(LinkError, match="Too many devices connect at the same time"):
                await connect(server.address)
            await silent[0].write(frame())
            await (await server.came.get()).read()
            third = await connect(server.address)
            server.leave()
            for transport in (*silent, third):
                await transport.close()

    run(main())


def test_a_stream_that_sends_nothing_is_ended() -> None:
    async def main() -> None:
        async with listening(limits=Limits(first_frame_s=0.1)) as server:
            device = await connect(server.address)
            reader = await server.came.get()
            with pytest.raises(LinkError, match=r"sent nothing for 0\.1 s"):
                await reader.read()
            server.leave()
            await device.close()

    run(main())


@pytest.mark.slow
def test_silence_after_the_first_frame_is_allowed() -> None:
    async def main() -> None:
        async with listening(limits=Limits(first_frame_s=2.0)) as server:
            device = await connect(server.address)
            reader = await server.came.get()
            await device.write(frame(1))
            await reader.read()
            waiting = asyncio.ensure_future(reader.read())
            await asyncio.wait([waiting], timeout=3.0)
            assert not waiting.done()
            await device.write(frame(2))
            assert (await waiting).message.epoch == 2
            server.leave()
            await device.close()

    run(main())


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate], ids=str)
def test_a_compressed_message_is_not_unpacked(algorithm: grpc.Compression) -> None:
    async def main() -> None:
        async with listening() as server, grpc.aio.insecure_channel(server.address) as channel:
            call = channel.stream_stream("/pipar.Link/Connect")(compression=algorithm)
            with contextlib.suppress(grpc.RpcError):  # refused, perhaps before it has left
                await call.write(bytes(50_000_000))  # a few kilobytes on the wire
            assert await call.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)
            while not server.came.empty():  # a stream, but no message on it
                with pytest.raises(LinkError):
                    await server.came.get_nowait().read()

    run(main())


def test_few_clients_can_watch_health_and_all_can_check_it() -> None:
    async def main() -> None:
        async with listening(limits=Limits(watchers=1)) as server, grpc.aio.insecure_channel(server.address) as channel:
            stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
            first = stub.Watch(request)
            assert (await first.read()).status == health_pb2.HealthCheckResponse.SERVING
            second = stub.Watch(request)
            assert await second.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
            first.cancel()

    run(main())


# --- rates


def test_an_allowance_can_be_used_in_one_burst_and_refills_over_time() -> None:
    allowance = TokenBucket(RateLimit(burst=3, per_second=2.0))
    assert [allowance.take(100.0) for _ in range(5)] == [True, True, True, False, False]
    assert [allowance.take(100.5), allowance.take(100.5)] == [True, False]
    assert [allowance.take(1000.0) for _ in range(4)] == [True, True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pi-1", "pi-2", "phone"])
def test_a_device_whose_link_always_breaks_never_connects_too_often(name: str) -> None:
    """Two hours: each connection is lost as soon as it is made, and the next attempt is the first of a backoff."""
    now, allowance = 0.0, TokenBucket(Limits().streams)
    backoff = Backoff.of_device(1, name, lambda: now)
    while now < 7200:
        assert allowance.take(now)
        now += next(backoff.pauses()).wait_s


def test_only_a_device_that_connects_too_often_is_refused(tmp_path: Path) -> None:
    folder = Folder.make(tmp_path / "certs")

    async def main() -> None:
        limits = Limits(streams=RateLimit(burst=3, per_second=0.01))
        async with listening(security=folder.by_token, limits=limits) as server:
            server.leave()
            for _ in range(3):
                await (await connect(server.address, security=folder.bearer())).close()
            with pytest.raises(LinkError, match="pi-1 connects too often") as refused:
                await connect(server.address, security=folder.bearer())
            assert not isinstance(refused.value, CredentialError)  # a later attempt succeeds
            await (await connect(server.address, security=folder.bearer("pi-2"))).close()

    run(main())


def test_without_credentials_all_devices_share_one_rate() -> None:
    async def main() -> None:
        async with listening(limits=Limits(open_streams=RateLimit(burst=2, per_second=0.01))) as server:
            server.leave()
            for _ in range(2):
                await (await connect(server.address)).close()
            with pytest.raises(LinkError, match="Too many devices connect at the same time"):
                await connect(server.address)

    run(main())


def test_only_a_device_that_is_refused_repeatedly_waits_for_its_refusals(tmp_path: Path) -> None:
    folder = Folder.make(tmp_path / "certs")

    async def main(refusal_s: float) -> None:
        limits = Limits(refusals=RateLimit(burst=1, per_second=1e-9), refusal_s=refusal_s)
        async with listening(security=folder.by_token, limits=limits) as server:
            server.leave()
            stranger = replace(folder.bearer(), token="guessed")
            with pytest.raises(CredentialError):
                await connect(server.address, security=stranger)
            second = asyncio.ensure_future(connect(server.address, security=stranger, timeout_s=PATIENCE_S))
            await (await connect(server.address, security=folder.bearer())).close()
            if refusal_s > PATIENCE_S:
                assert not second.done()
                second.cancel()
            else:
                with pytest.raises(CredentialError):
                    await second

    run(main(refusal_s=0.1))
    run(main(refusal_s=2 * PATIENCE_S))


# --- sockets


async def is_ended_first(limited: Doorman, patient: Doorman, sends: bytes = b"") -> bool:
    """Whether a bare connection is ended by a server while an older one to a more patient server is still open."""
    older = await bare_connection(patient, sends)
    await asyncio.sleep(0.5)  # if both had the same limit, the older one would be ended before the other
    younger = await bare_connection(limited, sends)
    try:
        await asyncio.wait_for(younger, PATIENCE_S)
        return not older.done()
    finally:
        older.cancel()


async def bare_connection(server: Doorman, sends: bytes) -> asyncio.Task[None]:
    """Open a connection, and return a task that ends when the server ends it."""
    host, _, port = server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sends)

    async def wait_for_its_end() -> None:
        try:
            with contextlib.suppress(ConnectionError):
                while await reader.read(1000):
                    pass
        finally:
            writer.transport.abort()

    return asyncio.create_task(wait_for_its_end())


@pytest.mark.slow
def test_a_connection_that_makes_no_handshake_is_ended(tmp_path: Path) -> None:
    security = Folder.make(tmp_path / "certs").by_token

    async def main() -> None:
        async with (
            listening(security=security, limits=Limits(handshake_s=0.5)) as limited,
            listening(security=security, limits=Limits(handshake_s=10 * PATIENCE_S)) as patient,
        ):
            assert await is_ended_first(limited, patient)
            # Bytes that are not a handshake are refused immediately, for any limit.
            await asyncio.wait_for(await bare_connection(patient, b"GET / HTTP/1.1\r\n\r\n"), PATIENCE_S)

    run(main())


@pytest.mark.slow
def test_a_connection_without_a_stream_is_ended() -> None:
    async def main() -> None:
        async with (
            listening(limits=Limits(idle_s=1.0)) as limited,
            listening(limits=Limits(idle_s=10 * PATIENCE_S)) as patient,
        ):
            settings = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
            assert await is_ended_first(limited, patient, settings)

    run(main())


def test_the_number_of_connections_is_limited() -> None:
    async def main() -> None:
        async with listening(limits=Limits(connections=2)) as server:
            devices = [await connect(server.address) for _ in range(2)]
            with pytest.raises(LinkError):
                await connect(server.address, timeout_s=0.5)
            server.leave()
            for device in devices:
                await device.close()

    run(main())


class Cable:
    """Carries bytes between device and server until it is cut: then nothing arrives, and neither end is notified."""

    def __init__(self, target: str, rate_bps: float | None = None) -> None:
        self._rate_bps = rate_bps
        self._host, _, self._port = target.rpartition(":")
        self._cut = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def plug_in(self) -> str:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        self._cut.set()

    async def remove(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, near: asyncio.StreamReader, near_writer: asyncio.StreamWriter) -> None:
        far, far_writer = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [near_writer, far_writer]
        for reader, writer in ((near, far_writer), (far, near_writer)):
            self._tasks.add(asyncio.ensure_future(self._carry(reader, writer)))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        free_at = loop.time()
        while data := await reader.read(4096 if self._rate_bps else 65536):
            if self._rate_bps:  # compensates for late timers
                free_at = max(loop.time() - 1.0, free_at) + len(data) * 8 / self._rate_bps
                await asyncio.sleep(free_at - loop.time())
            if not self._cut.is_set():
                writer.write(data)


@pytest.mark.slow
def test_a_cut_cable_is_noticed_at_both_ends() -> None:
    async def main() -> None:
        async with listening(keepalive=QUICK) as server, listening(keepalive=PATIENT) as other:
            cable, other_cable = Cable(server.address), Cable(other.address)
            device, *ends = await connected(server, cable, QUICK)
            other_device, *other_ends = await connected(other, other_cable, PATIENT)
            _, silent = await asyncio.wait(ends, timeout=4)  # several pings: they are answered, and not too many
            assert len(silent) == 2
            other_cable.cut()
            cable.cut()
            for end in ends:
                with pytest.raises(LinkError):
                    await asyncio.wait_for(end, PATIENCE_S)
            assert not any(end.done() for end in other_ends), "they are noticed by their own keepalives only"
            for end in other_ends:
                end.cancel()
            await device.close()
            await cable.remove()
            await other_cable.remove()  # whose end is one of the connection
            await other_device.close()

    run(main())


async def connected(
    server: Doorman, cable: Cable, keepalive: Keepalive
) -> tuple[Transport, asyncio.Future[Frame], asyncio.Future[Frame]]:
    """Connect over a cable; return the device's end, and the next reads of both ends."""
    device = await connect(await cable.plug_in(), keepalive=keepalive)
    far = await server.came.get()
    await device.write(frame())
    await far.read()
    return device, asyncio.ensure_future(device.read()), asyncio.ensure_future(far.read())


@pytest.mark.slow
def test_a_slow_link_is_not_taken_for_a_dead_one() -> None:
    """Twelve megabytes at 16 Mbit/s: data in flight takes less than the five seconds that a ping may take."""

    async def main() -> None:
        keepalive = Keepalive(every_s=1.0, timeout_s=5.0)
        async with listening(keepalive=keepalive) as server:
            cable = Cable(server.address, rate_bps=16e6)
            device = await connect(await cable.plug_in(), keepalive=keepalive)
            far = await server.came.get()
            sending = asyncio.ensure_future(_send(device, 12))
            for number in range(12):
                assert (await far.read()).message.epoch == number
            await sending
            server.leave()
            await device.close()
            await cable.remove()

    run(main())


async def _send(device: Transport, count: int) -> None:
    for number in range(count):
        await device.write(frame(number, 1_000_000))


def test_the_defaults_notice_a_dead_peer_within_a_minute() -> None:
    assert Keepalive().every_s + Keepalive().timeout_s <= 60
    assert ServerSecurity() == ServerSecurity(insecure=False)
