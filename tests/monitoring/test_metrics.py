"""The metrics, and their endpoint as a real HTTP client over loopback sees it."""

from __future__ import annotations

import http.client
import logging
import math
import socket
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.waiting import PATIENCE_S

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
from pipar.monitoring import metrics_endpoint
from pipar.monitoring.metrics import Monitor, monitored
from pipar.monitoring.metrics_endpoint import MetricsEndpoint

STARTED = Started("runs/x", "pipar", 9, 2, {}, {"pi-1": 100, "pi-2": 100}, {"pi-1": 4, "pi-2": 4})


def _result(epoch: int, **changed: float | None) -> EpochResult:
    values = {"train_loss": 2.25, "val_loss": 2.125, "val_accuracy": 0.5, **changed}
    return EpochResult(
        epoch=epoch,
        seconds=40.0,
        samples=200,
        bytes_up=1000,
        bytes_down=300,
        server_idle_s=0.0,
        device_idle_s=0.0,
        bound_s=0.0,
        efficiency=0.0,
        validation_s=0.0,
        **values,
    )


def _numbers(*events: Event) -> dict[str, float]:
    """Return what /metrics shows after these events, by name and labels."""
    monitor = Monitor()
    for event in events:
        monitor.observe(event)
    _, _, body = monitor.answer("/metrics")
    return _parsed(body)


def _parsed(body: bytes) -> dict[str, float]:
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


# --- numbers


def test_rounds_samples_and_bytes_add_up() -> None:
    numbers = _numbers(STARTED, _result(1), _result(2))
    assert numbers["pipar_rounds_total"] == 2
    assert (numbers["pipar_round"], numbers["pipar_round_goal"]) == (2, 9)
    assert numbers["pipar_samples_total"] == 400
    assert (numbers["pipar_bytes_total[up]"], numbers["pipar_bytes_total[down]"]) == (2000, 600)
    assert (numbers["pipar_round_seconds_count"], numbers["pipar_round_seconds_sum"]) == (2, 80.0)
    assert (numbers["pipar_round_seconds_bucket[30.0]"], numbers["pipar_round_seconds_bucket[60.0]"]) == (0, 2)


def test_a_round_with_two_events_counts_once() -> None:
    numbers = _numbers(RoundOver(1, {"pi-1": 5}), RoundOver(2, {"pi-1": 5}), _result(1), _result(2))
    assert (numbers["pipar_rounds_total"], numbers["pipar_round"]) == (2, 2)


def test_rounds_before_a_resume_do_not_count_for_this_process() -> None:
    numbers = _numbers(Resumed(6), RoundOver(7, {"pi-1": 5}))
    assert (numbers["pipar_rounds_total"], numbers["pipar_round"]) == (1, 7)


def test_an_unknown_loss_is_nan_rather_than_zero() -> None:
    names = ("pipar_train_loss", "pipar_validation_loss", "pipar_validation_accuracy")
    assert all(math.isnan(_numbers()[name]) for name in names)
    numbers = _numbers(_result(1), _result(2, train_loss=None, val_loss=None, val_accuracy=None))
    assert [numbers[name] for name in names] == [2.25, 2.125, 0.5]


def test_a_device_shows_the_loss_of_its_last_batch() -> None:
    numbers = _numbers(Progress("pi-1", 1, 4, 100, 1.75, 3.0))
    assert numbers["pipar_train_loss"] == 1.75
    assert numbers["pipar_progress_timestamp_seconds"] == pytest.approx(time.time(), abs=60)


def test_server_and_device_show_the_epsilon_that_devices_have_spent() -> None:
    assert not [name for name in _numbers(RoundOver(1, {"a": 5}), Trained("a", 1, 5)) if "epsilon" in name]
    rounds = [RoundOver(n, {"a": 5}, epsilon={"a": n, "b": 0.5}) for n in (1.0, 2.0)]
    numbers = _numbers(*rounds, Trained("c", 1, 5, 1.25, 4.0))
    assert [numbers[f"pipar_epsilon_spent[{device}]"] for device in "abc"] == [2.0, 0.5, 1.25]


@pytest.mark.parametrize(
    ("events", "connected", "away", "lost", "reconnects"),
    [
        ([Joined("a", 1), Joined("b", 2)], 2, 0, 0, 0),
        ([Joined("a", 1), Away("a", 30)], 0, 1, 0, 0),
        ([Joined("a", 1), Away("a", 30), Back("a", 3)], 1, 0, 0, 1),
        ([Joined("a", 1), Away("a", 30), Lost("a", "late")], 0, 0, 1, 0),
        ([Joined("a", 1), Lost("a", "x"), Joined("a", 1)], 1, 0, 1, 0),
        ([Joined("a", 1), Away("a", 30), Joined("a", 1)], 1, 0, 0, 0),
        ([Joined("a", 1), Joined("b", 2), Left("b")], 1, 0, 0, 0),
    ],
)
def test_devices_that_come_and_go_are_counted(
    events: list[Event], connected: int, away: int, lost: int, reconnects: int
) -> None:
    numbers = _numbers(*events)
    assert (numbers["pipar_devices_connected"], numbers["pipar_devices_away"]) == (connected, away)
    assert (numbers["pipar_devices_lost_total"], numbers["pipar_reconnects_total"]) == (lost, reconnects)


def test_other_events_are_counted() -> None:
    numbers = _numbers(
        Waiting(1, 5),
        Dropped("a", 1, "late"),
        Reconnecting("h:1", 1, 0.5, "refused"),
        Reconnecting("h:1", 2, 0.5, "refused"),
        Replanned(2, {}),
        ReplanFailed("no"),
        SaveFailed(3, "full"),
        Saved(4, "x"),
    )
    assert numbers["pipar_devices_wanted"] == 5
    assert numbers["pipar_rounds_dropped_total"] == 1
    assert numbers["pipar_connection_attempts_total"] == 2
    assert (numbers["pipar_replans_total"], numbers["pipar_replan_failures_total"]) == (1, 1)
    assert (numbers["pipar_checkpoint_failures_total"], numbers["pipar_checkpoint_round"]) == (1, 4)
    assert numbers["pipar_checkpoint_timestamp_seconds"] == pytest.approx(time.time(), abs=60)


def test_the_process_itself_is_measured() -> None:
    assert _numbers()["process_resident_memory_bytes"] > 1e6


def test_two_monitors_of_one_process_do_not_share_numbers() -> None:
    assert _numbers(_result(1))["pipar_rounds_total"] == 1
    assert _numbers()["pipar_rounds_total"] == 0


# --- the endpoint


@pytest.fixture
def monitor() -> Monitor:
    return Monitor()


@pytest.fixture
def endpoint(monitor: Monitor) -> Iterator[MetricsEndpoint]:
    endpoint = MetricsEndpoint(monitor.answer, "127.0.0.1:0", places=4, patience_s=10 * PATIENCE_S)
    yield endpoint
    endpoint.stop()


def _ask(endpoint: MetricsEndpoint, path: str, method: str = "GET") -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=PATIENCE_S)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"], response.read()
    finally:
        connection.close()


def _hanging(endpoint: MetricsEndpoint) -> socket.socket:
    """Return a client that has sent half a request and sends nothing more."""
    client = socket.create_connection(("127.0.0.1", endpoint.port), timeout=PATIENCE_S)
    client.sendall(b"GET /metrics HT")
    return client


def test_metrics_are_what_prometheus_reads(endpoint: MetricsEndpoint, monitor: Monitor) -> None:
    monitor.observe(_result(1))
    status, kind, body = _ask(endpoint, "/metrics?name=x")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert _parsed(body)["pipar_rounds_total"] == 1


def test_a_program_that_trains_or_waits_is_healthy(endpoint: MetricsEndpoint, monitor: Monitor) -> None:
    for event in (Waiting(0, 5), STARTED, Lost("a", "late"), SaveFailed(1, "full"), Reconnecting("h:1", 1, 1.0, "x")):
        monitor.observe(event)
        assert _ask(endpoint, "/healthz") == (200, "text/plain; charset=utf-8", b"ok\n")


def test_a_program_that_stops_or_fails_is_unhealthy_and_says_why(endpoint: MetricsEndpoint, monitor: Monitor) -> None:
    monitor.observe(Stopping("SIGTERM"))
    assert _ask(endpoint, "/healthz")[::2] == (503, b"stopping: SIGTERM\n")
    monitor.observe(Failed("Too few devices."))
    monitor.observe(Stopping("it failed"))
    assert _ask(endpoint, "/healthz")[::2] == (503, b"failed: Too few devices.\n")


@pytest.mark.parametrize("path", ["/", "/metrics/", "/healthz/x", "/../etc/passwd", "//metrics/x"])
def test_an_unknown_path_is_not_found(endpoint: MetricsEndpoint, path: str) -> None:
    assert _ask(endpoint, path)[::2] == (404, b"There are /healthz and /metrics.\n")


def test_only_get_and_head_are_answered(endpoint: MetricsEndpoint) -> None:
    assert _ask(endpoint, "/metrics", "POST")[0] == 501
    assert _ask(endpoint, "/healthz", "HEAD")[::2] == (200, b"")


def test_clients_that_hang_do_not_delay_others(endpoint: MetricsEndpoint) -> None:
    hanging = [_hanging(endpoint) for _ in range(12)]  # three times the number of places
    assert _ask(endpoint, "/healthz")[0] == 200  # in less than `patience_s` of the endpoint
    for client in hanging:
        client.close()


def test_the_oldest_connection_makes_room_when_all_places_are_taken(endpoint: MetricsEndpoint) -> None:
    hanging = [_hanging(endpoint) for _ in range(12)]
    assert hanging[0].recv(1) == b""  # hung up on, to make room
    assert _ask(endpoint, "/healthz")[0] == 200
    assert len(endpoint._opened) <= 4
    for client in hanging:
        client.close()


def test_a_burst_of_clients_is_not_turned_away(monitor: Monitor) -> None:
    is_busy, may_answer = threading.Event(), threading.Event()

    def answer_late(path: str) -> tuple[HTTPStatus, str, bytes]:
        is_busy.set()
        may_answer.wait(PATIENCE_S)
        return monitor.answer(path)

    endpoint = MetricsEndpoint(answer_late, "127.0.0.1:0")
    first = _hanging(endpoint)
    first.sendall(b"TP/1.0\r\n\r\n")
    assert is_busy.wait(PATIENCE_S)  # nothing is accepted until this one is answered
    burst = [socket.create_connection(("127.0.0.1", endpoint.port), timeout=0.5) for _ in range(20)]
    may_answer.set()
    for client in (first, *burst):
        client.close()
    assert _ask(endpoint, "/healthz")[0] == 200
    endpoint.stop()


def test_a_client_that_sends_a_byte_now_and_then_is_disconnected_too(monitor: Monitor) -> None:
    endpoint = MetricsEndpoint(monitor.answer, "127.0.0.1:0", patience_s=0.1)
    client = _hanging(endpoint)
    client.settimeout(0.02)
    deadline = time.monotonic() + PATIENCE_S
    ended = False
    while not ended and time.monotonic() < deadline:
        try:
            client.sendall(b"x")
            ended = client.recv(1) == b""
        except TimeoutError:
            continue
        except OSError:
            ended = True
    client.close()
    endpoint.stop()
    assert ended


@pytest.mark.parametrize(
    "sent",
    [
        # Fifty headers, each of an acceptable size.
        b"GET /metrics HTTP/1.1\r\n" + (b"X: " + b"x" * 1000 + b"\r\n") * 50 + b"\r\n",
        b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 100_000,
        b"GET /" + b"x" * 100_000,
        b"x" * 100_000,
    ],
    ids=["many headers", "long header", "long path", "no request"],
)
def test_a_large_request_is_not_read(endpoint: MetricsEndpoint, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=PATIENCE_S) as client:
        heard = b""
        try:
            client.sendall(sent)
            while part := client.recv(4096):
                heard += part
        except ConnectionError:  # the endpoint hangs up before it has read the whole request
            pass
    assert b"pipar_rounds" not in heard
    assert b" 200 " not in heard
    assert _ask(endpoint, "/healthz")[0] == 200


def test_several_clients_are_answered_while_events_arrive(endpoint: MetricsEndpoint, monitor: Monitor) -> None:
    statuses: list[int] = []
    clients = [threading.Thread(target=lambda: statuses.append(_ask(endpoint, "/metrics")[0])) for _ in range(3)]
    for client in clients:
        client.start()
    for number in range(1, 200):
        monitor.observe(RoundOver(number, {"a": 1}))
    for client in clients:
        client.join(PATIENCE_S)
    assert statuses == [200, 200, 200]


def test_no_thread_is_left_after_the_end() -> None:
    before = set(threading.enumerate())
    with monitored("127.0.0.1:0"):
        (thread,) = set(threading.enumerate()) - before
        assert thread.name == "monitor"
    assert not thread.is_alive()


def test_the_address_is_logged(log_records: list[logging.LogRecord]) -> None:
    endpoint = MetricsEndpoint(Monitor().answer, "127.0.0.1:0")
    endpoint.stop()
    assert [record.getMessage() for record in log_records] == [
        f"health and metrics at http://127.0.0.1:{endpoint.port}"
    ]


def test_stopping_does_not_wait_for_a_client_that_hangs(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_endpoint, "_SHUTDOWN_S", int(10 * PATIENCE_S))
    endpoint = MetricsEndpoint(monitor.answer, "127.0.0.1:0", patience_s=10 * PATIENCE_S)
    client = _hanging(endpoint)
    _ask(endpoint, "/healthz")
    stopping = threading.Thread(target=endpoint.stop, daemon=True)
    stopping.start()
    stopping.join(PATIENCE_S)  # anything that it might wait for takes longer
    assert not stopping.is_alive()
    assert client.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", endpoint.port), timeout=1)
    client.close()
    again = MetricsEndpoint(monitor.answer, f"127.0.0.1:{endpoint.port}")  # the port is free immediately
    again.stop()


def test_without_an_address_nothing_listens_and_events_still_count() -> None:
    before = threading.active_count()
    with monitored(None) as monitor:
        monitor.observe(_result(1))
        assert threading.active_count() == before
    assert _parsed(monitor.answer("/metrics")[2])["pipar_rounds_total"] == 1


def test_the_endpoint_stops_when_the_program_fails() -> None:
    before = threading.active_count()
    with pytest.raises(RuntimeError), monitored("127.0.0.1:0"):
        raise RuntimeError
    assert threading.active_count() == before


@pytest.mark.parametrize("address", ["9090", ":9090", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", ""])
def test_an_invalid_address_is_refused_in_one_sentence(address: str) -> None:
    with pytest.raises(InputError, match="is not an address: write HOST:PORT"):
        MetricsEndpoint(Monitor().answer, address)


def test_an_address_in_use_is_refused_in_one_sentence(endpoint: MetricsEndpoint) -> None:
    with pytest.raises(InputError, match=r"Cannot serve metrics on 127.0.0.1:\d+: address already in use."):
        MetricsEndpoint(Monitor().answer, f"127.0.0.1:{endpoint.port}")


def test_ipv6_addresses_work() -> None:
    try:
        endpoint = MetricsEndpoint(Monitor().answer, "[::1]:0")
    except InputError:
        pytest.skip("this machine has no IPv6")
    connection = http.client.HTTPConnection("::1", endpoint.port, timeout=PATIENCE_S)
    connection.request("GET", "/healthz")
    assert connection.getresponse().status == 200
    connection.close()
    endpoint.stop()
