"""A training over gRPC and threads, all in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from pipar.device.interfaces import Equipment
from pipar.events import EpochResult, Observer, ignore
from pipar.execution.lanes import ThreadLanes
from pipar.execution.spans import Span
from pipar.job.model_setup import make_learner, part_builder
from pipar.launch.assemble import ServerSetup, assemble_server, run_device
from pipar.planner.replanner import Replan
from pipar.server.enrolment import ClosedEnrolment
from pipar.transport.grpc_connect import connect
from pipar.transport.grpc_listener import Listener
from pipar.transport.limits import Keepalive
from support.training import Case, Trained, make_job
from support.waiting import PATIENCE_S


async def train_over_grpc(
    case: Case,
    replan: Replan | None = None,
    observe: Observer = ignore,
    *,
    late_s: Mapping[str, float] | None = None,
    keepalive: Keepalive | None = None,
    model: nn.Module | None = None,
) -> Trained:
    """Return the outcome of a case with a separate stream for every device; some devices may connect later."""
    torch.set_num_threads(1)
    workload = case.workload(model)
    job = make_job(workload)
    learner = make_learner(job, workload)
    epochs: list[EpochResult] = []
    spans: list[Span] = []

    def emit(result: EpochResult, of_epoch: list[Span]) -> None:
        epochs.append(result)
        spans.extend(of_epoch)

    validation = workload.samples.held_out_batches("validation")
    lanes = partial(ThreadLanes, speed=1.0, accelerator=learner.torch_device.accelerator)
    server = assemble_server(
        job,
        ServerSetup(
            learner=learner,
            validation=validation,
            enrolment=ClosedEnrolment(job),
            pool=lanes,
            background=lanes,
            emit=emit,
            observe=observe,
            replan=replan,
        ),
    )
    listener = Listener(server.admit, keepalive=keepalive)
    port = await listener.start("127.0.0.1:0")

    async def live(name: str) -> None:
        await asyncio.sleep((late_s or {}).get(name, 0.0))
        transport = await connect(f"127.0.0.1:{port}", keepalive=keepalive)
        equipment = Equipment(workload.samples.shard(name), part_builder(workload, name), lanes, guard=job.guard())
        await run_device(name, job.links[name], equipment, transport, observe=ignore)

    try:
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            for name in reversed(workload.names):
                group.create_task(live(name))
            await server.train()
            await server.wait_until_left()
    finally:
        await listener.stop()
        server.close()
    return Trained(job, learner.state(), epochs, spans)
