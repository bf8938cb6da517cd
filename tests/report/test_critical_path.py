"""The critical path: of a small pipeline written by hand, and of runs in virtual time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from pipar.execution.spans import COMPUTE, DOWNLINK, IO, SERVER, UPLINK, Span
from pipar.report.critical_path import Window, critical_path, middle_iteration, shares, subject, uses_link, whole_epoch
from pipar.report.record import RunRecord

ROUNDED_S = 3e-6


def span(
    text: str, lane: str, start: float, end: float, *, owner: str = "a", device: str = "", iteration: int = 1
) -> Span:
    """Return a span of epoch 1: span("u2", UPLINK, 3, 5) is micro-batch 2 on the uplink of device a."""
    kind = text.rstrip("0123456789")
    return Span(owner, lane, kind, 1, iteration, int(text[len(kind) :] or 0), start, end, device=device)


def served(text: str, start: float, end: float, device: str = "a", core: int = 0) -> Span:
    return span(text, f"core {core}", start, end, owner=SERVER, device=device)


#: Two micro-batches over a slow uplink: everything waits for its second upload.
SLOW_UPLINK = [
    span("fc1", COMPUTE, 0, 1), span("fc2", COMPUTE, 1, 2),
    span("u1", UPLINK, 1, 5), span("u2", UPLINK, 5, 9),
    served("fs1", 5, 6), served("bs1", 6, 7), served("fs2", 9, 10), served("bs2", 10, 11),
    span("d1", DOWNLINK, 7, 8), span("d2", DOWNLINK, 11, 12),
    span("bc1", COMPUTE, 8, 10), span("bc2", COMPUTE, 12, 14), span("step", COMPUTE, 14, 15),
]  # fmt: skip


def names(path: list[Span]) -> str:
    return " ".join(span.name for span in path)


def test_a_slow_uplink_is_on_the_path_with_all_of_its_uploads() -> None:
    window = Window("a", 1, 1, 0.0, 15.0)
    path = critical_path(SLOW_UPLINK, window)
    assert names(path) == "fc1 u1 u2 fs2 bs2 d2 bc2 step"
    assert shares(path, window) == pytest.approx(
        {COMPUTE: 4.0, IO: 0.0, UPLINK: 8.0, "core": 2.0, DOWNLINK: 1.0, "wait": 0.0}
    )


def test_latency_is_waiting_between_two_spans_of_the_path() -> None:
    late = [
        span("fc1", COMPUTE, 0, 1), span("u1", UPLINK, 1, 2), served("fs1", 2.5, 3), served("bs1", 3, 4),
        span("d1", DOWNLINK, 4, 5), span("bc1", COMPUTE, 5.5, 6), span("step", COMPUTE, 6, 7),
    ]  # fmt: skip
    window = Window("a", 1, 1, 0.0, 7.0)
    path = critical_path(late, window)
    assert names(path) == "fc1 u1 fs1 bs1 d1 bc1 step"
    assert shares(path, window)["wait"] == pytest.approx(1.0)


def test_a_core_that_is_busy_for_another_device_is_on_the_path() -> None:
    shared = [
        span("fc1", COMPUTE, 0, 1), span("u1", UPLINK, 1, 2),
        span("fc1", COMPUTE, 0, 0.5, owner="b"), span("u1", UPLINK, 0.5, 1, owner="b"),
        served("fs1", 1, 6, device="b"), served("fs1", 6, 7), served("bs1", 7, 8),
        span("d1", DOWNLINK, 8, 9), span("bc1", COMPUTE, 9, 10), span("step", COMPUTE, 10, 11),
    ]  # fmt: skip
    path = critical_path(shared, Window("a", 1, 1, 0.0, 11.0))
    assert [f"{subject(one)} {one.name}" for one in path] == [
        "b fc1", "b u1", "b fs1", "a fs1", "a bs1", "a d1", "a bc1", "a step",
    ]  # fmt: skip


def test_an_encoding_in_pieces_overlaps_with_its_upload() -> None:
    chunks = [
        span("fc1", COMPUTE, 0, 1), span("encode1", IO, 1, 2), span("encode1", IO, 2, 3), span("u1", UPLINK, 2, 6),
        served("fs1", 6, 7), served("bs1", 7, 8), span("d1", DOWNLINK, 8, 9), span("bc1", COMPUTE, 9, 10),
        span("step", COMPUTE, 10, 11),
    ]  # fmt: skip
    path = critical_path(chunks, Window("a", 1, 1, 0.0, 11.0))
    assert names(path) == "fc1 encode1 encode1 u1 fs1 bs1 d1 bc1 step"


def test_spans_without_duration_do_not_end_the_path() -> None:
    instant = [
        span("fc1", COMPUTE, 0, 1), span("encode1", IO, 1, 1), span("u1", UPLINK, 1, 2), served("decode1", 2, 2),
        served("fs1", 2, 3), served("bs1", 3, 4), served("encode1", 4, 4), span("d1", DOWNLINK, 4, 5),
        span("decode1", IO, 5, 5), span("bc1", COMPUTE, 5, 6), span("step", COMPUTE, 6, 6),
    ]  # fmt: skip
    path = critical_path(instant, Window("a", 1, 1, 0.0, 6.0))
    assert path[0].name == "fc1"
    assert {"u1", "fs1", "bs1", "d1", "bc1"} <= {one.name for one in path}


def test_the_exchange_of_models_waits_for_the_last_model() -> None:
    exchange = [
        span("step", COMPUTE, 0, 1), span("pack", COMPUTE, 1, 2, iteration=0), span("model", UPLINK, 2, 3, iteration=0),
        span("model", UPLINK, 2, 6, owner="b", iteration=0), span("pack", COMPUTE, 0, 2, owner="b", iteration=0),
        replace(served("decode", 6, 7, device="b"), iteration=0), replace(served("decode", 3, 4), iteration=0),
        replace(served("aggregate", 7, 8, device="", core=1), iteration=0),
        replace(served("pack", 8, 9, device=""), iteration=0), span("model", DOWNLINK, 9, 10, iteration=0),
        span("install", COMPUTE, 10, 11, iteration=0),
    ]  # fmt: skip
    path = critical_path(exchange, Window("a", 1, 0, 0.0, 11.0))
    assert [f"{subject(one)} {one.name}" for one in path] == [
        "b pack", "b model", "b decode", "server aggregate", "server pack", "a model", "a install",
    ]  # fmt: skip


@pytest.mark.parametrize("device", ["a", "b", "c"])
def test_among_models_that_arrive_together_the_path_takes_that_of_the_displayed_device(device: str) -> None:
    equal = [replace(served("aggregate", 3, 4, device=""), iteration=0)]
    for name in ("a", "b", "c"):
        equal += [
            span("pack", COMPUTE, 0, 1, owner=name, iteration=0),
            span("model", UPLINK, 1, 3 - 1e-9 * (name == device), owner=name, iteration=0),  # as rounded in a file
            span("model", DOWNLINK, 4, 5, owner=name, iteration=0),
            span("install", COMPUTE, 5, 6, owner=name, iteration=0),
        ]
    path = critical_path(equal, Window(device, 1, 0, 0.0, 6.0))
    assert {subject(one) for one in path} == {device, SERVER}


def test_no_spans_have_no_path() -> None:
    assert critical_path([], Window("a", 1, 1, 0.0, 1.0)) == []
    assert middle_iteration([], "a", 1) is None
    assert whole_epoch([], "a", 1) is None


def test_an_iteration_begins_after_the_previous_optimiser_step() -> None:
    steps = [span("step", COMPUTE, n, n + 0.5, iteration=n) for n in (1, 2, 3, 4)]
    assert middle_iteration(steps, "a", 1) == Window("a", 1, 2, 1.5, 2.5)
    assert middle_iteration(steps, "a", 1, like=4) == Window("a", 1, 4, 3.5, 4.5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fl", "sl", "sfl", "pipar"])
@pytest.mark.parametrize("whole", [False, True], ids=["iteration", "epoch"])
def test_in_the_virtual_world_the_path_has_no_gap_except_the_links_latency(
    runs: dict[str, Path], method: str, whole: bool
) -> None:
    spans = RunRecord.read(runs[method]).spans
    device = "device-2"
    window = whole_epoch(spans, device, 2) if whole else middle_iteration(spans, device, 2)
    assert window is not None
    assert uses_link(spans, window) == (method != "fl" and not whole)
    path = critical_path(spans, window)
    assert path[-1].end == pytest.approx(window.end, abs=ROUNDED_S)
    assert path[0].start <= window.start + ROUNDED_S or method == "sl"  # it gets its turn from the previous device
    for before, after in pairwise(path):
        assert after.start >= before.start
        gap = after.start - before.end
        arrives = before.lane in (UPLINK, DOWNLINK) and gap == pytest.approx(3e-3, abs=ROUNDED_S)
        assert gap <= ROUNDED_S or arrives or method == "sl", f"{before} ... {after}"
    assert sum(shares(path, window).values()) == pytest.approx(window.end - window.start)
