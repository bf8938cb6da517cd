"""A device's connection to its server: made with patience, and made again when it is lost.

Within the server's window a session goes on over the new connection as if nothing had been; behind it, the device joins
anew and takes part from the next round on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pipar.errors import (
    CredentialError,
    LinkError,
    PiparError,
    ProtocolError,
    ServerStopsError,
    SessionOverError,
    VersionError,
)
from pipar.events import Connected, Connecting, Observer, Reconnecting
from pipar.transport.backoff import Backoff, Pause
from pipar.transport.channel import Channel
from pipar.transport.interface import Transport
from pipar.wire.frames import cut_message
from pipar.wire.messages import Kind, Message, json_body, read_json

#: An answer to a hello that wants to go on with a session comes at once, or the server is not there.
_ANSWER_WITHIN_S = 10.0
#: A session that breaks off sooner, before it has begun or because the server said what it may not, is one more failed
#: attempt.
_SETTLED_S = 60.0


class Reconnector:
    """Dials the server until it answers, for as long as the backoff allows."""

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

    async def run(self, take_part: Callable[[Transport], Awaitable[None]]) -> None:
        """Take part in the training to its end, in as many sessions as that takes.

        What the server says wrong, as by a damaged frame, ends a session; what it says on purpose ends them all.
        """
        clock, pauses = asyncio.get_running_loop().time, self._backoff.pauses()
        within_s = self._backoff.give_up_after_s or None  # no patience at all is one attempt
        reason: LinkError | ProtocolError
        self._observe(Connecting(self._address))
        while True:
            self._lost, self._channel, reached_at = asyncio.Queue(), None, None
            try:
                transport = await self._reach(within_s)
                reached_at = clock()
                self._observe(Connected(self._address))
                return await take_part(transport)
            except (CredentialError, _GaveUpError):
                raise  # trying again is no use
            except LinkError as error:
                reason, went_well = error, self._was_let_in or _is_settled(reached_at, clock())
            except ProtocolError as error:
                if isinstance(error, VersionError) and not self._was_let_in:
                    raise  # nor is it here
                reason, went_well = error, self._was_let_in and _is_settled(reached_at, clock())
            if went_well:  # not one more failed attempt
                pauses = self._backoff.pauses()
            pause = next(pauses, None)
            if pause is None:
                raise _GaveUpError(f"Gave up {self._address}: {reason}") from None
            within_s = pause.within_s
            await self._wait(pause, reason)

    async def _wait(self, pause: Pause, reason: Exception) -> None:
        is_on_purpose = isinstance(reason, ServerStopsError)
        self._observe(Reconnecting(self._address, pause.attempt, pause.wait_s, str(reason), is_on_purpose))
        await asyncio.sleep(pause.wait_s)

    async def _reach(self, within_s: float | None) -> Transport:
        try:
            async with asyncio.timeout(within_s):
                return await self._dial()
        except TimeoutError:
            within = "" if within_s is None else f" within {within_s:.3g} s"
            raise LinkError(f"No server answered at {self._address}{within}.") from None

    @property
    def _was_let_in(self) -> bool:
        return self._channel is not None and self._channel.session != 0

    def lost(self, error: LinkError) -> None:
        """The channel's transport is gone."""
        self._lost.put_nowait(error)

    async def keep_attached(self, channel: Channel) -> None:
        """Give the channel another transport whenever it has lost one; runs until it is cancelled."""
        self._channel = channel
        while True:
            error = await self._lost.get()
            if channel.session == 0:
                channel.fail(error)  # nothing has begun that could go on
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
            except (SessionOverError, CredentialError):
                raise
            except LinkError as error:
                reason = error
            else:
                self._observe(Connected(self._address))
                return
        raise _GaveUpError(f"Gave up {self._address}: {reason}")


class _GaveUpError(LinkError):
    """The time for trying is over."""


def _is_settled(reached_at: float | None, now: float) -> bool:
    """Return whether a connection that is lost now has lasted: who waits for others to join is not failing."""
    return reached_at is not None and now - reached_at > _SETTLED_S


async def resume(channel: Channel, name: str, transport: Transport, *, within_s: float = _ANSWER_WITHIN_S) -> None:
    """Go on with the channel's session over this transport, or raise SessionOverError if the server does not."""
    hello = Message(Kind.HELLO, body=json_body({"name": name}))
    try:
        async with asyncio.timeout(within_s):
            for frame in cut_message(hello, channel.session, 0, channel.received):
                await transport.write(frame)
            answer = await transport.read()
        if answer.message.kind is not Kind.WELCOME:
            reason = read_json(answer.only()).get("reason", "no reason")
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
