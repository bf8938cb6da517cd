"""Why a server cannot be talked to: what gRPC keeps to itself, asked of the socket in a TLS handshake."""

from __future__ import annotations

import asyncio
import ssl

from pipar.transport.tls import DeviceSecurity
from pipar.units import split_address

_PATIENCE_S = 3.0
_AGAIN_S = 0.3
#: OpenSSL's numbers of what can be wrong with a certificate.
_EXPIRED, _NOT_YET_VALID, _WRONG_NAMES = 10, 9, {62, 64}


async def why_refused(address: str, security: DeviceSecurity) -> str | None:
    """Return one sentence if device and server will never understand each other; None if it may only be too early."""
    try:
        return await (_why_plain(address) if security.ca is None else _why_tls(address, security))
    except (ssl.SSLEOFError, OSError, TimeoutError):  # nobody there, or no answer: that may change
        return None


async def _why_plain(address: str) -> str | None:
    context = _context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        await _shake_hands(address, context, None, waits=False)
    except ssl.SSLError as error:
        # An alert is TLS, too; what is no TLS at all has no proper version.
        if "ALERT" not in (error.reason or ""):
            return None
    return f"The server at {address} speaks TLS: give the device the file of its authority, ca.pem."


async def _why_tls(address: str, security: DeviceSecurity) -> str | None:
    name = security.server_name or split_address(address)[0]
    context = _context()
    context.load_verify_locations(security.ca)
    if security.certificate is not None:
        context.load_cert_chain(security.certificate, security.key)
    try:
        # gRPC's server ends a connection whose certificate it does not take without a word, as one that just stops.
        if await _shake_hands(address, context, name):
            return None
        await asyncio.sleep(_AGAIN_S)
        if await _shake_hands(address, context, name):
            return None
    except ssl.SSLCertVerificationError as error:
        return _why_not_trusted(address, name, error)
    except ssl.SSLEOFError:
        return None
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):
            return f"The server at {address} does not speak TLS, and the device does: start it with a certificate."
    return _why_not_taken(address, security)


def _why_not_trusted(address: str, name: str, error: ssl.SSLCertVerificationError) -> str:
    who = f"The server at {address}"
    if error.verify_code == _EXPIRED:
        return f"{who} has a certificate that expired; make it a new one with `pipar certs server`."
    if error.verify_code == _NOT_YET_VALID:
        return f"{who} has a certificate that is not valid yet: compare the clocks of both machines."
    if error.verify_code in _WRONG_NAMES:
        return f"{who} has a certificate for other names than '{name}'; `pipar certs server --host {name}` adds it."
    return f"{who} has a certificate that the device's ca.pem does not vouch for: {error.verify_message}."


def _why_not_taken(address: str, security: DeviceSecurity) -> str:
    if security.certificate is None:
        return f"The server at {address} wants the device's certificate, and none was given; see `pipar certs issue`."
    return (
        f"The server at {address} does not take the device's certificate: it expired, is of another authority, or is "
        "not a device's."
    )


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])  # gRPC ends a connection that does not offer it
    return context


async def _shake_hands(address: str, context: ssl.SSLContext, name: str | None, *, waits: bool = True) -> bool:
    """Make a handshake; return whether the server says anything behind it, if we are to wait for that."""
    host, port = split_address(address)
    async with asyncio.timeout(_PATIENCE_S):
        reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name or host)
        try:
            return not waits or bool(await reader.read(1))
        finally:
            writer.transport.abort()  # a server need not answer a farewell
