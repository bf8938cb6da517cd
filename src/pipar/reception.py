"""Who takes part: devices are let in, what they say is taken in, and nobody leaves without being missed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from pipar.config import Link
from pipar.errors import LinkError, ProtocolError, TrainingError
from pipar.events import Joined, Observer, ignore
from pipar.ledger import Ledger
from pipar.link.channel import Channel, Transport
from pipar.planner.profile import Profile
from pipar.protocol.messages import Kind, Message, json_body, read_json
from pipar.protocol.orders import Orders
from pipar.session import Session, read_profile
from pipar.trace import COMPUTE, DOWNLINK, IO, SERVER, Recorder, unpack_trace


class Reception:
    """Where devices join. `orders` are those in force: who has none is not let in."""

    def __init__(
        self,
        orders: Mapping[str, Orders],
        links: Mapping[str, Link],
        ledger: Ledger,
        *,
        network: Profile | None = None,
        welcomes_at_once: bool = True,
        keep_spans: frozenset[str] | None = None,
        observe: Observer = ignore,
    ) -> None:
        self.sessions: dict[str, Session] = {}
        self._orders = orders
        self._links = links
        self._ledger = ledger
        self._network = network
        self._welcomes_at_once = welcomes_at_once
        self._keep_spans = keep_spans
        self._observe = observe
        self._all_joined = asyncio.Event()
        self._present: set[str] = set()
        self._left = asyncio.Event()

    async def admit(self, transport: Transport) -> None:
        """Let a device in and take in its messages until it leaves; one call a connection."""
        channel = Channel(transport, Recorder(SERVER, frozenset()), DOWNLINK)
        try:
            session = self._join(channel, await channel.receive())
        except (ProtocolError, LinkError) as error:
            channel.post(Message(Kind.FAULT, body=json_body({"reason": str(error)})))
            await channel.close()
            return
        try:
            await self._take_in(session)
        finally:
            await channel.close()
            self._present.discard(session.device)
            self._left.set()

    async def everybody(self) -> list[Session]:
        """Return the sessions of all devices, in name order, when the last one has joined."""
        await self._all_joined.wait()
        return [self.sessions[name] for name in sorted(self.sessions)]

    async def farewell(self) -> None:
        """Return when every device has left."""
        while self._present:
            self._left.clear()
            await self._left.wait()

    def welcome(self, session: Session) -> None:
        """Tell a device its orders."""
        session.channel.post(Message(Kind.WELCOME, body=self._orders[session.device].to_body()))

    def _join(self, channel: Channel, hello: Message) -> Session:
        content = read_json(hello) if hello.kind is Kind.HELLO else {"name": ""}
        name = str(content.get("name"))
        if name not in self._orders:
            raise ProtocolError(f"'{name}' is not a device of this training.")
        if name in self.sessions:
            raise ProtocolError(f"A device called '{name}' has joined already.")
        profile = read_profile(content.get("profile"), self._network)
        session = Session(name, channel, Recorder(name, self._keep_spans), profile)
        channel.session = self._orders[name].session
        channel.record_on(session.recorder)
        link = self._links[name]
        cycle = [other.down_bps for other in link.cycle]
        channel.shape(link.down_bps, link.latency_s, cycle=cycle, every_s=link.every_s)
        if self._welcomes_at_once:
            self.welcome(session)
        self.sessions[name] = session
        self._present.add(name)
        self._observe(Joined(name, len(self.sessions)))
        if len(self.sessions) == len(self._orders):
            self._all_joined.set()
        return session

    async def _take_in(self, session: Session) -> None:
        try:
            while True:
                message = await session.channel.receive()
                match message.kind:
                    case Kind.TRACE:
                        self._take_trace(session, message)
                    case Kind.FAULT:
                        raise LinkError(f"it gave up: {read_json(message).get('reason', 'no reason')}")
                    case Kind.ACTIVATION:
                        self._count_outstanding(session, message)
                        session.inbox.put_nowait(message)
                    case _:
                        session.inbox.put_nowait(message)
        except (LinkError, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                session.refuse(error)
            # Behind 'stop training' and its last trace, a device may leave.
            if session.stopped_after is None or session.last_trace < session.stopped_after:
                session.inbox.put_nowait(error)
                self._ledger.fail(TrainingError(f"{session.device} was lost: {error}"))

    def _count_outstanding(self, session: Session, message: Message) -> None:
        allowed = self._orders[session.device].plan.micro_batches
        session.outstanding += 1
        if session.outstanding > allowed:
            raise ProtocolError(f"{message} came with {allowed} micro-batches outstanding, which is all it may have.")

    def _take_trace(self, session: Session, message: Message) -> None:
        trace = unpack_trace(message.body.contiguous(), owner=session.device)
        if not trace.epoch == message.epoch == session.last_trace + 1 <= session.asked_for:
            raise ProtocolError(f"{message} carries the trace of epoch {trace.epoch}, which was not asked for.")
        if not {COMPUTE, IO} <= trace.totals.keys():
            raise ProtocolError(f"{message} carries a trace without the device's own lanes.")
        session.last_trace = trace.epoch
        downlink = session.recorder.take(trace.epoch)
        received, sent = session.channel.received_bytes, session.channel.sent_bytes
        self._ledger.add_trace(trace, downlink, received.pop(trace.epoch, 0), sent.pop(trace.epoch, 0))
