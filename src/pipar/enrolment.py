"""Who may take part in a job, and by which orders: its own devices, or anybody who has a credential."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pipar.config import DeviceSpec, Link
from pipar.errors import PlanError, ProtocolError
from pipar.job import Job
from pipar.methods import Plan
from pipar.planner.candidates import allowed_plans
from pipar.planner.profile import Profile
from pipar.planner.select import choose_by_estimate
from pipar.planning import make_plans
from pipar.protocol.orders import Orders
from pipar.session import Introduction

#: Returns every device's plan for the profiles that the devices brought with them.
PlanJoined = Callable[[Mapping[str, Profile]], Mapping[str, Plan]]


class Listed:
    """The devices of a job, and nobody else."""

    def __init__(self, job: Job, plan_joined: PlanJoined | None = None) -> None:
        self.job = job
        self.changed: Callable[[Job], None] = lambda _: None
        self._plan_joined = plan_joined

    def check(self, who: Introduction) -> None:
        if who.name not in self.job.links:
            raise ProtocolError(f"'{who.name}' is not a device of this training.")

    def link(self, name: str) -> Link:
        return self.job.links[name]

    async def begin(self, everybody: Sequence[Introduction]) -> Mapping[str, Orders]:
        """Return the orders of all devices of the job, with plans for the profiles that were brought."""
        if self._plan_joined is not None:
            brought = {who.name: who.profile for who in everybody if who.profile is not None}
            self.job = replace(self.job, device_profiles={**self.job.device_profiles, **brought})
            self.job = replace(self.job, plans=self._plan_joined(brought))
            self.changed(self.job)
        return self.job.orders()

    def join(self, who: Introduction) -> Orders:
        return self.job.orders()[who.name]


class Open:
    """Everybody who comes; a device that is not in the configuration is a machine of its own on a link of its own."""

    def __init__(self, job: Job, specs: Mapping[str, DeviceSpec], unlisted: Callable[[str], DeviceSpec]) -> None:
        self.job = job  # of those who have come
        self.changed: Callable[[Job], None] = lambda _: None
        self._kept: Mapping[str, Plan] = {}
        self._specs = specs
        self._unlisted = unlisted

    def keep_plans(self, plans: Mapping[str, Plan]) -> None:
        """Let devices go on by the plans that they had before this server was started."""
        self._kept = dict(plans)

    def check(self, who: Introduction) -> None:
        if who.profile is None:
            raise ProtocolError(f"'{who.name}' brings no profile of itself, so nothing can be planned for it.")
        known = self.job.sizes.get(who.name)
        if known is not None and known != who.samples:
            raise ProtocolError(f"'{who.name}' had {known} samples before and says {who.samples} now.")
        if known is None:
            alone = replace(self.job, specs=(), sizes={}, device_profiles={})
            fleet = self._with(alone, who).fleet()
            try:
                allowed_plans(fleet, fleet.members[0])
            except PlanError as error:
                raise ProtocolError(str(error)) from None

    def link(self, name: str) -> Link:
        return self._spec(name).link

    async def begin(self, everybody: Sequence[Introduction]) -> Mapping[str, Orders]:
        job = self.job
        for who in everybody:
            job = self._with(job, who)
        plans = {name: plan for name, plan in self._kept.items() if name in job.sizes}
        if plans and job.method.shares_server_model:  # one model, cut where it was
            plans = {name: plans.get(name, next(iter(plans.values()))) for name in job.sizes}
        elif len(plans) < len(job.sizes):
            # Seconds for a large fleet: beside the event loop, which has connections to keep alive.
            plans = await asyncio.to_thread(make_plans, job)
        self._change(replace(job, plans={**job.plans, **plans}))
        return self.job.orders()

    def join(self, who: Introduction) -> Orders:
        """Return orders with a first plan, by the paper's estimate or that of an equal device; all are chosen later."""
        job = self._with(self.job, who)
        fleet = job.fleet()
        kind = next(kind for kind in fleet.kinds() if who.name in {member.name for member in kind})
        plan = self._kept.get(who.name)
        plan = plan or next((job.plans[member.name] for member in kind if member.name in job.plans), None)
        if plan is None and job.method.shares_server_model and job.plans:
            plan = next(iter(job.plans.values()))
        if plan is None:
            try:
                plan = choose_by_estimate(fleet.of({who.name}))[who.name][0]
            except PlanError as error:
                raise ProtocolError(str(error)) from None
        self._change(replace(job, plans={**job.plans, who.name: plan}))
        return self.job.orders()[who.name]

    def _with(self, job: Job, who: Introduction) -> Job:
        if who.name in job.sizes:
            return job
        assert who.profile is not None
        specs = sorted([*job.specs, self._spec(who.name)], key=lambda spec: spec.name)
        return replace(
            job,
            specs=tuple(specs),
            sizes={**job.sizes, who.name: who.samples},
            device_profiles={**job.device_profiles, who.name: who.profile},
        )

    def _spec(self, name: str) -> DeviceSpec:
        return self._specs.get(name) or self._unlisted(name)

    def _change(self, job: Job) -> None:
        self.job = job
        self.changed(job)
