"""The interface of a transport, in memory or over gRPC."""

from __future__ import annotations

from typing import Protocol

from pipar.errors import LinkError
from pipar.wire.frames import Frame


class Transport(Protocol):
    """Carries frames to one peer and back, in order; `read` raises LinkError if the peer is lost."""

    async def write(self, frame: Frame) -> None: ...
    async def read(self) -> Frame: ...
    async def close(self) -> None: ...


class SendError(LinkError):
    """This side cannot send, and could not over another transport either."""

    @classmethod
    def caused_by(cls, error: Exception) -> SendError:
        return cls(f"Sending failed with {type(error).__name__}: {error}")
