"""The devices of the next round: each present device gets its orders, its replica and the latest model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial

from pipar.errors import LinkError, ProtocolError, UnusableProfileError, describe, is_lack_of_memory
from pipar.events import Drawn, Observer
from pipar.execution.lanes import Lanes
from pipar.execution.work import Work
from pipar.server.interfaces import Enrolment, Learner, Training
from pipar.server.link_measurement import LinkMeasurements
from pipar.server.membership import Membership
from pipar.server.plan_updates import PlanUpdates
from pipar.server.session import Session
from pipar.wire.orders import Orders


class Participants:
    """Welcomes devices between two rounds, and frees the replicas of devices that have left."""

    def __init__(
        self,
        training: Training,
        learner: Learner,
        enrolment: Enrolment,
        membership: Membership,
        plans: PlanUpdates,
        pool: Lanes,
        observe: Observer,
    ) -> None:
        self._training = training
        self._learner = learner
        self._enrolment = enrolment
        self._membership = membership
        self._plans = plans
        self._pool = pool
        self._observe = observe
        self._links = LinkMeasurements()
        self._planned_for: set[str] = set()  # devices that plans are made for
        self._drawn: Collection[str] | None = None  # devices that have a replica; None: all that are present

    async def begin(self, done: int) -> None:
        """Wait for enough devices, and put the first plans into effect: those of the job, or new ones by profile."""
        orders = await self._first_orders()
        links = {name: self._enrolment.link_to_plan(name) for name in sorted(self._planned_for)}
        changed = self._plans.begin(orders, links, self._training.plans)
        if changed:
            self._plans.move_and_announce(done + 1, changed)

    async def _first_orders(self) -> dict[str, Orders]:
        """Return the orders of all present devices; those for which no plan is possible are dismissed."""
        while True:
            await self._membership.wait_for(self._training.min_devices)
            await self._measure(self._membership.present)
            introductions = [session.introduction for session in self._membership.present()]
            self._planned_for = {introduction.name for introduction in introductions}
            try:
                return dict(await self._enrolment.begin(introductions))
            except UnusableProfileError as error:
                session = self._membership.sessions.get(error.device)
                # The device may have joined again meanwhile, as another machine.
                if session is not None and session.introduction in introductions:
                    await self._membership.dismiss(session, error)

    async def gather(self, done: int, wanted: int) -> None:
        """Wait for enough devices, and welcome all that are present and do not have their orders yet."""
        await self._membership.wait_for(max(self._training.min_devices, wanted))
        self.release_absent()
        await self._measure(self._unwelcomed)
        for session in self._membership.present():
            if session.owes_acknowledgements:  # what is kept for it must not grow with every round
                self._membership.end(session, LinkError("it has not acknowledged the messages of several rounds"))
            elif session.round.abandoned > done:  # the round that it was too late for is trained again
                await self._membership.dismiss(session, f"round {done + 1} starts over", again=True)
            elif not session.is_welcome:
                await self._try_to_welcome(session, done)

    def _unwelcomed(self) -> list[Session]:
        return [session for session in self._membership.present() if not session.is_welcome]

    async def _measure(self, joined: Callable[[], Iterable[Session]]) -> None:
        """Measure the links that no rate is known of."""
        if links := await self._links.measure(joined, self._enrolment.link):
            self._enrolment.measured(links)

    async def _try_to_welcome(self, session: Session, done: int) -> None:
        try:
            await self._welcome(session, done)
        except ProtocolError as error:  # no plan is possible for it, which does not stop the others
            await self._membership.dismiss(session, error)
        except Exception as error:  # noqa: BLE001 - the same holds for every other error in the work for it
            reason = f"the server failed to prepare for it: {describe(error)}"
            await self._membership.dismiss(session, reason, again=is_lack_of_memory(error))

    async def _welcome(self, session: Session, done: int) -> None:
        """Give a device its orders and make its replica."""
        name = session.device
        if not self._plans.knows(name):
            self._plans.join(name, self._enrolment.join(session.introduction), done + 1)
        if name not in self._planned_for:
            self._plans.replan_with(name, self._enrolment.link_to_plan(name))
        self._planned_for.add(name)
        self._plans.limit(session)
        self._membership.welcome(session, self._plans.orders(name))
        # It may have taken part before, and the others have continued training since.
        self._learner.discard_progress(name)
        if not self._training.draw.is_partial:
            await self._make_replica(name)

    async def _make_replica(self, name: str) -> None:
        # Copying the layers after the cut takes a while: before the round's clock starts.
        await self._pool.run((Work("install", device=name), partial(self._learner.replica, name)))

    async def draw(self, done: int, wanted: int) -> list[Session]:
        """Return the devices that are drawn for the next round, with their current plans and with replicas.

        The replicas of all others are freed before.
        """
        draw, present = self._training.draw, {session.device: session for session in self._membership.welcomed()}
        drawn = self._drawn = draw.next(done + 1, present, max(1, wanted))
        self._observe(Drawn(done + 1, tuple(drawn), len(present), draw.counts))
        self.release_absent()
        for name in drawn:
            self._plans.tell(present[name], done)
            await self._make_replica(name)
        return [present[name] for name in drawn if not present[name].is_over]

    def release_absent(self) -> None:
        """Free the replicas of devices that have left or are not drawn; leave those that have left out of plans."""
        present = self._membership.sessions.keys()
        gone = self._planned_for - present
        self._plans.replan_without(sorted(gone))
        # Also the replicas in a checkpoint of devices that have not come back.
        self._learner.keep_replicas_of(present if self._drawn is None else present & set(self._drawn))
        self._planned_for -= gone
