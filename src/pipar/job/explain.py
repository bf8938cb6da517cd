"""Why these plans: what the choice takes, what came next, what the paper's estimate and a full search say."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from pipar.config import Config, device_names
from pipar.errors import InputError
from pipar.events import Observer, Preparing, ignore
from pipar.execution.spans import Span
from pipar.job.job import Job
from pipar.job.plans import Rehearse, plans_by_estimate, search_job_plans, simulation
from pipar.links import Link
from pipar.methods import Plan, plans_as_json
from pipar.planner.background_search import search_again
from pipar.planner.candidates import candidates, needed_bytes
from pipar.planner.encoding import reencoded
from pipar.planner.exhaustive import ExhaustiveResult, search_all
from pipar.planner.fleet import Fleet, Member
from pipar.planner.search import from_sample, plans_by_device, plans_in_common
from pipar.planner.simulator import timeline
from pipar.planner.stage_times import lane_s
from pipar.planner.timing import LANES, Simulate, Timing, epoch_timing

#: A full search of several kinds of devices tries the finest of these grids of N that has few enough combinations.
_GRIDS = (
    (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25, 32, 40, 50, 64, 80, 100),
    (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 50, 100),
    (1, 2, 4, 8, 16, 32),
    (1, 4, 16),
)
#: At a few milliseconds each, minutes; most are ruled out by their bounds.
_MOST_COMBINATIONS = 100_000

Plans = Mapping[str, Plan]


@dataclass(frozen=True)
class Option:
    """Plans of all devices, and the seconds of an epoch by them."""

    plans: Plans
    epoch_s: float


@dataclass(frozen=True)
class DeviceGroup:
    """Devices that are alike and have one plan; `machine` is whose profile they have, None for this machine's."""

    devices: tuple[Member, ...]
    machine: str | None
    plan: Plan
    predicted_s: float  # until the last of them has ended its last iteration
    needed_bytes: int
    utilisation: Mapping[str, float]  # busy shares of the epoch, of a device's own lanes and of all cores
    shares: tuple[float, float] = (1.0, 1.0)  # that the encodings leave of the bytes up and down

    @property
    def bottleneck(self) -> str:
        """The busiest lane that these devices have to do with."""
        return max(LANES, key=lambda lane: self.utilisation[lane])

    @property
    def memory_bytes(self) -> int | None:
        return self.devices[0].memory_bytes

    def to_dict(self) -> dict[str, Any]:
        first, plan = self.devices[0], self.plan
        return {
            "devices": [member.name for member in self.devices],
            "machine": self.machine,
            "speed": first.costs.speed,
            "link": first.link.model_dump(mode="json"),
            "memory_bytes": self.memory_bytes,
            "needed_bytes": self.needed_bytes,
            **asdict(plan),
            "encoding": plan.encoding,
            "share_up": self.shares[0],
            "share_down": self.shares[1],
            "schedule": "1f1b" if plan.window else "all-forward",
            "predicted_s": self.predicted_s,
            "bottleneck": self.bottleneck,
            "utilisation": dict(self.utilisation),
        }


@dataclass(frozen=True)
class Timeline:
    """What a device's lanes, and the cores that work for it, do in one iteration, or in a whole epoch."""

    device: str
    spans: Sequence[Span]
    whole_epoch: bool


@dataclass(frozen=True)
class LinkState:
    """Links that change, when each is at the same place of its cycle, and the plans of a training at that time."""

    links: tuple[Link, ...]  # in the order of the configuration, equal ones once
    chosen: Option


@dataclass(frozen=True)
class ExhaustiveSearch:
    """What a full search found. `grid` are the N that it tried, None for all."""

    best: Option
    chosen_epoch_s: float
    grid: tuple[int, ...] | None
    simulated: int
    ruled_out: int
    seconds: float

    @property
    def score(self) -> float:
        """T_opt / T; paper V-D."""
        return self.best.epoch_s / self.chosen_epoch_s


@dataclass(frozen=True)
class LeakageLimitCost:
    """What `privacy.max_leakage` does to a choice: the split points that it rules out, with what they leak."""

    most: float
    ruled_out: Mapping[int, float]
    without: Option  # what would have been chosen without it
    guess: float | None = None  # what is rebuilt without any activation


@dataclass(frozen=True)
class Explanation:
    """A job's plans and what speaks for them. Times are of whole epochs, simulated."""

    job: Job
    fleet: Fleet
    chosen: Option
    timing: Timing
    runners_up: tuple[Option, ...]
    other: Option  # what the other estimate would have chosen
    simulations: int
    seconds: float
    exhaustive: ExhaustiveSearch | None = None
    states: tuple[LinkState, ...] = ()  # of links that change; all else here is about the first of them
    leakage_limit: LeakageLimitCost | None = None

    @property
    def estimate(self) -> str:
        return self.job.config.plan.estimate

    @property
    def utilisation(self) -> dict[str, float]:
        """The busy share of the epoch: of the busiest device's lanes, and of the server's cores on average."""
        return {lane: self.timing.busy_s[lane] / self.timing.epoch_s for lane in LANES}

    @cached_property
    def predicted_s(self) -> dict[str, float]:
        """When each device will have ended its last iteration; of many devices some stand for all of their kind."""
        known = self.timing.device_s
        slowest = [
            max(known[member.name] for member in kind if member.name in known) for kind in self.fleet.device_kinds()
        ]
        return {
            m.name: known.get(m.name, last)
            for kind, last in zip(self.fleet.device_kinds(), slowest, strict=True)
            for m in kind
        }

    def rows(self, plans: Plans | None = None) -> list[DeviceGroup]:
        """Return the devices, those together that are alike and have one plan, in the configuration's order."""
        plans = self.chosen.plans if plans is None else plans
        together: dict[tuple[object, ...], list[Member]] = {}
        place = {name: number for number, name in enumerate(device_names(self.job.config))}
        for member in sorted(self.fleet.members, key=lambda member: place[member.name]):
            key = (id(member.costs), member.link, member.memory_bytes, plans[member.name])
            together.setdefault(key, []).append(member)
        return [self._row(tuple(members), plans[members[0].name]) for members in together.values()]

    def _row(self, members: tuple[Member, ...], plan: Plan) -> DeviceGroup:
        first, fleet = members[0], self.fleet
        profile, needed = first.costs.profile, needed_bytes(fleet, first, plan)
        machine = next(spec.profile for spec in self.job.specs if spec.name == first.name)
        ended_s = max(self.predicted_s[member.name] for member in members)
        p, server = plan.split_point, fleet.server.profile
        shares = (profile.share(p, "up", plan.up), server.share(p, "down", plan.down))
        return DeviceGroup(members, machine, plan, ended_s, needed, self._utilisation(members, plan), shares)

    def _utilisation(self, members: tuple[Member, ...], plan: Plan) -> dict[str, float]:
        """Return how busy the lanes of the one with most data are; the server's cores are everybody's."""
        busiest = max(members, key=lambda member: member.samples)
        own = {lane: s / self.timing.epoch_s for lane, s in lane_s(self.fleet, busiest, plan).items()}
        return {lane: own.get(lane, self.utilisation[lane]) for lane in LANES}

    def timeline(self) -> Timeline | None:
        """Return one iteration of the device that ends last; None if nothing forecasts the method's.

        Of P = Q, which uses the links and the server for nothing but the models, it is the epoch with their exchange.
        """
        if self.job.method.shares_server_model:
            return None
        slowest = max(self.timing.device_s.items(), key=lambda item: item[1])[0]
        fleet, plans = self.fleet.sampled(), self.chosen.plans
        if plans[slowest].split_point == fleet.layers:
            return Timeline(slowest, timeline(fleet, plans, slowest, exchange=True), whole_epoch=True)
        return Timeline(slowest, timeline(fleet, plans, slowest, iterations=1), whole_epoch=False)

    def to_dict(self) -> dict[str, Any]:
        """Return what `pipar plan --json` prints."""
        other = "paper" if self.estimate == "simulation" else "simulation"
        document = {
            "method": self.job.method.name,
            "model": self.job.model,
            "dataset": self.job.dataset,
            "plans": [{**entry, "predicted_s": self.predicted_s[entry["device"]]} for entry in _tree(self.chosen)],
            "groups": [row.to_dict() for row in self.rows()],
            "server": {
                "machine": self.job.config.server.profile,
                "speed": self.job.config.server.speed,
                "cores": self.fleet.cores,
            },
            "predicted_epoch_s": self.chosen.epoch_s,
            "bottleneck": self.timing.bottleneck,
            "utilisation": self.utilisation,
            "runners_up": [
                {"plans": _tree(option), "epoch_s": option.epoch_s, "relative": option.epoch_s / self.chosen.epoch_s}
                for option in self.runners_up
            ],
            "estimate": self.estimate,
            other: {"plans": _tree(self.other), "epoch_s": self.other.epoch_s},
            "simulations": self.simulations,
            "seconds": self.seconds,
        }
        if self.states:
            document["states"] = [
                {
                    "links": [link.model_dump(mode="json") for link in state.links],
                    "plans": _tree(state.chosen),
                    "epoch_s": state.chosen.epoch_s,
                }
                for state in self.states
            ]
        if self.leakage_limit is not None:
            without = self.leakage_limit.without
            document["privacy"] = {
                "max_leakage": self.leakage_limit.most,
                "guess": self.leakage_limit.guess,
                "ruled_out": [
                    {"split_point": p, "leakage": leaks} for p, leaks in self.leakage_limit.ruled_out.items()
                ],
                "without": {"plans": _tree(without), "epoch_s": without.epoch_s},
                "relative": self.chosen.epoch_s / without.epoch_s,
            }
        if self.exhaustive is not None:
            found = self.exhaustive
            document |= {
                "best": {"plans": _tree(found.best), "epoch_s": found.best.epoch_s},
                "chosen_epoch_s": found.chosen_epoch_s,
                "score": found.score,
                "exhaustive": {
                    "micro_batches": "all" if found.grid is None else list(found.grid),
                    "simulated": found.simulated,
                    "ruled_out": found.ruled_out,
                    "seconds": found.seconds,
                },
            }
        return document


def _tree(option: Option) -> list[dict[str, Any]]:
    return [{**plan, "encoding": option.plans[plan["device"]].encoding} for plan in plans_as_json(option.plans)]


# --- from a configuration


def with_profile(config: Config, profile: str) -> Config:
    """Return the configuration with this profile for the server and all devices that have none of their own."""
    server = config.server if config.server.profile else config.server.model_copy(update={"profile": profile})
    devices = tuple(
        group if group.profile else group.model_copy(update={"profile": profile}) for group in config.devices
    )
    return config.model_copy(update={"server": server, "devices": devices})


def job_to_plan(config: Config, observe: Observer = ignore) -> Job:
    """Return the job of a configuration, as the training itself would; torch is needed if something must be measured
    or a factory called.
    """
    from pipar.job.prepare import unplanned_job, unplanned_timing_only_job

    job = unplanned_timing_only_job(config, observe)
    if job is None:
        from pipar.job.workload import Workload

        job = unplanned_job(Workload(config), observe)
    return job


# --- the explanation


def explain(job: Job, rehearse: Rehearse, *, exhaustive: bool = False, observe: Observer = ignore) -> Explanation:
    """Return a job's choice of plans and what speaks for it; `exhaustive` also tries all others."""
    started = time.monotonic()
    fleet, simulate = job.fleet(), simulation(job, rehearse)
    sample = fleet.sampled()
    grid = _grid(_evened(sample)) if exhaustive else None  # before anything takes time
    choice = search_job_plans(job, fleet, rehearse, observe=observe)
    seconds = time.monotonic() - started

    def timed(plans: Plans) -> Option:
        return Option(plans, epoch_timing(simulate, sample, plans).epoch_s)

    simulated = Option(choice.plans, choice.timing.epoch_s)
    estimated = timed(plans_by_estimate(job, fleet))
    next_best = [timed(from_sample(fleet, sample, by_kind)) for by_kind, _ in choice.runners_up]
    by_paper = job.config.plan.estimate == "paper"
    chosen, other = (estimated, simulated) if by_paper else (simulated, estimated)
    explanation = Explanation(
        job=job,
        fleet=fleet,
        chosen=chosen,
        timing=epoch_timing(simulate, sample, chosen.plans) if by_paper else choice.timing,
        runners_up=_others(chosen, [simulated, *next_best] if by_paper else next_best),
        other=other,
        simulations=choice.simulations,
        seconds=seconds,
        states=_states(job, fleet, chosen, simulate, observe),
        leakage_limit=_leakage_limit_cost(job, rehearse, chosen, observe),
    )
    if not exhaustive:
        return explanation
    started = time.monotonic()
    best, found = _search(fleet, simulate, grid, timed, observe)
    # Beside a grid of N there may be better ones that the choice has come across.
    tried = (found, chosen, other, *explanation.runners_up)
    searched = ExhaustiveSearch(
        best=min(tried, key=lambda option: option.epoch_s),
        chosen_epoch_s=chosen.epoch_s,
        grid=grid,
        simulated=best.simulated,
        ruled_out=best.ruled_out,
        seconds=time.monotonic() - started,
    )
    return replace(explanation, exhaustive=searched)


def _states(job: Job, fleet: Fleet, chosen: Option, simulate: Simulate, observe: Observer) -> tuple[LinkState, ...]:
    """Return what a training would do at each place of the links' cycles; nothing if no link changes.

    Cycles of different lengths or times do not stay together as they are here, which is how they begin.
    """
    place = {name: number for number, name in enumerate(device_names(job.config))}
    members = sorted(fleet.members, key=lambda member: place[member.name])
    changing = list(dict.fromkeys(member.link for member in members if member.link.cycle))
    count = max((len(link.cycle) for link in changing), default=0)
    states = []
    for number in range(count):
        observe(Preparing("Planning for links that change", number / count))
        there = replace(fleet, members=tuple(replace(m, link=_at(m.link, number)) for m in fleet.members))
        option = chosen if number == 0 else _replanned(job, there, chosen.plans, simulate)
        states.append(LinkState(tuple(_at(link, number) for link in changing), option))
    return tuple(states)


def _leakage_limit_cost(job: Job, rehearse: Rehearse, chosen: Option, observe: Observer) -> LeakageLimitCost | None:
    """Return what the limit on leakage costs; None without one."""
    most = job.config.privacy.max_leakage
    if most is None:
        return None
    if not job.leaky_cuts or not job.method.splits:
        return LeakageLimitCost(most, job.leaky_cuts, chosen, job.leakage_guess)
    free = replace(job, leaky_cuts={})
    fleet, by_paper = free.fleet(), job.config.plan.estimate == "paper"
    plans = (
        plans_by_estimate(free, fleet) if by_paper else search_job_plans(free, fleet, rehearse, observe=observe).plans
    )
    without = Option(plans, epoch_timing(simulation(free, rehearse), fleet.sampled(), plans).epoch_s)
    return LeakageLimitCost(most, job.leaky_cuts, without, job.leakage_guess)


def _at(link: Link, number: int) -> Link:
    return link.cycle[number % len(link.cycle)] if link.cycle else link


def _replanned(job: Job, fleet: Fleet, plans: Plans, simulate: Simulate) -> Option:
    """Return the plans that a training has behind such a change: new ones if it may choose and they are better."""
    if job.method.shares_server_model:
        plans = reencoded(fleet, plans) if job.can_replan else plans
    elif job.can_replan:
        by_paper = job.config.plan.estimate == "paper"
        plans = plans_by_estimate(job, fleet) if by_paper else search_again(fleet, plans)
    return Option(plans, simulate(fleet.sampled(), plans, None).epoch_s)


def _others(chosen: Option, options: Sequence[Option]) -> tuple[Option, ...]:
    return tuple(sorted((o for o in options if o.plans != chosen.plans), key=lambda option: option.epoch_s))


def _search(
    fleet: Fleet,
    simulate: Simulate,
    grid: tuple[int, ...] | None,
    timed: Callable[[Plans], Option],
    observe: Observer,
) -> tuple[ExhaustiveResult, Option]:
    """Return the best of all plans, or of those on a grid of N."""
    alike = _evened(fleet.sampled())

    def progress(done: int, most: int) -> None:
        observe(Preparing(f"Trying every plan: {done:,} of at most {most:,} combinations", done / most))

    if alike.method.shares_server_model:
        best = _best_in_common(alike, simulate, progress)
    else:
        best = search_all(alike, simulate, micro_batches=grid, progress=progress)
    return best, timed(from_sample(fleet, alike, best.by_kind))


def _likeness(member: Member, fleet: Fleet) -> tuple[object, ...]:
    """Return what makes a device's kind, but for the size of its last batch."""
    return (replace(member, samples=0).kind, fleet.iterations(member.samples))


def _evened(fleet: Fleet) -> Fleet:
    """Return the fleet with as many samples for each of its devices that are alike but for their last batch.

    Samples dealt out evenly are often one more for some devices: that makes no other plan for them, but a search of all
    combinations.
    """
    most: dict[tuple[object, ...], int] = {}
    for member in fleet.members:
        likeness = _likeness(member, fleet)
        most[likeness] = max(member.samples, most.get(likeness, 0))
    members = tuple(replace(member, samples=most[_likeness(member, fleet)]) for member in fleet.members)
    return replace(fleet, members=members)


def _grid(fleet: Fleet) -> tuple[int, ...] | None:
    """Return the N to try: None for all of them, if that is not too many combinations of several kinds of devices."""
    options = [[option.plan.micro_batches for option in candidates(fleet, kind[0])] for kind in fleet.device_kinds()]
    if len(options) == 1 or fleet.method.shares_server_model:
        return None
    for grid in (None, *_GRIDS):
        count = prod(sum(grid is None or n in grid for n in of) for of in options)
        if count <= _MOST_COMBINATIONS:
            return grid
    raise InputError(
        f"--exhaustive would try {count:,} combinations of {len(options)} kinds of devices, more than "
        f"{_MOST_COMBINATIONS:,}: give fewer kinds (as many samples for each device, for example), or a split point."
    )


def _best_in_common(fleet: Fleet, simulate: Simulate, progress: Callable[[int, int], None]) -> ExhaustiveResult:
    """Return the best plans with one split point, that of the shared server-side model."""
    found, every = [], plans_in_common(fleet)
    for number, by_kind in enumerate(every, start=1):
        found.append((simulate(fleet, plans_by_device(fleet, by_kind), None).epoch_s, by_kind))
        progress(number, len(every))
    seconds, by_kind = min(found)
    return ExhaustiveResult(by_kind, seconds, simulated=len(found), ruled_out=0)
