"""The virtual world: server and devices as coroutines of one process, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pipar.device.interfaces import DevicePart, Equipment, EvaluationSamples, MakeLanes, Samples
from pipar.events import EpochResult, Observer
from pipar.execution.clock import run_virtually
from pipar.execution.lanes import Accelerator, VirtualLanes
from pipar.execution.spans import Span
from pipar.job.job import Job, shared_costs
from pipar.launch.assemble import ServerSetup, assemble_server, run_device
from pipar.launch.sizes_only import SizesOnlyDevicePart, SizesOnlyEvaluation, SizesOnlyLearner, SizesOnlySamples
from pipar.planner.background_search import PlanSearch, search_inline
from pipar.planner.costs import Costs
from pipar.planner.replanner import Replan
from pipar.privacy.budget import PrivacyAccountant
from pipar.profiling.memory import Memory
from pipar.server.enrolment import ClosedEnrolment
from pipar.server.interfaces import ModelKeeper
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
    best: ModelKeeper | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> TorchLearner:
    """Train with the real mathematics in virtual time; return the learner with the global model.

    A caller that passes the `learner` keeps the model if the training is interrupted. `replan` makes new plans when
    links change; it takes no virtual time. `accountant` counts the updates that devices send; `best` keeps the best
    model. No round begins after `should_stop` has returned True.
    """
    # Imports torch, which a timing-only run does without.
    from pipar.job.model_setup import deterministic, make_learner, part_builder
    from pipar.job.torch_devices import device_torch_device

    learner = learner or make_learner(job, workload)
    server_lanes = _lanes(job.server_costs(), learner.torch_device.accelerator)
    setup = ServerSetup(
        learner=learner,
        validation=workload.samples.held_out_batches("validation"),
        enrolment=ClosedEnrolment(job),
        pool=server_lanes,
        background=server_lanes,
        emit=emit,
        observe=observe,
        replan=replan,
        search=search_inline,
        accountant=accountant,
        best=best,
        should_stop=should_stop,
    )
    memory = _memory(job)

    def evaluation(device: str) -> EvaluationSamples | None:
        return workload.evaluation_samples(device, memory[device])

    def accelerator(device: str) -> Accelerator | None:
        return device_torch_device(job.config, device).accelerator

    training = _train(job, setup, workload.samples.shard, partial(part_builder, workload), evaluation, accelerator)
    run_virtually(training, within=deterministic(job.config.run.seed))
    return learner


def train_timing_only(
    job: Job,
    emit: Emit,
    observe: Observer,
    *,
    replan: Replan | None = None,
    search: PlanSearch = search_inline,
    accountant: PrivacyAccountant | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Run the same programs with sizes and costs only, without torch; `replan` or `search` makes new plans."""
    setup = timing_only_setup(
        job, emit, observe, replan=replan, search=search, accountant=accountant, should_stop=should_stop
    )

    def samples(device: str) -> Samples:
        return SizesOnlySamples(job.sizes[device], job.noised_bytes, job.target_size)

    def part_builder(device: str) -> Callable[[Orders], DevicePart]:
        profile, share = job.device_profiles[device], job.server_profile.changes_share
        return lambda orders: SizesOnlyDevicePart(profile, orders.plan.split_point, share, targets=job.target_size)

    memory = _memory(job)

    def evaluation(device: str) -> EvaluationSamples | None:
        count = job.evaluation_sizes.get(device)
        return None if count is None else SizesOnlyEvaluation(count, memory[device])

    run_virtually(_train(job, setup, samples, part_builder, evaluation))


def timing_only_setup(
    job: Job,
    emit: Emit,
    observe: Observer,
    *,
    replan: Replan | None = None,
    search: PlanSearch = search_inline,
    accountant: PrivacyAccountant | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> ServerSetup:
    """Return the parts of a server that trains with sizes only."""
    server_lanes = _lanes(job.server_costs())
    return ServerSetup(
        learner=SizesOnlyLearner(
            job.server_profile,
            job.split_points,
            cache_bytes=job.config.server.activation_cache,
            targets=job.target_size,
        ),
        validation=(),
        enrolment=ClosedEnrolment(job),
        pool=server_lanes,
        background=server_lanes,
        emit=emit,
        observe=observe,
        replan=replan,
        search=search,
        accountant=accountant,
        should_stop=should_stop,
    )


def _memory(job: Job) -> dict[str, Memory]:
    """Return the memory of each device's process."""
    return {spec.name: Memory(job.device_profiles[spec.name], spec.memory_bytes) for spec in job.specs}


async def _train(
    job: Job,
    setup: ServerSetup,
    samples: Callable[[str], Samples],
    part_builder: Callable[[str], Callable[[Orders], DevicePart]],
    evaluation: Callable[[str], EvaluationSamples | None],
    accelerator: Callable[[str], Accelerator | None] = lambda _: None,
) -> None:
    """Run the server and all devices of a job to the end; the functions take a device's name."""
    server, costs = assemble_server(job, setup), shared_costs()
    try:
        async with asyncio.TaskGroup() as group:
            for spec in job.specs:
                near, far = memory_pair()
                group.create_task(server.admit(far))
                lanes = _lanes(costs(job.device_profiles[spec.name], spec.speed), accelerator(spec.name))
                parts = samples(spec.name), part_builder(spec.name)
                equipment = Equipment(*parts, lanes, guard=job.guard(), evaluation=evaluation(spec.name))
                device = run_device(
                    spec.name, spec.link, equipment, near, keep_spans=job.traced_devices, observe=setup.observe
                )
                group.create_task(device)
            group.create_task(server.train())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _lanes(costs: Costs, accelerator: Accelerator | None = None) -> MakeLanes:
    return lambda lanes, recorder: VirtualLanes(lanes, recorder, costs.seconds, costs.contention, accelerator)
