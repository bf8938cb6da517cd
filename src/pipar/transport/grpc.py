"""The gRPC transport: one bidirectional stream per device, raw bytes through generic handlers.

A frame's bytes are sent without a protobuf message around them, which is twice as fast as a message with a bytes field
and needs half of the server's CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from pipar.errors import AddressInUseError, CredentialError, DeviceRefusedError, LinkError, peer_text
from pipar.transport import open_files
from pipar.transport.addresses import check_listening
from pipar.transport.authenticator import Authenticator
from pipar.transport.diagnosis import why_refused
from pipar.transport.interface import Transport
from pipar.transport.limits import MESSAGE_BYTES, Keepalive, Limits, TokenBucket
from pipar.transport.reloading import FreshMaterial, Notices, Notify
from pipar.transport.tls import DeviceSecurity, Material, ServerSecurity, check_device, check_server
from pipar.wire.frames import CHUNK_BYTES, Frame, pack_frame, unpack_frame

_SERVICE, _METHOD = "pipar.Link", "Connect"
#: The metadata with which a server accepts a device.
_ACCEPTED = ("pipar", "welcome")
_CLOSE_TIMEOUT_S = 10.0
_GRACE_S = 1.0
#: How long calls that were cancelled may take to end.
_ENDING_S = 30.0
_GONE = "The peer closed the connection."

#: Tasks that read streams; asyncio itself keeps only weak references to tasks.
_PUMPS: set[asyncio.Future[None]] = set()

#: Takes a device's stream and the name in its credential (None if no credential is needed).
Accept = Callable[[Transport, str | None], Awaitable[None]]
#: Called for a refused connection with its origin and the reason.
Refused = Callable[[str, str], None]


class _Stream:
    """One end of a device's stream. A separate task reads it, because gRPC ends a call whose read is cancelled.

    It reads ahead a little, and only one message before the first `read`. Flow control of HTTP/2 holds back everything
    beyond that at the peer.
    """

    def __init__(self, call: Any, limits: Limits, first_frame_s: float | None = None) -> None:
        self.has_spoken = False
        self._call = call
        self._read_ahead_bytes = limits.read_ahead_bytes
        self._first_frame_s = first_frame_s
        self._arrived: deque[tuple[bytes, float]] = deque()  # and when
        self._held_bytes = 0
        self._ended = False
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._pump = asyncio.ensure_future(self._read_all())
        _PUMPS.add(self._pump)
        self._pump.add_done_callback(_PUMPS.discard)

    async def _read_all(self) -> None:
        try:
            while (data := await self._call.read()) is not grpc.aio.EOF:
                if self._ended:
                    continue  # not needed any more, but the end of the stream comes after it
                self._arrived.append((data, asyncio.get_running_loop().time()))
                self._held_bytes += len(data) + MESSAGE_BYTES
                self._news.set()
                while self._is_full():
                    self._room.clear()
                    await self._room.wait()
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            pass  # the stream has ended, for any reason
        finally:
            self.end()

    def _is_full(self) -> bool:
        if self._ended:
            return False
        return self._held_bytes >= self._read_ahead_bytes or (not self.has_spoken and bool(self._arrived))

    def end(self) -> None:
        """End the stream: nothing more will arrive or be read."""
        self._ended = True
        self._news.set()
        self._room.set()

    async def write(self, frame: Frame) -> None:
        try:
            await self._call.write(pack_frame(frame))
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise LinkError(_GONE) from error

    async def read(self) -> Frame:
        try:
            async with asyncio.timeout(None if self.has_spoken else self._first_frame_s):
                await self._wait_for_message()
        except TimeoutError:
            raise LinkError(f"The peer sent nothing for {self._first_frame_s:g} s.") from None
        self.has_spoken = True
        data, came_at = self._arrived.popleft()
        self._held_bytes -= len(data) + MESSAGE_BYTES
        self._room.set()
        return unpack_frame(data, came_at)

    async def _wait_for_message(self) -> None:
        """Return when a message has arrived; raise if none will."""
        while not self._arrived:
            if self._ended:
                raise LinkError(_GONE)
            self._news.clear()
            await self._news.wait()

    async def close(self) -> None:
        """Read nothing more. The reading task ends with the call: gRPC never frees a read that is cancelled."""
        self.end()


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
        notices: Notices | None = None,
    ) -> None:
        from pipar.transport.health import Health  # imports protobuf, which devices do not need

        self._accept = accept
        self._security = security or ServerSecurity()
        self._limits = _within_open_files(limits or Limits())
        self._refused = refused
        self._notices = notices or Notices()
        self._authenticator = Authenticator(self._security, self._notices)
        self._material: FreshMaterial | None = None
        self._streams: dict[_Stream, str | None] = {}  # and the name in its credential
        self._contexts: dict[_Stream, Any] = {}
        self._calls: dict[asyncio.Task[None], asyncio.Task[None]] = {}  # gRPC's task of each stream, and our session
        # For new streams, by name; there are no more names than credentials.
        self._allowances: dict[str | None, TokenBucket] = {}
        self._refusals = TokenBucket(self._limits.refusals)
        self._held_back = 0  # refusals that are being delayed
        self._server = grpc.aio.server(options=_server_options(self._limits, keepalive or Keepalive()))
        handler: Any = grpc.stream_stream_rpc_method_handler(self._connected)
        service = grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler})
        self._server.add_generic_rpc_handlers((service,))
        self._health = Health(self._server, _SERVICE, watchers=self._limits.watchers)

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
        """Read files of credentials that have changed, and end the streams of devices that were revoked."""
        if self._material is not None:
            self._material.refresh()
        if not self._authenticator.refresh():
            return
        for stream, peer in list(self._streams.items()):
            context = self._contexts[stream]
            why = None if peer is None else self._authenticator.why_revoked(peer, context.auth_context())
            if why is not None:
                if self._refused is not None:
                    self._refused(context.peer(), f"{peer}: {why}")
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
            await self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, str(why))
            return
        except LinkError as why:
            await self._refuse(context, grpc.StatusCode.UNAVAILABLE, str(why))
            return
        if why_full := self._why_full(peer):
            await self._refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, why_full)
            return
        await self._serve(context, peer)

    async def _serve(self, context: Any, peer: str | None) -> None:
        stream = _Stream(context, self._limits, self._limits.first_frame_s)
        self._streams[stream], self._contexts[stream] = peer, context
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

    async def _admit(self, context: Any, stream: _Stream, peer: str | None) -> None:
        with contextlib.suppress(grpc.aio.BaseError):  # if the device is gone, reading its stream shows that
            await context.send_initial_metadata((_ACCEPTED,))
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

    async def _refuse(self, context: Any, code: grpc.StatusCode, why: str) -> None:
        if self._refused is not None:
            self._refused(context.peer(), why)
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


def _options(keepalive: Keepalive) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", CHUNK_BYTES + 4096),
        ("grpc.max_send_message_length", CHUNK_BYTES + 4096),
        ("grpc.keepalive_time_ms", round(keepalive.every_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(keepalive.timeout_s * 1000)),
        # Otherwise a minute, for any keepalive timeout.
        ("grpc.http2.ping_timeout_ms", round(keepalive.timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        # A ping waits for the data that is in flight. With probing, gRPC lets that grow to many megabytes, which
        # can take a slow link longer than the timeout for a dead one.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 1 << 20),
        # A compressed message of some kilobytes could unpack to gigabytes and exceed every limit.
        ("grpc.compression_enabled_algorithms_bitset", 1),
    ]


def _server_options(limits: Limits, keepalive: Keepalive) -> list[tuple[str, Any]]:
    return [
        *_options(keepalive),
        # Two servers on one port would silently share its devices: a port in use has to be an error.
        ("grpc.so_reuseport", 0),
        # By default gRPC ends an idle connection at the third ping of five minutes ("too_many_pings").
        ("grpc.http2.min_ping_interval_without_data_ms", round(limits.ping_s * 1000)),
        ("grpc.max_concurrent_streams", limits.streams_per_credential + 2),  # on one connection
        ("grpc.max_allowed_incoming_connections", limits.connections),
        ("grpc.server_handshake_timeout_ms", round(limits.handshake_s * 1000)),
        ("grpc.max_connection_idle_ms", round(limits.idle_s * 1000)),
    ]


class _DeviceStream(_Stream):
    """The device's end of a stream: it opened the stream, so it also closes it."""

    def __init__(self, channel: grpc.aio.Channel, call: Any) -> None:
        super().__init__(call, Limits())
        self._channel = channel

    async def close(self) -> None:
        self.end()
        try:
            await self._call.done_writing()
            # The server ends the stream when it has read everything; closing earlier could lose frames of ours.
            await asyncio.wait([self._pump], timeout=_CLOSE_TIMEOUT_S)
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the call has ended already
        await self._channel.close()


async def connect(
    address: str,
    *,
    security: DeviceSecurity | None = None,
    timeout_s: float = 30.0,
    keepalive: Keepalive | None = None,
) -> Transport:
    """Return a transport to the server at HOST:PORT, which has accepted this device.

    Raises DeviceRefusedError if a verified server refuses its credential, CredentialError if this device and what
    answers at the address can never connect, another LinkError if the server did not answer in time or has no room now.
    """
    security = security or DeviceSecurity()
    channel = _channel(address, security, keepalive or Keepalive())
    try:
        async with asyncio.timeout(timeout_s):
            await _reach(channel, address, security)
            call: Any = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")(metadata=security.metadata())
            await _be_accepted(call, address, is_verified=security.ca is not None)
    except TimeoutError:
        await channel.close()
        raise LinkError(f"No server answered at {address} within {timeout_s:g} s.") from None
    except BaseException:
        await channel.close()
        raise
    return _DeviceStream(channel, call)


def _channel(address: str, security: DeviceSecurity, keepalive: Keepalive) -> grpc.aio.Channel:
    material = check_device(security, address)
    options = [
        *_options(keepalive),
        ("grpc.use_local_subchannel_pool", 1),  # a separate connection, not shared within this process
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]
    if material is None:
        return grpc.aio.insecure_channel(address, options=options)
    if security.server_name is not None:
        options.append(("grpc.ssl_target_name_override", security.server_name))
    credentials = grpc.ssl_channel_credentials(material.authorities, material.key, material.certificate)
    return grpc.aio.secure_channel(address, credentials, options=options)


async def _reach(channel: grpc.aio.Channel, address: str, security: DeviceSecurity) -> None:
    """Return when there is a connection; raise if there can never be one."""
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and (why := await why_refused(address, security)):
            raise CredentialError(why)
        await channel.wait_for_state_change(state)


async def _be_accepted(call: Any, address: str, *, is_verified: bool) -> None:
    """Return when the server has accepted this device; raise if it refuses."""
    if _ACCEPTED in tuple(await call.initial_metadata() or ()):
        return
    code, details = await call.code(), peer_text(await call.details())
    if code is grpc.StatusCode.OK:
        return  # accepted, and ended so soon that gRPC dropped the first answer; a refusal has another code
    if code is grpc.StatusCode.UNAUTHENTICATED:
        refused = DeviceRefusedError if is_verified else CredentialError
        raise refused(f"The server at {address} refuses the device's credential: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        raise CredentialError(f"The program that answers at {address} is not a pipar server: check the address.")
    raise LinkError(f"The server at {address} does not accept the device now: {details}")
