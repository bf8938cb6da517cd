"""Assembling the two programs from their parts; the same for both worlds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, TypeVar

from pipar.device.interfaces import DeviceLanes, Equipment, MakeLanes
from pipar.device.program import Device
from pipar.events import EpochResult, Observer
from pipar.execution.spans import CORE, EVALUATION, SERVER, UPLINK, Recorder, Span
from pipar.job.job import Bounds, Job
from pipar.methods import Plan
from pipar.planner.background_search import PlanSearch, ReplanBySearch, ReplanEncodings, search_by_estimate
from pipar.planner.learned_costs import Predictor, forecast_rounds
from pipar.planner.replanner import Replan, Replanner
from pipar.privacy.budget import PrivacyAccountant
from pipar.server.allow_list import AllowList
from pipar.server.enrolment import ClosedEnrolment, OpenEnrolment
from pipar.server.epoch_results import ResultCollector, TimeBounds
from pipar.server.interfaces import (
    Checkpointer,
    Deadline,
    Learner,
    ModelKeeper,
    ServerLanes,
    Services,
    SessionSettings,
    Training,
)
from pipar.server.learned_timeouts import ChosenTimeouts
from pipar.server.program import Server
from pipar.server.sampling import Draw
from pipar.server.session import fault
from pipar.server.timeouts import SLOWEST_BPS, Forecast
from pipar.settings.config import Config, device_names
from pipar.settings.links import Link
from pipar.transport.channel import Channel
from pipar.transport.interface import Transport
from pipar.transport.reconnect import Reconnector
from pipar.transport.shaping import RateOverTime

T = TypeVar("T")
#: How long a session may be resumed where the server does not choose that.
_USUAL_WINDOW_S = 30.0
#: By how much epochs of real machines differ, as a share, until a training has shown it.
_USUAL_SCATTER = 0.03


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
    replanner: Replanner | None = None  # decides itself when plans change, and which they are
    deadline: Deadline | None = None  # of each round, if not as configured
    search: PlanSearch | None = None  # without `replan`, finds them for what the server has learned of the fleet
    session_numbers: Iterable[int] | None = None
    checkpointer: Checkpointer | None = None
    best: ModelKeeper | None = None  # keeps the best global model
    accountant: PrivacyAccountant | None = None  # with what the devices have spent of their privacy budgets before
    should_stop: Callable[[], bool] = lambda: False  # whether the caller wants no further round
    drawn: Mapping[str, int] = field(default_factory=dict)  # rounds before, by device, if devices are drawn
    draw: Draw | None = None  # draws them, if not by the seed
    done: Sequence[float | None] = ()  # the validation losses of the epochs that were trained before


def chooses_plans(job: Job) -> bool:
    """Return whether P or N of a device is chosen: then a search may choose again during the training."""
    return not job.specs or any("auto" in (spec.split_point, spec.micro_batches) for spec in job.specs)


@dataclass(frozen=True)
class Bookkeeping:
    """The parts of a server that do not serve devices: results, and new plans."""

    results: ResultCollector
    recorder: Recorder  # of the server's cores
    replanner: Replanner | None


def assemble_bookkeeping(job: Job, setup: ServerSetup) -> Bookkeeping:
    """Return the bookkeeping of a job, for a training without the programs."""
    return _ServerBuilder(job, setup).bookkeeping()


def assemble_server(job: Job, setup: ServerSetup) -> Server:
    """Return the server of a job, ready to admit devices."""
    return _ServerBuilder(job, setup).build()


def most_devices(config: Config) -> int:
    """Return how many devices a deployment waits for: those of the configuration, but no more than may take part."""
    listed, allowed = len(device_names(config)), config.server.allow
    return listed if allowed is None else max(1, min(listed, len(AllowList(allowed).names())))


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
        is_real = bool(job.hosted) or isinstance(setup.enrolment, OpenEnrolment)
        scatter = _USUAL_SCATTER if is_real else 0.0
        self._predictor = None if job.method.shares_server_model else Predictor(job.fleet(), job.plans, scatter=scatter)
        self._replan_encodings = ReplanEncodings(job.fleet(), job.plans)
        self._results = self._make_results()

    def bookkeeping(self) -> Bookkeeping:
        """Return the parts that do not serve devices."""
        return Bookkeeping(self._results, self._recorder, self._make_replanner())

    def build(self) -> Server:
        """Return the server."""
        job, setup = self._job, self._setup
        setup.enrolment.add_listener(self._follow)
        lanes = ServerLanes(
            setup.pool([f"{CORE} {number}" for number in range(job.cores)], self._recorder),
            setup.background(["validation"], self._background),
            self._recorder,
            setup.background([EVALUATION], self._background),
        )
        services = Services(
            self._results,
            setup.accountant or PrivacyAccountant(job.update_noise),
            self._make_replanner(),
            setup.checkpointer,
            setup.observe,
            setup.best,
        )
        sessions = SessionSettings(
            network=job.server_profile,
            resume_window_s=_seconds(job.config.server.resume_window, _USUAL_WINDOW_S),
            numbers=setup.session_numbers,
            real_links=isinstance(setup.enrolment, OpenEnrolment),
            keep_spans=self._kept,
            timeouts=self._chosen_timeouts(),
            targets=job.target_size,
            inputs=job.inputs,
            method=job.method.name,
        )
        return Server(self._training(), setup.learner, setup.enrolment, lanes, services, sessions)

    def _training(self) -> Training:
        job, config, fleet = self._job, self._job.config, self._job.fleet()
        return Training(
            method=job.method,
            epochs=config.run.epochs,
            local_epochs=config.run.local_epochs,
            draw=self._setup.draw or Draw(config.run.devices_per_round, config.run.seed, self._setup.drawn),
            patience=config.run.patience,
            plans=job.plans,
            min_devices=config.server.min_devices or len(job.specs) or most_devices(config),
            round_deadline_s=_seconds(config.server.round_deadline, None),
            validation=self._setup.validation,
            deadline=self._setup.deadline,
            should_stop=self._setup.should_stop,
            at_once=fleet.at_once,
        )

    def _chosen_timeouts(self) -> ChosenTimeouts | None:
        """Return which timeouts the server chooses; none if its devices are known.

        They are processes of one machine, whose end is noticed, and the result of a run may not depend on its load.
        """
        given = self._job.config.server
        if not isinstance(self._setup.enrolment, OpenEnrolment):
            return None
        return ChosenTimeouts(
            deadline=given.round_deadline == "auto",
            resume_window=given.resume_window == "auto",
            keepalive=given.keepalive == "auto",
            forecasts=self._forecasts,
        )

    def _forecasts(self, names: Collection[str]) -> dict[str, Forecast]:
        """Return the forecasts of a round of these devices, by the fleet as it is known now."""
        job = self._setup.enrolment.job
        fleet = replace(job.fleet(), recalled=0.0) if self._predictor is None else self._predictor.now()
        plans = job.plans if self._predictor is None else {**job.plans, **self._predictor.plans}
        known = fleet.of({name for name in names if name in plans})
        try:
            seconds = forecast_rounds(known, plans, SLOWEST_BPS) if known.members else {}
        except (ArithmeticError, LookupError, ValueError):  # a profile with numbers that cannot be computed with
            return {}
        return {name: Forecast(*of) for name, of in seconds.items()}

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
        if self._setup.replanner is not None:
            return self._setup.replanner
        replan = self._setup.replan or self._make_replan()
        if replan is None or not self._job.can_replan:
            return None
        learned = self._predictor.reason if self._predictor is not None else lambda: ""
        return Replanner(self._job.links, replan, self._setup.observe, learned=learned)

    def _make_replan(self) -> Replan | None:
        """Return how new plans are chosen: P, N and encodings, encodings alone, or none at all."""
        job, search = self._job, self._setup.search
        if search is None:
            return None
        if self._predictor is not None and chooses_plans(job):
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


def _seconds(given: float | str, otherwise: T) -> float | T:
    """Return a duration of the configuration; `otherwise` if it does not give one."""
    return otherwise if isinstance(given, str) else given


async def run_device(
    name: str,
    link: Link,
    equipment: Equipment,
    transport: Transport,
    *,
    keep_spans: frozenset[str] | None = None,
    reconnector: Reconnector | None = None,
    is_real: bool = False,
    rates: RateOverTime | None = None,
    observe: Observer,
) -> None:
    """Run one device over a transport, from hello to the end; with a reconnector, over as many transports as needed.

    `rates` are those of its uplink, if not the link's.
    """
    recorder = Recorder(name, keep_spans)
    on_lost = None if reconnector is None else reconnector.lost
    channel = Channel(transport, recorder, UPLINK, on_lost=on_lost, is_real=is_real)
    if rates is None:
        channel.emulate(link, attrgetter("up_bps"))
    else:
        channel.pace(rates, link.latency_s)
    lanes = DeviceLanes.of(equipment, recorder)
    device = Device(name, equipment, lanes, channel, recorder, observe)
    keeping = None if reconnector is None else asyncio.ensure_future(reconnector.keep_attached(channel))
    try:
        await device.train()
    except asyncio.CancelledError:
        channel.post(fault("it was asked to stop"))  # so that the server does not wait for it to resume
        raise
    finally:
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        await channel.close()
        lanes.close()
