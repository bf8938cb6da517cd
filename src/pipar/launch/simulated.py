"""A timing-only training by the planner's simulator: the results of the programs, without running them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from dataclasses import replace

from pipar.events import Drawn, EndedByCallback, EpochResult, Observer, RoundOver, Scores, ignore
from pipar.execution.clock import run_virtually
from pipar.execution.spans import Span, Totals
from pipar.job.job import Job
from pipar.launch.assemble import assemble_bookkeeping, chooses_plans
from pipar.launch.virtual import timing_only_setup
from pipar.planner.simulated_training import SimulatedTraining
from pipar.privacy.budget import PrivacyAccountant
from pipar.server.epoch_results import RoundSummary
from pipar.server.sampling import Draw

Emit = Callable[[EpochResult, list[Span]], None]


class _PlansChangeError(Exception):
    """Devices get new plans during the training."""


def why_programs(job: Job) -> str:
    """Return why the programs have to run to time a job; empty if the simulator gives the same result.

    Where a search may choose other plans during the training, the training is simulated to see whether it does: then
    the choice may depend on the last digits of times, so it is left to the programs.
    """
    config, server = job.config, job.config.server
    reasons = (
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
    try:
        run_virtually(_Training(job, lambda *_: None, ignore, watch=frozenset(), checks_plans=True).run())
    except _PlansChangeError:
        return "devices get new plans"
    return ""


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
    training = _Training(job, emit, observe, accountant, should_stop, watch=job.traced_devices)
    run_virtually(training.run())


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
        checks_plans: bool = False,
    ) -> None:
        self._job, self._observe, self._should_stop = job, observe, should_stop
        self._watch, self._checks_plans = watch, checks_plans
        self._setup = timing_only_setup(job, emit, observe, accountant=accountant)
        self._draw = Draw(job.config.run.devices_per_round, job.config.run.seed)

    async def run(self) -> None:
        """Train all rounds, or until the caller wants no further one."""
        job = self._job
        self._books = books = assemble_bookkeeping(job, self._setup)
        fleet = replace(job.fleet(), recalled=0.0)
        self._training = SimulatedTraining(fleet, job.orders(), draws=job.draws, watch=self._watch)
        self._replanner = books.replanner if self._checks_plans else None
        if self._replanner is not None:
            self._replanner.begin(job.links)
        for number in range(1, job.config.run.epochs + 1):
            if self._should_stop():
                self._observe(EndedByCallback(number - 1))
                break
            await self._train_round(number)
        self._training.stop()
        self._report()

    async def _train_round(self, number: int) -> None:
        training, books = self._training, self._books
        names = self._draw.next(number, self._job.sizes.keys())
        if self._job.draws:
            self._observe(Drawn(number, tuple(names), len(self._job.sizes), self._draw.counts))
        training.train(number, names if self._job.draws else None)
        self._report()  # of the round before
        await self._measure(number)
        training.average()
        done = training.finish()
        books.recorder.totals[number] = {"core": Totals(busy_s=done.busy_s)}
        books.recorder.spans[number] = done.spans
        self._record(number, names, done.seconds)

    def _report(self) -> None:
        """Let the reports of the last round arrive."""
        for one in self._training.reports():
            self._books.results.add_trace(one.trace, one.downlink, one.bytes_up, one.bytes_down)

    async def _measure(self, number: int) -> None:
        """Tell the results what links have shown; raise if a search then finds other plans."""
        measured, replanner = self._training.measured, self._replanner
        self._books.results.measure_links(number, measured)
        if replanner is None or number == self._job.config.run.epochs:
            return
        replanner.observe_round(measured)
        while replanner.is_searching:
            await asyncio.sleep(0)
        plans = self._job.plans
        if any(plans.get(name, plan) != plan for name, plan in (replanner.take() or {}).items()):
            raise _PlansChangeError

    def _record(self, number: int, names: list[str], seconds: float) -> None:
        job, books = self._job, self._books
        counted = {name: job.sizes[name] for name in names}
        passes = job.config.run.local_epochs
        books.results.add_round(
            number, RoundSummary(counted, None, seconds, passes=passes, is_drawn=job.draws), reporting=names
        )
        self._observe(RoundOver(number, counted))
        books.results.add_validation(number, Scores())
