"""A job's plans: which simulation the planner asks, and what it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from pipar.errors import PlanError
from pipar.events import EpochResult, Observer, Preparing, ignore
from pipar.execution.spans import COMPUTE, DOWNLINK, IO, SERVER, UPLINK, Span, by_lane
from pipar.job.job import Job
from pipar.methods import Plan
from pipar.planner.candidates import allowed_plans
from pipar.planner.encoding import recoded
from pipar.planner.fleet import Fleet
from pipar.planner.large_fleets import choose_for
from pipar.planner.search import Choice, choose_by_estimate, everybodys
from pipar.planner.simulator import simulate, simulate_within
from pipar.planner.timing import Simulate, Timing

#: What counts as a lane's work: the stages of the iterations, and models on the links.
_COUNTED = frozenset({"fc", "bc", "step", "u", "decode", "fs", "bs", "encode", "d", "model"})
#: The search ends long before in most cases; a display needs something to count towards.
_USUAL_SIMULATIONS = 60


def planned(job: Job, observe: Observer = ignore) -> Job:
    """Return the job with every device's plan: as configured, or chosen where it says "auto"."""
    return replace(job, plans=make_plans(job, observe))


def make_plans(job: Job, observe: Observer = ignore) -> dict[str, Plan]:
    """Return every device's plan."""
    fleet = job.fleet()
    given = _given_plans(fleet)
    if given is not None:
        return given
    if job.config.plan.estimate == "paper":
        return plans_by_estimate(job, fleet)
    return plan_choice(job, fleet, observe=observe).plans


def plans_by_estimate(job: Job, fleet: Fleet) -> dict[str, Plan]:
    """Return every device's plan by the paper's estimate."""
    chosen = {name: plan for name, (plan, _) in choose_by_estimate(fleet).items()}
    if not job.method.shares_server_model:
        return chosen
    # One server-side model can be cut in one place only: the earliest, unless another one was given.
    asked = {spec.split_point for spec in job.specs if spec.split_point != "auto"}
    _check_common(asked)
    common = min(asked or {plan.split_point for plan in chosen.values()})
    return recoded(fleet, {name: replace(plan, split_point=common) for name, plan in chosen.items()})


def _given_plans(fleet: Fleet) -> dict[str, Plan] | None:
    """Return the plans if there is nothing to choose."""
    only = []
    for kind in fleet.kinds():
        options = allowed_plans(fleet, kind[0])
        if len(options) > 1:  # of a hundred kinds, all options would take longer than the choice
            return None
        only += options
    by_kind = tuple(only)
    if fleet.method.shares_server_model:
        _check_common({plan.split_point for plan in by_kind})
    return everybodys(fleet, by_kind)


def _check_common(given: set[int]) -> None:
    if len(given) > 1:
        raise PlanError(
            f"Split points {', '.join(map(str, sorted(given)))} are given, but this method shares one server-side "
            "model: give all devices the same split point, or use sfl or pipar."
        )


def plan_choice(
    job: Job, fleet: Fleet, *, start: Mapping[str, Plan] | None = None, observe: Observer = ignore
) -> Choice:
    """Return the chosen plans with their runners-up; `start` are those in force, when they are chosen again."""

    def progress(done: int) -> None:
        observe(Preparing("Planning", min(0.99, done / _USUAL_SIMULATIONS)))

    within = None if job.method.shares_server_model else simulate_within
    choice = choose_for(fleet, simulation(job), within=within, start=start, progress=progress)
    observe(Preparing("Planning", 1.0))
    return choice


def simulation(job: Job) -> Simulate:
    """Return what runs plans: the quick simulation where it knows the method, else the virtual world itself."""
    if job.method.shares_server_model:
        return lambda fleet, plans, iterations: rehearse(_with_fleet(job, fleet, plans), iterations)
    return simulate


def _with_fleet(job: Job, fleet: Fleet, plans: Mapping[str, Plan]) -> Job:
    """Return the job of these devices only, with their links and speeds and the server's as the fleet has them."""
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


def rehearse(job: Job, iterations: int | None) -> Timing:
    """Return the timing of a job's first iterations, from the virtual world itself, without the mathematics."""
    from pipar.launch.virtual import train_without_mathematics

    fleet, run = job.fleet(), job.config.run
    update = {"epochs": 1, "patience": None, "trace": "full"}
    short = replace(
        job,
        config=job.config.model_copy(update={"run": run.model_copy(update=update)}),
        sizes={name: sum(fleet.batches(size, iterations)) for name, size in job.sizes.items()},
    )
    results: list[tuple[EpochResult, list[Span]]] = []
    train_without_mathematics(short, lambda result, spans: results.append((result, spans)), ignore)
    ((result, spans),) = results
    lanes = by_lane(span for span in spans if span.epoch == 1 and not span.waiting)
    start = min(span.start for name in job.sizes for span in lanes[name, IO])

    own = {
        name: tuple(_busy_s(lanes.get((name, lane), [])) for lane in (COMPUTE, UPLINK, DOWNLINK)) for name in job.sizes
    }
    device, uplink, downlink = (max(of) for of in zip(*own.values(), strict=True))
    cores = [of for (owner, _), of in lanes.items() if owner == SERVER]
    return Timing(
        epoch_s=result.seconds,
        ends={
            name: tuple(span.end - start for span in lanes[name, COMPUTE] if span.kind == "step") for name in job.sizes
        },
        busy_s={
            "device": device,
            "uplink": uplink,
            "server": sum(map(_busy_s, cores)) / job.cores,
            "downlink": downlink,
        },
        own_s=own,
    )


def _busy_s(spans: Iterable[Span]) -> float:
    return sum(span.end - span.start for span in spans if span.kind in _COUNTED)
