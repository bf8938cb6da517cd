"""The virtual world: server and devices as coroutines of one process, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pipar.device.program import DevicePart, Samples
from pipar.events import EpochResult, Observer
from pipar.execution.clock import run_virtually
from pipar.execution.lanes import VirtualLanes
from pipar.execution.spans import Span
from pipar.job.job import Job, shared_costs
from pipar.launch.assemble import Equipment, MakeLanes, ServerSetup, assemble_server, run_device
from pipar.launch.sizes_only import SizesOnlyDevicePart, SizesOnlyLearner, SizesOnlySamples
from pipar.planner.background_search import PlanSearch, search_inline
from pipar.planner.costs import Costs
from pipar.planner.replanner import Replan
from pipar.privacy.budget import PrivacyAccountant
from pipar.server.enrolment import ClosedEnrolment
from pipar.server.interfaces import Learner
from pipar.transport.in_memory import memory_pair
from pipar.wire.orders import Orders

if TYPE_CHECKING:  # a timing-only run does without torch
    from pipar.job.workload import Workload
    from pipar.nn.learner import TorchLearner

Emit = Callable[[EpochResult, list[Span]], None]


def train_virtually(
    job: Job,
    workload: Workload,
    emit: Emit,
    observe: Observer,
    learner: TorchLearner | None = None,
    *,
    replan: Replan | None = None,
    accountant: PrivacyAccountant | None = None,
) -> TorchLearner:
    """Train with the real mathematics in virtual time; return the learner with the global model.

    Who passes the learner in has the model as far as it came, even if the training is interrupted. `replan` makes new
    plans when links change; it may take no virtual time. `accountant` is where what the devices send is counted.
    """
    from pipar.job.model_setup import make_learner, part_builder, repeatable

    learner = learner or make_learner(job, workload)
    build = partial(part_builder, workload)
    validation = workload.held_out_batches("validation")
    training = _train(job, learner, validation, workload.shard, build, emit, observe, replan, accountant=accountant)
    run_virtually(training, within=repeatable(job.config.run.seed))
    return learner


def train_timing_only(
    job: Job,
    emit: Emit,
    observe: Observer,
    *,
    replan: Replan | None = None,
    search: PlanSearch = search_inline,
    accountant: PrivacyAccountant | None = None,
) -> None:
    """Run the same programs over sizes and costs alone, without torch; new plans come from `replan` or `search`."""
    learner = SizesOnlyLearner(job.server_profile, job.split_points)

    def samples(name: str) -> Samples:
        return SizesOnlySamples(job.sizes[name], job.noised_bytes)

    def builder(name: str) -> Callable[[Orders], DevicePart]:
        profile, share = job.device_profiles[name], job.server_profile.changes_share
        return lambda orders: SizesOnlyDevicePart(profile, orders.plan.split_point, share)

    run_virtually(_train(job, learner, (), samples, builder, emit, observe, replan, search, accountant))


async def _train(
    job: Job,
    learner: Learner,
    validation: Sequence[tuple[int, Any]],
    samples: Callable[[str], Samples],
    builder: Callable[[str], Callable[[Orders], DevicePart]],
    emit: Emit,
    observe: Observer,
    replan: Replan | None,
    search: PlanSearch = search_inline,
    accountant: PrivacyAccountant | None = None,
) -> None:
    server_lanes = _lanes(job.server_costs())
    server = assemble_server(
        job,
        ServerSetup(
            learner=learner,
            validation=validation,
            enrolment=ClosedEnrolment(job),
            pool=server_lanes,
            background=server_lanes,
            emit=emit,
            observe=observe,
            replan=replan,
            search=search,
            accountant=accountant,
        ),
    )
    costs = shared_costs()
    try:
        async with asyncio.TaskGroup() as group:
            for spec in job.specs:
                near, far = memory_pair()
                group.create_task(server.admit(far))
                device_lanes = _lanes(costs(job.device_profiles[spec.name], spec.speed))
                equipment = Equipment(samples(spec.name), builder(spec.name), device_lanes, guard=job.guard())
                life = run_device(spec.name, spec.link, equipment, near, keep_spans=job.traced_devices, observe=observe)
                group.create_task(life)
            group.create_task(server.train())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _lanes(costs: Costs) -> MakeLanes:
    return lambda lanes, recorder: VirtualLanes(lanes, recorder, costs.seconds, costs.contention)
