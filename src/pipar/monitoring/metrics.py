"""What a running program tells its operators over HTTP: whether it is well, and numbers for Prometheus.

`/healthz` and `/metrics`, fed by events. The endpoint has threads of its own, so that nobody who asks can hold up the
event loop; it answers GET and HEAD only, reads a few kilobytes of a request at most, and has patience for seconds.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from pipar.errors import InputError
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
from pipar.transport.addresses import why
from pipar.units import split_address

_SECONDS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400)
_TEXT = "text/plain; charset=utf-8"
#: The text format that every Prometheus reads, whatever this version of its client calls the latest.
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"

_log = logging.getLogger("pipar.monitoring.metrics")


class Health:
    """Whether the program is well: it is, whether it trains or waits, until it stops or fails."""

    def __init__(self) -> None:
        self._trouble = ""

    @property
    def trouble(self) -> str:
        """Why it is not well; empty if it is."""
        return self._trouble

    def observe(self, event: Event) -> None:
        """Take one event in."""
        # A checkpoint that cannot be written is for an alarm (its counter), not for whoever restarts what is not well:
        # a restart would lose just what was not saved.
        if isinstance(event, Failed):
            self._trouble = f"failed: {event.reason}"
        elif isinstance(event, Stopping) and not self._trouble:
            self._trouble = f"stopping: {event.reason}"


class Metrics:
    """The numbers of one server or one device since it was started, in a registry of their own."""

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
        self._round = self._gauge("pipar_round", "Number of the last round that is finished, also before a resume")
        self._round_goal = self._gauge("pipar_round_goal", "Rounds that the training is to have")
        self._samples = Counter("pipar_samples", "Samples trained in finished rounds", registry=self.registry)
        self._bytes = Counter(
            "pipar_bytes", "Bytes between server and devices in finished rounds", ["direction"], registry=self.registry
        )
        for direction in ("up", "down"):
            self._bytes.labels(direction)
        self._seconds = Histogram(
            "pipar_round_seconds", "Seconds that a round took", buckets=_SECONDS, registry=self.registry
        )
        # Not a number until there is one: a loss of 0 would look like a triumph.
        self._train_loss = self._gauge("pipar_train_loss", "Training loss, the latest known", math.nan)
        self._val_loss = self._gauge("pipar_validation_loss", "Validation loss of the last judged round", math.nan)
        self._accuracy = self._gauge("pipar_validation_accuracy", "Validation accuracy, from 0 to 1", math.nan)
        self._progress = self._gauge("pipar_progress_timestamp_seconds", "Unix time of the last sign of progress")
        self._replans = Counter("pipar_replans", "Times that new plans came into force", registry=self.registry)
        self._replan_failures = Counter(
            "pipar_replan_failures", "Times that new plans could not be chosen", registry=self.registry
        )

    def _make_devices(self) -> None:
        self._connected = self._gauge("pipar_devices_connected", "Devices that are connected now")
        self._kept = self._gauge("pipar_devices_away", "Devices whose link is lost and whose place is kept")
        self._wanted = self._gauge("pipar_devices_wanted", "Devices that the training has or waits for")
        self._lost = Counter("pipar_devices_lost", "Devices given up for lost", registry=self.registry)
        self._dropped = Counter(
            "pipar_rounds_dropped", "Rounds of single devices that did not count", registry=self.registry
        )
        self._returns = Counter("pipar_reconnects", "Devices that came back after a lost link", registry=self.registry)
        self._epsilon = Gauge(
            "pipar_epsilon_spent", "Epsilon that a device has spent, where updates have noise", ["device"],
            registry=self.registry,
        )  # fmt: skip
        self._attempts = Counter(
            "pipar_connection_attempts", "Attempts of this device to reach its server again", registry=self.registry
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
        """Take one event in; what has no number is passed over."""
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
        """Count a round once, whichever of its events is first."""
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
    """Health and numbers of this program; `observe` is an Observer. Without an endpoint it only counts."""

    def __init__(self) -> None:
        self.health = Health()
        self.metrics = Metrics()

    def observe(self, event: Event) -> None:
        """Take one event in: quick, and from one thread, whoever asks at the same time from others."""
        self.health.observe(event)
        self.metrics.observe(event)

    def answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        """Return status, type and body for a path."""
        if path == "/metrics":
            return HTTPStatus.OK, _EXPOSITION, generate_latest(self.metrics.registry)
        if path == "/healthz":
            trouble = self.health.trouble
            status = HTTPStatus.SERVICE_UNAVAILABLE if trouble else HTTPStatus.OK
            return status, _TEXT, f"{trouble or 'ok'}\n".encode()
        return HTTPStatus.NOT_FOUND, _TEXT, b"There are /healthz and /metrics.\n"


@contextlib.contextmanager
def monitored(address: str | None) -> Iterator[Monitor]:
    """Give a monitor that can be asked at HOST:PORT until the program ends; without an address, by nobody."""
    monitor = Monitor()
    if address is None:
        yield monitor
        return
    endpoint = Endpoint(monitor, address)
    try:
        yield monitor
    finally:
        endpoint.stop()


class Endpoint:
    """The HTTP server of a monitor; it listens when this is made, and no longer when `stop` has returned."""

    def __init__(self, monitor: Monitor, address: str, *, patience_s: float = 5.0, places: int = 16) -> None:
        host, port = split_address(address)
        try:
            family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._server = _Server(monitor, family, place[:2], patience_s, places)
        except OSError as error:
            raise InputError(f"Cannot serve metrics on {address}: {why(error)}.") from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="monitor", daemon=True
        )
        self._thread.start()
        _log.info("health and metrics at http://%s:%d", address.rpartition(":")[0], self.port)

    def stop(self) -> None:
        """Stop listening, and hang up on who is still there."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.hang_up(older_than_s=-math.inf)


class _Server(socketserver.ThreadingTCPServer):
    """A thread a connection, a few connections at most, and none for long.

    A client that sends nothing, or one byte now and then, loses its connection after `patience_s`; when all places are
    taken, the oldest connection makes room, so that such clients keep nobody out.
    """

    allow_reuse_address = True
    daemon_threads = True  # whoever hangs must not keep the program from ending
    request_queue_size = 64  # with the default of 5, a burst of connections makes the next one wait for a second

    def __init__(
        self, monitor: Monitor, family: socket.AddressFamily, place: Any, patience_s: float, places: int
    ) -> None:
        self.address_family = family
        self.monitor = monitor
        self._patience_s = patience_s
        self._places = places
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}  # since when; the oldest is first
        super().__init__(place, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            oldest = next(iter(self._open)) if len(self._open) >= self._places else None
            self._open[request] = time.monotonic()
            if oldest is not None:
                _hang_up(oldest)
                del self._open[oldest]
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called between two requests, and several times a second."""
        self.hang_up(older_than_s=self._patience_s)

    def hang_up(self, older_than_s: float) -> None:
        """End the connections that have been there for longer; their threads close them."""
        now = time.monotonic()
        with self._lock:
            for connection in [one for one, since in self._open.items() if now - since > older_than_s]:
                _hang_up(connection)
                del self._open[connection]

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base's signature
        _log.debug("A request for metrics was not answered.", exc_info=True)  # the client is gone, or was too slow


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is gone already
        connection.shutdown(socket.SHUT_RDWR)


class _FewBytes:
    """The first kilobytes of what a client sends; then it has ended, whatever more may come."""

    def __init__(self, source: Any, size_bytes: int = 8192) -> None:
        self._source = source
        self.left_bytes = size_bytes

    def readline(self, limit: int = -1) -> bytes:
        line: bytes = self._source.readline(self.left_bytes if limit < 0 else min(limit, self.left_bytes))
        self.left_bytes -= len(line)
        return line

    def close(self) -> None:
        self._source.close()


class _Handler(BaseHTTPRequestHandler):
    """One request, one answer, and the connection ends."""

    server: _Server

    def setup(self) -> None:
        super().setup()
        self.rfile: Any = _FewBytes(self.rfile)

    def do_GET(self) -> None:
        if self.rfile.left_bytes <= 0:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        status, kind, body = self.server.monitor.answer(self.path.partition("?")[0])
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - named by http.server

    def version_string(self) -> str:
        return "pipar"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - named by http.server
        _log.debug(format, *args)
