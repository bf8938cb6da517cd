"""Access to the live page: from this machine, or with the token; never through a page of another site."""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
import socket
from dataclasses import dataclass, field

from pipar.errors import InputError
from pipar.transport.tls import is_loopback
from pipar.units import split_address

#: The value on the command line that requests a new token.
AUTO = "auto"
_LEAST_CHARACTERS = 16
_TOKEN = re.compile(r"[A-Za-z0-9_.~-]+")


@dataclass(frozen=True)
class Access:
    """What a request needs. A browser's cookie holds `session`, not the token itself."""

    host: str  # at which the page is served
    token: str | None = None  # None: no token is needed
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    @classmethod
    def of(cls, address: str, token: str | None) -> Access:
        """Return the access to a page at HOST:PORT; beyond loopback there is always a token."""
        host, _ = split_address(address)
        if token == AUTO or (token is None and not is_loopback(address)):
            token = secrets.token_urlsafe(24)
        if token is not None and (len(token) < _LEAST_CHARACTERS or not _TOKEN.fullmatch(token)):
            raise InputError(
                f"The token of the live page needs {_LEAST_CHARACTERS} or more letters, digits or -_.~; "
                f"'{AUTO}' creates one."
            )
        return cls(host.lower(), token)

    def is_token(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())

    def is_session(self, given: str) -> bool:
        """Return whether a browser has presented the token before; always true if none is needed."""
        return self.token is None or hmac.compare_digest(given.encode(), self.session.encode())

    def knows_host(self, header: str) -> bool:
        """Return whether a request's Host is a name of this machine.

        A foreign page can point its own name to this machine's address, and then read this page as its own (DNS
        rebinding); but then its name is in the request. An address in place of a name cannot be forged this way.
        """
        name = _host_of(header)
        if name in ("localhost", self.host):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            own = socket.gethostname().lower()  # not the full name: looking it up may take seconds
            return not self._is_local and name in (own, f"{own}.local")
        return address.is_loopback or not self._is_local

    @property
    def _is_local(self) -> bool:
        return is_loopback(f"{self.host}:0")


def _host_of(header: str) -> str:
    """Return the host of HOST[:PORT] or [IPv6][:PORT]."""
    bracketed = re.fullmatch(r"\[([^\]]*)\](?::\d*)?", header)
    return (bracketed[1] if bracketed else re.sub(r":\d*$", "", header)).lower().removesuffix(".")


def shown_host(host: str) -> str:
    """Return the host for a URL: the name of this machine in place of 0.0.0.0, which is not one."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return socket.gethostname()
    return f"[{host}]" if address.version == 6 else host
