"""Why a server cannot be reached: gRPC does not say, so a TLS handshake on a plain socket finds out."""

from __future__ import annotations

import asyncio
import ssl

from pipar.transport.tls import DeviceSecurity
from pipar.units import split_address

_PATIENCE_S = 3.0
_AGAIN_S = 0.3
#: OpenSSL's error codes for certificates.
_EXPIRED, _NOT_YET_VALID, _WRONG_NAMES = 10, 9, {62, 64}


async def why_refused(address: str, security: DeviceSecurity) -> str | None:
    """Return why device and server can never connect with these settings; None if trying again may help."""
    try:
        return await (_why_plain(address) if security.ca is None else _why_tls(address, security))
    except (ssl.SSLEOFError, OSError, TimeoutError):  # no server, or no answer: that may change
        return None


async def _why_plain(address: str) -> str | None:
    context = _context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        await _shake_hands(address, context, None, waits=False)
    except ssl.SSLError as error:
        # An alert comes from a TLS server too; other errors mean that the server does not use TLS.
        if "ALERT" not in (error.reason or ""):
            return None
    return (
        f"The server at {address} uses TLS: give the device the folder with ca.pem and its credential, --certs FOLDER."
    )


async def _why_tls(address: str, security: DeviceSecurity) -> str | None:
    name = security.server_name or split_address(address)[0]
    context = _context()
    context.load_verify_locations(security.ca)
    if security.certificate is not None:
        context.load_cert_chain(security.certificate, security.key)
    try:
        # gRPC's server closes a connection whose certificate it refuses without an alert, as a server that stops does.
        # So a second attempt tells the two apart.
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
            return (
                f"The server at {address} does not use TLS, but the device does: start the server with a certificate."
            )
    return _why_not_taken(address, security)


def _why_not_trusted(address: str, name: str, error: ssl.SSLCertVerificationError) -> str:
    server = f"The server at {address}"
    if error.verify_code == _EXPIRED:
        return f"{server} has a certificate that has expired; issue a new one with `pipar certs server`."
    if error.verify_code == _NOT_YET_VALID:
        return f"{server} has a certificate that is not valid yet: compare the clocks of both machines."
    if error.verify_code in _WRONG_NAMES:
        return f"{server} has a certificate for other names than '{name}'; `pipar certs server --host {name}` adds it."
    return f"{server} has a certificate that cannot be verified with the device's ca.pem: {error.verify_message}."


def _why_not_taken(address: str, security: DeviceSecurity) -> str:
    if security.certificate is None:
        return (
            f"The server at {address} needs a certificate of the device, and none was given; see `pipar certs issue`."
        )
    return (
        f"The server at {address} refuses the device's certificate: it has expired, was signed by another authority, "
        "or was not issued for a device."
    )


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])  # gRPC closes a connection that does not offer it
    return context


async def _shake_hands(address: str, context: ssl.SSLContext, name: str | None, *, waits: bool = True) -> bool:
    """Make a handshake; return whether the server sends anything after it, or True without waiting for that."""
    host, port = split_address(address)
    async with asyncio.timeout(_PATIENCE_S):
        reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name or host)
        try:
            return not waits or bool(await reader.read(1))
        finally:
            writer.transport.abort()  # do not wait for the server to confirm the close
