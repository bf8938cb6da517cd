"""One end of a gRPC stream: raw bytes through generic handlers.

A frame's bytes are sent without a protobuf message around them, which is twice as fast as a message with a bytes field
and needs half of the server's CPU time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import grpc

from pipar.errors import LinkError
from pipar.transport.limits import MESSAGE_BYTES, Keepalive, Limits
from pipar.wire.frames import CHUNK_BYTES, Frame, pack_frame, unpack_frame

SERVICE = "pipar.Link"
METHOD = "Connect"
#: The metadata with which a server accepts a device.
ACCEPTED = ("pipar", "welcome")
_GONE = "The peer closed the connection."
#: Tasks that read streams; asyncio itself keeps only weak references to tasks.
_PUMPS: set[asyncio.Future[None]] = set()


class Stream:
    """One end of a device's stream. A separate task reads it, because gRPC ends a call whose read is cancelled.

    It reads ahead a little, and only one message before the first `read`. Flow control of HTTP/2 holds back everything
    beyond that at the peer.
    """

    def __init__(self, call: Any, limits: Limits, first_frame_s: float | None = None) -> None:
        self.has_spoken = False
        self._call = call
        self._read_ahead_bytes = limits.read_ahead_bytes
        self._first_frame_s = first_frame_s
        self._arrived: deque[tuple[bytes, float]] = deque()  # and when
        self._held_bytes = 0
        self._ended = False
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._pump = asyncio.ensure_future(self._read_all())
        _PUMPS.add(self._pump)
        self._pump.add_done_callback(_PUMPS.discard)

    async def _read_all(self) -> None:
        try:
            while (data := await self._call.read()) is not grpc.aio.EOF:
                if self._ended:
                    continue  # not needed any more, but the end of the stream comes after it
                self._arrived.append((data, asyncio.get_running_loop().time()))
                self._held_bytes += len(data) + MESSAGE_BYTES
                self._news.set()
                while self._is_full():
                    self._room.clear()
                    await self._room.wait()
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            pass  # the stream has ended, for any reason
        finally:
            self.end()

    def _is_full(self) -> bool:
        if self._ended:
            return False
        return self._held_bytes >= self._read_ahead_bytes or (not self.has_spoken and bool(self._arrived))

    def end(self) -> None:
        """End the stream: nothing more will arrive or be read."""
        self._ended = True
        self._news.set()
        self._room.set()

    async def write(self, frame: Frame) -> None:
        try:
            await self._call.write(pack_frame(frame))
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise LinkError(_GONE) from error

    async def read(self) -> Frame:
        try:
            async with asyncio.timeout(None if self.has_spoken else self._first_frame_s):
                await self._wait_for_message()
        except TimeoutError:
            raise LinkError(f"The peer sent nothing for {self._first_frame_s:g} s.") from None
        self.has_spoken = True
        data, came_at = self._arrived.popleft()
        self._held_bytes -= len(data) + MESSAGE_BYTES
        self._room.set()
        return unpack_frame(data, came_at)

    async def _wait_for_message(self) -> None:
        """Return when a message has arrived; raise if none will."""
        while not self._arrived:
            if self._ended:
                raise LinkError(_GONE)
            self._news.clear()
            await self._news.wait()

    async def close(self) -> None:
        """Read nothing more. The reading task ends with the call: gRPC never frees a read that is cancelled."""
        self.end()


def common_options(keepalive: Keepalive, window_bytes: int) -> list[tuple[str, Any]]:
    """Return gRPC's options for both ends; the peer may send `window_bytes` before it is told that they were read."""
    return [
        ("grpc.max_receive_message_length", CHUNK_BYTES + 4096),
        ("grpc.max_send_message_length", CHUNK_BYTES + 4096),
        ("grpc.keepalive_time_ms", round(keepalive.every_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(keepalive.timeout_s * 1000)),
        # Otherwise a minute, for any keepalive timeout.
        ("grpc.http2.ping_timeout_ms", round(keepalive.timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        # Probing would adapt the window to the delay of an idle link. Ours have to cover the delay of a busy one.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", window_bytes),
        # A compressed message of some kilobytes could unpack to gigabytes and exceed every limit.
        ("grpc.compression_enabled_algorithms_bitset", 1),
    ]
