"""Assembling the two programs from their parts; the same for both worlds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from pipar.config import device_names
from pipar.device.interfaces import DeviceLanes, Equipment, MakeLanes
from pipar.device.program import Device
from pipar.events import EpochResult, Observer
from pipar.execution.spans import CORE, SERVER, UPLINK, Recorder, Span
from pipar.job.job import Bounds, Job
from pipar.links import Link
from pipar.methods import Plan
from pipar.planner.background_search import PlanSearch, ReplanBySearch, ReplanEncodings, search_by_estimate
from pipar.planner.predictor import Predictor
from pipar.planner.replanner import Replan, Replanner
from pipar.privacy.budget import PrivacyAccountant
from pipar.server.enrolment import ClosedEnrolment, OpenEnrolment
from pipar.server.epoch_results import ResultCollector, TimeBounds
from pipar.server.interfaces import Checkpointer, Learner, ServerLanes, Services, SessionSettings, Training
from pipar.server.program import Server
from pipar.server.session import fault
from pipar.transport.channel import Channel
from pipar.transport.interface import Transport
from pipar.transport.reconnect import Reconnector


@dataclass(frozen=True)
class ServerSetup:
    """The parts of a server, in addition to its job."""

    learner: Learner
    enrolment: ClosedEnrolment | OpenEnrolment  # which devices may join, and their orders
    pool: MakeLanes
    background: MakeLanes
    emit: Callable[[EpochResult, list[Span]], None]
    observe: Observer
    validation: Sequence[tuple[int, Any]] = ()  # held-out batches
    replan: Replan | None = None  # makes new plans when links change
    search: PlanSearch | None = None  # without `replan`, finds them for what the server has learned of the fleet
    session_numbers: Iterable[int] | None = None
    checkpointer: Checkpointer | None = None
    accountant: PrivacyAccountant | None = None  # with what the devices have spent of their privacy budgets before
    done: Sequence[float | None] = ()  # the validation losses of the epochs that were trained before


def assemble_server(job: Job, setup: ServerSetup) -> Server:
    """Return the server of a job, ready to admit devices."""
    return _ServerBuilder(job, setup).build()


class _ServerBuilder:
    """Makes the parts of a server, and lets those that depend on the fleet follow its changes."""

    def __init__(self, job: Job, setup: ServerSetup) -> None:
        self._job = job
        self._setup = setup
        # A sample of the devices, and the server's own work that is for no device alone.
        own: Container[str] | None
        if isinstance(setup.enrolment, OpenEnrolment):  # its devices are not known yet
            self._kept = own = job.sample_of_traced_devices()
        else:
            self._kept = kept = job.traced_devices
            own = kept | {SERVER} if kept else kept
        self._recorder, self._background = Recorder(SERVER, own), Recorder(SERVER, own)
        # How devices take turns at a shared server-side model is not predicted.
        self._predictor = None if job.method.shares_server_model else Predictor(job.fleet(), job.plans)
        self._replan_encodings = ReplanEncodings(job.fleet(), job.plans)
        self._results = self._make_results()

    def build(self) -> Server:
        """Return the server."""
        job, setup = self._job, self._setup
        setup.enrolment.add_listener(self._follow)
        lanes = ServerLanes(
            setup.pool([f"{CORE} {number}" for number in range(job.cores)], self._recorder),
            setup.background(["validation"], self._background),
            self._recorder,
        )
        services = Services(
            self._results,
            setup.accountant or PrivacyAccountant(job.update_noise),
            self._make_replanner(),
            setup.checkpointer,
            setup.observe,
        )
        sessions = SessionSettings(
            network=job.server_profile,
            resume_window_s=job.config.server.resume_window,
            numbers=setup.session_numbers,
            real_links=isinstance(setup.enrolment, OpenEnrolment),
            keep_spans=self._kept,
        )
        return Server(self._training(), setup.learner, setup.enrolment, lanes, services, sessions)

    def _training(self) -> Training:
        job, config = self._job, self._job.config
        return Training(
            method=job.method,
            epochs=config.run.epochs,
            patience=config.run.patience,
            plans=job.plans,
            min_devices=config.server.min_devices or len(job.specs) or len(device_names(config)),
            round_deadline_s=config.server.round_deadline,
            validation=self._setup.validation,
        )

    def _make_results(self) -> ResultCollector:
        job, enrolment = self._job, self._setup.enrolment

        def bounds_of(plans: Mapping[str, Plan]) -> Bounds:
            return replace(enrolment.job, plans={**enrolment.job.plans, **plans}).bounds()

        return ResultCollector(
            TimeBounds(job.links, job.bounds(), job.cores, bounds_of),
            self._recorder,
            self._background,
            self._setup.emit,
            predictor=self._predictor,
            done=self._setup.done,
        )

    def _make_replanner(self) -> Replanner | None:
        replan = self._setup.replan or self._make_replan()
        if replan is None or not self._job.can_replan:
            return None
        learned = self._predictor.has_learned if self._predictor is not None else lambda: False
        return Replanner(self._job.links, replan, self._setup.observe, learned=learned)

    def _make_replan(self) -> Replan | None:
        """Return how new plans are chosen: P, N and encodings, encodings alone, or none at all."""
        job, search = self._job, self._setup.search
        if search is None:
            return None
        is_auto = not job.specs or any("auto" in (spec.split_point, spec.micro_batches) for spec in job.specs)
        if self._predictor is not None and is_auto:
            return ReplanBySearch(
                self._predictor, search_by_estimate if job.config.plan.estimate == "paper" else search
            )
        return self._replan_encodings if job.config.wire.encoding == "auto" else None

    def _follow(self, job: Job) -> None:
        """Take over a fleet that has grown, or whose machines are known better."""
        self._replan_encodings.fleet, self._replan_encodings.plans = job.fleet(), job.plans
        if self._predictor is not None:
            self._predictor.fleet = self._replan_encodings.fleet
        for name, link in job.links.items():
            self._results.join(name, link)


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
    """Run one device over a transport, from hello to the end; with a reconnector, over as many transports as needed."""
    recorder = Recorder(name, keep_spans)
    on_lost = None if reconnector is None else reconnector.lost
    channel = Channel(transport, recorder, UPLINK, on_lost=on_lost, is_real=is_real)
    channel.emulate(link, attrgetter("up_bps"))
    lanes = DeviceLanes.of(equipment, recorder)
    device = Device(name, equipment, lanes, channel, recorder, observe)
    keeping = None if reconnector is None else asyncio.ensure_future(reconnector.keep_attached(channel))
    try:
        await device.train()
    except asyncio.CancelledError:
        channel.post(fault("it was stopped"))  # so that the server does not wait for it to resume
        raise
    finally:
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        await channel.close()
        lanes.close()
