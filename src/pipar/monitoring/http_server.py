"""HTTP on a thread next to the training: uvicorn without signal handlers or logs, and connections with deadlines."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol


class DeadlineProtocol(H11Protocol):
    """An HTTP connection that can be given a deadline; there is one at a time, and none once it is closed."""

    _deadline: asyncio.TimerHandle | None = None

    def set_deadline(self, seconds: float, on_expiry: Callable[..., None], *args: Any) -> None:
        """Call `on_expiry` after this time, unless another deadline is set or the connection closes before."""
        self.clear_deadline()
        self._deadline = self.loop.call_later(seconds, on_expiry, *args)

    def clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.clear_deadline()
        super().connection_lost(exc)


def http_server(
    app: ASGIApp, protocol: type[DeadlineProtocol], *, shutdown_s: int, largest_request_bytes: int | None = None
) -> uvicorn.Server:
    """Return a server for an application; at its end, open connections have `shutdown_s` seconds to finish.

    A request that has grown larger without being complete is refused; one that arrives in one piece is not.
    """
    config = uvicorn.Config(
        app,
        http=protocol,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=logging.CRITICAL,  # a client that sends garbage must not fill the log of a training
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=shutdown_s,
        h11_max_incomplete_event_size=largest_request_bytes,
    )
    return uvicorn.Server(config)


def cut_off(transport: asyncio.Transport) -> None:
    """Close a connection, and discard what is still to be sent: the system would otherwise offer it for minutes."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


async def cut_off_all(server: uvicorn.Server) -> None:
    """Close all remaining connections without waiting until their clients have read what they were sent."""
    for connection in list(server.server_state.connections):
        cut_off(connection.transport)
    await asyncio.sleep(0)
