"""Which devices may join a job, and their first orders: the devices of its configuration, or any with a credential."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pipar.errors import PlanError, ProtocolError, UnusableProfileError
from pipar.execution.clock import clock_machine
from pipar.job.job import Job
from pipar.methods import Plan
from pipar.planner.encoding_choice import reencoded
from pipar.planner.fleet import Fleet
from pipar.planner.paper_selection import estimate_plans
from pipar.planner.single_device_plan import best_plan_alone
from pipar.profiling.profile import Profile
from pipar.server.allow_list import AllowList
from pipar.server.device_messages import Introduction
from pipar.settings.config import DeviceSpec
from pipar.settings.links import Link
from pipar.wire.orders import Orders

#: Is called with the job when it has changed.
Listener = Callable[[Job], None]
#: Returns every device's plan for the profiles that the devices sent.
PlanJoined = Callable[[Mapping[str, Profile]], Mapping[str, Plan]]


class ClosedEnrolment:
    """Only the devices of a job may join."""

    def __init__(self, job: Job, plan_joined: PlanJoined | None = None) -> None:
        self.job = job
        self._listeners: list[Listener] = []
        self._plan_joined = plan_joined

    def add_listener(self, listener: Listener) -> None:
        """Call this with the job whenever its devices, their profiles or their first plans change."""
        self._listeners.append(listener)

    def check(self, introduction: Introduction) -> None:
        if introduction.name not in self.job.links:
            raise ProtocolError(f"'{introduction.name}' is not a device of this training.")
        if introduction.samples != self.job.sizes[introduction.name]:
            raise ProtocolError(
                f"'{introduction.name}' reports {introduction.samples} samples, but by the configuration it has "
                f"{self.job.sizes[introduction.name]}."
            )

    def link(self, name: str) -> Link:
        return self.job.links[name]

    def measured(self, links: Mapping[str, Link]) -> None:
        pass  # links of processes of one machine are emulated

    def link_to_plan(self, name: str) -> Link:
        return self.job.links[name]

    async def begin(self, introductions: Sequence[Introduction]) -> Mapping[str, Orders]:
        """Return the orders of all devices of the job, with plans for the profiles that they sent."""
        if self._plan_joined is not None:
            brought = {
                introduction.name: introduction.profile
                for introduction in introductions
                if introduction.profile is not None
            }
            self.job = replace(self.job, device_profiles={**self.job.device_profiles, **brought})
            self.job = replace(self.job, plans=self._plan_joined(brought))
            _tell(self._listeners, self.job)
        return self.job.orders()

    def join(self, introduction: Introduction) -> Orders:
        return self.job.orders()[introduction.name]


class OpenEnrolment:
    """Every device may join, or only those of `server.allow`.

    One that is not in the configuration is planned for as a separate machine and link.
    """

    def __init__(
        self,
        job: Job,
        specs: Mapping[str, DeviceSpec],
        unlisted: Callable[[str], DeviceSpec],
        make_plans: Callable[[Job], Mapping[str, Plan]],
    ) -> None:
        self.job = replace(job, real_links=True)  # of the devices that have joined
        self._listeners: list[Listener] = []
        self._kept: Mapping[str, Plan] = {}
        self._specs = specs
        self._unlisted = unlisted
        self._make_plans = make_plans
        allowed = job.config.server.allow
        self._allow_list = None if allowed is None else AllowList(allowed)

    def keep_plans(self, plans: Mapping[str, Plan]) -> None:
        """Let devices continue with the plans that they had before this server was started."""
        self._kept = dict(plans)

    def add_listener(self, listener: Listener) -> None:
        """Call this with the job whenever its devices, their profiles or their first plans change."""
        self._listeners.append(listener)

    def take_change(self) -> str | None:
        """Return a sentence about a change of the file of server.allow since this was last asked, if any."""
        return None if self._allow_list is None else self._allow_list.take_change()

    def check_allowed(self, name: str) -> None:
        """Raise ProtocolError if server.allow does not name a device now."""
        if self._allow_list is not None:
            self._allow_list.check(name)

    def check(self, introduction: Introduction) -> None:
        self.check_allowed(introduction.name)
        if introduction.profile is None:
            raise ProtocolError(f"'{introduction.name}' sent no profile of its machine, so no plan can be made for it.")
        wanted = self._spec(introduction.name).threads
        if wanted not in ("auto", introduction.threads):
            raise ProtocolError(
                f"'{introduction.name}' computes with {introduction.threads} threads, but devices.threads = {wanted} "
                "in the server's configuration: give both the same."
            )
        most = self.job.most_samples
        if most is not None and introduction.samples > most:
            raise ProtocolError(
                f"'{introduction.name}' reports {introduction.samples} samples; a device may have at most {most} in "
                "this training. If the number is right, set server.max_samples to it."
            )
        known = self.job.sizes.get(introduction.name)
        if known is not None and known != introduction.samples:
            raise ProtocolError(
                f"'{introduction.name}' had {known} samples before and reports {introduction.samples} now."
            )
        if known is None:
            fleet = self._with(self._empty_job, introduction).fleet()
            (member,) = fleet.members
            cut = self._common_plan
            if cut is not None:
                member = replace(member, split_point=cut.split_point)
            try:
                _plan_alone(self.job, replace(fleet, members=(member,)))
            except _UNUSABLE as error:
                raise _unusable(introduction.name, error) from None

    def link(self, name: str) -> Link:
        return self._spec(name).link

    def measured(self, links: Mapping[str, Link]) -> None:
        self.job = replace(self.job, measured_links={**self.job.measured_links, **links})

    def link_to_plan(self, name: str) -> Link:
        return self.job.measured_links.get(name) or self.link(name)

    async def begin(self, introductions: Sequence[Introduction]) -> Mapping[str, Orders]:
        job = self.job
        for introduction in introductions:
            job = self._with(job, introduction)
        try:
            plans = await self._first_plans(job)
        except (ArithmeticError, ValueError):
            await self._find_unusable(introductions)
            raise
        self._change(replace(job, plans={**job.plans, **plans}))
        return self.job.orders()

    async def _first_plans(self, job: Job) -> Mapping[str, Plan]:
        kept = {name: plan for name in job.sizes if (plan := self._kept_plan(job, name)) is not None}
        if len(kept) == len(job.sizes):
            return reencoded(job.fleet(), kept)
        # Off the event loop, which keeps connections alive: a large fleet takes seconds.
        return await asyncio.to_thread(self._make_plans, job)

    async def _find_unusable(self, introductions: Sequence[Introduction]) -> None:
        """Raise if there is a device for which no plan can be made, even alone."""
        for introduction in introductions:
            try:
                await self._first_plans(self._with(self._empty_job, introduction))
            except _UNUSABLE as error:
                raise _unusable(introduction.name, error) from None

    def join(self, introduction: Introduction) -> Orders:
        """Return orders with a first plan: that of an equal device, or the best for it alone."""
        job = self._with(self.job, introduction)
        try:
            plan = self._first_plan(job, introduction)
        except _UNUSABLE as error:
            raise _unusable(introduction.name, error) from None
        self._change(replace(job, plans={**job.plans, introduction.name: plan}))
        return self.job.orders()[introduction.name]

    def _first_plan(self, job: Job, introduction: Introduction) -> Plan:
        fleet = job.fleet()
        kind = next(kind for kind in fleet.device_kinds() if introduction.name in {member.name for member in kind})
        kept = self._kept_plan(job, introduction.name)
        if kept is not None:
            return reencoded(fleet.of({introduction.name}), {introduction.name: kept})[introduction.name]
        plan = next((job.plans[member.name] for member in kind if member.name in job.plans), None)
        return plan or _plan_alone(job, fleet.of({introduction.name}))

    @property
    def _empty_job(self) -> Job:
        """Return the job without any device, to plan for one alone."""
        return replace(self.job, specs=(), sizes={}, device_profiles={})

    @property
    def _common_plan(self) -> Plan | None:
        """Return a plan with the cut of a server-side model that all devices share; None if there is none yet."""
        plans = self.job.plans or self._kept
        return next(iter(plans.values()), None) if self.job.method.shares_server_model else None

    def _kept_plan(self, job: Job, name: str) -> Plan | None:
        """Return the plan that a device continues with; its encodings are chosen again by the current configuration."""
        plan = self._kept.get(name) or self._common_plan
        # The device may have come back as a machine that holds fewer layers, or to a server that allows fewer cuts.
        is_allowed = (
            plan is not None
            and plan.split_point <= len(job.device_profiles[name].layers)
            and plan.split_point not in job.leaky_cuts
        )
        return plan if is_allowed else None

    def _with(self, job: Job, introduction: Introduction) -> Job:
        if introduction.name in job.sizes:
            return job
        assert introduction.profile is not None
        specs = sorted([*job.specs, self._spec(introduction.name)], key=lambda spec: spec.name)
        is_here = introduction.machine == clock_machine()
        return replace(
            job,
            hosted=job.hosted | ({introduction.name} if is_here else set()),
            specs=tuple(specs),
            sizes={**job.sizes, introduction.name: introduction.samples},
            device_profiles={**job.device_profiles, introduction.name: introduction.profile},
        )

    def _spec(self, name: str) -> DeviceSpec:
        return self._specs.get(name) or self._unlisted(name)

    def _change(self, job: Job) -> None:
        self.job = job
        _tell(self._listeners, job)


def _tell(listeners: Sequence[Listener], job: Job) -> None:
    for listener in listeners:
        listener(job)


def _plan_alone(job: Job, fleet: Fleet) -> Plan:
    """Return the plan of the only device of a fleet, until the plans of all devices are chosen together."""
    if job.config.plan.estimate == "paper":
        return estimate_plans(fleet)[fleet.members[0].name][0]
    return best_plan_alone(fleet)


#: Planning raises these if a device allows no plan, or if its profile has numbers that cannot be computed with.
_UNUSABLE = (PlanError, ArithmeticError, ValueError)


def _unusable(device: str, error: Exception) -> UnusableProfileError:
    """Return the error that ends the session of one device, and of no other."""
    if isinstance(error, PlanError):
        return UnusableProfileError(device, str(error))
    return UnusableProfileError(device, f"No plan can be made from the profile of '{device}': {error}.")
