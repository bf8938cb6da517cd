"""The gRPC transport: one bidirectional stream a device, raw bytes through generic handlers.

Without a message type in between, a frame's bytes go to the socket as they are: twice as fast as a protobuf
message with a bytes field, at half the server's CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from pipar.errors import CredentialError, InputError, LinkError
from pipar.transport.addresses import check_listening
from pipar.transport.diagnosis import why_refused
from pipar.transport.interface import Transport
from pipar.transport.limits import MESSAGE_BYTES, Keepalive, Limits, TokenBucket
from pipar.transport.tls import Authenticator, DeviceSecurity, Material, ServerSecurity, check_device, check_server
from pipar.wire.frames import CHUNK_BYTES, Frame, pack_frame, unpack_frame

_SERVICE, _METHOD = "pipar.Link", "Connect"
#: How a server begins its answer to a device that may speak.
_LET_IN = ("pipar", "welcome")
_CLOSE_TIMEOUT_S = 10.0
_GRACE_S = 1.0
_GONE = "The peer closed the connection."

#: Tasks that read streams, to their ends.
_PUMPS: set[asyncio.Future[None]] = set()

#: Takes a device's stream and the name that its credential gives it (None where none is needed).
Accept = Callable[[Transport, str | None], Awaitable[None]]
#: Told of a connection that was not taken: where it came from, and why.
Refused = Callable[[str, str], None]


class _Stream:
    """One end of a device's stream. A task of its own reads it, because gRPC ends a call whose read is cancelled.

    It reads ahead a little, and one message only before the first is asked for. What the peer sends beyond that stays
    with the peer: HTTP/2 stops it when nobody reads.
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
                    continue  # nobody takes it, but what is behind it is the end
                self._arrived.append((data, asyncio.get_running_loop().time()))
                self._held_bytes += len(data) + MESSAGE_BYTES
                self._news.set()
                while self._is_full():
                    self._room.clear()
                    await self._room.wait()
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            pass  # for a reader the stream is at its end, whatever ended it
        finally:
            self.end()

    def _is_full(self) -> bool:
        if self._ended:
            return False
        return self._held_bytes >= self._read_ahead_bytes or (not self.has_spoken and bool(self._arrived))

    def end(self) -> None:
        """Nothing more will come, or be asked for."""
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
                await self._something()
        except TimeoutError:
            raise LinkError(f"The peer said nothing for {self._first_frame_s:g} s.") from None
        self.has_spoken = True
        data, came_at = self._arrived.popleft()
        self._held_bytes -= len(data) + MESSAGE_BYTES
        self._room.set()
        return unpack_frame(data, came_at)

    async def _something(self) -> None:
        """Return when a message is there; raise if none will come."""
        while not self._arrived:
            if self._ended:
                raise LinkError(_GONE)
            self._news.clear()
            await self._news.wait()

    async def close(self) -> None:
        """Take nothing more. The task that reads ends with the call: gRPC never frees a read that is cancelled."""
        self.end()


class Listener:
    """Listens for devices; hands each new stream to `accept`, which returns when the device's session is over.

    Who has no credential that `security` asks for gets the error UNAUTHENTICATED and nothing else; `accept` never hears
    of it. If a file of credentials cannot be read, nobody is let in: they get UNAVAILABLE, and `barred` is told once.
    Beside it stands gRPC's health service, which needs none.
    """

    def __init__(
        self,
        accept: Accept,
        *,
        security: ServerSecurity | None = None,
        limits: Limits | None = None,
        keepalive: Keepalive | None = None,
        refused: Refused | None = None,
        barred: Callable[[str], None] = lambda _: None,
    ) -> None:
        from pipar.transport.health import Health  # brings protobuf, which devices do without

        self._accept = accept
        self._security = security or ServerSecurity()
        self._limits = limits or Limits()
        self._refused = refused
        self._authenticator = Authenticator(self._security, barred)
        self._streams: dict[_Stream, str | None] = {}  # with the credential's name
        self._calls: dict[asyncio.Task[None], asyncio.Task[None]] = {}  # gRPC's of each stream, with our session
        self._allowances: dict[str | None, TokenBucket] = {}  # of streams; there are no more names than credentials
        self._refusals = TokenBucket(self._limits.refusals)
        self._held_back = 0  # refusals that are not given yet
        self._server = grpc.aio.server(options=_server_options(self._limits, keepalive or Keepalive()))
        handler: Any = grpc.stream_stream_rpc_method_handler(self._connected)
        service = grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler})
        self._server.add_generic_rpc_handlers((service,))
        self._health = Health(self._server, _SERVICE, watchers=self._limits.watchers)

    async def start(self, address: str) -> int:
        """Listen on HOST:PORT (port 0: any free one) and return the port."""
        material = check_server(self._security, address)
        check_listening(address)  # gRPC would write lines of its own
        try:
            if material is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, _server_credentials(material))
        except RuntimeError:
            port = 0
        if port == 0:
            raise InputError(f"Cannot listen on {address}: the port is in use or the address is not this machine's.")
        await self._server.start()
        await self._health.serving(True)
        return port

    async def stop(self) -> None:
        await self._health.serving(False)
        await self._server.stop(grace=_GRACE_S)
        await self._end_calls()

    async def _end_calls(self) -> None:
        """Wait for the streams to be over: gRPC writes a traceback for each that the end of its loop cuts short."""
        if under_way := {*self._calls, *self._health.watching}:
            await asyncio.wait(under_way, timeout=_GRACE_S)
        for session in self._calls.values():
            session.cancel()
        if self._calls:
            await asyncio.wait(self._calls)

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
        self._streams[stream] = peer
        session = asyncio.ensure_future(self._admit(context, stream, peer))
        call = asyncio.current_task()
        assert call is not None
        self._calls[call] = session
        call.add_done_callback(self._calls.pop)
        try:
            await asyncio.shield(session)
        except asyncio.CancelledError:
            # So gRPC says that the device is gone. The session is not cancelled: it is told as by any other link.
            stream.end()
            await session
            raise
        finally:
            del self._streams[stream]
            await stream.close()

    async def _admit(self, context: Any, stream: _Stream, peer: str | None) -> None:
        with contextlib.suppress(grpc.aio.BaseError):  # a device that is gone already is so when it is read
            await context.send_initial_metadata((_LET_IN,))
        await self._accept(stream, peer)

    def _why_full(self, peer: str | None) -> str | None:
        """Return why there is no room for another stream, None if there is."""
        if not self._allowance(peer).take(asyncio.get_running_loop().time()):
            return "Too many devices connect at once." if peer is None else f"{peer} connects too often."
        if peer is not None and Counter(self._streams.values())[peer] >= self._limits.streams_per_credential:
            return f"{peer} is connected {self._limits.streams_per_credential} times already."
        if sum(not stream.has_spoken for stream in self._streams) >= self._limits.newcomers:
            return "Too many devices connect at once."
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
        """Let those wait who are refused again and again: a connection has few streams, so it asks slowly then."""
        if self._refusals.take(asyncio.get_running_loop().time()) or self._held_back >= self._limits.newcomers:
            return
        self._held_back += 1
        try:
            await asyncio.sleep(self._limits.refusal_s)
        finally:
            self._held_back -= 1


def _server_credentials(material: Material) -> Any:
    assert material.certificate is not None
    assert material.key is not None
    return grpc.ssl_server_credentials(
        [(material.key, material.certificate)],
        root_certificates=material.authorities,
        require_client_auth=material.authorities is not None,
    )


def _options(keepalive: Keepalive) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", CHUNK_BYTES + 4096),
        ("grpc.max_send_message_length", CHUNK_BYTES + 4096),
        ("grpc.keepalive_time_ms", round(keepalive.every_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(keepalive.timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", round(keepalive.timeout_s * 1000)),  # a minute otherwise, whatever stands above
        ("grpc.http2.max_pings_without_data", 0),
        # A ping waits behind what is under way already. By itself gRPC lets that grow to many megabytes, for which a
        # slow link takes longer than a dead one is waited for.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 1 << 20),
        # A message of some kilobytes could unpack to gigabytes, past every limit.
        ("grpc.compression_enabled_algorithms_bitset", 1),
    ]


def _server_options(limits: Limits, keepalive: Keepalive) -> list[tuple[str, Any]]:
    return [
        *_options(keepalive),
        # Two servers on one port would share its devices without a word: a port in use is to be an error.
        ("grpc.so_reuseport", 0),
        # What devices ask for is half of this rate: their pings are never too many.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", round(keepalive.every_s * 500)),
        ("grpc.max_concurrent_streams", limits.streams_per_credential + 2),  # on one connection
        ("grpc.max_allowed_incoming_connections", limits.connections),
        ("grpc.server_handshake_timeout_ms", round(limits.handshake_s * 1000)),
        ("grpc.max_connection_idle_ms", round(limits.idle_s * 1000)),
    ]


class _DeviceStream(_Stream):
    """A device's end: it opened the stream, so it also ends it."""

    def __init__(self, channel: grpc.aio.Channel, call: Any) -> None:
        super().__init__(call, Limits())
        self._channel = channel

    async def close(self) -> None:
        self.end()
        try:
            await self._call.done_writing()
            # The server ends the stream when it has read all: only then is nothing of ours cut off.
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
    """Return a transport to the server at HOST:PORT that has let us in.

    A CredentialError says why it never will; another LinkError that it did not answer in time, or has no room now.
    """
    security = security or DeviceSecurity()
    channel = _channel(address, security, keepalive or Keepalive())
    try:
        async with asyncio.timeout(timeout_s):
            await _reach(channel, address, security)
            call: Any = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")(metadata=security.metadata())
            await _be_let_in(call, address)
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
        ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, whatever others in this process have tried
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]
    if material is None:
        return grpc.aio.insecure_channel(address, options=options)
    if security.server_name is not None:
        options.append(("grpc.ssl_target_name_override", security.server_name))
    credentials = grpc.ssl_channel_credentials(material.authorities, material.key, material.certificate)
    return grpc.aio.secure_channel(address, credentials, options=options)


async def _reach(channel: grpc.aio.Channel, address: str, security: DeviceSecurity) -> None:
    """Return when there is a connection; raise if there will never be one."""
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and (why := await why_refused(address, security)):
            raise CredentialError(why)
        await channel.wait_for_state_change(state)


async def _be_let_in(call: Any, address: str) -> None:
    """Return when the server says that we may speak; raise if it says anything else."""
    if _LET_IN in tuple(await call.initial_metadata() or ()):
        return
    code, details = await call.code(), await call.details()
    if code is grpc.StatusCode.UNAUTHENTICATED:
        raise CredentialError(f"The server at {address} does not let the device in: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        raise CredentialError(f"What answers at {address} is not a pipar server.")
    raise LinkError(f"The server at {address} does not take the device: {details}")
