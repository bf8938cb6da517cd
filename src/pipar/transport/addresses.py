"""Addresses on which a program of this machine can listen."""

from __future__ import annotations

import errno
import os
import socket

from pipar.errors import AddressInUseError, InputError
from pipar.units import split_address


def listen_on(address: str, purpose: str) -> socket.socket:
    """Return a socket that listens on HOST:PORT; raise an error such as "Cannot serve metrics on ...: ..."."""
    try:
        return _listening(address)
    except OSError as error:
        kind = AddressInUseError if error.errno == errno.EADDRINUSE else InputError
        raise kind(f"Cannot {purpose} on {address}: {why(error)}.") from None


def check_listening(address: str) -> None:
    """Raise an error if no program can listen on HOST:PORT now."""
    listen_on(address, "listen").close()


def why_not_listening(address: str) -> str:
    """Return why no program can listen on HOST:PORT; an empty text if one can."""
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
    """Return the reason for an error with an address, in a few words."""
    if isinstance(error, socket.gaierror):
        return "there is no such host"
    return os.strerror(error.errno or 0).lower()
