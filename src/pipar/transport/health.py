"""gRPC's standard health service: tells a supervisor whether the server listens."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health(health.aio.HealthServicer):  # type: ignore[misc]
    """The state of the server and its service. The number of watchers is limited: watching needs no credential."""

    def __init__(self, server: Any, service: str, *, watchers: int) -> None:
        super().__init__()
        self._service = service
        self._free = watchers
        self.watching: set[asyncio.Task[None]] = set()  # gRPC's calls of the watchers
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    async def serving(self, is_serving: bool) -> None:
        """Report from now on whether devices are served."""
        for name in ("", self._service):
            await self.set(name, _SERVING if is_serving else _NOT_SERVING)

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802 - the service's own name
        if self._free <= 0:
            await context.abort(_exhausted(), "Too many clients watch already; use Check.")
        self._free -= 1
        call = asyncio.current_task()
        assert call is not None
        self.watching.add(call)
        call.add_done_callback(self.watching.discard)
        try:
            await super().Watch(request, context)
        finally:
            self._free += 1


def _exhausted() -> Any:
    import grpc

    return grpc.StatusCode.RESOURCE_EXHAUSTED
