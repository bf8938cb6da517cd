"""The downlink does not wait for a busy uplink, although what a device says about it queues after its activations."""

from __future__ import annotations

import asyncio

import pytest
from support.waiting import PATIENCE_S

from pipar.transport.grpc_connect import connect
from pipar.transport.grpc_listener import Listener
from pipar.transport.interface import Transport
from pipar.transport.limits import Keepalive
from pipar.wire.frames import Frame, cut_message
from pipar.wire.messages import Body, Kind, Message

GRADIENTS = 12
PATIENT = Keepalive(every_s=10 * PATIENCE_S, timeout_s=10 * PATIENCE_S)


def gradient(number: int) -> Frame:
    (cut,) = cut_message(Message(Kind.GRADIENT, number, body=Body.of(bytes(1_000_000))), 0, number)
    return cut


class Road:
    """Carries bytes both ways, and after `jam` only to the device: what it sends is held for good."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._is_jammed = False
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self) -> str:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def jam(self) -> None:
        self._is_jammed = True

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, near: asyncio.StreamReader, near_writer: asyncio.StreamWriter) -> None:
        far, far_writer = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [near_writer, far_writer]
        for reader, writer, is_up in ((near, far_writer, True), (far, near_writer, False)):
            self._tasks.append(asyncio.ensure_future(self._carry(reader, writer, is_up=is_up)))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_up: bool) -> None:
        while data := await reader.read(65536):
            if not (is_up and self._is_jammed):
                writer.write(data)


@pytest.mark.slow
def test_gradients_of_a_large_batch_arrive_while_the_uplink_carries_nothing() -> None:
    async def main() -> None:
        came: asyncio.Queue[Transport] = asyncio.Queue()
        leave = asyncio.Event()

        async def accept(transport: Transport, _: str | None) -> None:
            came.put_nowait(transport)
            await leave.wait()

        listener = Listener(accept, keepalive=PATIENT)
        road = Road(f"127.0.0.1:{await listener.start('127.0.0.1:0')}")
        device = await connect(await road.open(), keepalive=PATIENT)
        server = await came.get()
        await server.write(gradient(1))
        await device.read()
        road.jam()
        sending = asyncio.ensure_future(_send(server))
        for number in range(2, GRADIENTS + 1):
            assert (await device.read()).message.epoch == number
        await sending
        leave.set()
        await road.close()
        await device.close()
        await listener.stop()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


async def _send(server: Transport) -> None:
    for number in range(2, GRADIENTS + 1):
        await server.write(gradient(number))
