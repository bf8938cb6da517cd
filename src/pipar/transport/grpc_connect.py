"""The device's end of the gRPC transport: one bidirectional stream to its server."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from pipar.errors import CredentialError, DeviceRefusedError, LinkError, peer_text
from pipar.transport.congestion import prefer_cubic_to
from pipar.transport.diagnosis import why_refused
from pipar.transport.grpc_stream import ACCEPTED, METHOD, SERVICE, Stream, common_options
from pipar.transport.interface import Transport
from pipar.transport.limits import Keepalive, Limits
from pipar.transport.tls import DeviceSecurity, check_device
from pipar.units import split_address

_CLOSE_TIMEOUT_S = 10.0
#: The server learns that a device has read a gradient only after the activations that wait for the uplink. So this has
#: to be what the downlink can carry while the uplink, which is often ten times slower, sends a micro-batch or two.
_WINDOW_BYTES = 16 << 20


class _DeviceStream(Stream):
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
            prefer_cubic_to(split_address(address)[1])
            call: Any = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=security.metadata())
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
        *common_options(keepalive, _WINDOW_BYTES),
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
    if ACCEPTED in tuple(await call.initial_metadata() or ()):
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
