"""Which devices take part: they join, lose their connection, resume their session, and leave."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from itertools import count
from operator import attrgetter
from urllib.parse import unquote

from pipar.errors import (
    LinkError,
    ProtocolError,
    TryAgainError,
    VersionError,
    describe,
    forget_frames,
    is_lack_of_memory,
    peer_text,
)
from pipar.events import Away, Back, Joined, Left, Lost, Observer, Waiting
from pipar.execution.clock import clock_machine
from pipar.execution.spans import COMPUTE, DOWNLINK, IO, Recorder, unpack_trace
from pipar.privacy.budget import PrivacyAccountant
from pipar.server.device_messages import Introduction, read_hello
from pipar.server.epoch_results import ResultCollector
from pipar.server.interfaces import AdmissionPolicy, SessionSettings
from pipar.server.learned_timeouts import LearnedTimeouts
from pipar.server.name_conflicts import NameConflicts
from pipar.server.refusals import RefusalReporter
from pipar.server.session import Session, fault
from pipar.transport.channel import Channel
from pipar.transport.interface import Transport
from pipar.transport.link_trial import FRAME_BYTES
from pipar.units import format_seconds
from pipar.wire.frames import Frame, body_limit, cut_message
from pipar.wire.messages import Kind, Message, read_json
from pipar.wire.orders import Orders

#: A device that connects has to say hello within this time.
HELLO_TIMEOUT_S = 10.0
#: How long the server waits for devices to leave after 'stop training', if the resume window is not longer.
_LEAVE_TIMEOUT_S = 30.0
#: How long the last message to a device may take.
_LAST_MESSAGE_TIMEOUT_S = 2.0


class Membership:
    """Where devices join, leave and come back. A device without orders waits for the next round."""

    def __init__(
        self,
        policy: AdmissionPolicy,
        settings: SessionSettings,
        results: ResultCollector,
        accountant: PrivacyAccountant,
        observe: Observer,
    ) -> None:
        self.sessions: dict[str, Session] = {}
        self.draws = False  # only some devices take part in a round
        self._policy = policy
        self._settings = settings
        self._results = results
        self._accountant = accountant
        self._observe = observe
        self.timeouts = LearnedTimeouts(settings.timeouts, observe)
        self._refusals = RefusalReporter(observe)
        self._numbers = iter(settings.numbers if settings.numbers is not None else count(1))
        self._conflicts = NameConflicts()
        self._loop = asyncio.get_running_loop()
        self._readers: dict[Session, asyncio.Task[None]] = {}
        self._away: dict[Session, tuple[asyncio.TimerHandle, float]] = {}
        self._changed = asyncio.Event()
        self._round_ends_at = 0.0
        self._last_epoch: int | None = None  # when the training is over

    # --- connections

    async def admit(self, transport: Transport, peer: str | None = None) -> None:
        """Let a device join or resume its session, and return when its connection is over.

        `peer` is the name in its credential, if it has one.
        """
        hello: Frame | None = None
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await transport.read()
            session = self._resume(hello, transport, peer) if hello.session else self._join(hello, transport, peer)
        except TimeoutError:
            await self._refuse(transport, TryAgainError(f"No HELLO arrived within {HELLO_TIMEOUT_S:g} s."), peer or "")
        except VersionError as error:
            await self._refuse(transport, error, peer or error.device)
        except (ProtocolError, LinkError) as error:
            await self._refuse(transport, error, peer or _claimed_name(hello))
        except Exception as error:  # noqa: BLE001 - the connection ends here, and the others do not notice
            kind = TryAgainError if is_lack_of_memory(error) else ProtocolError
            failed = kind(f"The server failed to read the HELLO: {describe(error)}")
            await self._refuse(transport, failed, peer or _claimed_name(hello))
        else:
            await session.channel.until_lost(transport)

    async def _refuse(self, transport: Transport, error: ProtocolError | LinkError, device: str) -> None:
        """Tell a device that it may not join, and report it unless that is part of reconnecting."""
        again = isinstance(error, TryAgainError)
        if not isinstance(error, LinkError | _SessionGoneError):
            self._refusals.report(device, str(error), again=again)
        await _send_refusal(transport, error, again=again)

    def revoke(self, device: str) -> None:
        """End the session of a device whose credential was revoked: no round waits for it any longer."""
        if device in self.sessions:
            self.end(self.sessions[device], LinkError("its credential was revoked"))

    def report_refused(self, origin: str, reason: str, device: str = "") -> None:
        """Report a refused connection by its device, as the credential proves, or by gRPC's name of its origin.

        Such names are "ipv4:10.0.0.9:5123" and "ipv6:%5B::1%5D:5123".
        """
        if device:
            self._refusals.report(device, reason, again=False)
            return
        host = unquote(origin).partition(":")[2].rpartition(":")[0]  # each attempt has another port
        self._refusals.report(f"a device at {host or origin}", reason, again=False)

    def _join(self, hello: Frame, transport: Transport, peer: str | None) -> Session:
        if hello.message.kind is not Kind.HELLO:
            raise ProtocolError(f"The first message has to be HELLO, not {hello.message}.")
        introduction = read_hello(hello.only(), self._settings.expected, peer)
        self._policy.check(introduction)
        self._accountant.check_claim(introduction.name, introduction.spent)
        self._end_previous(introduction.name, has_credential=peer is not None)
        # Only now: a device that is refused may not change the count of the one whose name it gives.
        self._accountant.learn(introduction.name, introduction.spent)
        return self._begin(introduction, transport)

    def _end_previous(self, name: str, *, has_credential: bool) -> None:
        """End the session of a device that joins again: it has lost its state, or it would have resumed."""
        previous = self.sessions.get(name)
        if previous is None:
            return
        if previous.channel.is_attached and not has_credential:
            raise TryAgainError(f"A device called '{name}' has joined already.")
        if previous.channel.is_attached:
            self._conflicts.replace(name, self._loop.time())
        self.end(previous, LinkError("it was started again, or another device uses its name"))

    def _begin(self, introduction: Introduction, transport: Transport) -> Session:
        name, settings = introduction.name, self._settings
        recorder = Recorder(name, settings.keep_spans)
        channel = Channel(
            transport,
            recorder,
            DOWNLINK,
            on_lost=lambda error: self._lost(session, error),
            is_real=settings.real_links,
        )
        session = Session(introduction, next(self._numbers), channel, recorder)
        channel.session = session.number
        channel.answers_alive = True
        channel.limit(body_limit({Kind.PROBE: FRAME_BYTES}))  # and small messages, until its plan is known
        channel.emulate(self._policy.link(name), attrgetter("down_bps"))
        self.sessions[name] = session
        self._readers[session] = self._loop.create_task(self._read(session))
        self._observe(Joined(name, len(self.sessions), introduction.threads))
        if self._last_epoch is not None:
            session.stop(self._last_epoch)
        self._notify()
        return session

    def _resume(self, hello: Frame, transport: Transport, peer: str | None) -> Session:
        """Resume a session over a new connection: each side sends again what the other has not received."""
        name = peer if peer is not None else str(read_json(hello.only()).get("name"))
        session = self.sessions.get(name)
        if hello.message.kind is not Kind.HELLO or session is None or session.number != hello.session:
            self.timeouts.tried_to_resume(name)
            raise _SessionGoneError("That session is over.")
        if not session.is_welcome:
            raise _SessionGoneError("That session has not begun.")
        # First, because it raises if the device asks for messages that are no longer kept; it stays away then.
        session.channel.attach(transport, hello.acknowledged, greeting=Message(Kind.WELCOME))
        self._observe(Back(name, self._loop.time() - self._cancel_timeout(session)))
        return session

    def _lost(self, session: Session, error: LinkError) -> None:
        """A connection is lost; its device may resume the session within the window, or while the round waits."""
        window_s = self._window_s(session)
        if session.is_over or not session.is_welcome or window_s <= 0:
            self.end(session, error)
            return
        window_s = max(window_s, self._round_ends_at - self._loop.time())
        self._observe(Away(session.device, window_s))
        timed_out = LinkError(f"its link was lost for more than {format_seconds(window_s)}")
        self._away[session] = (self._loop.call_later(window_s, self.end, session, timed_out), self._loop.time())

    def _window_s(self, session: Session) -> float:
        return (
            self.timeouts.resume_window_s(session) if self.timeouts.chooses_window else self._settings.resume_window_s
        )

    def give_up_silent(self, session: Session, silent_s: float) -> None:
        """Nothing has been heard from a device for too long: its connection is lost, and by default so is its place."""
        reason = LinkError(f"nothing was heard from it for {format_seconds(silent_s)}")
        if self.timeouts.chooses_window:  # the window has passed as well: it counts from the last sign of life
            self.timeouts.fell_silent(session)
            self.end(session, reason)
        else:
            session.channel.lose(reason)

    def _cancel_timeout(self, session: Session) -> float:
        """Cancel the timeout of a lost connection; return when it was lost."""
        timer, since = self._away.pop(session, (None, self._loop.time()))
        if timer is not None:
            timer.cancel()
        return since

    def keep_places_until(self, round_ends_at: float) -> None:
        """Let lost devices resume until the deadline of the round, also after the resume window."""
        self._round_ends_at = round_ends_at

    # --- sessions

    async def wait_for(self, wanted: int) -> None:
        """Return when this number of devices is present."""
        if len(self.sessions) < wanted:
            self._observe(Waiting(len(self.sessions), wanted))
        while len(self.sessions) < wanted:
            await self._changed.wait()

    def present(self) -> list[Session]:
        """Return the sessions in name order, also of devices that are away and may resume."""
        return [self.sessions[name] for name in sorted(self.sessions)]

    def welcomed(self) -> list[Session]:
        """Return the sessions of devices that have their orders, in name order."""
        return [session for session in self.present() if session.is_welcome]

    def welcome(self, session: Session, orders: Orders) -> None:
        """Send a device its orders."""
        self._accountant.welcome(session.device)
        spent = self._accountant.of(session.device)
        session.welcome(replace(orders, releases=spent.releases, spent=spent.mu_squared))

    def end(self, session: Session, reason: Exception) -> None:
        """End a session; the device may only join again, as a new one."""
        if session.is_over:
            return
        reason = session.end(reason)
        forget_frames(reason)
        self._cancel_timeout(session)
        if self.sessions.get(session.device) is session:
            del self.sessions[session.device]
        self._results.forget_device(session.device)
        self._observe(_left_or_lost(session, reason))
        self._notify()

    async def dismiss(self, session: Session, reason: Exception | str, *, again: bool = False) -> None:
        """Tell a device why its session is over, and whether it may try `again`; then end the session."""
        verdict = session.condemn(reason if isinstance(reason, Exception) else LinkError(reason))
        session.refuse(reason, again=again)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_MESSAGE_TIMEOUT_S):
                await session.channel.drain()
        self.end(session, verdict)

    async def suspend(self, reason: str) -> None:
        """Tell all devices that the server stops for now, and to retry; then end their sessions."""
        await asyncio.gather(*(self._suspend(session, reason) for session in self.present()))

    async def _suspend(self, session: Session, reason: str) -> None:
        session.note_server_stops()
        await self.dismiss(session, reason, again=True)

    def refuse_all(self, error: Exception) -> None:
        """Tell all devices why the training has failed."""
        for session in self.present():
            session.refuse(error)

    def stop(self, epoch: int) -> None:
        """Tell all devices, also those that still join, that the training is over."""
        self._last_epoch = epoch
        for session in self.present():
            session.stop(epoch)

    async def wait_until_left(self) -> None:
        """Return when every device has left; those that are away are not waited for longer than the window."""
        try:
            async with asyncio.timeout(max(_LEAVE_TIMEOUT_S, self._settings.resume_window_s)):
                while self.sessions:
                    await self._changed.wait()
        except TimeoutError:
            self.close()
        await asyncio.gather(*self._readers.values(), return_exceptions=True)

    def close(self) -> None:
        """End all sessions."""
        for session in self.present():
            session.note_server_stops()
            self.end(session, LinkError("the server has ended"))

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- messages

    async def _read(self, session: Session) -> None:
        """Read a device's messages until its session is over."""
        try:
            await self._read_all(session)
        except LinkError as error:
            self.end(session, error)
            forget_frames(error)  # also if the session, which keeps it, was over already
        except ProtocolError as error:
            await self.dismiss(session, error)
            forget_frames(error)
        except Exception as error:  # noqa: BLE001 - the task ends here, and the failure becomes an event
            reason = f"the server failed to read what it sent: {describe(error)}"
            await self.dismiss(session, reason, again=is_lack_of_memory(error))
        finally:
            self._readers.pop(session, None)
            await session.channel.close()

    async def _read_all(self, session: Session) -> None:
        while True:
            # Not assigned to a name, which would hold a whole model until the next message arrives.
            self._take(session, await session.channel.receive())

    def _take(self, session: Session, message: Message) -> None:
        if message.kind is Kind.FAULT:
            raise LinkError(f"it ended its session ({peer_text(read_json(message).get('reason', 'no reason'))})")
        if message.kind is Kind.STOP and session.is_stopped:
            raise LinkError("it has left")
        if message.kind is Kind.PROBE:
            session.take_probe(message)
            return
        if not session.is_welcome:
            raise ProtocolError(f"{message} arrived before the device had its orders.")
        if message.kind is Kind.END_EPOCH:  # its update follows, and part of it may arrive even if not all does
            self._accountant.note(session.device)
        if message.kind is Kind.TRACE:
            self._take_trace(session, message)
        elif message.kind is Kind.SCORES:
            if not session.evaluation.take(message):  # the server no longer waits for it
                session.channel.count_useless(message)
        elif message.kind is Kind.HELLO:
            raise ProtocolError(f"{message} arrived in the middle of a session.")
        elif session.is_wanted(message):
            session.take(message)
        else:
            session.channel.count_useless(message)

    def _take_trace(self, session: Session, message: Message) -> None:
        trace = unpack_trace(message.body.contiguous(), owner=session.device)
        session.check_trace(trace, message)
        if not {COMPUTE, IO} <= trace.totals.keys():
            raise ProtocolError(f"{message} carries a trace without the device's own lanes.")
        if any(trace.totals[lane].first_start > trace.totals[lane].last_end for lane in (COMPUTE, IO)):
            raise ProtocolError(f"{message} carries a trace of lanes that start after their end.")
        session.trace_arrived()
        keep_spans = self._settings.keep_spans
        if keep_spans is not None and session.device not in keep_spans:
            trace = replace(trace, spans=[])  # a device does not know whether its spans are kept
        if trace.clock is not None:
            trace = trace.later(trace.clock.offset_s(clock_machine(), *session.greeted_at))
        downlink = session.recorder.take(trace.epoch)
        try:
            # A device that is drawn gets the previous round's model in its own round.
            since = trace.epoch - 1 if self.draws else None
            self._results.add_trace(trace, downlink, *session.channel.counts.take(trace.epoch, since))
        except Exception as error:  # noqa: BLE001 - results are the server's own: readers and waiters get the error
            self._results.fail(error)
            session.fail(error)

    def is_own_failure(self, error: Exception) -> bool:
        """Return whether an error is a failure of the server's results, which ends the training."""
        return self._results.is_failure(error)


def _left_or_lost(session: Session, reason: Exception) -> Left | Lost:
    if session.is_stopped:
        return Left(session.device)
    return (Left if session.server_stops else Lost)(session.device, str(reason))


class _SessionGoneError(TryAgainError):
    """A session that cannot be resumed; the device may join again."""


def _claimed_name(hello: Frame | None) -> str:
    """Return the name that a device without a credential gives itself; empty if its HELLO has none."""
    try:
        name = None if hello is None else read_json(hello.only()).get("name")
    except (ProtocolError, LinkError):
        return ""
    return name if isinstance(name, str) else ""


async def _send_refusal(transport: Transport, reason: Exception, *, again: bool) -> None:
    try:
        for frame in cut_message(fault(reason, again=again), 0, 0):
            await transport.write(frame)
    except LinkError:
        pass  # it is gone already
    await transport.close()
