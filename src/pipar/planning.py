"""A job's plans: which simulation the planner asks, and what it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipar.errors import PlanError
from pipar.events import EpochResult, Event, Observer, Preparing, Progress, ignore
from pipar.forecast import forecast
from pipar.job import Job
from pipar.methods import Plan
from pipar.planner.candidates import candidates
from pipar.planner.costs import Costs
from pipar.planner.fleet import Fleet, Member
from pipar.planner.select import ByKind, Choice, choose, choose_by_estimate
from pipar.planner.timing import Simulate, Timing

#: A fleet of more devices is planned by a sample of it, with as many cores for each device.
_SAMPLE = 128
#: The search ends long before in most cases; a display needs something to count towards.
_USUAL_SIMULATIONS = 60


def planned(job: Job, observe: Observer = ignore) -> Job:
    """Return the job with every device's plan: as configured, or chosen where it says "auto"."""
    return replace(job, plans=make_plans(job, observe))


def make_plans(job: Job, observe: Observer = ignore) -> dict[str, Plan]:
    """Return every device's plan."""
    given = _given_plans(job.fleet())
    if given is not None:
        return given
    if job.config.plan.estimate == "paper":
        chosen = {name: plan for name, (plan, _) in choose_by_estimate(job.fleet()).items()}
        if not job.method.shares_server_model:
            return chosen
        # One server-side model can be cut in one place only: the earliest, which every device can hold.
        common = min(plan.split_point for plan in chosen.values())
        return {name: replace(plan, split_point=common) for name, plan in chosen.items()}
    return plan_choice(job, observe=observe).plans


def _given_plans(fleet: Fleet) -> dict[str, Plan] | None:
    """Return the plans if there is nothing to choose."""
    options = [candidates(fleet, kind[0]) for kind in fleet.kinds()]
    if any(len(of) > 1 for of in options):
        return None
    by_kind = tuple(of[0].plan for of in options)
    cuts = sorted({plan.split_point for plan in by_kind})
    if fleet.method.shares_server_model and len(cuts) > 1:
        raise PlanError(
            f"Split points {', '.join(map(str, cuts))} are given, but this method shares one server-side model: give "
            "all devices the same split point, or use sfl or pipar."
        )
    return everybodys(fleet, by_kind)


def plan_choice(
    job: Job, *, fleet: Fleet | None = None, start: Mapping[str, Plan] | None = None, observe: Observer = ignore
) -> Choice:
    """Return the chosen plans with their runners-up; `start` are those in force, when they are chosen again."""
    fleet = fleet or job.fleet()
    sample = sampled(fleet)
    simulate = simulation(job)

    def progress(done: int) -> None:
        observe(Preparing("Planning", min(0.99, done / _USUAL_SIMULATIONS)))

    begin = tuple(start[kind[0].name] for kind in sample.kinds()) if start is not None else None
    choice = choose(sample, simulate, start=begin, progress=progress)
    observe(Preparing("Planning", 1.0))
    return replace(choice, plans=everybodys(fleet, choice.by_kind))


def everybodys(fleet: Fleet, by_kind: ByKind) -> dict[str, Plan]:
    """Return each device's plan from those of the kinds."""
    return {m.name: plan for kind, plan in zip(fleet.kinds(), by_kind, strict=True) for m in kind}


def simulation(job: Job) -> Simulate:
    """Return what runs plans: the quick simulation where it knows the method, else the virtual world itself."""
    if job.method.shares_server_model:
        return lambda _, plans, iterations: rehearse(replace(job, plans=plans), iterations)
    return lambda fleet, plans, iterations: forecast(fleet, plans, iterations=iterations)


def sampled(fleet: Fleet) -> Fleet:
    """Return a fleet of at most some hundred devices, of every kind its share, with as many cores for each device."""
    count = len(fleet.members)
    if count <= _SAMPLE:
        return fleet
    members: list[Member] = []
    for kind in fleet.kinds():
        members += kind[: max(1, round(len(kind) * _SAMPLE / count))]
    share = fleet.cores * len(members) / count
    cores = max(1, round(share))
    server = Costs(fleet.server.profile, fleet.server.speed * share / cores)
    return replace(fleet, members=tuple(sorted(members, key=lambda m: m.name)), server=server, cores=cores)


def rehearse(job: Job, iterations: int | None) -> Timing:
    """Return the timing of a job's first iterations, from the virtual world itself, without the mathematics."""
    from pipar.virtual import train_without_mathematics

    fleet, run = job.fleet(), job.config.run
    short = replace(
        job,
        config=job.config.model_copy(
            update={"run": run.model_copy(update={"epochs": 1, "patience": None, "trace": "off"})}
        ),
        sizes={name: sum(fleet.batches(size)[:iterations]) for name, size in job.sizes.items()},
    )
    results: list[EpochResult] = []
    ends: dict[str, list[float]] = {name: [] for name in job.sizes}

    def observe(event: Event) -> None:
        if isinstance(event, Progress) and event.owner in ends:
            ends[event.owner].append(event.at_s)

    train_without_mathematics(short, lambda result, _: results.append(result), observe)
    (result,) = results
    most = max(map(len, ends.values()))
    return Timing(
        epoch_s=result.seconds,
        iteration_ends=tuple(max(of[n] for of in ends.values() if n < len(of)) for n in range(most)),
        device_s={name: of[-1] for name, of in ends.items()},
        busy_s={lane: share * result.seconds for lane, share in result.utilisation.items()},
    )
