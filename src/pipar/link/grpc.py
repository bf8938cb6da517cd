"""The gRPC transport: one bidirectional stream a device, raw bytes through generic handlers.

Without a message type in between, a frame's bytes go to the socket as they are: twice as fast as a protobuf
message with a bytes field, at half the server's CPU time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from pipar.errors import InputError, LinkError
from pipar.link.channel import Transport
from pipar.protocol.wire import CHUNK_BYTES, Frame, pack_frame, unpack_frame

_SERVICE, _METHOD = "pipar.Link", "Connect"
_OPTIONS = [
    ("grpc.max_receive_message_length", CHUNK_BYTES + 4096),
    ("grpc.max_send_message_length", CHUNK_BYTES + 4096),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.http2.max_pings_without_data", 0),
]
_CLOSE_TIMEOUT_S = 10.0
_GONE = "The peer closed the connection."


class _Stream:
    """One end of a device's stream. A task of its own reads it, because gRPC ends a call whose read is cancelled."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._pump = asyncio.ensure_future(self._read_all())

    async def _read_all(self) -> None:
        try:
            while (data := await self._call.read()) is not grpc.aio.EOF:
                self._arrived.put_nowait(data)
        except grpc.RpcError:
            pass  # for a reader the stream is at its end, whatever ended it
        finally:
            self.end()

    def end(self) -> None:
        """Nothing more will come."""
        self._arrived.put_nowait(None)

    async def write(self, frame: Frame) -> None:
        try:
            await self._call.write(pack_frame(frame))
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise LinkError(_GONE) from error

    async def read(self) -> Frame:
        data = await self._arrived.get()
        if data is None:
            self.end()  # every later read ends, too
            raise LinkError(_GONE)
        return unpack_frame(data)

    async def close(self) -> None:
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)


class Listener:
    """Listens for devices; hands each new stream to `accept`, which returns when the device's session is over."""

    def __init__(self, accept: Callable[[Transport], Awaitable[None]]) -> None:
        self._accept = accept
        # Two servers on one port would share its devices without a word: a port in use is to be an error.
        self._server = grpc.aio.server(options=[*_OPTIONS, ("grpc.so_reuseport", 0)])
        handler: Any = grpc.stream_stream_rpc_method_handler(self._connected)
        service = grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler})
        self._server.add_generic_rpc_handlers((service,))

    async def start(self, address: str) -> int:
        """Listen on HOST:PORT (port 0: any free one) and return the port."""
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError:
            port = 0
        if port == 0:
            raise InputError(f"Cannot listen on {address}: the port is in use or the address is not this machine's.")
        await self._server.start()
        return port

    async def stop(self) -> None:
        await self._server.stop(grace=1.0)

    async def _connected(self, _: Any, context: Any) -> None:
        stream = _Stream(context)
        session = asyncio.ensure_future(self._accept(stream))
        try:
            await asyncio.shield(session)
        except asyncio.CancelledError:
            # So gRPC says that the device is gone. The session is not cancelled: it is told as by any other link.
            stream.end()
            await session
            raise
        finally:
            await stream.close()


class _DeviceStream(_Stream):
    """A device's end: it opened the stream, so it also ends it."""

    def __init__(self, channel: grpc.aio.Channel, call: Any) -> None:
        super().__init__(call)
        self._channel = channel

    async def close(self) -> None:
        try:
            await self._call.done_writing()
            # The server ends the stream when it has read all: only then is nothing of ours cut off.
            await asyncio.wait([self._pump], timeout=_CLOSE_TIMEOUT_S)
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the call has ended already
        await super().close()
        await self._channel.close()


async def connect(address: str, *, timeout_s: float = 30.0) -> Transport:
    """Return a transport to the server at HOST:PORT, or raise LinkError if it does not answer in time."""
    channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
    try:
        await asyncio.wait_for(channel.channel_ready(), timeout_s)
    except TimeoutError:
        await channel.close()
        raise LinkError(f"No server answered at {address} within {timeout_s:g} s.") from None
    call: Any = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")()
    return _DeviceStream(channel, call)
