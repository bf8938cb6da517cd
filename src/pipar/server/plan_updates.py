"""The current orders, and how their plans change between two rounds when links or machines do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial

from pipar.events import Replanned
from pipar.execution.lanes import Lanes
from pipar.execution.work import Work
from pipar.methods import Plan
from pipar.planner.replanner import MeasuredLink
from pipar.server.interfaces import Learner, Services
from pipar.server.membership import Membership
from pipar.server.message_limits import MessageLimits
from pipar.server.session import Session
from pipar.settings.links import Link
from pipar.wire.messages import Body, Kind, Message
from pipar.wire.orders import Orders, plan_body


class PlanUpdates:
    """Holds every device's orders, measures links by the traffic of rounds, and puts new plans into effect."""

    def __init__(
        self,
        learner: Learner,
        pool: Lanes,
        membership: Membership,
        limits: MessageLimits,
        services: Services,
        *,
        draws: bool = False,
    ) -> None:
        self._draws = draws  # only some devices take part in a round
        self._learner = learner
        self._pool = pool
        self._membership = membership
        self._limits = limits
        self._results = services.results
        self._replanner = services.replanner
        self._observe = services.observe
        self._orders: dict[str, Orders] = {}
        self._measured: dict[str, MeasuredLink] = {}
        self._unmeasured: set[str] = set()  # devices of the round whose traffic is not known yet

    # --- orders

    def orders(self, device: str) -> Orders:
        """Return the current orders of a device."""
        return self._orders[device]

    def knows(self, device: str) -> bool:
        """Whether a device has orders, maybe from an earlier session."""
        return device in self._orders

    @property
    def keep_state(self) -> bool:
        """Whether optimisers keep their state between rounds."""
        return any(orders.keep_state for orders in self._orders.values())

    def limit(self, session: Session) -> None:
        """Let a device send no more than its plan needs."""
        self._limits.set(session, self._orders[session.device])

    def begin(
        self, orders: Mapping[str, Orders], links: Mapping[str, Link], before: Mapping[str, Plan]
    ) -> dict[str, Plan]:
        """Put the first orders into effect; return the plans that differ from those made before the devices joined."""
        self._orders = dict(orders)
        if self._replanner is not None:
            self._replanner.begin(links)
        plans = {name: order.plan for name, order in sorted(orders.items())}
        return {name: plan for name, plan in plans.items() if plan != before.get(name)}

    def join(self, device: str, orders: Orders, first_epoch: int) -> None:
        """Put the first orders of a device that joins later into effect."""
        self._orders[device] = orders
        self.move_and_announce(first_epoch, {device: orders.plan}, f"{device} joined: its first plan")

    def move_and_announce(self, first_epoch: int, changed: Mapping[str, Plan], why: str = "") -> None:
        """Cut the network as these plans say, before any device trains with them."""
        self._learner.move_cuts({name: plan.split_point for name, plan in changed.items()})
        self._put_into_force(first_epoch, changed, why)

    def replan_with(self, device: str, link: Link) -> None:
        """Choose plans again for a fleet that a device has joined."""
        if self._replanner is not None:
            self._replanner.join(device, link)

    def replan_without(self, devices: Iterable[str]) -> None:
        """Leave devices out of future plans."""
        if self._replanner is not None:
            for device in devices:
                self._replanner.leave(device)

    def close(self) -> None:
        """Choose no more plans."""
        if self._replanner is not None:
            self._replanner.close()

    # --- links

    def recall(self, epoch: int, devices: Collection[str]) -> None:
        """These devices refer to activations that they have sent before, in this epoch."""
        if devices:
            self._results.recall(epoch, devices)

    def begin_measuring(self, devices: Iterable[str]) -> None:
        """A round begins whose traffic will show the links of these devices."""
        self._measured, self._unmeasured = {}, set(devices)

    def add_measured(self, device: str, link: MeasuredLink, epoch: int) -> None:
        """Take a link as the traffic of a round has shown it."""
        self._measured[device] = link
        self.measure_without(device, epoch)

    def measure_without(self, device: str, epoch: int) -> None:
        """Wait for no more traffic of a device; when none is missing, see how the links have changed."""
        self._unmeasured.discard(device)
        if self._unmeasured or not self._measured:
            return
        measured, self._measured = self._measured, {}
        self._results.measure_links(epoch, measured)
        if self._replanner is not None:
            # Before the models travel: a choice that needs no time is made when they have arrived.
            self._replanner.observe_round(measured)

    # --- new plans

    async def adopt(self, epoch: int) -> None:
        """Put new plans into effect if some were chosen: devices receive theirs, and layers change sides."""
        changed = self._changed((self._replanner.take() if self._replanner is not None else None) or {})
        if not changed:
            return
        moved = {
            name: plan.split_point
            for name, plan in changed.items()
            if plan.split_point != self._orders[name].plan.split_point
        }
        move = Work("install", epoch, size_bytes=self._learner.model_bytes() * len(moved))
        leaving = await self._pool.run((move, partial(self._learner.move_cuts, moved))) if moved else {}
        self._put_into_force(epoch + 1, changed, self._replanner.why if self._replanner is not None else "")
        for name, plan in changed.items():
            session = self._membership.sessions.get(name)
            # Others get this plan with their welcome, or when they are drawn.
            if session is not None and session.is_welcome and not self._draws:
                with_state = name in moved and self._orders[name].keep_state
                self._send(session, plan, epoch, leaving[name] if with_state else None)

    def tell(self, session: Session, epoch: int) -> None:
        """Send a device that is drawn its plan, if that has changed since it was last told."""
        plan = self._orders[session.device].plan
        if plan != session.plan:
            self._send(session, plan, epoch, None)

    def _send(self, session: Session, plan: Plan, epoch: int, leaving: Body | None) -> None:
        """Send a device its new plan, and the optimiser state of the layers that it takes over."""
        self.limit(session)
        session.forget_model_of_another_part(plan.split_point)
        session.plan = plan
        session.channel.post(Message(Kind.PLAN, epoch, body=plan_body(plan)))
        if leaving is not None:
            session.channel.post(Message(Kind.STATE, epoch, body=leaving))
            session.expect_state()

    def _changed(self, plans: Mapping[str, Plan]) -> dict[str, Plan]:
        known = {name: plan for name, plan in sorted(plans.items()) if name in self._orders}
        return {name: plan for name, plan in known.items() if plan != self._orders[name].plan}

    def _put_into_force(self, first_epoch: int, changed: Mapping[str, Plan], why: str = "") -> None:
        for name, plan in changed.items():
            self._orders[name] = replace(self._orders[name], plan=plan)
        plans = {name: orders.plan for name, orders in sorted(self._orders.items())}
        self._results.replan(first_epoch, plans)
        self._observe(Replanned(first_epoch, {name: asdict(plan) for name, plan in plans.items()}, why))
