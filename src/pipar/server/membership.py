"""Who takes part: devices are let in, come back over other connections, and nobody leaves without being missed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from operator import attrgetter
from typing import Protocol

from pipar.errors import LinkError, ProtocolError, forget_frames
from pipar.events import Away, Back, Joined, Left, Lost, Observer, Waiting, ignore
from pipar.execution.clock import clock_machine
from pipar.execution.spans import COMPUTE, DOWNLINK, IO, Recorder, unpack_trace
from pipar.links import Link
from pipar.privacy.budget import PrivacyAccountant
from pipar.profiling.profile import Profile
from pipar.server.epoch_results import ResultCollector
from pipar.server.session import Introduction, Session, fault, read_hello
from pipar.transport.channel import Channel, Transport
from pipar.wire.frames import Frame, body_limit, cut_message
from pipar.wire.messages import Kind, Message, read_json
from pipar.wire.orders import Orders

#: Who connects has to say hello within this time.
HELLO_WITHIN_S = 10.0
#: How long everybody is waited for who has been told that the training is over.
_FAREWELL_S = 30.0
#: Who does not take its last message within this time does not get it.
_LAST_WORDS_S = 2.0


class AdmissionPolicy(Protocol):
    """Knows who may take part."""

    def check(self, who: Introduction) -> None:
        """Raise ProtocolError if it may not."""

    def link(self, name: str) -> Link:
        """Return what the device's link is to be like."""


class Membership:
    """Where devices join, leave and come back. Who has no orders yet waits for the next round."""

    def __init__(
        self,
        policy: AdmissionPolicy,
        results: ResultCollector,
        *,
        network: Profile | None = None,
        resume_window_s: float = 0.0,
        numbers: Iterable[int] | None = None,
        real_links: bool = False,
        keep_spans: frozenset[str] | None = None,
        accountant: PrivacyAccountant | None = None,
        observe: Observer = ignore,
    ) -> None:
        self._accountant = accountant or PrivacyAccountant(None)
        self.sessions: dict[str, Session] = {}
        self._policy = policy
        self._results = results
        self._network = network
        self._resume_window_s = resume_window_s
        self._numbers = iter(numbers if numbers is not None else count(1))
        self._real_links = real_links
        self._keep_spans = keep_spans
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._lives: dict[Session, asyncio.Task[None]] = {}
        self._away: dict[Session, tuple[asyncio.TimerHandle, float]] = {}
        self._changed = asyncio.Event()
        #: Until then the round waits, also for who is away for longer than the window.
        self.waits_until = 0.0
        self._over_at: int | None = None  # the last epoch, when the training is over

    # --- connections

    async def admit(self, transport: Transport, peer: str | None = None) -> None:
        """Let a device in, or back in, and return when its connection is over; `peer` is its credential's name."""
        try:
            async with asyncio.timeout(HELLO_WITHIN_S):
                hello = await transport.read()
            session = self._resumed(hello, transport, peer) if hello.session else self._joined(hello, transport, peer)
        except TimeoutError:
            await _refuse(transport, ProtocolError(f"No hello came within {HELLO_WITHIN_S:g} s."), again=True)
        except (ProtocolError, LinkError) as error:
            await _refuse(transport, error, again=isinstance(error, _GoneError))
        else:
            await session.channel.until_lost(transport)

    def _joined(self, hello: Frame, transport: Transport, peer: str | None) -> Session:
        if hello.message.kind is not Kind.HELLO:
            raise ProtocolError(f"The first message is to be HELLO, but {hello.message} came.")
        who = read_hello(hello.only(), self._network, peer)
        self._policy.check(who)
        self._replace(who.name, is_proved=peer is not None)
        self._accountant.learn(who.name, who.spent)  # of who is let in: nobody else may say what a device has spent
        return self._begin(who, transport)

    def _replace(self, name: str, *, is_proved: bool) -> None:
        """End the session of a device that joins anew: it has lost its state, or it would have come back."""
        before = self.sessions.get(name)
        if before is None:
            return
        if before.channel.is_attached and not is_proved:
            raise _GoneError(f"A device called '{name}' has joined already.")
        self.end(before, LinkError("it has joined anew"))

    def _begin(self, who: Introduction, transport: Transport) -> Session:
        recorder = Recorder(who.name, self._keep_spans)
        channel = Channel(
            transport,
            recorder,
            DOWNLINK,
            on_lost=lambda error: self._lost(session, error),
            is_real=self._real_links,
        )
        session = Session(who, next(self._numbers), channel, recorder)
        session.hello_at = self._loop.time()
        channel.session = session.number
        channel.limit(body_limit({}))  # small messages only, until its plan is known
        channel.emulate(self._policy.link(who.name), attrgetter("down_bps"))
        self.sessions[who.name] = session
        self._lives[session] = self._loop.create_task(self._live(session))
        self._observe(Joined(who.name, len(self.sessions)))
        if self._over_at is not None:
            self._stop(session, self._over_at)
        self._notify()
        return session

    def _resumed(self, hello: Frame, transport: Transport, peer: str | None) -> Session:
        """Go on with a session over another connection: what either side has not got is sent again."""
        name = peer if peer is not None else str(read_json(hello.only()).get("name"))
        session = self.sessions.get(name)
        if hello.message.kind is not Kind.HELLO or session is None or session.number != hello.session:
            raise _GoneError("That session is over.")
        if not session.is_welcome:
            raise _GoneError("That session has not begun.")
        session.channel.attach(transport, hello.acknowledged, greeting=Message(Kind.WELCOME))  # or it stays away
        self._observe(Back(name, self._loop.time() - self._wait_no_longer(session)))
        return session

    def _wait_no_longer(self, session: Session) -> float:
        """Return since when a device was away, whose return is not waited for any more."""
        timer, since = self._away.pop(session, (None, self._loop.time()))
        if timer is not None:
            timer.cancel()
        return since

    def _lost(self, session: Session, error: LinkError) -> None:
        """A connection is gone; its device may come back over another one within the window."""
        if session.is_over or not session.is_welcome or self._resume_window_s <= 0:
            self.end(session, error)
            return
        window_s = max(self._resume_window_s, self.waits_until - self._loop.time())
        self._observe(Away(session.device, window_s))
        gone = LinkError(f"its link was lost for more than {window_s:g} s")
        self._away[session] = (self._loop.call_later(window_s, self.end, session, gone), self._loop.time())

    # --- sessions

    async def joined(self, wanted: int) -> None:
        """Return when so many devices are there."""
        if len(self.sessions) < wanted:
            self._observe(Waiting(len(self.sessions), wanted))
        while len(self.sessions) < wanted:
            await self._changed.wait()

    def present(self) -> list[Session]:
        """Return the sessions in name order."""
        return [self.sessions[name] for name in sorted(self.sessions)]

    def welcome(self, session: Session, orders: Orders) -> None:
        """Tell a device its orders."""
        session.is_welcome = True
        session.welcome_at = self._loop.time()
        spent = self._accountant.of(session.device)
        told = replace(orders, session=session.number, releases=spent.releases, spent=spent.mu_squared)
        session.channel.post(Message(Kind.WELCOME, body=told.to_body()))

    def end(self, session: Session, reason: Exception) -> None:
        """The device takes part no more; if it comes, it comes anew."""
        if session.is_over:
            return
        session.is_over = True
        reason = session.verdict or reason
        forget_frames(reason)
        self._wait_no_longer(session)
        if self.sessions.get(session.device) is session:
            del self.sessions[session.device]
        session.inbox.put_nowait(reason)
        session.channel.fail(reason if isinstance(reason, LinkError) else LinkError(str(reason)))
        self._results.lose(session.device)
        self._observe(_farewell_of(session, reason))
        self._notify()

    async def dismiss(self, session: Session, reason: Exception | str, *, again: bool = False) -> None:
        """Tell a device why it takes part no more, and end its session."""
        session.verdict = session.verdict or (reason if isinstance(reason, Exception) else LinkError(reason))
        session.refuse(reason, again=again)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await session.channel.drain()
        self.end(session, session.verdict)

    async def let_go(self, session: Session, reason: str) -> None:
        """Tell a device that the server stops, in good order; it may come again when there is one."""
        session.is_let_go = True
        await self.dismiss(session, reason, again=True)

    def stop(self, epoch: int) -> None:
        """Tell everybody, also who still comes, that the training is over."""
        self._over_at = epoch
        for session in self.present():
            self._stop(session, epoch)

    def _stop(self, session: Session, epoch: int) -> None:
        session.stopped = True
        session.channel.post(Message(Kind.STOP, epoch))

    async def wait_until_left(self) -> None:
        """Return when every device has left; those that are away are not waited for longer than the window."""
        try:
            async with asyncio.timeout(max(_FAREWELL_S, self._resume_window_s)):
                while self.sessions:
                    await self._changed.wait()
        except TimeoutError:
            self.close()
        await asyncio.gather(*self._lives.values(), return_exceptions=True)

    def close(self) -> None:
        """End all sessions."""
        for session in self.present():
            session.is_let_go = True
            self.end(session, LinkError("the server has ended"))

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _live(self, session: Session) -> None:
        """Take in a device's messages until its session is over."""
        try:
            await self._take_in(session)
        except LinkError as error:
            self.end(session, error)
            forget_frames(error)  # also if the session, which keeps it, was over already
        except ProtocolError as error:
            await self.dismiss(session, error)
            forget_frames(error)
        except Exception as error:  # noqa: BLE001 - the task ends here, and whoever waits is told
            self._results.fail(error)
            session.inbox.put_nowait(error)
            await self.dismiss(session, error)
        finally:
            self._lives.pop(session, None)
            await session.channel.close()

    async def _take_in(self, session: Session) -> None:
        while True:
            # Without a name for it here, which would hold a whole model until the next message comes.
            self._take(session, await session.channel.receive())

    def _take(self, session: Session, message: Message) -> None:
        if message.kind is Kind.FAULT:
            raise LinkError(f"it gave up: {read_json(message).get('reason', 'no reason')}")
        if message.kind is Kind.STOP and session.stopped:
            raise LinkError("it has said goodbye")
        if not session.is_welcome:
            raise ProtocolError(f"{message} came before the device was welcome.")
        if message.kind is Kind.END_EPOCH:  # its update follows, and some of it may come even if not all does
            self._accountant.note(session.device)
        if message.kind is Kind.TRACE:
            self._take_trace(session, message)
        elif message.kind is Kind.HELLO:
            raise ProtocolError(f"{message} came in the middle of a session.")
        elif message.epoch > session.abandoned or _answers_plan(message, session.abandoned):
            if message.kind is Kind.ACTIVATION:
                session.count_outstanding(message)
            session.take(message)
        else:
            session.channel.count_useless(message)

    def _take_trace(self, session: Session, message: Message) -> None:
        trace = unpack_trace(message.body.contiguous(), owner=session.device)
        if not session.asked_for or not trace.epoch == message.epoch == session.asked_for[0]:
            raise ProtocolError(f"{message} carries the trace of epoch {trace.epoch}, which was not asked for.")
        if not {COMPUTE, IO} <= trace.totals.keys():
            raise ProtocolError(f"{message} carries a trace without the device's own lanes.")
        session.asked_for.popleft()
        if self._keep_spans is not None and session.device not in self._keep_spans:
            trace = replace(trace, spans=[])  # a device does not know whose spans are kept
        if trace.clock is not None:
            trace = trace.later(trace.clock.offset_s(clock_machine(), session.hello_at, session.welcome_at))
        downlink = session.recorder.take(trace.epoch)
        self._results.add_trace(trace, downlink, *session.channel.take_counts(trace.epoch))


def _farewell_of(session: Session, reason: Exception) -> Left | Lost:
    if session.stopped:
        return Left(session.device)
    return (Left if session.is_let_go else Lost)(session.device, str(reason))


def _answers_plan(message: Message, abandoned: int) -> bool:
    """Return whether this is momentum that was asked for when the round was over already."""
    return message.kind is Kind.STATE and message.epoch == abandoned


class _GoneError(ProtocolError):
    """A session that cannot be resumed, or a name that is still taken: joining anew may help."""


async def _refuse(transport: Transport, reason: Exception, *, again: bool = False) -> None:
    try:
        for frame in cut_message(fault(reason, again=again), 0, 0):
            await transport.write(frame)
    except LinkError:
        pass  # it is gone already
    await transport.close()
