"""A device's connection to its server: made with retries, and made again when it is lost.

Within the server's resume window a session resumes seamlessly over the new connection. After that, the device joins
again and takes part from the next round.

A device that has never been admitted ends with the first reason that a person has to look into, such as a certificate
of another authority. Once it has been admitted, its settings were right: another program that answers at the server's
address later may be gone soon, so the device keeps trying. Only its server, with a verified certificate, can end it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pipar.errors import (
    CredentialError,
    DeviceRefusedError,
    InputError,
    LinkError,
    PiparError,
    ProtocolError,
    ServerStopsError,
    SessionOverError,
    VersionError,
    peer_text,
)
from pipar.events import Connected, Connecting, Observer, Reconnecting
from pipar.transport.backoff import Backoff, Pause
from pipar.transport.channel import Channel
from pipar.transport.interface import Transport
from pipar.units import format_seconds
from pipar.wire.frames import cut_message
from pipar.wire.messages import Kind, Message, json_body, read_json

#: A server immediately answers a HELLO that resumes a session; after this time it counts as unreachable.
_ANSWER_WITHIN_S = 10.0
#: A connection attempt that takes longer than this is given up and retried; later ones may take up to the second.
_CONNECT_S, _MOST_CONNECT_S = 10.0, 80.0
#: A connection that lasts no longer than this, and fails before the device joined or by a breach of the protocol,
#: counts as one more failed attempt.
_SETTLED_S = 60.0


class Reconnector:
    """Connects to the server, and again whenever the connection is lost, for as long as the backoff allows."""

    def __init__(
        self, name: str, address: str, dial: Callable[[], Awaitable[Transport]], backoff: Backoff, observe: Observer
    ) -> None:
        self._name = name
        self._address = address
        self._dial = dial
        self._backoff = backoff
        self._observe = observe
        self._lost: asyncio.Queue[LinkError] = asyncio.Queue()
        self._channel: Channel | None = None
        self._was_ever_admitted = False

    async def run(self, take_part: Callable[[Transport], Awaitable[None]]) -> None:
        """Take part in the training to its end, in as many sessions as needed.

        A breach of the protocol by the server, such as a damaged frame, ends one session; an error that the server
        sends on purpose ends the run. Another version of the protocol ends it only before the device was admitted.
        """
        clock, pauses = asyncio.get_running_loop().time, self._backoff.pauses()
        within_s = self._backoff.give_up_after_s or None  # 0 means a single attempt
        reason: LinkError | ProtocolError
        self._observe(Connecting(self._address))
        while True:
            self._lost, self._channel, reached_at = asyncio.Queue(), None, None
            try:
                transport = await self._reach(within_s)
                reached_at = clock()
                self._observe(Connected(self._address))
                return await take_part(transport)
            except (LinkError, ProtocolError) as error:
                if self._is_final(error):
                    raise  # trying again does not help
                reason, lasted = error, _is_settled(reached_at, clock())
                is_breach = isinstance(error, ProtocolError)
                went_well = (self._is_admitted and lasted) if is_breach else (self._is_admitted or lasted)
            if went_well:  # this did not count as a failed attempt
                pauses = self._backoff.pauses()
            pause = next(pauses, None)
            if pause is None:
                raise _GaveUpError(f"Gave up connecting to {self._address}: {reason}") from None
            within_s = pause.within_s
            await self._wait(pause, reason)

    def _is_final(self, error: LinkError | ProtocolError) -> bool:
        """Return whether an error ends the device."""
        if isinstance(error, DeviceRefusedError | _GaveUpError):
            return True
        self._was_ever_admitted |= self._is_admitted
        return isinstance(error, CredentialError | VersionError) and not self._was_ever_admitted

    async def _wait(self, pause: Pause, reason: Exception) -> None:
        is_on_purpose = isinstance(reason, ServerStopsError)
        self._observe(Reconnecting(self._address, pause.attempt, pause.wait_s, str(reason), is_on_purpose))
        await asyncio.sleep(pause.wait_s)

    async def _reach(self, within_s: float | None) -> Transport:
        try:
            async with asyncio.timeout(within_s):
                return await self._dial()
        except TimeoutError:
            within = "" if within_s is None else f" within {format_seconds(within_s)}"
            raise LinkError(f"No server answered at {self._address}{within}.") from None
        except InputError as error:
            if self._is_admitted or self._was_ever_admitted:
                # The device's certificate is read for every connection, and may be half replaced at this moment.
                raise LinkError(str(error)) from None
            raise

    @property
    def _is_admitted(self) -> bool:
        return self._channel is not None and self._channel.session != 0

    def lost(self, error: LinkError) -> None:
        """The channel's transport is gone."""
        self._lost.put_nowait(error)

    async def keep_attached(self, channel: Channel) -> None:
        """Attach a new transport to the channel whenever it has lost one; runs until it is cancelled."""
        self._channel = channel
        while True:
            error = await self._lost.get()
            if channel.session == 0:
                channel.fail(error)  # there is no session to resume
                continue
            try:
                await self._resume(channel, error)
            except PiparError as failure:
                channel.fail(failure if isinstance(failure, LinkError) else LinkError(str(failure)))

    async def _resume(self, channel: Channel, reason: LinkError) -> None:
        clock = asyncio.get_running_loop().time
        for pause in self._backoff.pauses():
            await self._wait(pause, reason)
            began = clock()
            try:
                transport = await self._reach(pause.within_s)
                left_s = _ANSWER_WITHIN_S if pause.within_s is None else began + pause.within_s - clock()
                await resume(channel, self._name, transport, within_s=min(_ANSWER_WITHIN_S, left_s))
            except (SessionOverError, DeviceRefusedError):
                raise
            except LinkError as error:
                reason = error
            else:
                self._observe(Connected(self._address))
                return
        raise _GaveUpError(f"Gave up connecting to {self._address}: {reason}")


class PatientDialer:
    """Connects within a time that follows from the attempts so far: twice as long after one that took too long.

    After a success, it is four times as long as that took, and never less than at first.
    """

    def __init__(
        self,
        connect: Callable[[float], Awaitable[Transport]],
        clock: Callable[[], float],
        most_s: float | None = None,
    ) -> None:
        self._connect = connect
        self._clock = clock
        self._most_s = min(_MOST_CONNECT_S, most_s or _MOST_CONNECT_S)  # 0 means a single attempt
        self.timeout_s = min(_CONNECT_S, self._most_s)

    async def dial(self) -> Transport:
        """Return a connection, or raise LinkError."""
        began = self._clock()
        try:
            transport = await self._connect(self.timeout_s)
        except LinkError:
            if self._clock() - began >= self.timeout_s:
                self._allow(2 * self.timeout_s)
            raise
        self._allow(max(_CONNECT_S, 4 * (self._clock() - began)))
        return transport

    def _allow(self, seconds: float) -> None:
        self.timeout_s = min(seconds, self._most_s)


class _GaveUpError(LinkError):
    """No attempt is left within the time for giving up."""


def _is_settled(reached_at: float | None, now: float) -> bool:
    """Return whether a connection that is lost now had lasted; a device may wait for others to join."""
    return reached_at is not None and now - reached_at > _SETTLED_S


async def resume(channel: Channel, name: str, transport: Transport, *, within_s: float = _ANSWER_WITHIN_S) -> None:
    """Resume the channel's session over this transport; raise SessionOverError if the server does not."""
    hello = Message(Kind.HELLO, body=json_body({"name": name}))
    try:
        async with asyncio.timeout(within_s):
            for frame in cut_message(hello, channel.session, 0, channel.received):
                await transport.write(frame)
            answer = await transport.read()
        if answer.message.kind is not Kind.WELCOME:
            reason = peer_text(read_json(answer.only()).get("reason", "no reason"))
            raise SessionOverError(f"The server ended the session: {reason}")
        channel.attach(transport, answer.acknowledged)
    except TimeoutError:
        await transport.close()
        raise LinkError("The server did not answer.") from None
    except ProtocolError as error:
        await transport.close()
        raise SessionOverError(str(error)) from None
    except LinkError:
        await transport.close()
        raise
