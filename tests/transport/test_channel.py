"""One contract for every transport: in memory under virtual time, and gRPC over loopback in real time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import pytest
from support.waiting import PATIENCE_S

from pipar.errors import LinkError
from pipar.execution.clock import run_virtually
from pipar.execution.spans import DOWNLINK, UPLINK, Recorder
from pipar.transport.channel import Channel
from pipar.transport.grpc_connect import connect
from pipar.transport.grpc_listener import Listener
from pipar.transport.in_memory import memory_pair
from pipar.transport.interface import Transport
from pipar.wire.frames import cut_message
from pipar.wire.messages import Body, Chunks, Kind, Message, Payload, json_body

T = TypeVar("T")
Scenario = Callable[[Channel, Channel], Awaitable[T]]


class MemoryWorld:
    """Both ends in memory, in virtual time."""

    def run(self, scenario: Scenario[T]) -> T:
        async def main() -> T:
            async with channels(*memory_pair()) as (device, server):
                return await scenario(device, server)

        return run_virtually(main())


class GrpcWorld:
    """A real stream over loopback."""

    def run(self, scenario: Scenario[T]) -> T:
        async def main() -> T:
            arrived: asyncio.Queue[Transport] = asyncio.Queue()

            async def accept(transport: Transport, _: str | None) -> None:
                ending = _Ending(transport)
                arrived.put_nowait(ending)
                await ending.closed.wait()

            listener = Listener(accept)
            port = await listener.start("127.0.0.1:0")
            try:
                near = await connect(f"127.0.0.1:{port}", timeout_s=PATIENCE_S)
                # The server learns of a stream with its first bytes.
                await near.write(next(iter(cut_message(Message(Kind.STOP), 0, 0))))
                far = await arrived.get()
                await far.read()
                async with channels(near, far) as (device, server):
                    return await scenario(device, server)
            finally:
                await listener.stop()

        return asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


class _Ending:
    """A server's transport whose end ends the call, as the end of `admit` does."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.closed = asyncio.Event()
        self.write, self.read = transport.write, transport.read

    async def close(self) -> None:
        await self._transport.close()
        self.closed.set()


@contextlib.asynccontextmanager
async def channels(near: Transport, far: Transport) -> AsyncIterator[tuple[Channel, Channel]]:
    device, server = Channel(near, Recorder("pi"), UPLINK), Channel(far, Recorder("server"), DOWNLINK)
    try:
        yield device, server
    finally:
        await asyncio.gather(device.close(), server.close())


@pytest.fixture(params=[MemoryWorld, GrpcWorld], ids=["memory", "grpc"])
def world(request: pytest.FixtureRequest) -> MemoryWorld | GrpcWorld:
    made: MemoryWorld | GrpcWorld = request.param()
    return made


World = MemoryWorld | GrpcWorld


def activation(number: int, size: int = 16) -> Message:
    return Message(Kind.ACTIVATION, 1, number, 1, 1, 1, Body.of(bytes([number % 256]) * size))


def model(size: int) -> Message:
    content = bytes(range(251)) * (size // 251 + 1)
    return Message(Kind.MODEL, 1, body=Body.of(memoryview(content)[:size], encoding="safetensors"))


FAULT = Message(Kind.FAULT, body=json_body({"reason": "enough"}))


def content_of(message: Message) -> tuple[Message, bytes]:
    return replace(message, body=Body()), bytes(message.body.contiguous())


async def receive(channel: Channel, count: int) -> list[Message]:
    return [await channel.receive() for _ in range(count)]


# --- the contract


def test_messages_arrive_in_the_order_in_which_they_were_posted(world: World) -> None:
    async def scenario(device: Channel, server: Channel) -> list[int]:
        for number in range(1, 201):
            device.post(activation(number, size=number * 50))
        return [message.iteration for message in await receive(server, 200)]

    assert world.run(scenario) == list(range(1, 201))


def test_a_large_message_arrives_whole_between_small_ones(world: World) -> None:
    sent = [activation(1), model(2_500_001), activation(2)]

    async def scenario(device: Channel, server: Channel) -> list[Message]:
        for message in sent:
            device.post(message)
        return await receive(server, 3)

    assert list(map(content_of, world.run(scenario))) == list(map(content_of, sent))


def test_a_fault_overtakes_a_large_message_that_is_being_sent(world: World) -> None:
    async def scenario(device: Channel, server: Channel) -> list[Message]:
        device.shape(80e6, 0.0)  # 0.1 s a chunk
        device.post(model(3_000_000))
        device.post(activation(1))
        for _ in range(3):  # the sender takes the first chunk now
            await asyncio.sleep(0)
        device.post(FAULT)
        return await receive(server, 3)

    received = world.run(scenario)
    assert [message.kind for message in received] == [Kind.FAULT, Kind.MODEL, Kind.ACTIVATION]
    assert content_of(received[1]) == content_of(model(3_000_000))


def test_both_directions_run_at_the_same_time(world: World) -> None:
    async def scenario(device: Channel, server: Channel) -> tuple[list[Message], list[Message]]:
        for number in range(1, 31):
            device.post(activation(number, 100_000))
            server.post(replace(activation(number, 100_000), kind=Kind.GRADIENT))
        up, down = await asyncio.gather(receive(server, 30), receive(device, 30))
        return up, down

    up, down = world.run(scenario)
    assert [message.iteration for message in up] == [message.iteration for message in down] == list(range(1, 31))
    assert {message.kind for message in up} == {Kind.ACTIVATION}
    assert {message.kind for message in down} == {Kind.GRADIENT}


@pytest.mark.parametrize("latency_s", [0.0, 0.02])
@pytest.mark.parametrize("closes", ["device", "server"])
def test_closing_loses_nothing_that_was_posted(world: World, closes: str, latency_s: float) -> None:
    async def until_the_end(channel: Channel) -> list[Message]:
        messages = []
        with contextlib.suppress(LinkError):
            while True:
                messages.append(await channel.receive())
        await channel.close()
        return messages

    async def scenario(device: Channel, server: Channel) -> list[Message]:
        sender, receiver = (device, server) if closes == "device" else (server, device)
        sender.shape(400e6, latency_s)  # so that much is still to be sent when it closes
        for number in range(1, 21):
            sender.post(activation(number))
        sender.post(model(2_000_001))
        sender.post(FAULT)
        _, messages = await asyncio.gather(sender.close(), until_the_end(receiver))
        return messages

    received = world.run(scenario)
    assert [message.kind for message in received] == [Kind.FAULT] + [Kind.ACTIVATION] * 20 + [Kind.MODEL]
    assert content_of(received[-1]) == content_of(model(2_000_001))


def test_a_lost_peer_is_a_link_error_from_every_receive_and_the_sender_does_not_hang(world: World) -> None:
    async def scenario(device: Channel, server: Channel) -> None:
        server.post(activation(1))
        await device.receive()
        await server.close()
        for _ in range(2):
            with pytest.raises(LinkError, match="closed the connection"):
                await device.receive()
        for number in range(1, 40):
            device.post(activation(number, 1_000_000))
        await device.drain()

    world.run(scenario)


def test_latency_is_added_once_and_does_not_reduce_the_throughput(world: World) -> None:
    async def scenario(device: Channel, server: Channel) -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        device.shape(None, 0.2)
        start = loop.time()
        for number in range(1, 31):
            device.post(activation(number))
        await server.receive()
        first = loop.time() - start
        await receive(server, 29)
        return first, loop.time() - start

    first, last = world.run(scenario)
    assert first >= 0.2
    # One after another they would take 30 x 0.2 = 6 s; the rest is room for a busy machine.
    assert last < 3.0


def test_both_sides_count_the_same_bytes_by_epoch(world: World) -> None:
    async def scenario(device: Channel, server: Channel) -> list[dict[int, int]]:
        before = dict(server.counts.received)
        assert before == {}
        for message in (activation(1), model(1_500_000), Message(Kind.TRACE, 1, body=Body.of(b"12345"))):
            device.post(message)
        server.post(Message(Kind.ROUND, 7))
        await asyncio.gather(receive(server, 3), receive(device, 1))
        await asyncio.gather(device.drain(), server.drain())
        return [device.counts.sent, server.counts.received, server.counts.sent, device.counts.received]

    up, up_counted, down, down_counted = world.run(scenario)
    # 49 bytes of header per frame; a trace is sent in the epoch after its own.
    assert up == up_counted == {1: (49 + 16) + (2 * 49 + 1_500_000), 2: 49 + 5}
    assert down == down_counted == {7: 49}


def test_only_the_bytes_of_the_latest_epochs_are_kept() -> None:
    """A device that trains for years does not ask for them, and a hostile peer may name any epoch."""

    async def scenario(device: Channel, server: Channel) -> list[dict[int, int]]:
        for epoch in range(1, 101):
            device.post(Message(Kind.ROUND, epoch))
        await receive(server, 100)
        return [device.counts.sent, server.counts.received]

    for counted in MemoryWorld().run(scenario):
        assert list(counted)[-2:] == [99, 100]
        assert len(counted) <= 8


@pytest.mark.parametrize("rate_bps", [None, 80e6])
def test_the_measured_rate_is_that_of_the_link_and_not_of_this_machine(world: World, rate_bps: float | None) -> None:
    async def scenario(device: Channel, server: Channel) -> float | None:
        device.shape(rate_bps, 0.0)
        for number in range(1, 11):
            device.post(activation(number, 20_000))
            await server.receive()
        await device.drain()
        return device.meter.read(1).rate_bps

    assert world.run(scenario) == (None if rate_bps is None else pytest.approx(rate_bps, rel=1e-9))


def test_a_receive_that_is_cancelled_loses_no_message_and_not_the_connection(world: World) -> None:
    async def scenario(device: Channel, server: Channel) -> list[int]:
        waiting = asyncio.ensure_future(server.receive())
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        device.post(activation(1))
        device.post(activation(2))
        return [message.iteration for message in await receive(server, 2)]

    assert world.run(scenario) == [1, 2]


def test_several_tasks_can_wait_for_the_same_drain(world: World) -> None:
    async def scenario(device: Channel, server: Channel) -> int:
        device.post(model(1_200_000))
        await asyncio.gather(device.drain(), device.drain(), server.receive())
        return sum(device.counts.sent.values())

    assert world.run(scenario) == 2 * 49 + 1_200_000


# --- exact times, in virtual time only


def test_a_message_ends_exactly_when_its_frame_is_sent_at_the_rate() -> None:
    async def scenario(device: Channel, server: Channel) -> float:
        device.shape(8e6, 0.0)
        device.post(model(1_000_000))
        await server.receive()
        return asyncio.get_running_loop().time()

    assert MemoryWorld().run(scenario) == (49 + 1_000_000) * 8 / 8e6 == 1.000049


def test_frames_are_sent_one_after_another_and_leave_their_spans() -> None:
    spans = []

    async def scenario(device: Channel, server: Channel) -> list[float]:
        recorder = device._recorder
        device.shape(800.0, 10.0)  # 100 bytes per second
        loop = asyncio.get_running_loop()
        arrivals = []
        device.post(activation(1, size=51))
        device.post(activation(2, size=151))
        for _ in range(2):
            await server.receive()
            arrivals.append(loop.time())
        device.post(replace(activation(3, size=51), kind=Kind.GRADIENT))
        await server.receive()
        arrivals.append(loop.time())
        await device.drain()
        spans.extend((span.name, span.start, span.end) for span in recorder.take(1).spans)
        return arrivals

    # 100 bytes: 0..1 s; 200 bytes: 1..3 s; the third is posted when the second has arrived, at 13 s.
    assert MemoryWorld().run(scenario) == [11.0, 13.0, 24.0]
    assert spans == [("u1", 0.0, 1.0), ("u1", 1.0, 3.0), ("wait bs1", 3.0, 13.0), ("d1", 13.0, 14.0)]


def test_the_two_directions_do_not_slow_each_other_down() -> None:
    async def scenario(device: Channel, server: Channel) -> tuple[float, float]:
        device.shape(800.0, 0.0)
        server.shape(1600.0, 0.0)

        async def arrival(channel: Channel) -> float:
            await channel.receive()
            return asyncio.get_running_loop().time()

        device.post(activation(1, size=151))
        server.post(activation(1, size=151))
        up, down = await asyncio.gather(arrival(server), arrival(device))
        return up, down

    assert MemoryWorld().run(scenario) == (2.0, 1.0)


def test_without_a_rate_sending_takes_no_time() -> None:
    async def scenario(device: Channel, server: Channel) -> float:
        device.shape(None, 0.0)
        device.post(model(5_000_000))
        await server.receive()
        return asyncio.get_running_loop().time()

    assert MemoryWorld().run(scenario) == 0.0


def test_a_sizes_only_message_takes_as_long_as_a_full_one() -> None:
    async def scenario(device: Channel, server: Channel) -> float:
        device.shape(8e6, 0.0)
        device.post(Message(Kind.MODEL, body=Body(2_500_000)))
        await server.receive()
        return asyncio.get_running_loop().time()

    assert MemoryWorld().run(scenario) == pytest.approx((3 * 49 + 2_500_000) * 8 / 8e6, rel=1e-15)


def test_a_fault_is_sent_between_two_chunks() -> None:
    async def scenario(device: Channel, server: Channel) -> tuple[float, float]:
        device.shape(8e6, 0.0)
        device.post(model(3_000_000))
        await asyncio.sleep(0.5)
        device.post(FAULT)
        loop = asyncio.get_running_loop()
        assert (await server.receive()).kind is Kind.FAULT
        fault_at = loop.time()
        await server.receive()
        return fault_at, loop.time()

    fault_at, model_at = MemoryWorld().run(scenario)
    fault_s = (49 + FAULT.body.size_bytes) * 8 / 8e6
    assert fault_at == pytest.approx(1.000049 + fault_s, rel=1e-12)
    assert model_at == pytest.approx(3 * 1.000049 + fault_s, rel=1e-12)


def test_a_message_that_no_frame_can_carry_is_refused_by_post() -> None:
    async def scenario(device: Channel, server: Channel) -> None:
        with pytest.raises(Exception, match="does not fit the wire format"):
            device.post(Message(Kind.ACTIVATION, micro_batch=70_000))
        device.post(activation(1))
        await server.receive()

    MemoryWorld().run(scenario)


@pytest.mark.parametrize("latency_s", [0.0, 0.1])
def test_an_error_while_sending_ends_the_connection_with_its_reason(latency_s: float) -> None:
    class Broken:
        def __init__(self, transport: Transport) -> None:
            self.read, self.close = transport.read, transport.close

        async def write(self, _: object) -> None:
            raise ValueError("no such frame")

    async def main() -> None:
        near, far = memory_pair()
        lost: list[LinkError] = []
        channel = Channel(Broken(near), Recorder("pi"), UPLINK, on_lost=lost.append)
        channel.shape(None, latency_s)
        channel.post(activation(1))
        with pytest.raises(LinkError, match="Sending failed with ValueError: no such frame"):
            await channel.receive()
        with pytest.raises(LinkError):
            await far.read()
        assert lost == []  # it would go wrong over another link, too
        await channel.close()

    run_virtually(main())


# --- messages that leave while they are still being encoded


def growing(count: int, size: int = 100_000) -> tuple[Message, Chunks]:
    """Return a coded message of this number of chunks, the first of them ready; each is (nearly) as long as `size`."""
    shape = (count, 50_000)  # samples that fit a chunk one by one
    chunks = Chunks(count, lambda number: Payload.of(bytes([number]) * size))
    chunks.add(chunks.encode_next())
    body = Body(count * 200_000, (), "float32", shape, "planes", chunks)
    return Message(Kind.GRADIENT, 1, 1, 1, count, count, body), chunks


def test_chunks_leave_as_they_are_encoded_and_not_before() -> None:
    async def scenario(device: Channel, server: Channel) -> list[float]:
        device.shape(8e6, 0.0)  # a chunk takes 0.1 s
        loop = asyncio.get_running_loop()
        message, chunks = growing(3)
        device.post(message)
        device.post(activation(2))
        times = []
        receiving = loop.create_task(server.receive())
        for pause in (0.05, 1.0):  # while the first one is on the link; long after the second one
            await asyncio.sleep(pause)
            assert not receiving.done()
            device.add_chunk(chunks, chunks.encode_next())
        whole = await receiving
        times.append(loop.time())
        assert [bytes(buffer[:1]) for buffer in whole.body.buffers] == [b"\0", b"\1", b"\2"]
        assert (await server.receive()).iteration == 2  # after it, although it was ready before
        return times

    (at,) = MemoryWorld().run(scenario)
    assert at == pytest.approx(0.05 + 1.0 + 0.1, abs=1e-3)  # the last chunk was sent when it was there


def test_a_message_that_opens_or_ends_a_link_overtakes_a_partly_encoded_one(world: World) -> None:
    async def scenario(device: Channel, server: Channel) -> bytes:
        message, chunks = growing(2)
        device.post(message)
        await asyncio.sleep(0)
        device.post(FAULT)  # overtakes chunks that are not encoded yet
        assert (await server.receive()).kind is Kind.FAULT
        device.add_chunk(chunks, chunks.encode_next())
        whole = await server.receive()
        return b"".join(bytes(buffer[:1]) for buffer in whole.body.buffers)

    assert world.run(scenario) == b"\0\1"


def test_the_rate_of_an_emulated_link_is_known_and_that_of_a_real_one_after_some_traffic() -> None:
    async def main() -> list[float | None]:
        near, far = memory_pair()
        real = Channel(near, Recorder("a"), UPLINK, is_real=True)
        emulated = Channel(far, Recorder("b"), DOWNLINK)
        try:
            unknown, limitless = real.rate_bps(1), emulated.rate_bps(1)
            emulated.shape(5e6, 0.0)
            real.meter.count(1, 1_000_000, 0.4)
            of_last_epoch = real.rate_bps(2)
            return [unknown, limitless, emulated.rate_bps(1), real.rate_bps(1), of_last_epoch]
        finally:
            await real.close()
            await emulated.close()

    assert run_virtually(main()) == [0.0, None, 5e6, 20e6, 20e6]
