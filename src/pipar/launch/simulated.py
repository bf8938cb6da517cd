"""A timing-only training by the planner's simulator: the results of the programs, without running them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Mapping
from dataclasses import replace

from pipar.events import (
    Drawn,
    EndedByCallback,
    EpochResult,
    Event,
    Observer,
    Preparing,
    ReplanFailed,
    RoundOver,
    Scores,
    ignore,
)
from pipar.execution.clock import run_virtually
from pipar.execution.spans import Span, Totals
from pipar.job.job import Job
from pipar.launch.assemble import assemble_bookkeeping, chooses_plans
from pipar.launch.virtual import timing_only_setup
from pipar.methods import Plan
from pipar.planner.replanner import MeasuredLink, Replanner
from pipar.planner.simulated_training import SimulatedTraining
from pipar.privacy.budget import PrivacyAccountant
from pipar.server.epoch_results import RoundSummary
from pipar.server.sampling import Draw

Emit = Callable[[EpochResult, list[Span]], None]


def why_programs(
    job: Job,
    observe: Observer = ignore,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    recorded: bool = False,
) -> str:
    """Return why the programs have to run to time a job; empty if the simulator gives the same result.

    Where a search may choose other plans during the training, the training is simulated to see whether it does: then
    the choice may depend on the last digits of times, so it is left to the programs. `observe` gets the progress of
    this simulation, which ends once the caller wants no training.
    """
    config, server = job.config, job.config.server
    reasons = (
        (recorded, "it is recorded"),
        (job.method.shares_server_model, f"devices share one server-side model in {job.method.name}"),
        (any(spec.link.cycle for spec in job.specs), "links change"),
        (not isinstance(server.round_deadline, str), "rounds have a deadline"),
        (0 < (server.min_devices or 0) < len(job.specs), "it begins before all devices have joined"),
        (bool(job.evaluation_sizes), "devices evaluate models"),
        (job.update_noise is not None, "updates get noise"),
        (job.steady_layers > 0, "the server may keep activations"),
        (job.keep_state and job.can_replan, "the state of optimisers moves with layers"),
        (bool(job.hosted) or job.real_links, "machines and links are real"),
        (config.run.patience is not None, "it ends by its losses"),
    )
    reason = next((reason for holds, reason in reasons if holds), "")
    if reason or config.run.epochs == 1 or not (job.can_replan and chooses_plans(job)):
        return reason
    return _why_plans_change(job, observe, should_stop)


def _why_plans_change(job: Job, observe: Observer, should_stop: Callable[[], bool]) -> str:
    """Return that a search finds other plans for a round of a training, or fails; empty if neither happens.

    There is no search after the last round but one: its plans would be too late.
    """
    failures: list[Event] = []

    def note(event: Event) -> None:
        if isinstance(event, ReplanFailed):
            failures.append(event)

    training = _Training(job, lambda *_: None, note, watch=frozenset())
    replanner, searched = training.books.replanner, job.config.run.epochs - 1
    assert replanner is not None
    replanner.begin(job.links)
    for number in range(1, searched + 1):
        if should_stop():
            break
        observe(Preparing("Simulating whether devices get new plans", (number - 1) / searched))
        # A round is simulated outside of an event loop, so that Ctrl-C ends it at once.
        found = run_virtually(_found(replanner, training.train_round(number)))
        if failures:
            return "a search for new plans fails"
        if any(job.plans.get(name, plan) != plan for name, plan in found.items()):
            return "devices get new plans"
    return ""


async def _found(replanner: Replanner, measured: Mapping[str, MeasuredLink]) -> Mapping[str, Plan]:
    """Return the plans that a search finds after a round with these links; none if nothing has changed."""
    replanner.observe_round(measured)
    while replanner.is_searching:
        await asyncio.sleep(0)
    return replanner.take() or {}


def simulate_training(
    job: Job,
    emit: Emit,
    observe: Observer,
    *,
    accountant: PrivacyAccountant | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Time a job for which `why_programs` names no reason; `emit` and `observe` get what the programs would tell.

    Devices do not tell their progress, and none joins or leaves.
    """
    _Training(job, emit, observe, accountant, should_stop, watch=job.traced_devices).run()


class _Training:
    """The rounds of a simulated training, and what the server does with what they tell."""

    def __init__(
        self,
        job: Job,
        emit: Emit,
        observe: Observer,
        accountant: PrivacyAccountant | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        *,
        watch: Container[str] | None,
    ) -> None:
        self.books = assemble_bookkeeping(job, timing_only_setup(job, emit, observe, accountant=accountant))
        self._job, self._observe, self._should_stop = job, observe, should_stop
        self._draw = Draw(job.config.run.devices_per_round, job.config.run.seed)
        fleet = replace(job.fleet(), recalled=0.0)
        self._training = SimulatedTraining(fleet, job.orders(), draws=job.draws, watch=watch)

    def run(self) -> None:
        """Train all rounds, or until the caller wants no further one."""
        for number in range(1, self._job.config.run.epochs + 1):
            if self._should_stop():
                self._observe(EndedByCallback(number - 1))
                break
            self.train_round(number)
        self._training.stop()
        self._report()

    def train_round(self, number: int) -> Mapping[str, MeasuredLink]:
        """Train a round; return the links as its traffic has shown them."""
        job, training, books = self._job, self._training, self.books
        names = self._draw.next(number, job.sizes.keys())
        if job.draws:
            self._observe(Drawn(number, tuple(names), len(job.sizes), self._draw.counts))
        training.train(number, names if job.draws else None)
        self._report()  # of the round before
        measured = training.measured
        books.results.measure_links(number, measured)
        training.average()
        done = training.finish()
        books.recorder.totals[number] = {"core": Totals(busy_s=done.busy_s)}
        books.recorder.spans[number] = done.spans
        self._record(number, names, done.seconds)
        return measured

    def _report(self) -> None:
        """Let the reports of the last round arrive."""
        for one in self._training.reports():
            self.books.results.add_trace(one.trace, one.downlink, one.bytes_up, one.bytes_down)

    def _record(self, number: int, names: list[str], seconds: float) -> None:
        job, results = self._job, self.books.results
        counted = {name: job.sizes[name] for name in names}
        summary = RoundSummary(counted, None, seconds, passes=job.config.run.local_epochs, is_drawn=job.draws)
        results.add_round(number, summary, reporting=names)
        self._observe(RoundOver(number, counted))
        results.add_validation(number, Scores())
