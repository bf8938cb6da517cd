"""Putting the two programs together with what they compute with; the same for both worlds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from pipar.config import device_names
from pipar.device.program import Device, DevicePart, Samples
from pipar.events import EpochResult, Observer
from pipar.execution.lanes import Lanes
from pipar.execution.spans import COMPUTE, CORE, IO, NOISE, SERVER, UPLINK, Recorder, Span
from pipar.job.job import Job
from pipar.links import Link
from pipar.planner.background_search import PlanSearch, ReplanBySearch, ReplanEncodings, search_by_estimate
from pipar.planner.predictor import Predictor
from pipar.planner.replanner import Replan, Replanner
from pipar.privacy.budget import PrivacyAccountant, PrivacyGuard
from pipar.profiling.profile import Profile
from pipar.server.enrolment import ClosedEnrolment, OpenEnrolment
from pipar.server.epoch_results import ResultCollector
from pipar.server.program import Checkpointer, Learner, Server, Training
from pipar.server.session import fault
from pipar.transport.channel import Channel, Transport
from pipar.transport.reconnect import Reconnector
from pipar.wire.orders import Orders

#: Makes lanes of these names that leave their spans with this recorder.
MakeCompute = Callable[[Sequence[str], Recorder], Lanes]


def assemble_server(
    job: Job,
    learner: Learner,
    validation: Sequence[tuple[int, Any]],
    *,
    enrolment: ClosedEnrolment | OpenEnrolment,
    pool: MakeCompute,
    background: MakeCompute,
    emit: Callable[[EpochResult, list[Span]], None],
    observe: Observer,
    replan: Replan | None = None,
    search: PlanSearch | None = None,
    session_numbers: Iterable[int] | None = None,
    checkpointer: Checkpointer | None = None,
    accountant: PrivacyAccountant | None = None,
    done: Sequence[float | None] = (),
) -> Server:
    """Return the server of a job, ready to admit devices; `enrolment` says which, and by which orders.

    `replan` makes new plans when links change; without it, they are those that `search` finds for what the server has
    learned of the fleet. `accountant` is what the devices have spent of their privacy before, and where it is counted.
    `done` are the validation losses of the epochs that were trained before.
    """
    config = job.config
    keep = job.traced_devices
    own = keep | {SERVER} if keep else keep  # a sample of the devices, and all that the server does for nobody alone
    recorder, beside = Recorder(SERVER, own), Recorder(SERVER, own)
    # How a shared server-side model is served, device by device in turn, is not foreseen.
    predictor = None if job.method.shares_server_model else Predictor(job.fleet(), job.plans)
    is_auto = not job.specs or any("auto" in (spec.split_point, spec.micro_batches) for spec in job.specs)
    replan_encodings = ReplanEncodings(job.fleet(), job.plans)
    if replan is None and search is not None and predictor is not None and is_auto:
        by_paper = config.plan.estimate == "paper"
        replan = ReplanBySearch(predictor, search_by_estimate if by_paper else search)
    elif replan is None and search is not None and config.wire.encoding == "auto":
        replan = replan_encodings
    results = ResultCollector(
        job.links,
        job.bounds(),
        job.cores,
        recorder=recorder,
        background=beside,
        emit=emit,
        bounds_of=lambda plans: replace(enrolment.job, plans={**enrolment.job.plans, **plans}).bounds(),
        predictor=predictor,
        done=done,
    )
    replanner = None
    if replan is not None and job.can_replan:
        learned = predictor.has_learned if predictor is not None else lambda: False
        replanner = Replanner(job.links, replan, observe, learned=learned)

    def changed(now: Job) -> None:
        """Tell everybody who counts on the fleet that it has grown, or that its machines are known better."""
        replan_encodings.fleet, replan_encodings.plans = now.fleet(), now.plans
        if predictor is not None:
            predictor.fleet = replan_encodings.fleet
        for name, link in now.links.items():
            results.join(name, link)

    enrolment.add_listener(changed)
    training = Training(
        method=job.method,
        epochs=config.run.epochs,
        patience=config.run.patience,
        plans=job.plans,
        min_devices=config.server.min_devices or len(job.specs) or len(device_names(config)),
        round_deadline_s=config.server.round_deadline,
        resume_window_s=config.server.resume_window,
        validation=validation,
        profile=job.server_profile,
    )
    return Server(
        training,
        learner,
        enrolment,
        pool=pool([f"{CORE} {number}" for number in range(job.cores)], recorder),
        background=background(["validation"], beside),
        recorder=recorder,
        results=results,
        keep_spans=keep,
        session_numbers=session_numbers,
        real_links=isinstance(enrolment, OpenEnrolment),
        replanner=replanner,
        checkpointer=checkpointer,
        accountant=accountant or PrivacyAccountant(job.update_noise),
        observe=observe,
    )


@dataclass(frozen=True)
class Equipment:
    """What a device brings along: its data, what builds its part of a network, what it computes on, its own profile,

    and what it lets nobody else decide: the noise on what it sends, and how often it sends it.
    """

    samples: Samples
    build_part: Callable[[Orders], DevicePart]
    compute: MakeCompute
    profile: Profile | None = None
    guard: PrivacyGuard = field(default_factory=PrivacyGuard)  # one for all of the device's sessions


async def run_device(
    name: str,
    link: Link,
    equipment: Equipment,
    transport: Transport,
    *,
    keep_spans: frozenset[str] | None = None,
    reconnector: Reconnector | None = None,
    is_real: bool = False,
    observe: Observer,
) -> None:
    """Run one device over a transport, from hello to the end; with a reconnector over as many as it takes."""
    recorder = Recorder(name, keep_spans)
    on_lost = None if reconnector is None else reconnector.lost
    channel = Channel(transport, recorder, UPLINK, on_lost=on_lost, is_real=is_real)
    channel.emulate(link, attrgetter("up_bps"))
    lanes = [equipment.compute([lane], recorder) for lane in (COMPUTE, IO, NOISE)]
    device = Device(
        name,
        equipment.samples,
        equipment.build_part,
        channel=channel,
        compute=lanes[0],
        io=lanes[1],
        noise=lanes[2],
        recorder=recorder,
        profile=equipment.profile,
        guard=equipment.guard,
        observe=observe,
    )
    keeping = None if reconnector is None else asyncio.ensure_future(reconnector.keep_attached(channel))
    try:
        await device.train()
    except asyncio.CancelledError:
        channel.post(fault("it was stopped"))  # so that nobody waits for its return
        raise
    finally:
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        await channel.close()
        for lane in lanes:
            lane.close()
