"""The congestion control of this program's TCP connections.

Where BBR is the system's default, connections of pipar use CUBIC instead, if the system allows it. BBR (version 1)
takes the short bursts that a shaped link lets through for its rate: on a link of 10 Mbit/s it lost up to every fourth
packet, and its full queue delayed the acknowledgements of gradients, which arrived late (decision 036).
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")
_AVOIDED, _PREFERRED = "bbr", "cubic"
_NAME_BYTES = 16


def prefer_cubic_at(port: int) -> None:
    """Let connections that this program accepts at a port use CUBIC in place of BBR."""
    _prefer_cubic(lambda one: one.getsockname()[1] == port)


def prefer_cubic_to(port: int) -> None:
    """Let connections of this program to a port use CUBIC in place of BBR."""
    _prefer_cubic(lambda one: one.getpeername()[1] == port)


def congestion_control(one: socket.socket) -> str:
    """Return the name of a socket's congestion control."""
    name: bytes = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
    return name.rstrip(b"\0").decode()


def _prefer_cubic(is_ours: Callable[[socket.socket], bool]) -> None:
    for one in _tcp_sockets():
        # A socket may be closed, or unconnected. Some systems allow other programs than root only the default.
        with one, suppress(OSError):
            if is_ours(one) and congestion_control(one) == _AVOIDED:
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _PREFERRED.encode())


def _tcp_sockets() -> Iterator[socket.socket]:
    """Yield copies of this program's TCP sockets: gRPC has no option for this, and does not give out its sockets."""
    with suppress(OSError):  # only Linux has this folder
        for path in _DESCRIPTORS.iterdir():
            one = _copy(int(path.name))
            if one is not None and one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                yield one
            elif one is not None:
                one.close()


def _copy(number: int) -> socket.socket | None:
    """Return a copy of the socket with this descriptor; None if there is none.

    Other threads may close the descriptor at any time, and open something else under its number.
    """
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return None
        copied = os.dup(number)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copied)
    except OSError:
        os.close(copied)
        return None
