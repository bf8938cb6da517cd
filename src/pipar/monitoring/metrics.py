"""Health and Prometheus metrics of a running server or device, updated by its events.

`metrics_endpoint` serves them as `/healthz` and `/metrics`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from http import HTTPStatus

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from pipar.events import (
    Away,
    Back,
    Dropped,
    EpochResult,
    Event,
    Failed,
    Joined,
    Left,
    Lost,
    Progress,
    Reconnecting,
    ReplanFailed,
    Replanned,
    Resumed,
    RoundOver,
    Saved,
    SaveFailed,
    Started,
    Stopping,
    Trained,
    Waiting,
)

_SECONDS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400)
_TEXT = "text/plain; charset=utf-8"
#: The text format that every Prometheus reads, even if this version of its client has a later one.
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


class Health:
    """Whether the program is healthy: while it trains or waits, until it stops or fails."""

    def __init__(self) -> None:
        self._trouble = ""

    @property
    def trouble(self) -> str:
        """Why the program is not healthy; empty if it is."""
        return self._trouble

    def observe(self, event: Event) -> None:
        """Update the health by one event."""
        # A checkpoint that cannot be written raises an alert (by its counter), but the program stays healthy: a
        # supervisor would restart an unhealthy one, and lose exactly what was not saved.
        if isinstance(event, Failed):
            self._trouble = f"failed: {event.reason}"
        elif isinstance(event, Stopping) and not self._trouble:
            self._trouble = f"stopping: {event.reason}"


class Metrics:
    """The metrics of one server or device since its start, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._present: set[str] = set()
        self._away: set[str] = set()
        self._last_round = 0
        self._make_training()
        self._make_devices()
        self._make_checkpoints()

    def _make_training(self) -> None:
        self._rounds = Counter("pipar_rounds", "Rounds finished by this process", registry=self.registry)
        self._round = self._gauge("pipar_round", "Number of the last finished round, including rounds before a resume")
        self._round_goal = self._gauge("pipar_round_goal", "Rounds that the training will have")
        self._samples = Counter("pipar_samples", "Samples trained in finished rounds", registry=self.registry)
        self._bytes = Counter(
            "pipar_bytes", "Bytes between server and devices in finished rounds", ["direction"], registry=self.registry
        )
        for direction in ("up", "down"):
            self._bytes.labels(direction)
        self._seconds = Histogram(
            "pipar_round_seconds", "Duration of a round in seconds", buckets=_SECONDS, registry=self.registry
        )
        # NaN until a value is known: a loss of 0 would look like a perfect model.
        self._train_loss = self._gauge("pipar_train_loss", "Latest training loss", math.nan)
        self._val_loss = self._gauge("pipar_validation_loss", "Validation loss of the last validated round", math.nan)
        self._accuracy = self._gauge("pipar_validation_accuracy", "Validation accuracy, from 0 to 1", math.nan)
        self._metrics = Gauge(
            "pipar_validation_metric", "Metric of the last validated round", ["name"], registry=self.registry
        )
        self._on_devices = Gauge(
            "pipar_device_metric",
            "Value on the devices' own samples, over all devices",
            ["name", "of"],
            registry=self.registry,
        )
        self._progress = self._gauge("pipar_progress_timestamp_seconds", "Unix time of the last progress")
        self._replans = Counter("pipar_replans", "Times that new plans took effect", registry=self.registry)
        self._replan_failures = Counter(
            "pipar_replan_failures", "Times that new plans could not be chosen", registry=self.registry
        )

    def _make_devices(self) -> None:
        self._connected = self._gauge("pipar_devices_connected", "Devices connected now")
        self._kept = self._gauge("pipar_devices_away", "Devices that lost their connection and may still resume")
        self._wanted = self._gauge("pipar_devices_wanted", "Devices that take part or are awaited")
        self._lost = Counter("pipar_devices_lost", "Devices that did not reconnect in time", registry=self.registry)
        self._dropped = Counter(
            "pipar_rounds_dropped", "Rounds of single devices that were excluded", registry=self.registry
        )
        self._returns = Counter("pipar_reconnects", "Reconnections after a lost connection", registry=self.registry)
        self._epsilon = Gauge(
            "pipar_epsilon_spent", "Privacy budget (epsilon) spent by a device, if updates are noised", ["device"],
            registry=self.registry,
        )  # fmt: skip
        self._attempts = Counter(
            "pipar_connection_attempts", "Attempts of this device to reconnect to its server", registry=self.registry
        )

    def _make_checkpoints(self) -> None:
        self._saved = self._gauge("pipar_checkpoint_timestamp_seconds", "Unix time of the last checkpoint; 0 if none")
        self._saved_round = self._gauge("pipar_checkpoint_round", "Round of the last checkpoint")
        self._save_failures = Counter(
            "pipar_checkpoint_failures", "Checkpoints that could not be written", registry=self.registry
        )

    def _gauge(self, name: str, words: str, first: float = 0.0) -> Gauge:
        gauge = Gauge(name, words, registry=self.registry)
        gauge.set(first)
        return gauge

    def observe(self, event: Event) -> None:
        """Update the metrics by one event."""
        self._of_training(event)
        self._of_devices(event)
        self._of_checkpoints(event)

    def _of_training(self, event: Event) -> None:
        match event:
            case Started():
                self._round_goal.set(event.epochs)
            case Progress():
                self._progress.set_to_current_time()
                self._set_known(self._train_loss, event.loss)
            case RoundOver():
                self._finish_round(event.epoch)
            case EpochResult():
                self._finish_round(event.epoch)
                self._take_result(event)
            case Replanned():
                self._replans.inc()
            case ReplanFailed():
                self._replan_failures.inc()

    def _finish_round(self, epoch: int) -> None:
        """Count a round once, whichever of its events arrives first."""
        if epoch > self._last_round:
            self._last_round = epoch
            self._rounds.inc()
            self._round.set(epoch)
            self._progress.set_to_current_time()

    def _take_result(self, result: EpochResult) -> None:
        self._seconds.observe(result.seconds)
        self._samples.inc(result.samples)
        self._bytes.labels("up").inc(result.bytes_up)
        self._bytes.labels("down").inc(result.bytes_down)
        self._set_known(self._train_loss, result.train_loss)
        self._set_known(self._val_loss, result.val_loss)
        self._set_known(self._accuracy, result.val_accuracy)
        for name, value in result.val_metrics.items():
            self._metrics.labels(name).set(value)
        for of in ("mean", "worst_decile"):
            for name, value in (result.device_metrics.get(of) or {}).items():
                self._on_devices.labels(name, of).set(value)

    def _set_known(self, gauge: Gauge, value: float | None) -> None:
        if value is not None:
            gauge.set(value)

    def _of_devices(self, event: Event) -> None:
        match event:
            case Started():
                self._wanted.set(len(event.samples))
            case Waiting():
                self._wanted.set(event.wanted)
            case Joined():
                self._present.add(event.device)
                self._away.discard(event.device)
            case Back():
                self._returns.inc()
                self._present.add(event.device)
                self._away.discard(event.device)
            case Away():
                self._present.discard(event.device)
                self._away.add(event.device)
            case Lost() | Left():
                if isinstance(event, Lost):
                    self._lost.inc()
                self._present.discard(event.device)
                self._away.discard(event.device)
            case Dropped():
                self._dropped.inc()
            case Reconnecting():
                self._attempts.inc()
            case RoundOver():
                for device, epsilon in event.epsilon.items():
                    self._epsilon.labels(device).set(epsilon)
            case Trained() if event.epsilon is not None:
                self._epsilon.labels(event.device).set(event.epsilon)
        self._connected.set(len(self._present))
        self._kept.set(len(self._away))

    def _of_checkpoints(self, event: Event) -> None:
        match event:
            case Saved():
                self._saved.set_to_current_time()
                self._saved_round.set(event.epoch)
            case SaveFailed():
                self._save_failures.inc()
            case Resumed():
                self._last_round = event.epoch
                self._round.set(event.epoch)


class Monitor:
    """Health and metrics of this program; `observe` is an Observer."""

    def __init__(self) -> None:
        self.health = Health()
        self.metrics = Metrics()

    def observe(self, event: Event) -> None:
        """Update both by one event. Only one thread may call this; others may call `answer` meanwhile."""
        self.health.observe(event)
        self.metrics.observe(event)

    def answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        """Return status, content type and body for a path."""
        if path == "/metrics":
            return HTTPStatus.OK, _EXPOSITION, generate_latest(self.metrics.registry)
        if path == "/healthz":
            trouble = self.health.trouble
            status = HTTPStatus.SERVICE_UNAVAILABLE if trouble else HTTPStatus.OK
            return status, _TEXT, f"{trouble or 'ok'}\n".encode()
        return HTTPStatus.NOT_FOUND, _TEXT, b"There are /healthz and /metrics.\n"


@contextlib.contextmanager
def monitored(address: str | None) -> Iterator[Monitor]:
    """Yield a monitor, served at HOST:PORT until the block ends; without an address it is not served."""
    monitor = Monitor()
    if address is None:
        yield monitor
        return
    # Imported on use: a device that serves no metrics saves the memory of an HTTP server.
    from pipar.monitoring.metrics_endpoint import MetricsEndpoint

    endpoint = MetricsEndpoint(monitor.answer, address)
    try:
        yield monitor
    finally:
        endpoint.stop()
