"""Running a cell: each function takes a configuration and returns a few numbers, small enough for a table."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from tempfile import TemporaryDirectory
from typing import Any

from pipar.errors import TooLittleMemoryError
from pipar.events import EpochResult, ignore
from pipar.job.job import Job
from pipar.job.plans import with_plans
from pipar.job.prepare import unplanned_timing_only_job
from pipar.launch.rehearsal import rehearse
from pipar.launch.simulated import simulate_training, why_programs
from pipar.launch.virtual import train_timing_only
from pipar.methods import Plan
from pipar.planner.candidates import allowed_plans
from pipar.planner.fleet import Fleet, plans_by_device
from pipar.planner.learned_costs import predict_s
from pipar.planner.search import search_kinds, search_plans
from pipar.planner.simulator import simulate, simulate_within
from pipar.planner.stage_times import lane_s
from pipar.planner.timing import steady_epoch_s
from pipar.settings.config import Config
from pipar.settings.config_file import config_from
from pipar.settings.wording import plans_text
from pipar.storage.run_json import plan_from_json
from reproduction.plan_scores import PlansToScore, score_plans
from reproduction.replanning_cost import replanning_cost

Result = dict[str, Any]


def run_cell(how: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> Result:
    """Return the result of a cell; that no plan fits into a device's memory is a result, too."""
    try:
        return {"fits": True, **RUNNERS[how](config_from(config), options)}
    except TooLittleMemoryError as error:
        return {"fits": False, "why": str(error)}


def _timing(config: Config, options: Mapping[str, Any]) -> Result:
    """Run epochs timing-only and return the times, bytes and idle times of the last one."""
    del options
    job, planning_s = _planned(config)
    results: list[EpochResult] = []
    train = train_timing_only if why_programs(job) else simulate_training
    train(job, lambda result, _: results.append(result), ignore)
    last = results[-1]
    return {
        "plan": _plans(job.plans),
        "is_whole": all(plan.split_point == job.layers for plan in job.plans.values()),
        "seconds": last.seconds,
        "server_idle_s": last.server_idle_s,
        "device_idle_s": last.device_idle_s,
        "bytes_up": last.bytes_up,
        "bytes_down": last.bytes_down,
        "utilisation": last.utilisation,
        "server_bytes": server_bytes(job.fleet(), job.plans),
        "planning_s": planning_s,
    }


def _planned(config: Config) -> tuple[Job, float]:
    """Return the job with its plans, and the CPU seconds of choosing them."""
    job = _unplanned(config)
    began = time.process_time()
    job = with_plans(job, rehearse)
    return job, time.process_time() - began


def _unplanned(config: Config) -> Job:
    job = unplanned_timing_only_job(config)
    assert job is not None, "a named network and a named dataset need no inspection"
    return job


def _plans(plans: Mapping[str, Plan]) -> str:
    return plans_text(str(plan) for plan in plans.values())


def _plan(config: Config, options: Mapping[str, Any]) -> Result:
    """Choose plans for a fleet of any size, and predict its epoch from a sample of it."""
    del options
    fleet = _unplanned(config).fleet()
    began = time.process_time()
    plans = search_plans(fleet, simulate, within=simulate_within).plans
    planning_s = time.process_time() - began
    lanes: dict[tuple[Any, ...], dict[str, float]] = {}
    up = down = 0.0
    for member in fleet.members:
        key = (*member.kind, member.samples, plans[member.name])
        if key not in lanes:
            lanes[key] = lane_s(fleet, member, plans[member.name])
        up += lanes[key]["uplink"] * (member.link.up_bps or 0.0) / 8
        down += lanes[key]["downlink"] * (member.link.down_bps or 0.0) / 8
    return {
        "plan": _plans(plans),
        "is_whole": all(plan.split_point == fleet.layers for plan in plans.values()),
        "seconds": predict_s(fleet, plans),
        "bytes_up": round(up),
        "bytes_down": round(down),
        "server_bytes": server_bytes(fleet, plans),
        "planning_s": planning_s,
    }


def _map(config: Config, options: Mapping[str, Any]) -> Result:
    """Choose a plan, and predict the epoch of a fleet with this plan and with every P and each of the given N.

    The two N on either side of the chosen one are added: a coarse grid alone could not find a better plan.
    """
    fleet = _unplanned(config).fleet()
    (kind,) = fleet.device_kinds()
    (chosen,) = search_kinds(fleet, simulate, within=simulate_within).by_kind
    wanted = {*options["micro_batches"], *range(chosen.micro_batches - 2, chosen.micro_batches + 3)}
    plans = [plan for plan in allowed_plans(fleet, kind[0]) if plan.micro_batches in wanted]
    seconds = [steady_epoch_s(simulate, fleet, plans_by_device(fleet, (plan,))) for plan in plans]
    return {
        "chosen": [chosen.split_point, chosen.micro_batches],
        "pairs": [[plan.split_point, plan.micro_batches, s] for plan, s in zip(plans, seconds, strict=True)],
    }


def server_bytes(fleet: Fleet, plans: Mapping[str, Plan]) -> int:
    """Return the size of the models on the server: weights, gradients and momentum of each replica, and returned parts.

    The global model before and after the aggregation is included; activations of micro-batches that are being computed,
    one per core, are not.
    """
    profile = fleet.server.profile
    whole = profile.parameter_bytes(1, fleet.layers)
    parts: dict[int, int] = {}
    for member in fleet.members:
        cut = plans[member.name].split_point
        parts[cut] = parts.get(cut, 0) + 1
    return 2 * whole + sum(
        count * (profile.parameter_bytes(1, cut) + 3 * (whole - profile.parameter_bytes(1, cut)))
        for cut, count in parts.items()
    )


def _search(config: Config, options: Mapping[str, Any]) -> Result:
    """Choose plans, and score them by exhaustive search with times that the planner does not know."""
    fleet = _unplanned(config).fleet()
    before = PlansToScore.of(fleet, options.get("micro_batches"))
    return asdict(score_plans(fleet, before, seed=options["seed"], epochs=0))


def _replan(config: Config, options: Mapping[str, Any]) -> Result:
    """Train for about `training_s` seconds on links that change; return the CPU seconds of choosing again."""
    job, first_planning_s = _planned(config)
    epochs = options.get("epochs") or max(5, math.ceil(options["training_s"] / predict_s(job.fleet(), job.plans)))
    run = job.config.run.model_copy(update={"epochs": epochs})
    job = replace(job, config=job.config.model_copy(update={"run": run}))
    return {**replanning_cost(job), "first_planning_s": first_planning_s}


def _train(config: Config, options: Mapping[str, Any]) -> Result:
    """Train with the mathematics in virtual time; return losses and accuracies, epoch by epoch."""
    from pipar.launch.run import run

    del options
    with TemporaryDirectory() as folder, _runs_in(folder):
        result = run(config, world="virtual")
    columns = ("seconds", "train_loss", "val_loss", "val_accuracy")
    return {
        "plan": _trained_plans(result.content),
        **{name: [epoch[name] for epoch in result.epochs] for name in columns},
        "test_accuracy": result.test_accuracy,
        "weights_sha256": result.content["weights_sha256"],
    }


def _alike(config: Config, options: Mapping[str, Any]) -> Result:
    """Train with several methods; return the largest difference of their weights, over the largest weight."""
    from pipar.launch.run import run, with_method

    with TemporaryDirectory() as folder, _runs_in(folder):
        results = [run(with_method(config, method), world="virtual") for method in options["methods"]]
        first, *others = (result.state_dict() for result in results)
    largest = max(float(weights.abs().max()) for weights in first.values())
    apart = max(float((other[name] - weights).abs().max()) for name, weights in first.items() for other in others)
    return {"plan": _trained_plans(results[-1].content), "largest_difference": apart / largest}


def _trained_plans(content: Mapping[str, Any]) -> str:
    return _plans({entry["device"]: plan_from_json(entry) for entry in content["plans"]})


@contextmanager
def _runs_in(folder: str) -> Iterator[None]:
    """Put the folders of runs there."""
    before = os.environ.get("PIPAR_RUNS")
    os.environ["PIPAR_RUNS"] = folder
    try:
        yield
    finally:
        del os.environ["PIPAR_RUNS"]
        if before is not None:
            os.environ["PIPAR_RUNS"] = before


RUNNERS: dict[str, Callable[[Config, Mapping[str, Any]], Result]] = {
    "timing": _timing,
    "plan": _plan,
    "map": _map,
    "search": _search,
    "replan": _replan,
    "train": _train,
    "alike": _alike,
}
