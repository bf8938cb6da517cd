"""Who may look at the live page: this machine, or whoever has the token; and no page of another site by a detour."""

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

#: What is asked for on the command line in place of a token of one's own.
AUTO = "auto"
_LEAST_CHARACTERS = 16
_TOKEN = re.compile(r"[A-Za-z0-9_.~-]+")


@dataclass(frozen=True)
class Access:
    """What a request has to bring along. Its words for a browser, the session, are not the token itself."""

    host: str  # that the page is served at
    token: str | None = None  # None: nobody needs one
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    @classmethod
    def of(cls, address: str, token: str | None) -> Access:
        """Return the access to a page at HOST:PORT: beyond loopback nobody comes in without a token."""
        host, _ = split_address(address)
        if token == AUTO or (token is None and not is_loopback(address)):
            token = secrets.token_urlsafe(24)
        if token is not None and (len(token) < _LEAST_CHARACTERS or not _TOKEN.fullmatch(token)):
            raise InputError(
                f"The token of the live page has to have {_LEAST_CHARACTERS} or more letters, digits or -_.~; "
                f"'{AUTO}' makes one."
            )
        return cls(host.lower(), token)

    def is_token(self, said: str) -> bool:
        return self.token is not None and hmac.compare_digest(said.encode(), self.token.encode())

    def is_session(self, said: str) -> bool:
        """Return whether a browser has shown the token before; without a token everybody has."""
        return self.token is None or hmac.compare_digest(said.encode(), self.session.encode())

    def knows_host(self, header: str) -> bool:
        """Return whether a request's Host is a name of this machine.

        A foreign page can give a name of its own this machine's address, and then read what is served here as its own
        (DNS rebinding); but its name is in the request. An address in place of a name cannot be forged so.
        """
        name = _host_of(header)
        if name in ("localhost", self.host):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            own = socket.gethostname().lower()  # its whole name would have to be asked for, and that may take seconds
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
    """Return what to call this machine by in an address to open: 0.0.0.0 is none."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return socket.gethostname()
    return f"[{host}]" if address.version == 6 else host
