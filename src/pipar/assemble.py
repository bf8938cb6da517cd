"""Putting the two programs together with what they compute with; the same for both worlds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipar.choosing import Choices, Search, search_by_estimate
from pipar.compute import Compute
from pipar.device import Device, DevicePart, Samples
from pipar.events import EpochResult, Observer
from pipar.foresight import Foresight
from pipar.job import Job
from pipar.ledger import Ledger
from pipar.link.channel import Channel, Transport
from pipar.methods import Plan
from pipar.planner.profile import Profile
from pipar.protocol.orders import Orders
from pipar.replanning import Choose, Replanner
from pipar.server import Learner, PlanJoined, Server, Training
from pipar.trace import COMPUTE, CORE, IO, SERVER, UPLINK, Recorder, Span

#: Makes lanes of these names that leave their spans with this recorder.
MakeCompute = Callable[[Sequence[str], Recorder], Compute]


def assemble_server(
    job: Job,
    learner: Learner,
    validation: Sequence[tuple[int, Any]],
    *,
    pool: MakeCompute,
    background: MakeCompute,
    emit: Callable[[EpochResult, list[Span]], None],
    observe: Observer,
    plan_joined: PlanJoined | None = None,
    choose: Choose | None = None,
    search: Search | None = None,
) -> Server:
    """Return the server of a job, ready to admit its devices.

    With `plan_joined` the devices' own profiles decide on their first plans. `choose` makes new ones when links change;
    without it, they are those that `search` finds for what the server has learned of the fleet.
    """
    keep = job.traced_devices
    own = keep | {SERVER} if keep else keep  # a sample of the devices, and all that the server does for nobody alone
    recorder, beside = Recorder(SERVER, own), Recorder(SERVER, own)
    # How a shared server-side model is served, device by device in turn, is not foreseen.
    foresight = None if job.method.shares_server_model else Foresight(job.fleet(), job.plans)
    is_auto = any("auto" in (spec.split_point, spec.micro_batches) for spec in job.specs)
    if choose is None and search is not None and foresight is not None and is_auto:
        by_paper = job.config.plan.estimate == "paper"
        choose = Choices(foresight, search_by_estimate if by_paper else search)

    joined = job  # with the profiles that the devices bring

    def plan(profiles: Mapping[str, Profile]) -> Mapping[str, Plan]:
        assert plan_joined is not None
        nonlocal joined
        joined = replace(job, device_profiles={**job.device_profiles, **profiles})
        if foresight is not None:
            foresight.fleet = joined.fleet()
        return plan_joined(profiles)

    ledger = Ledger(
        job.links,
        job.bounds(),
        job.cores,
        recorder=recorder,
        background=beside,
        emit=emit,
        bounds_of=lambda plans: replace(joined, plans=plans).bounds(),
        foresight=foresight,
    )
    replanner = None
    if choose is not None and can_replan(job):
        learned = foresight.has_learned if foresight is not None else lambda: False
        replanner = Replanner(job.links, choose, observe, learned=learned)
    training = Training(
        method=job.method,
        epochs=job.config.run.epochs,
        patience=job.config.run.patience,
        orders=job.orders(),
        links=job.links,
        validation=validation,
        profile=job.server_profile,
    )
    return Server(
        training,
        learner,
        pool=pool([f"{CORE} {number}" for number in range(job.cores)], recorder),
        background=background(["validation"], beside),
        recorder=recorder,
        ledger=ledger,
        keep_spans=keep,
        plan_joined=None if plan_joined is None else plan,
        replanner=replanner,
        observe=observe,
    )


def can_replan(job: Job) -> bool:
    """Return whether a device can be given another plan between two rounds.

    Not where devices share a server-side model, which has one cut; in federated learning there is nothing to choose.
    """
    return job.config.plan.replan and job.method.splits and not job.method.shares_server_model


async def run_device(
    job: Job,
    name: str,
    samples: Samples,
    build_part: Callable[[Orders], DevicePart],
    transport: Transport,
    *,
    compute: MakeCompute,
    observe: Observer,
    profile: Profile | None = None,
) -> None:
    """Run one device of a job over a transport, from hello to the end."""
    recorder = Recorder(name, job.traced_devices)
    link = job.links[name]
    channel = Channel(transport, recorder, UPLINK)
    cycle = [other.up_bps for other in link.cycle]
    channel.shape(link.up_bps, link.latency_s, cycle=cycle, every_s=link.every_s)
    lanes = compute([COMPUTE], recorder), compute([IO], recorder)
    device = Device(
        name,
        samples,
        build_part,
        channel=channel,
        compute=lanes[0],
        io=lanes[1],
        recorder=recorder,
        profile=profile,
        observe=observe,
    )
    try:
        await device.train()
    finally:
        await channel.close()
        for lane in lanes:
            lane.close()
