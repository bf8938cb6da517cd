"""Replaying a recorded training in virtual time: as it was, or as it would have been under other conditions.

The programs are those of production, with sizes instead of tensors. Their work takes as long as recorded, their links
have the recorded rates, and devices join, are away and are lost when they were.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pipar.device.interfaces import DevicePart, Equipment, MakeLanes
from pipar.errors import InputError, PiparError, TrainingError
from pipar.events import EpochResult, Event, Joined, Observer, Preparing, Waiting, ignore
from pipar.execution.clock import run_virtually
from pipar.execution.lanes import VirtualLanes
from pipar.execution.spans import Recorder, Span
from pipar.execution.work import Place, Work
from pipar.job.job import Job
from pipar.launch.assemble import ServerSetup, assemble_server, run_device
from pipar.launch.replay_parts import (
    OrderedLanes,
    RecordedDeadline,
    RecordedDraw,
    RecordedOrder,
    RecordedPlans,
    ReplayedLearner,
    ReplayedPart,
    ReplayEnrolment,
)
from pipar.launch.sizes_only import SizesOnlySamples
from pipar.methods import Plan, check_plan
from pipar.recording.flight import Flight, RecordedEvent
from pipar.recording.lookup import RecordedTimes, ReplayClock, ReplayedRates, RoundRates
from pipar.recording.recorder import link_models
from pipar.server.program import Server
from pipar.transport.in_memory import MemoryTransport, memory_pair
from pipar.wire.orders import Orders

#: A device that is lost is excluded from its round right after that.
_RIGHT_AFTER_S = 1.0


@dataclass(frozen=True)
class Change:
    """Other conditions than the recorded ones."""

    plan: tuple[int, int] | None = None  # P and N of all devices, in every round
    link_factor: float = 1.0
    without: frozenset[str] = frozenset()

    @property
    def is_none(self) -> bool:
        return self == Change()

    def __str__(self) -> str:
        words = [] if self.plan is None else [f"P={self.plan[0]} N={self.plan[1]}"]
        words += [f"links x {self.link_factor:g}"] if self.link_factor != 1.0 else []
        words += [f"without {', '.join(sorted(self.without))}"] if self.without else []
        return ", ".join(words)


@dataclass
class Replayed:
    """The epochs of a replay, by the number of the recorded round, and the spans of those that were asked for."""

    results: dict[int, EpochResult] = field(default_factory=dict)
    spans: dict[int, list[Span]] = field(default_factory=dict)


def replay(
    flight: Flight,
    change: Change | None = None,
    *,
    spans_of: frozenset[int] = frozenset(),
    observe: Observer = ignore,
) -> Replayed:
    """Return what the training takes in virtual time; `spans_of` are rounds whose spans are kept.

    `observe` is told after each round how far the replay is.
    """
    change = change or Change()
    out = Replayed()
    what = "Replaying the recording" if change.is_none else f"Replaying with {change}"

    def emit(result: EpochResult, spans: list[Span]) -> None:
        number = result.epoch + flight.first_round - 1
        out.results[number] = result
        observe(Preparing(what, len(out.results) / len(flight.rounds)))
        if number in spans_of:
            out.spans[number] = spans

    one = _Replay(flight, _changed_job(flight, change), change)
    try:
        run_virtually(one.train(emit))
    except TrainingError as error:
        done = max(out.results, default=flight.first_round - 1)
        why = one.why_it_waits(done + 1) or error
        raise TrainingError(f"The replay cannot continue after round {done} of the recording: {why}") from None
    return out


def _changed_job(flight: Flight, change: Change) -> Job:
    """Return the job under other conditions, or raise an InputError that says why they are impossible."""
    job = flight.job
    names = [spec.name for spec in job.specs]
    unknown = sorted(change.without - set(names))
    if unknown:
        raise InputError(f"'{unknown[0]}' is not a device of this recording; there are {', '.join(names[:20])}.")
    if change.without >= set(names):
        raise InputError("Without all of its devices there is nothing to replay: leave at least one.")
    if not (math.isfinite(change.link_factor) and change.link_factor > 0):
        raise InputError(f"{change.link_factor:g} is not a factor for links: give a number above 0, such as 2.")
    left = [spec for spec in job.specs if spec.name not in change.without]
    plans = {spec.name: _changed_plan(job, job.plans[spec.name], change) for spec in left}
    least = min(job.config.server.min_devices or 1, len(left))
    server = job.config.server.model_copy(update={"min_devices": least})
    return replace(
        job,
        specs=tuple(replace(spec, link=spec.link.times(change.link_factor)) for spec in left),
        sizes={spec.name: job.sizes[spec.name] for spec in left},
        device_profiles={spec.name: job.device_profiles[spec.name] for spec in left},
        plans=plans,
        config=job.config.model_copy(update={"server": server}),
    )


def _changed_plan(job: Job, plan: Plan, change: Change) -> Plan:
    if change.plan is None:
        return plan
    split_point, micro_batches = change.plan
    method = job.method
    if not method.splits:
        raise InputError(f"--plan: {method.name} trains the whole network on devices, so it has no other plans.")
    if not method.pipelines and micro_batches != 1:
        raise InputError(f"--plan: {method.name} does not cut batches: give N = 1, as in {split_point},1.")
    wanted = replace(plan, split_point=split_point, micro_batches=micro_batches)
    try:
        return check_plan(wanted, layers=job.layers, batch_size=job.config.run.batch_size, model=job.model)
    except PiparError as error:
        raise InputError(str(error)) from None


class _Replay:
    """One replay: the server, the devices, and what happened to them."""

    def __init__(self, flight: Flight, job: Job, change: Change) -> None:
        self._flight = flight
        self._job = job
        self._change = change
        self._plans = {flight.epoch_of(one): one.plans for one in flight.rounds}
        self._drawn = {flight.epoch_of(one): one.times.devices.keys() | one.times.down for one in flight.rounds}
        self._clock = ReplayClock(flight, self._round_begins, follows_devices=change.is_none)
        self._times = RecordedTimes(flight, job, self._plan_of)
        self._job = replace(job, server_profile=replace(job.server_profile, changes_share=self._times.changes_share()))
        self._events = [e for e in flight.events if e.device in job.sizes]
        self._joined = asyncio.Event()
        self._waiting: Waiting | None = None  # until enough devices have joined
        self._ends: dict[str, tuple[MemoryTransport, MemoryTransport]] = {}
        self._tasks: dict[asyncio.Task[Any], MemoryTransport | None] = {}  # with a device's end of its connection

    def _plan_of(self, device: str, epoch: int) -> Plan:
        if self._change.plan is not None:
            return self._job.plans[device]
        return self._plans.get(epoch, {}).get(device, self._job.plans[device])

    def why_it_waits(self, number: int) -> str:
        """Return why a round cannot begin, if the server waits for devices; none joins any more."""
        if self._waiting is None:
            return ""
        present, wanted = self._waiting.present, self._waiting.wanted
        left = "no device is left" if not present else f"only {present} of {wanted} devices are left"
        return f"{left} in round {number}; the others were lost before, or are left out."

    async def train(self, emit: Callable[[EpochResult, list[Span]], None]) -> None:
        """Run the training to its end."""
        self._loop = asyncio.get_running_loop()
        first = self._flight.rounds[0].start
        present = [name for name in self._job.sizes if self._flight.joined_at(name) <= first]
        self._deadline = RecordedDeadline(is_needed=any(map(self._was_too_late, self._events)))
        self._server = self._make_server(emit)
        for name in present:
            self._start(name)
        training = self._loop.create_task(self._train_when_joined(set(present)))
        self._tasks[training] = None
        try:
            await self._supervise(training)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._server.close()

    async def _train_when_joined(self, devices: set[str]) -> None:
        while not devices <= {session.device for session in self._server.sessions}:
            self._joined.clear()
            await self._joined.wait()
        await self._server.train()

    async def _supervise(self, training: asyncio.Task[None]) -> None:
        """Return when the training has ended; raise what ended a device that was not lost."""
        while not training.done():
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                end = self._tasks.pop(task)
                error = task.exception() if not task.cancelled() else None
                if error is not None and (task is training or any(end is near for near, _ in self._ends.values())):
                    raise error
        if not training.cancelled() and (error := training.exception()) is not None:
            raise error

    def _make_server(self, emit: Callable[[EpochResult, list[Span]], None]) -> Server:
        job = self._job
        plans = {} if self._change.plan is not None else self._plans
        learner = ReplayedLearner(job.server_profile, job.split_points, self._share_down, targets=job.target_size)
        learner.changes_bytes = partial(self._changes_bytes, "down")
        return assemble_server(
            job,
            ServerSetup(
                learner=learner,
                enrolment=ReplayEnrolment(job),
                pool=self._cores(),
                background=self._server_lanes(),
                emit=emit,
                observe=self._observe,
                replanner=RecordedPlans(plans),
                draw=RecordedDraw(job.config.run.devices_per_round, self._drawn),
                deadline=self._deadline if job.config.server.round_deadline == "auto" else None,
            ),
        )

    def _device_lanes(self, name: str) -> MakeLanes:
        def timed(work: Work) -> float:
            self._clock.note_work(name, work, self._loop.time())
            return self._times.device_s(name, work)

        return lambda lanes, recorder: VirtualLanes(lanes, recorder, timed)

    def _server_lanes(self) -> MakeLanes:
        return lambda lanes, recorder: VirtualLanes(lanes, recorder, self._times.server_s)

    def _cores(self) -> MakeLanes:
        """Return how the server's cores are made; under other conditions, micro-batches come in another order."""
        if not self._change.is_none:
            return self._server_lanes()
        order = RecordedOrder({self._flight.epoch_of(one): one for one in self._flight.rounds})

        def make(lanes: Sequence[str], recorder: Recorder) -> VirtualLanes:
            cores = OrderedLanes(lanes, recorder, self._times.server_s)
            cores.order = order
            return cores

        return make

    def _share_down(self, place: Place) -> float | None:
        epoch, device = place[0], place[-1]
        assert isinstance(epoch, int)
        return self._times.share(str(device), epoch, "down")

    def _changes_bytes(self, way: str, device: str) -> int | None:
        return self._times.changes_bytes(device, self._clock.epoch, way)

    # --- devices

    def _start(self, name: str) -> None:
        """Let a device connect."""
        near, far = memory_pair()
        self._ends[name] = near, far
        self._tasks[self._loop.create_task(self._server.admit(far))] = None
        self._tasks[self._loop.create_task(self._run_device(name, near))] = near

    async def _run_device(self, name: str, near: MemoryTransport) -> None:
        job = self._job
        samples = SizesOnlySamples(job.sizes[name], job.noised_bytes, job.target_size)
        equipment = Equipment(samples, self._part_builder(name), self._device_lanes(name), guard=job.guard())
        link = job.links[name]
        rates = self._rates(name, 0)
        await run_device(name, link, equipment, near, keep_spans=job.traced_devices, rates=rates, observe=ignore)

    def _part_builder(self, name: str) -> Callable[[Orders], DevicePart]:
        profile, share = self._job.device_profiles[name], self._job.server_profile.changes_share

        def share_at(place: Place) -> float | None:
            assert isinstance(place[0], int)
            return self._times.share(name, place[0], "up")

        def build(orders: Orders) -> DevicePart:
            part = ReplayedPart(profile, orders.plan.split_point, share, share_at, self._job.target_size)
            part.changes_bytes = partial(self._changes_bytes, "up", name)
            return part

        return build

    def _rates(self, name: str, way: int) -> ReplayedRates:
        """Return the rates of a device's uplink (0) or downlink (1)."""
        link = next(spec.link for spec in self._flight.job.specs if spec.name == name)
        joined = [e.at for e in self._events if e.what == "Joined" and e.device == name]
        now = self._clock.recorded(self._loop.time())
        since = max((at for at in joined if at <= now + 1e-6), default=joined[0] if joined else 0.0)
        measured = [(one.start, one.rates[name][way]) for one in self._flight.rounds if name in one.rates]
        rates = RoundRates(measured) if measured else link_models(link, since)[way].rates
        return ReplayedRates(rates, self._clock, name, self._absences(name), self._change.link_factor)

    def _absences(self, name: str) -> list[tuple[float, float]]:
        """Return when nothing was sent over the link of a device, in order.

        It was away until it was back, or the server gave it up. In a round that excludes it, and in which the server
        computed nothing for it, it sent nothing.
        """
        found: list[tuple[float, float]] = []
        rounds = {one.number: one for one in self._flight.rounds}
        lost_at: float | None = None
        for event in self._events:
            if event.device != name:
                continue
            if event.what == "Away":
                lost_at = event.at
            elif event.what in ("Back", "Lost", "Left") and lost_at is not None:
                found.append((lost_at, event.at))
                lost_at = None
            elif event.what == "Dropped":
                one = rounds.get(event.about.get("epoch", 0))
                if one is not None and name not in one.times.serving and one.start < event.at:
                    found.append((one.start, event.at))
        if lost_at is not None:
            found.append((lost_at, self._flight.rounds[-1].end))
        return _merged(found)

    # --- what happened

    def _observe(self, event: Event) -> None:
        if isinstance(event, Joined):
            session = next(one for one in self._server.sessions if one.device == event.device)
            session.channel.pace(self._rates(event.device, 1), self._job.links[event.device].latency_s)
            self._joined.set()
            if self._waiting is not None and event.devices >= self._waiting.wanted:
                self._waiting = None
        elif isinstance(event, Waiting):
            self._waiting = event

    def _round_begins(self, epoch: int) -> None:
        """Set timers for what happened from the start of this round to that of the next one."""
        starts = {self._flight.epoch_of(one): one.start for one in self._flight.rounds}
        start, next_start = starts[epoch], min((s for s in starts.values() if s > starts[epoch]), default=math.inf)
        for event in self._events:
            happens_at = self._loop.time() + event.at - start
            if start < event.at <= next_start and event.what in ("Joined", "Lost"):
                self._loop.call_at(happens_at, self._happen, event)
            elif event.about.get("epoch") == epoch + self._flight.first_round - 1 and self._was_too_late(event):
                self._deadline.exclude(event.device, happens_at)

    def _was_too_late(self, event: RecordedEvent) -> bool:
        """Return whether a device was excluded from a round and not lost."""
        return event.what == "Dropped" and not any(
            other.what == "Lost" and other.device == event.device and abs(other.at - event.at) < _RIGHT_AFTER_S
            for other in self._events
        )

    def _happen(self, event: RecordedEvent) -> None:
        name = event.device
        self._sever(name)
        if event.what == "Joined":
            self._start(name)

    def _sever(self, name: str) -> None:
        """End the connection of a device; the server ends its session."""
        for end in self._ends.pop(name, ()):
            self._tasks[self._loop.create_task(end.close())] = None


def _merged(stretches: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return stretches of time in order, of which none overlap."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(stretches):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
