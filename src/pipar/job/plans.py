"""The plans of a job: as configured, by the paper's estimate, or by a search with simulations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from pipar.errors import PlanError
from pipar.events import Observer, Preparing, ignore
from pipar.job.job import Job
from pipar.methods import Plan
from pipar.planner.candidates import allowed_plans
from pipar.planner.encoding_choice import reencoded
from pipar.planner.fleet import Fleet, plans_by_device
from pipar.planner.paper_selection import estimate_plans
from pipar.planner.search import SearchResult, search_plans
from pipar.planner.simulator import simulate, simulate_within
from pipar.planner.timing import Simulate, Timing
from pipar.planner.uncut_plans import surest

#: Returns the timing of a job's first iterations, or of a whole epoch, by a timing-only run of its programs.
Rehearse = Callable[[Job, int | None], Timing]
#: For the progress bar. Most searches end long before this number.
_USUAL_SIMULATIONS = 60


def with_plans(job: Job, rehearse: Rehearse, observe: Observer = ignore) -> Job:
    """Return the job with every device's plan: as configured, or chosen where the configuration says "auto"."""
    return replace(job, plans=make_plans(job, rehearse, observe))


def make_plans(job: Job, rehearse: Rehearse, observe: Observer = ignore) -> dict[str, Plan]:
    """Return every device's plan."""
    fleet = job.fleet()
    given = _given_plans(fleet)
    if given is not None:
        return given
    if job.config.plan.estimate == "paper":
        return plans_by_estimate(job, fleet)
    found = search_job_plans(job, fleet, rehearse, observe=observe).plans
    return found if job.method.shares_server_model else dict(surest(fleet, found))


def plans_by_estimate(job: Job, fleet: Fleet) -> dict[str, Plan]:
    """Return every device's plan by the paper's estimate."""
    chosen = {name: plan for name, (plan, _) in estimate_plans(fleet).items()}
    if not job.method.shares_server_model:
        return chosen
    # One server-side model has one cut: the given one, or the earliest of those chosen.
    asked = {spec.split_point for spec in job.specs if spec.split_point != "auto"}
    check_common(asked)
    common = min(asked or {plan.split_point for plan in chosen.values()})
    return reencoded(fleet, {name: replace(plan, split_point=common) for name, plan in chosen.items()})


def _given_plans(fleet: Fleet) -> dict[str, Plan] | None:
    """Return the plans if the configuration leaves nothing to choose, else None."""
    only = []
    for kind in fleet.device_kinds():
        options = allowed_plans(fleet, kind[0])
        if len(options) > 1:  # listing the options of a hundred kinds would take longer than the search
            return None
        only += options
    by_kind = tuple(only)
    if fleet.method.shares_server_model:
        check_common({plan.split_point for plan in by_kind})
    return plans_by_device(fleet, by_kind)


def check_common(given: set[int]) -> None:
    """Raise PlanError if devices that share a server-side model are given different split points."""
    if len(given) > 1:
        raise PlanError(
            f"Split points {', '.join(map(str, sorted(given)))} are given, but this method shares one server-side "
            "model: give all devices the same split point, or use sfl or pipar."
        )


def search_job_plans(
    job: Job, fleet: Fleet, rehearse: Rehearse, *, start: Mapping[str, Plan] | None = None, observe: Observer = ignore
) -> SearchResult:
    """Return the chosen plans with their runners-up; `start` are the current ones, when plans are chosen again."""

    def progress(done: int) -> None:
        observe(Preparing("Planning", min(0.99, done / _USUAL_SIMULATIONS)))

    within = None if job.method.shares_server_model else simulate_within
    choice = search_plans(fleet, simulation(job, rehearse), within=within, start=start, progress=progress)
    observe(Preparing("Planning", 1.0))
    return choice


def simulation(job: Job, rehearse: Rehearse) -> Simulate:
    """Return a function that times plans: the planner's simulator if it covers the method, else a timing-only run."""
    if job.method.shares_server_model:
        return lambda fleet, plans, iterations: rehearse(_with_fleet(job, fleet, plans), iterations)
    return simulate


def _with_fleet(job: Job, fleet: Fleet, plans: Mapping[str, Plan]) -> Job:
    """Return the job with only the devices of a fleet, and with the fleet's links and speeds."""
    members = {member.name: member for member in fleet.members}
    here = [spec for spec in job.specs if spec.name in members]
    server = job.config.server.model_copy(update={"cores": fleet.cores, "speed": fleet.server.speed})
    return replace(
        job,
        config=job.config.model_copy(update={"server": server}),
        specs=tuple(replace(s, link=members[s.name].link, speed=members[s.name].costs.speed) for s in here),
        sizes={name: member.samples for name, member in members.items()},
        plans=plans,
    )
