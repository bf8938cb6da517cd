"""The server's end of the gRPC transport: a listener with one bidirectional stream per device."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from pipar.errors import AddressInUseError, CredentialError, LinkError
from pipar.transport import open_files
from pipar.transport.addresses import check_listening
from pipar.transport.authenticator import Authenticator
from pipar.transport.congestion import prefer_cubic_at
from pipar.transport.grpc_stream import ACCEPTED, METHOD, SERVICE, Stream, common_options
from pipar.transport.interface import Transport
from pipar.transport.limits import Keepalive, Limits, TokenBucket
from pipar.transport.reloading import FreshMaterial, Notices, Notify
from pipar.transport.tls import Material, ServerSecurity, check_server

_GRACE_S = 1.0
#: How long calls that were cancelled may take to end.
_ENDING_S = 30.0

#: Takes a device's stream and the name in its credential (None if no credential is needed).
Accept = Callable[[Transport, str | None], Awaitable[None]]
#: Called for a refused connection with its origin, the reason and the device, "" if its credential does not prove one.
Refused = Callable[[str, str, str], None]
#: Called with the name of a device whose credential was revoked, before its connection ends.
Revoked = Callable[[str], None]


class Listener:
    """Listens for devices; passes each new stream to `accept`, which returns when the device's session is over.

    A device without the credentials that `security` asks for gets the error UNAUTHENTICATED and never reaches `accept`.
    While a file of credentials cannot be read, every device gets UNAVAILABLE, and `notices` is told once. The server
    also has gRPC's health service, which needs no credential. New connections use certificate files as they are then.
    """

    def __init__(
        self,
        accept: Accept,
        *,
        security: ServerSecurity | None = None,
        limits: Limits | None = None,
        keepalive: Keepalive | None = None,
        refused: Refused | None = None,
        revoked: Revoked | None = None,
        notices: Notices | None = None,
    ) -> None:
        from pipar.transport.health import Health  # imports protobuf, which devices do not need

        self._accept = accept
        self._security = security or ServerSecurity()
        self._limits = _within_open_files(limits or Limits())
        self._refused = refused
        self._revoked = revoked
        self._notices = notices or Notices()
        self._authenticator = Authenticator(self._security, self._notices)
        self._material: FreshMaterial | None = None
        self._streams: dict[Stream, str | None] = {}  # and the name in its credential
        self._contexts: dict[Stream, Any] = {}
        # What TLS knows of the latest connection of each device, which may be away; no more than there are credentials.
        self._known: dict[str, Any] = {}
        self._calls: dict[asyncio.Task[None], asyncio.Task[None]] = {}  # gRPC's task of each stream, and our session
        # For new streams, by name; there are no more names than credentials.
        self._allowances: dict[str | None, TokenBucket] = {}
        self._refusals = TokenBucket(self._limits.refusals)
        self._held_back = 0  # refusals that are being delayed
        self._server = grpc.aio.server(options=_server_options(self._limits, keepalive or Keepalive()))
        handler: Any = grpc.stream_stream_rpc_method_handler(self._connected)
        service = grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})
        self._server.add_generic_rpc_handlers((service,))
        self._health = Health(self._server, SERVICE, watchers=self._limits.watchers)

    @property
    def most_connections(self) -> int:
        """How many connections it accepts: what it was given, or as many as the limit of open files has room for."""
        return self._limits.connections

    async def start(self, address: str) -> int:
        """Listen on HOST:PORT (port 0: any free port) and return the port."""
        material = check_server(self._security, address)
        check_listening(address)  # gRPC would print its own lines
        try:
            if material is None:
                port = self._server.add_insecure_port(address)
            else:
                self._material = FreshMaterial(self._security, material, self._from_any_thread())
                port = self._server.add_secure_port(address, _server_credentials(self._material))
        except RuntimeError:
            port = 0
        if port == 0:
            raise AddressInUseError(
                f"Cannot listen on {address}: the port is in use, or the address does not belong to this machine."
            )
        await self._server.start()
        prefer_cubic_at(port)
        await self._health.serving(True)
        return port

    def _from_any_thread(self) -> Notices:
        """Return the notices for gRPC's threads, in which handshakes ask for certificates."""
        loop, notices = asyncio.get_running_loop(), self._notices

        def later(notify: Notify) -> Notify:
            def say(sentence: str) -> None:
                loop.call_soon_threadsafe(notify, sentence)

            return say

        return Notices(later(notices.reloaded), later(notices.failed), later(notices.barred))

    @property
    def certificates(self) -> list[tuple[Path, bytes]]:
        """The certificate and the authority that new connections get now, as PEM, with their files."""
        if self._material is None:
            return []
        loaded, security = self._material.loaded, self._security
        given = ((security.certificate, loaded.certificate), (security.client_ca, loaded.authorities))
        return [(path, pem) for path, pem in given if path is not None and pem is not None]

    def refresh(self) -> None:
        """Read files of credentials that have changed, and end streams and places of devices that were revoked."""
        if self._material is not None:
            self._material.refresh()
        if not self._authenticator.refresh():
            return
        for device in [name for name, auth in self._known.items() if self._authenticator.why_revoked(name, auth)]:
            del self._known[device]
            if self._revoked is not None:
                self._revoked(device)  # first: the place of a device whose stream ends would be kept for a while
        for stream, peer in list(self._streams.items()):
            context = self._contexts[stream]
            why = None if peer is None else self._authenticator.why_revoked(peer, context.auth_context())
            if why is not None and peer is not None:
                if self._refused is not None:
                    self._refused(context.peer(), why, peer)
                stream.end()

    async def stop(self) -> None:
        await self._health.serving(False)
        await self._server.stop(grace=_GRACE_S)
        await self._end_calls()

    async def _end_calls(self) -> None:
        """Wait for the streams to end: gRPC prints a traceback for each one that is open when the loop ends."""
        if under_way := {*self._calls, *self._health.watching}:
            await asyncio.wait(under_way, timeout=_GRACE_S)
        for session in self._calls.values():
            session.cancel()
        if cancelled := {*self._calls, *self._health.watching}:  # gRPC itself cancels the health watchers
            await asyncio.wait(cancelled, timeout=_ENDING_S)

    async def _connected(self, _: Any, context: Any) -> None:
        try:
            peer = self._authenticator.name_of(context.auth_context(), context.invocation_metadata() or ())
        except CredentialError as why:
            await self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, str(why), why.device)
            return
        except LinkError as why:
            await self._refuse(context, grpc.StatusCode.UNAVAILABLE, str(why))
            return
        if why_full := self._why_full(peer):
            await self._refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, why_full)
            return
        await self._serve(context, peer)

    async def _serve(self, context: Any, peer: str | None) -> None:
        stream = Stream(context, self._limits, self._limits.first_frame_s)
        self._streams[stream], self._contexts[stream] = peer, context
        if peer is not None:
            self._known[peer] = context.auth_context()
        session = asyncio.ensure_future(self._admit(context, stream, peer))
        call = asyncio.current_task()
        assert call is not None
        self._calls[call] = session
        call.add_done_callback(self._calls.pop)
        try:
            await asyncio.shield(session)
        except asyncio.CancelledError:
            # gRPC cancels the call when the device is gone. The session is not cancelled: it sees the end of its
            # stream, as over any other transport.
            stream.end()
            await session
            raise
        finally:
            del self._streams[stream], self._contexts[stream]
            await stream.close()

    async def _admit(self, context: Any, stream: Stream, peer: str | None) -> None:
        with contextlib.suppress(grpc.aio.BaseError):  # if the device is gone, reading its stream shows that
            await context.send_initial_metadata((ACCEPTED,))
        await self._accept(stream, peer)

    def _why_full(self, peer: str | None) -> str | None:
        """Return why another stream is refused; None if it is accepted."""
        if not self._allowance(peer).take(asyncio.get_running_loop().time()):
            return "Too many devices connect at the same time." if peer is None else f"{peer} connects too often."
        if peer is not None and Counter(self._streams.values())[peer] >= self._limits.streams_per_credential:
            return f"{peer} is connected {self._limits.streams_per_credential} times already."
        if sum(not stream.has_spoken for stream in self._streams) >= self._limits.newcomers:
            return "Too many devices connect at the same time."
        return None

    def _allowance(self, peer: str | None) -> TokenBucket:
        if peer not in self._allowances:
            self._allowances[peer] = TokenBucket(self._limits.open_streams if peer is None else self._limits.streams)
        return self._allowances[peer]

    async def _refuse(self, context: Any, code: grpc.StatusCode, why: str, device: str = "") -> None:
        if self._refused is not None:
            self._refused(context.peer(), why, device)
        await self._hold_back()
        await context.abort(code, why)

    async def _hold_back(self) -> None:
        """Delay refusals if there are too many: a connection has few streams, so its peer then asks slowly."""
        if self._refusals.take(asyncio.get_running_loop().time()) or self._held_back >= self._limits.newcomers:
            return
        self._held_back += 1
        try:
            await asyncio.sleep(self._limits.refusal_s)
        finally:
            self._held_back -= 1


def _within_open_files(limits: Limits) -> Limits:
    """Return the limits with as many connections as leave files for the rest of the process."""
    return replace(limits, connections=open_files.most_connections(limits.connections, open_files.limits()[0]))


def _server_credentials(material: FreshMaterial) -> Any:
    """Return credentials for which gRPC asks again at every new connection."""

    def fetch() -> Any:
        new = material.take_new()
        return None if new is None else _certificate_configuration(new)

    return grpc.dynamic_ssl_server_credentials(
        _certificate_configuration(material.loaded),
        fetch,
        require_client_authentication=material.loaded.authorities is not None,
    )


def _certificate_configuration(material: Material) -> Any:
    assert material.certificate is not None
    assert material.key is not None
    return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.authorities)


def _server_options(limits: Limits, keepalive: Keepalive) -> list[tuple[str, Any]]:
    return [
        *common_options(keepalive, limits.window_bytes),
        # Two servers on one port would silently share its devices: a port in use has to be an error.
        ("grpc.so_reuseport", 0),
        # By default gRPC ends an idle connection at the third ping of five minutes ("too_many_pings").
        ("grpc.http2.min_ping_interval_without_data_ms", round(limits.ping_s * 1000)),
        ("grpc.max_concurrent_streams", limits.streams_per_credential + 2),  # on one connection
        ("grpc.max_allowed_incoming_connections", limits.connections),
        ("grpc.server_handshake_timeout_ms", round(limits.handshake_s * 1000)),
        ("grpc.max_connection_idle_ms", round(limits.idle_s * 1000)),
    ]
