"""Lanes serve jobs first come, first served: compared with a model in virtual time, with barriers in real threads."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.waiting import PATIENCE_S

from pipar.execution.clock import run_virtually, sleep_until
from pipar.execution.lanes import Lanes, ThreadLanes, VirtualLanes
from pipar.execution.spans import Recorder, Span
from pipar.execution.work import Work


def work(kind: str = "fs", n: int = 1, seconds: int = 0, device: str = "pi") -> Work:
    """Return work whose cost in virtual time is `samples`."""
    return Work(kind, 1, 1, n, samples=seconds, device=device)


def nothing() -> None:
    return None


# --- virtual


def by_hand(lanes: int, jobs: list[tuple[int, int]]) -> list[tuple[float, float, int]]:
    """(start, end, lane) of each job (arrival, seconds): each takes the lane that is free first."""
    free = [0.0] * lanes
    placed = []
    for arrival, seconds in jobs:
        lane = min(range(lanes), key=lambda number: (free[number], number))
        start = max(float(arrival), free[lane])
        free[lane] = start + seconds
        placed.append((start, free[lane], lane))
    return placed


jobs = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=15).map(sorted)


@pytest.mark.slow
@settings(max_examples=50)
@given(st.integers(1, 4), jobs)
def test_jobs_go_to_the_first_free_lane_in_the_order_of_their_arrival(
    lanes: int, arrivals: list[tuple[int, int]]
) -> None:
    recorder, ends = Recorder("server"), []

    async def submit(pool: VirtualLanes, number: int, seconds: int) -> None:
        result = await pool.run((work(n=number, seconds=seconds), lambda: number))
        ends.append((result, asyncio.get_running_loop().time()))

    async def main() -> None:
        pool = VirtualLanes([f"core {n}" for n in range(lanes)], recorder, lambda w: float(w.samples))
        async with asyncio.TaskGroup() as group:
            for number, (arrival, seconds) in enumerate(arrivals):
                await sleep_until(float(arrival))
                group.create_task(submit(pool, number, seconds))

    run_virtually(main())
    spans = {span.micro_batch: span for span in recorder.take(1).spans if not span.waiting}
    placed = by_hand(lanes, arrivals)
    found = [(spans[n].start, spans[n].end, int(spans[n].lane[5:])) for n in range(len(arrivals))]
    assert found == placed
    # The result is available when the work ends, not before.
    assert sorted(ends) == [(number, end) for number, (_, end, _) in enumerate(placed)]


def test_the_steps_of_a_job_stay_on_one_lane_and_pass_on_their_results() -> None:
    recorder = Recorder("server")

    async def main() -> tuple[Any, float]:
        pool = VirtualLanes(["core 0", "core 1"], recorder, lambda w: float(w.samples))
        result = await pool.run(
            (work("decode", seconds=1), lambda: 5),
            (work("fs", seconds=2), lambda x: x + 1),
            (work("bs", seconds=4), str),
        )
        return result, asyncio.get_running_loop().time()

    assert run_virtually(main()) == ("6", 7.0)
    spans = [(span.lane, span.kind, span.start, span.end) for span in recorder.take(1).spans]
    assert spans == [("core 0", "decode", 0.0, 1.0), ("core 0", "fs", 1.0, 3.0), ("core 0", "bs", 3.0, 7.0)]


@pytest.mark.parametrize(("lane", "waited"), [("core 0", [("wait u2", 2.0, 9.0)]), ("compute", [])])
def test_a_servers_core_records_its_waits_and_a_devices_lane_leaves_that_to_its_program(
    lane: str, waited: list[tuple[str, float, float]]
) -> None:
    recorder = Recorder("server")

    async def main() -> None:
        pool = VirtualLanes([lane], recorder, lambda w: float(w.samples))
        await pool.run((work(n=1, seconds=2), nothing))
        await sleep_until(9.0)
        await pool.run((work(n=2, seconds=1), nothing))

    run_virtually(main())
    assert [(span.name, span.start, span.end) for span in recorder.take(1).spans if span.waiting] == waited


# --- threads


def with_threads(lanes: list[str], scenario: Callable[[Lanes], Any], *, speed: float = 1.0) -> tuple[Any, list[Span]]:
    """The result of a scenario over real threads, and the spans that it left."""
    recorder = Recorder("server")

    async def main() -> Any:
        pool = ThreadLanes(lanes, recorder, speed=speed)
        try:
            return await scenario(pool)
        finally:
            pool.close()

    return asyncio.run(asyncio.wait_for(main(), PATIENCE_S)), recorder.take(1).spans


def test_one_lane_runs_one_job_at_a_time_in_the_order_of_submission() -> None:
    order: list[str] = []

    def job(number: int) -> Callable[[], None]:
        def run() -> None:
            order.append(f"start {number}")
            sum(range(2000))
            order.append(f"end {number}")

        return run

    async def scenario(pool: Lanes) -> None:
        await asyncio.gather(*(pool.run((work(n=number), job(number))) for number in range(20)))

    _, spans = with_threads(["core 0"], scenario)
    assert order == [f"{what} {number}" for number in range(20) for what in ("start", "end")]
    busy = [span for span in spans if not span.waiting]
    assert all(one.end <= other.start for one, other in itertools.pairwise(busy))


def test_two_lanes_run_two_jobs_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=PATIENCE_S)  # broken unless both jobs run at the same time

    async def scenario(pool: Lanes) -> None:
        await asyncio.gather(*(pool.run((work(n=n), meeting.wait)) for n in range(2)))

    _, spans = with_threads(["core 0", "core 1"], scenario)
    assert {span.lane for span in spans} == {"core 0", "core 1"}


def test_a_job_in_a_thread_passes_results_from_step_to_step() -> None:
    async def scenario(pool: Lanes) -> Any:
        return await pool.run(
            (work("decode"), threading.get_ident),
            (work("fs"), lambda ident: (ident, threading.get_ident())),
            (work("bs"), lambda idents: (*idents, threading.get_ident())),
        )

    idents, spans = with_threads(["core 0", "core 1"], scenario)
    assert len(set(idents)) == 1
    assert idents[0] != threading.get_ident()
    assert [span.kind for span in spans if not span.waiting] == ["decode", "fs", "bs"]


def test_an_exception_is_raised_and_the_lane_continues() -> None:
    async def scenario(pool: Lanes) -> Any:
        with pytest.raises(KeyError, match="lost"):
            await pool.run((work(), lambda: {}["lost"]))
        return await pool.run((work(), lambda: "well"))

    result, spans = with_threads(["core 0"], scenario)
    assert result == "well"
    assert len([span for span in spans if not span.waiting]) == 1


@pytest.mark.parametrize("virtual", [True, False])
def test_an_exception_in_a_later_step_ends_the_job(virtual: bool) -> None:
    reached = []

    async def scenario(pool: Lanes) -> None:
        with pytest.raises(ZeroDivisionError):
            await pool.run((work(), lambda: 0), (work(), lambda x: 1 // x), (work(), reached.append))

    async def in_virtual_time() -> None:
        await scenario(VirtualLanes(["core 0"], Recorder("server"), lambda _: 1.0))

    if virtual:
        run_virtually(in_virtual_time())
    else:
        with_threads(["core 0"], scenario)
    assert reached == []


def burn(cpu_s: float) -> Callable[[], tuple[float, float]]:
    """Return a job that uses this much CPU time, and returns the CPU time and the elapsed time that it really took."""

    def run() -> tuple[float, float]:
        start, began = time.thread_time(), time.monotonic()
        while time.thread_time() - start < cpu_s:
            math.sqrt(2.0)
        return time.thread_time() - start, time.monotonic() - began

    return run


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of lanes, which a busy host may prolong."""
    asked: list[float] = []

    def sleep(seconds: float) -> None:
        asked.append(seconds)
        real_sleep(seconds)

    real_sleep = time.sleep
    monkeypatch.setattr(time, "sleep", sleep)
    return asked


@pytest.mark.slow
def test_half_the_speed_makes_a_span_twice_its_cpu_time_on_a_busy_host_too(pauses: list[float]) -> None:
    async def scenario(pool: Lanes) -> Any:
        return await pool.run((work(), burn(0.1)))

    (used, took), spans = with_threads(["core 0"], scenario, speed=0.5)
    (span,) = (span for span in spans if not span.waiting)
    # Never shorter than used / speed, up to what thread_time cannot resolve. Anything longer is due to the host: no
    # more is waited than is missing when the job is over.
    assert span.end - span.start >= used / 0.5 - 0.002
    assert sum(pauses) <= max(0.0, used / 0.5 - took) + 0.002


def test_waiting_is_not_slowed_down(pauses: list[float]) -> None:
    gate = threading.Event()

    async def scenario(pool: Lanes) -> None:
        job = asyncio.ensure_future(pool.run((work(), gate.wait)))
        await asyncio.sleep(0.05)
        gate.set()
        await job

    with_threads(["core 0"], scenario, speed=0.01)
    # It waited for 0.05 s and used some microseconds of CPU: a hundredth of the speed would be 5 s.
    assert sum(pauses) < 2.0


def test_a_low_priority_lane_does_not_change_the_priority_of_others() -> None:
    import os

    async def main() -> tuple[int, int]:
        pool = ThreadLanes(["validation"], Recorder("server"), nice=19)
        inside = await pool.run((work(), lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
        pool.close()
        return inside, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    inside, here = asyncio.run(main())
    assert (inside, here < 19) == (19, True)
