"""Collects the numbers of each epoch, and emits its result when they are complete, in order."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipar.events import EpochResult, Scores
from pipar.execution.spans import COMPUTE, DOWNLINK, EVALUATION, IO, UPLINK, EpochTrace, Recorder, Span
from pipar.job.job import Bounds
from pipar.methods import Plan
from pipar.planner.fleet import Fleet
from pipar.planner.learned_costs import Predictor, entries_from
from pipar.planner.replanner import MeasuredLink
from pipar.settings.links import Link
from pipar.units import rounded

#: How long the server waits for the traces of the last round, apart from five times the length of the round.
_LAST_TRACES_TIMEOUT_S = 60.0
#: Of measured rates: clocks and frames allow no more.
_DIGITS = 6


@dataclass
class _Epoch:
    devices: dict[str, EpochTrace] = field(default_factory=dict)
    downlinks: list[EpochTrace] = field(default_factory=list)
    bytes_up: dict[str, int] = field(default_factory=dict)
    bytes_down: dict[str, int] = field(default_factory=dict)
    rates_bps: dict[str, list[float | None]] = field(default_factory=dict)
    server: EpochTrace | None = None
    awaited: set[str] = field(default_factory=set)  # devices whose traces are missing
    round: RoundSummary | None = None
    validated: bool = False
    scores: Scores = field(default_factory=Scores)
    validation: EpochTrace | None = None


@dataclass(frozen=True)
class RoundSummary:
    """What the server knows of a round when it is over."""

    counted: Mapping[str, int]  # samples of the devices that count, by name
    train_loss: float | None
    seconds: float  # on the server's clock
    errors: tuple[float | None, float | None] = (None, None)  # of lossy encodings, up and down
    epsilon: float | None = None
    passes: int = 1  # over the samples of each device
    is_drawn: bool = False  # only some devices took part; its seconds begin with the models that they were sent


class TimeBounds:
    """The time that no schedule of an epoch's bytes on these links and lanes can beat.

    `bounds` are those of the first plans, and `bounds_of` gives those of others.
    """

    def __init__(
        self,
        links: Mapping[str, Link],
        bounds: Bounds,
        cores: int,
        bounds_of: Callable[[Mapping[str, Plan]], Bounds] | None = None,
    ) -> None:
        self.cores = cores
        self._links = links
        self._bounds = {1: bounds}  # by the first epoch that they hold for
        self._bounds_of = bounds_of
        self._recalled: dict[int, frozenset[str]] = {}  # by epoch: devices that compute nothing

    def join(self, device: str, link: Link) -> None:
        """Add a device."""
        self._links = {**self._links, device: link}

    def replan(self, first_epoch: int, plans: Mapping[str, Plan]) -> None:
        """From this epoch on the devices train with other plans."""
        if self._bounds_of is not None:
            self._bounds[first_epoch] = self._bounds_of(plans)

    def forget(self, epoch: int) -> None:
        """Keep only the bounds of later epochs."""
        self._bounds = entries_from(self._bounds, epoch + 1)
        self._recalled = {number: devices for number, devices in self._recalled.items() if number > epoch}

    def recall(self, epoch: int, devices: Collection[str]) -> None:
        """These devices compute nothing in an epoch: the server has kept their activations."""
        self._recalled[epoch] = self._recalled.get(epoch, frozenset()) | frozenset(devices)

    def seconds(self, number: int, epoch: _Epoch) -> float:
        """Return the bound of an epoch, from the bytes sent over the configured rates, and from profiled compute.

        No measured span is part of it, except where a link has no constant rate.
        """
        bounds = self._bounds[max(first for first in self._bounds if first <= number)]
        is_drawn = epoch.round is not None and epoch.round.is_drawn
        served = (bounds.served_s.get(name, 0.0) for name in sorted(epoch.devices))
        slowest = (sum(served) if is_drawn else bounds.server_s) / self.cores
        downlinks = {trace.owner: trace for trace in epoch.downlinks}
        for name in epoch.devices:
            link = self._links[name]
            # Without a constant rate, the measured one: the bytes over it are the time they were on the link.
            up_bps, down_bps = (None, None) if link.cycle else (link.up_bps, link.down_bps)
            up = epoch.bytes_up[name] * 8 / up_bps if up_bps else _busy(epoch.devices[name], UPLINK)
            down = epoch.bytes_down[name] * 8 / down_bps if down_bps else _busy(downlinks[name], DOWNLINK)
            device_s = 0.0 if name in self._recalled.get(number, ()) else bounds.device_s.get(name, 0.0)
            slowest = max(slowest, up, down, device_s)
        return slowest


class ResultCollector:
    """Collects traces, counts and losses of the epochs; `emit` gets each epoch's result and its spans."""

    def __init__(
        self,
        bounds: TimeBounds,
        recorder: Recorder,
        background: Recorder,
        emit: Callable[[EpochResult, list[Span]], None],
        *,
        predictor: Predictor | None = None,
        done: Sequence[float | None] = (),
    ) -> None:
        self._bounds = bounds
        self._predictor = predictor
        self._recorder = recorder
        self._background = background
        self._emit = emit
        self._epochs: dict[int, _Epoch] = {}
        self._emitted = len(done)
        self._losses = list(done)
        self._last_round_s = 0.0
        self._changed = asyncio.Event()
        self._failure: Exception | None = None

    def recall(self, epoch: int, devices: Collection[str]) -> None:
        """These devices refer to activations that they have sent before, in this epoch."""
        self._bounds.recall(epoch, devices)
        if self._predictor is not None:
            self._predictor.recall(epoch, devices)

    def add_trace(self, trace: EpochTrace, downlink: EpochTrace, bytes_up: int, bytes_down: int) -> None:
        """Take a device's trace of an epoch, with what the server counted of its link."""
        epoch = self._epoch(trace.epoch)
        epoch.awaited.discard(trace.owner)
        epoch.devices[trace.owner] = trace
        epoch.downlinks.append(downlink)
        epoch.bytes_up[trace.owner] = bytes_up
        epoch.bytes_down[trace.owner] = bytes_down
        self._emit_complete()

    def add_round(self, number: int, summary: RoundSummary, reporting: Iterable[str]) -> None:
        """Take what the server knows of a round; the traces of the `reporting` devices will follow."""
        epoch = self._epoch(number)
        epoch.round = summary
        epoch.awaited |= set(reporting)
        epoch.server = self._recorder.take(number)
        self._last_round_s = summary.seconds
        self._emit_complete()

    def join(self, device: str, link: Link) -> None:
        """Add a device that joins later."""
        self._bounds.join(device, link)

    def forget_device(self, device: str) -> None:
        """Wait for no more traces of a device."""
        for epoch in self._epochs.values():
            epoch.awaited.discard(device)
        self._emit_complete()

    def add_validation(self, number: int, scores: Scores) -> None:
        """Take the validation of the global model that an epoch ended with."""
        epoch = self._epoch(number)
        epoch.validated, epoch.scores = True, scores
        epoch.validation = self._background.take(number)
        self._losses.append(scores.compared)
        self._emit_complete()

    def replan(self, first_epoch: int, plans: Mapping[str, Plan]) -> None:
        """From this epoch on the devices train with other plans."""
        self._bounds.replan(first_epoch, plans)
        if self._predictor is not None:
            self._predictor.replan(first_epoch, plans)

    def measure_links(self, epoch: int, measured: Mapping[str, MeasuredLink]) -> None:
        """Take the links as the traffic of an epoch has shown them."""
        self._epoch(epoch).rates_bps = {name: _rates_bps(link) for name, link in sorted(measured.items())}
        if self._predictor is not None:
            self._predictor.measure_links(epoch, measured)

    def fleet(self) -> Fleet | None:
        """Return the fleet as the training has shown it; None where nothing is predicted."""
        return None if self._predictor is None else self._predictor.now()

    def fail(self, failure: Exception) -> None:
        """Raise this failure in every waiter, now and later."""
        self._failure = failure
        self._changed.set()

    def is_failure(self, error: Exception) -> bool:
        """Return whether this error is the failure that waiters get."""
        return error is self._failure

    def check(self) -> None:
        """Raise the failure, if there was one."""
        if self._failure is not None:
            raise self._failure

    async def complete(self, last_epoch: int) -> None:
        """Return when the results of all epochs up to this one are emitted."""
        while self._emitted < last_epoch:
            await self._wait()

    async def deliver(self, last_epoch: int, devices: Collection[str]) -> None:
        """Return when all results are emitted; after a timeout, the missing traces of these devices are left out."""
        try:
            # Traces follow the models, which take their time on slow links.
            async with asyncio.timeout(_LAST_TRACES_TIMEOUT_S + 5 * self._last_round_s):
                await self.complete(last_epoch)
        except TimeoutError:
            for device in sorted(devices):
                self.forget_device(device)
            await self.complete(last_epoch)

    async def stale_epochs(self, number: int) -> int:
        """Return the number of epochs, up to this one, since what is monitored last improved."""
        while len(self._losses) < number:
            await self._wait()
        return stale_epochs(self._losses[:number])

    async def _wait(self) -> None:
        self.check()
        self._changed.clear()
        await self._changed.wait()

    def _epoch(self, number: int) -> _Epoch:
        return self._epochs.setdefault(number, _Epoch())

    def _emit_complete(self) -> None:
        """Emit the epochs that are complete."""
        while (epoch := self._epochs.get(self._emitted + 1)) is not None and self._is_complete(epoch):
            self._emitted += 1
            del self._epochs[self._emitted]
            result = self._result(self._emitted, epoch)
            self._emit(result, _spans(epoch))
            self._learn(self._emitted, epoch, result.seconds)
            self._bounds.forget(self._emitted)
        self._changed.set()

    def _learn(self, number: int, epoch: _Epoch, seconds: float) -> None:
        if self._predictor is not None and epoch.server is not None:
            computed = {name: trace.totals[COMPUTE].busy_s for name, trace in epoch.devices.items()}
            self._predictor.learn(number, computed, sum(lane.busy_s for lane in epoch.server.totals.values()))
            if epoch.devices:
                self._predictor.learn_seconds(number, seconds, epoch.devices.keys())
            self._predictor.forget(number)

    def _is_complete(self, epoch: _Epoch) -> bool:
        return epoch.validated and epoch.server is not None and not epoch.awaited

    def _result(self, number: int, epoch: _Epoch) -> EpochResult:
        summary = epoch.round
        assert summary is not None
        assert epoch.server is not None
        assert epoch.validation is not None
        traces = [epoch.devices[name] for name in sorted(epoch.devices)]
        start = min((trace.totals[IO].first_start for trace in traces), default=0.0)
        seconds = max((trace.totals[COMPUTE].last_end for trace in traces), default=summary.seconds) - start
        if summary.is_drawn:  # the new model travels in the next round, to the devices that are drawn for it
            seconds = summary.seconds
        busy = {
            "device": _mean([trace.totals[COMPUTE].busy_s for trace in traces]),
            "uplink": _mean([_busy(trace, UPLINK) for trace in traces]),
            "server": sum(lane.busy_s for lane in epoch.server.totals.values()) / self._bounds.cores,
            "downlink": _mean([_busy(trace, DOWNLINK) for trace in epoch.downlinks]),
        }
        bound = self._bounds.seconds(number, epoch)
        device_bytes = {name: [epoch.bytes_up[name], epoch.bytes_down[name]] for name in sorted(epoch.bytes_up)}
        return EpochResult(
            epoch=number,
            seconds=seconds,
            samples=summary.passes * sum(summary.counted.values()),
            train_loss=summary.train_loss,
            val_loss=epoch.scores.loss,
            val_accuracy=epoch.scores.accuracy,
            val_metrics=epoch.scores.metrics,
            device_metrics={} if epoch.scores.devices is None else epoch.scores.devices.to_dict(),
            bytes_up=sum(epoch.bytes_up.values()),
            bytes_down=sum(epoch.bytes_down.values()),
            server_idle_s=max(0.0, seconds - busy["server"]),
            device_idle_s=max(0.0, seconds - busy["device"]),
            bound_s=bound,
            efficiency=bound / seconds if seconds else 0.0,
            validation_s=sum(t.busy_s for lane, t in epoch.validation.totals.items() if lane != EVALUATION),
            utilisation={lane: min(1.0, used / seconds) if seconds else 0.0 for lane, used in busy.items()},
            devices=len(summary.counted),
            error_up=summary.errors[0],
            error_down=summary.errors[1],
            epsilon=summary.epsilon,
            device_bytes=device_bytes,
            device_rates={
                name: possible_rates(rates, device_bytes.get(name, ()), seconds)
                for name, rates in epoch.rates_bps.items()
            },
            predicted_s=self._predictor.predicted_s(number, summary.counted) if self._predictor is not None else None,
        )


def stale_epochs(losses: Iterable[float | None]) -> int:
    """Return the number of validation losses after the best one; one that has diverged is the worst."""
    known = [loss if math.isfinite(loss) else math.inf for loss in losses if loss is not None]
    return len(known) - 1 - known.index(min(known)) if known else 0


def _rates_bps(link: MeasuredLink) -> list[float | None]:
    """Return the rates up and down, as far as the traffic was enough to show them; None also for no limit."""
    return [way.rate_bps if way.is_enough else None for way in (link.up, link.down)]


def possible_rates(rates: Sequence[float | None], sizes: Sequence[int], seconds: float) -> list[float | None]:
    """Return measured rates, rounded, but none below what the bytes of a round took at most: the whole round.

    A rate may be of earlier rounds, and those of machines that are late are too low.
    """
    least = [8 * size / seconds for size in sizes] if sizes and seconds > 0 else [0.0] * len(rates)
    both = zip(rates, least, strict=True)
    return [None if rate is None else rounded(max(rate, needed), _DIGITS) for rate, needed in both]


def _busy(trace: EpochTrace, lane: str) -> float:
    return trace.totals[lane].busy_s if lane in trace.totals else 0.0


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _spans(epoch: _Epoch) -> list[Span]:
    assert epoch.server is not None
    assert epoch.validation is not None
    traces = [*epoch.devices.values(), *epoch.downlinks, epoch.server, epoch.validation]
    return [span for trace in traces for span in trace.spans]
