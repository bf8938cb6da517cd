"""Where a program of this machine can listen."""

from __future__ import annotations

import os
import socket

from pipar.errors import InputError
from pipar.units import split_address


def listen_on(address: str, purpose: str) -> socket.socket:
    """Return a socket that listens on HOST:PORT; or raise one sentence, as in "Cannot serve metrics on ...: ..."."""
    try:
        return _listening(address)
    except OSError as error:
        raise InputError(f"Cannot {purpose} on {address}: {why(error)}.") from None


def check_listening(address: str) -> None:
    """Raise one sentence if nobody can listen on HOST:PORT now."""
    listen_on(address, "listen").close()


def why_not_listening(address: str) -> str:
    """Return why nobody can listen on HOST:PORT; nothing if somebody can."""
    try:
        _listening(address).close()
    except OSError as error:
        return why(error)
    return ""


def _listening(address: str) -> socket.socket:
    host, port = split_address(address)
    family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place[:2], family=family, backlog=64)


def why(error: OSError) -> str:
    """Return what is wrong with an address, in a few words."""
    if isinstance(error, socket.gaierror):
        return "there is no such host"
    return os.strerror(error.errno or 0).lower()
