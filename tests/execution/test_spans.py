"""Spans in; busy, waiting and idle times and Chrome events out, compared with times computed by hand."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipar.errors import ProtocolError
from pipar.execution.spans import (
    WORK_KINDS,
    ChromeEvents,
    Clock,
    EpochTrace,
    Recorder,
    Span,
    Totals,
    busy_s,
    by_lane,
    excerpt,
    pack_trace,
    uncovered_s,
    unpack_trace,
)


def events_of(spans: list[Span], origin: float = 0.0) -> list[dict[str, object]]:
    return list(ChromeEvents().events(spans, origin))


def span(start: float, end: float, *, kind: str = "fc", owner: str = "pi", lane: str = "compute", n: int = 1) -> Span:
    return Span(owner, lane, kind, 1, 1, n, start, end)


@pytest.mark.parametrize(
    ("spans", "busy"),
    [
        ([], 0.0),
        ([(1, 2)], 1.0),
        ([(1, 2), (4, 6)], 3.0),
        ([(4, 6), (1, 2)], 3.0),
        ([(1, 5), (2, 3)], 4.0),
        ([(1, 3), (2, 5)], 4.0),
        ([(1, 3), (3, 5)], 4.0),
        ([(1, 3), (1, 3)], 2.0),
        ([(-5, 1), (9, 20)], 2.0),
        ([(-5, 20)], 10.0),
        ([(11, 12)], 0.0),
        ([(3, 3)], 0.0),
    ],
    ids=str,
)
def test_busy_is_the_union_of_spans_within_ten_seconds(spans: list[tuple[float, float]], busy: float) -> None:
    found = [span(start, end) for start, end in spans]
    assert busy_s(found, 0.0, 10.0) == busy
    assert uncovered_s(found, 0.0, 10.0) == 10.0 - busy


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=12))
def test_the_union_counts_every_second_once(pairs: list[tuple[int, int]]) -> None:
    spans = [span(float(start), float(start + length)) for start, length in pairs]
    covered = {second for start, length in pairs for second in range(start, start + length)} & set(range(5, 25))
    assert busy_s(spans, 5.0, 25.0) == len(covered)


def test_a_recorder_sums_each_lane_and_epoch_and_keeps_the_spans() -> None:
    recorder = Recorder("pi")
    recorder.busy("compute", "fc", 1, 1, 1, 2.0, 3.0)
    recorder.waited("compute", "d", 1, 1, 1, 3.0, 7.0)
    recorder.busy("compute", "bc", 1, 1, 1, 7.0, 9.0)
    recorder.busy("compute", "fc", 2, 1, 1, 20.0, 20.5)
    trace = recorder.take(1)
    assert trace.totals == {"compute": Totals(busy_s=3.0, waiting_s=4.0, first_start=2.0, last_end=9.0)}
    assert [one.name for one in trace.spans] == ["fc1", "wait d1", "bc1"]
    assert recorder.busy_s == {"compute": 3.5}
    assert recorder.take(1) == EpochTrace("pi", 1)


def test_waiting_for_no_time_leaves_nothing() -> None:
    recorder = Recorder("pi")
    recorder.waited("compute", "d", 1, 1, 1, 3.0, 3.0)
    recorder.waited("compute", "d", 1, 1, 1, 3.0, 2.0)
    assert recorder.take(1) == EpochTrace("pi", 1)


def test_sums_are_exact_whether_or_not_spans_are_kept() -> None:
    kept, sums_only, some = Recorder("server"), Recorder("server", frozenset()), Recorder("server", frozenset({"pi-1"}))
    for recorder in (kept, sums_only, some):
        for n in (1, 2):
            recorder.busy("core 0", "fs", 1, 1, n, float(n), n + 0.5, f"pi-{n}")
    traces = [recorder.take(1) for recorder in (kept, sums_only, some)]
    assert traces[0].totals == traces[1].totals == traces[2].totals
    assert [len(trace.spans) for trace in traces] == [2, 0, 1]


# --- its bytes

seconds = st.floats(0, 1e9)
spans = st.builds(
    lambda lane, kind, waiting, iteration, n, times: Span(
        "pi", lane, kind, 3, iteration, n, min(times), max(times), waiting
    ),
    st.sampled_from(["compute", "io", "uplink"]),
    st.sampled_from(WORK_KINDS),
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**16 - 1),
    st.tuples(seconds, seconds),
)
totals = st.dictionaries(
    st.sampled_from(["compute", "io", "uplink"]),
    st.builds(Totals, seconds, seconds, seconds | st.just(math.inf), seconds),
)


@pytest.mark.slow
@settings(max_examples=50)
@given(totals, st.lists(spans, max_size=8))
def test_a_trace_is_restored_to_the_last_bit(sums: dict[str, Totals], found: list[Span]) -> None:
    trace = EpochTrace("pi", 3, sums, found)
    assert unpack_trace(pack_trace(trace), owner="pi") == trace


def test_a_trace_belongs_to_its_sender_even_if_it_names_another_owner() -> None:
    read = unpack_trace(pack_trace(EpochTrace("server", 1, {}, [span(1, 2)])), owner="pi")
    assert (read.owner, read.spans[0].owner) == ("pi", "pi")


def with_head(head: object, tail: bytes = b"") -> bytes:
    data = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("!I", len(data)) + data + tail


GOOD: dict[str, object] = {"owner": "pi", "epoch": 1, "lanes": ["compute"], "totals": {}}


def packed_span(lane: int = 0, kind: int = 0, start: float = 1.0, end: float = 2.0) -> bytes:
    return struct.pack("!BB?IHdd", lane, kind, False, 1, 1, start, end)


def test_the_made_up_head_and_span_are_valid_before_they_are_damaged() -> None:
    assert len(unpack_trace(with_head(GOOD, packed_span()), owner="pi").spans) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\x00",
        b"\xff\xff\xff\xff{}",
        with_head(b"{"),
        with_head(b"\xff"),
        with_head(b"[" * 100_000),
        with_head([]),
        with_head({}),
        with_head({**GOOD, "epoch": "x"}),
        with_head({**GOOD, "epoch": math.inf}),
        with_head({**GOOD, "epoch": math.nan}),
        with_head({**GOOD, "totals": []}),
        with_head({**GOOD, "totals": {"io": 3}}),
        with_head({**GOOD, "totals": {"io": [1, 2, 3, 4, 5]}}),
        with_head({**GOOD, "totals": {"io": ["much"]}}),
        with_head({**GOOD, "totals": {"io": [10**400]}}),
        with_head({**GOOD, "lanes": None}, packed_span()),
        with_head({**GOOD, "lanes": [["io"]]}, packed_span()),
        with_head(GOOD, packed_span()[:-1]),
        with_head(GOOD, packed_span(lane=1)),
        with_head(GOOD, packed_span(kind=len(WORK_KINDS))),
        with_head(GOOD, packed_span(start=3.0)),
        with_head(GOOD, packed_span(start=math.nan)),
        with_head(GOOD, packed_span(end=math.inf)),
        with_head(GOOD, packed_span(start=-math.inf)),
    ],
    ids=lambda data: repr(data[:40]),
)
def test_a_damaged_trace_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="pi sent a trace"):
        unpack_trace(data, owner="pi")


@pytest.mark.slow
@given(st.lists(spans, max_size=2), st.data())
def test_any_damage_gives_a_trace_or_a_protocol_error(found: list[Span], data: st.DataObject) -> None:
    packed = bytearray(pack_trace(EpochTrace("pi", 3, {"compute": Totals(1, 2, 3, 4)}, found)))
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        trace = unpack_trace(bytes(packed[: data.draw(st.integers(0, len(packed)))]), owner="pi")
    except ProtocolError:
        return
    json.dumps(events_of(trace.spans), allow_nan=False)


# --- Chrome events

GOLDEN_EVENTS = """
[{"ph":"M","name":"process_name","pid":1,"tid":0,"args":{"name":"server"}},
 {"ph":"M","name":"thread_name","pid":1,"tid":1,"args":{"name":"core 0"}},
 {"ph":"X","name":"wait u1","cat":"wait","pid":1,"tid":1,"ts":0.0,"dur":1500000.0,
  "args":{"epoch":1,"iteration":1,"micro_batch":1,"device":"pi"}},
 {"ph":"X","name":"fs1","cat":"fs","pid":1,"tid":1,"ts":1500000.0,"dur":250000.0,
  "args":{"epoch":1,"iteration":1,"micro_batch":1,"device":"pi"}},
 {"ph":"M","name":"process_name","pid":2,"tid":0,"args":{"name":"pi"}},
 {"ph":"M","name":"thread_name","pid":2,"tid":1,"args":{"name":"compute"}},
 {"ph":"X","name":"fc1","cat":"fc","pid":2,"tid":1,"ts":0.0,"dur":1000000.0,
  "args":{"epoch":1,"iteration":1,"micro_batch":1}},
 {"ph":"X","name":"step","cat":"step","pid":2,"tid":1,"ts":2000000.0,"dur":0.001,
  "args":{"epoch":1,"iteration":1,"micro_batch":0}},
 {"ph":"M","name":"thread_name","pid":2,"tid":2,"args":{"name":"uplink"}},
 {"ph":"X","name":"u1","cat":"u","pid":2,"tid":2,"ts":1000000.0,"dur":500000.0,
  "args":{"epoch":1,"iteration":1,"micro_batch":1}}]
"""


def test_spans_become_chrome_events_with_the_server_first_and_one_track_per_lane() -> None:
    core = replace(span(11.5, 11.75, kind="fs", owner="server", lane="core 0"), device="pi")
    found = [
        span(12.0, 12.000000001, kind="step", n=0),
        span(11.0, 11.5, kind="u", lane="uplink"),
        core,
        replace(core, kind="u", start=10.0, end=11.5, waiting=True),
        span(10.0, 11.0),
    ]
    assert events_of(found, origin=10.0) == json.loads(GOLDEN_EVENTS)


@pytest.mark.slow
@settings(max_examples=50)
@given(st.lists(spans, max_size=20))
def test_every_span_is_one_event_and_a_track_holds_one_lane(found: list[Span]) -> None:
    events = events_of(found)
    drawn = [event for event in events if event["ph"] == "X"]
    assert len(drawn) == len(found)
    lanes = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(lanes.values()) == sorted(lane for _, lane in by_lane(found))
    for (_, lane), inside in by_lane(found).items():
        (track,) = [key for key, name in lanes.items() if name == lane]
        assert sum((event["pid"], event["tid"]) == track for event in drawn) == len(inside)


# --- clocks of other machines


def test_a_trace_names_the_clock_of_its_times() -> None:
    made = EpochTrace("a", 3, {"compute": Totals(1.0, 0.0, 5.0, 7.0)}, clock=Clock("board", 1.5, 2.5))
    assert unpack_trace(pack_trace(made), owner="a") == made


def test_a_clock_that_is_behind_is_corrected_up_to_half_the_difference_of_both_delays() -> None:
    clock = Clock("board", hello_at=100.0, welcome_at=103.0)
    # The server's clock shows 5000 more; the hello took 0.2 s and the welcome 0.1 s.
    assert clock.offset_s("server", 5100.2, 5102.9) == pytest.approx(5000.05)
    assert clock.offset_s("board", 5100.2, 5102.9) == 0.0  # one machine has one clock


def test_a_trace_on_another_clock_keeps_its_lengths() -> None:
    span = Span("a", "compute", "fc", 1, 1, 1, 5.0, 6.0)
    trace = EpochTrace("a", 1, {"compute": Totals(1.0, 0.5, 5.0, 7.0)}, [span])
    moved = trace.later(10.0)
    assert moved.totals == {"compute": Totals(1.0, 0.5, 15.0, 17.0)}
    assert [(one.start, one.end) for one in moved.spans] == [(15.0, 16.0)]
    assert trace.later(0.0) is trace


@pytest.mark.parametrize("said", [["x", 1.0], ["x", "1", 2.0], [1, 1.0, 2.0], ["x", float("nan"), 1.0], 7])
def test_an_invalid_clock_is_refused(said: object) -> None:
    head = json.dumps({"lanes": [], "epoch": 1, "totals": {}, "clock": said}).encode()
    with pytest.raises(ProtocolError, match="cannot be read"):
        unpack_trace(struct.pack("!I", len(head)) + head, owner="a")


# --- excerpts for pictures


def epoch_of(devices: int, iterations: int) -> list[Span]:
    """Return an epoch in which device k ends k seconds late, and a core works for each micro-batch."""
    spans = []
    for device in range(devices):
        name, late = f"pi-{device:02}", float(device)
        for number in range(1, iterations + 1):
            at = late + 10.0 * number
            spans.append(Span(name, "compute", "fc", 1, number, 1, at, at + 1))
            spans.append(Span("server", "core 0", "fs", 1, number, 1, at + 2, at + 2.1, device=name))
            spans.append(Span(name, "compute", "step", 1, number, 0, at + 4, at + 5))
    return spans


def test_an_excerpt_of_few_spans_has_all_of_them() -> None:
    spans = epoch_of(2, 3)
    assert excerpt(spans) == (spans, 0)


def test_an_excerpt_has_three_iterations_of_the_slowest_device_and_the_others_at_that_time() -> None:
    found, left_out = excerpt(epoch_of(10, 9), most=200, devices=4)
    owned = [span for span in found if span.owner != "server"]
    assert {span.iteration for span in owned if span.owner == "pi-09"} == {4, 5, 6}
    assert {span.owner for span in owned} == {"pi-00", "pi-03", "pi-06", "pi-09"}
    start, end = (
        at(getattr(s, when) for s in owned if s.owner == "pi-09") for at, when in ((min, "start"), (max, "end"))
    )
    steps = [span for span in epoch_of(10, 9) if span.owner in {"pi-00", "pi-03", "pi-06"} and span.kind == "step"]
    assert {s for s in steps if s.start >= start and s.end <= end} <= set(owned)
    assert max(owned, key=lambda span: span.end * (span.kind == "step")).owner == "pi-09", "it is the slowest no more"
    assert left_out == 0


def test_an_excerpt_shows_the_cores_work_for_other_devices() -> None:
    found, _ = excerpt(epoch_of(10, 9), most=200, devices=4)
    start, end = min(span.start for span in found), max(span.end for span in found)
    cores = [span for span in found if span.owner == "server"]
    assert {span.device for span in cores} == {f"pi-{number:02}" for number in range(10)}
    assert all(span.end > start and span.start < end for span in cores)


@pytest.mark.parametrize(("most", "devices", "iterations"), [(60, 4, 3), (30, 4, 1), (7, 3, 1), (5, 2, 1), (4, 1, 1)])
def test_an_excerpt_drops_iterations_and_then_devices_but_never_the_server(
    most: int, devices: int, iterations: int
) -> None:
    spans = epoch_of(4, 9)
    found, _ = excerpt([span for span in spans if span.owner != "server"] + [s for s in spans if s.device], most=most)
    assert len({span.owner for span in found} - {"server"}) == devices
    own = [span for span in found if "pi-03" in (span.owner, span.device)]
    assert len(own) == 3 * iterations
    assert sum(span.owner == "server" for span in own) == iterations


def test_an_excerpt_never_exceeds_twice_its_limit_and_reports_what_is_missing() -> None:
    spans = epoch_of(40, 2)
    found, left_out = excerpt(spans, most=2, devices=4)
    assert {span.owner for span in found} == {"pi-39", "server"}
    assert len(found) == 4
    start, end = min(span.start for span in found[:2]), max(span.end for span in found[:2])
    served = [s for s in spans if s.device not in ("", "pi-39") and s.end > start and s.start < end]
    assert left_out == 1 + len(served) - 2


def test_of_each_device_only_the_first_spans_of_an_epoch_are_kept_and_all_are_summed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipar.execution.spans.MOST_SPANS", 3)
    recorder = Recorder("server")
    for number in range(5):
        for device in ("a", "b"):
            recorder.busy("core 0", "fs", 1, number, 1, float(number), number + 0.5, device)
    recorder.busy("core 0", "fs", 2, 1, 1, 9.0, 9.5, "a")
    trace = recorder.take(1)
    assert [(span.device, span.iteration) for span in trace.spans] == [(d, n) for n in range(3) for d in ("a", "b")]
    assert trace.totals["core 0"].busy_s == 5.0
    assert len(recorder.take(2).spans) == 1


@pytest.mark.parametrize("lanes", [["compute", "io", "x" * 1000], ["compute", "io", 7], {"compute": 0}])
def test_a_trace_with_lanes_that_no_device_has_is_refused(lanes: object) -> None:
    head = json.dumps({"owner": "a", "epoch": 1, "lanes": lanes, "totals": {}}).encode()
    with pytest.raises(
        ProtocolError,
        match="of lanes that no device has; a device has compute, downlink, evaluation, io, noise, uplink",
    ):
        unpack_trace(struct.pack("!I", len(head)) + head, owner="a")


def test_totals_of_lanes_that_no_device_has_are_refused() -> None:
    head = json.dumps({"epoch": 1, "lanes": [], "totals": {f"lane {n}": [0, 0, 0, 0] for n in range(1000)}}).encode()
    with pytest.raises(ProtocolError, match="of lanes that no device has"):
        unpack_trace(struct.pack("!I", len(head)) + head, owner="a")
