"""Lanes: run a function as a piece of work, and record its span.

In the real world a lane is a thread (torch releases the interpreter lock). In the virtual world the function runs
inline, and the result is available after the time that the cost model gives.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from pipar.execution.clock import sleep_until
from pipar.execution.spans import Recorder
from pipar.execution.work import Work

#: Work and its function. The first function of a job takes no argument, each other one the result of the previous.
Step = tuple[Work, Callable[..., Any]]
#: Takes the position and the result of a step that has ended.
Ended = Callable[[int, Any], None]


class Lanes(Protocol):
    """Lanes that serve jobs first come, first served; a job stays on one lane."""

    async def run(self, *steps: Step, ended: Ended | None = None) -> Any:
        """Run the steps one after another and return the result of the last.

        `ended` is called with each step's position and result when the step ends, even if the caller was cancelled.
        """

    def close(self) -> None: ...


class Accelerator(Protocol):
    """What the functions of a lane compute on, if it works on its own: functions only submit work to it."""

    def begin_lane(self) -> None: ...  # the calling thread gets a stream of its own

    def end_stage(self) -> None: ...  # returns when everything is done that the calling thread has submitted


def work_label(work: Work) -> tuple[str, int, int, int]:
    """Return the fields of a span that come from its work."""
    return work.kind, work.epoch, work.iteration, work.micro_batch


class VirtualLanes:
    """Lanes in virtual time. The duration of a job is known when it is submitted, so no queue is needed.

    Lanes of one machine may slow each other down: `crowded` gives the slowdown for each other lane that is busy.
    """

    def __init__(
        self,
        lanes: Sequence[str],
        recorder: Recorder,
        seconds: Callable[[Work], float],
        crowded: Callable[[int], float] | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._crowded = crowded if len(lanes) > 1 else None
        self._loop = asyncio.get_running_loop()
        self._recorder = recorder
        self._seconds = seconds
        self._free = [(self._loop.time(), number, lane) for number, lane in enumerate(lanes)]
        self._idle_kind = "u" if len(lanes) and lanes[0].startswith("core") else ""

    async def run(self, *steps: Step, ended: Ended | None = None) -> Any:
        now = self._loop.time()
        free_at, number, lane = self._free[0]
        start = max(now, free_at)
        if self._idle_kind:
            _, epoch, iteration, micro_batch = work_label(steps[0][0])
            device = steps[0][0].device
            self._recorder.waited(lane, self._idle_kind, epoch, iteration, micro_batch, free_at, start, device)
        slower = self._slower(steps[0][0], start)
        value: tuple[Any, ...] = ()
        for place, (work, function) in enumerate(steps):
            value = (function(*value),)
            if self._accelerator is not None:
                self._accelerator.end_stage()
            end = start + self._seconds(work) * slower
            self._recorder.busy(lane, *work_label(work), start, end, work.device)
            if ended is not None:
                self._loop.call_at(end, ended, place, value[0])
            start = end
        heapq.heapreplace(self._free, (start, number, lane))
        await sleep_until(start)
        return value[0]

    def _slower(self, work: Work, start: float) -> float:
        """Return how many times longer a job takes because of the other lanes that are busy when it starts."""
        if self._crowded is None:
            return 1.0
        busy = sum(free_at > start for free_at, _, _ in self._free[1:])
        return 1.0 + self._crowded(work.samples) * busy

    def close(self) -> None:
        pass


class ThreadLanes:
    """Lanes that are threads, each with a stream of its accelerator if there is one.

    A speed below 1 is emulated by sleeping in proportion to the CPU time used, not to the time passed: time that a busy
    host takes away is not multiplied. With an accelerator it is the time passed, for which that computes. `prepare` is
    called first in every thread.
    """

    def __init__(
        self,
        lanes: Sequence[str],
        recorder: Recorder,
        *,
        speed: float = 1.0,
        nice: int = 0,
        accelerator: Accelerator | None = None,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self._accelerator = accelerator
        self._used_s = time.thread_time if accelerator is None else time.perf_counter
        self._loop = asyncio.get_running_loop()
        self._recorder = recorder
        self._speed = speed
        self._nice = nice
        self._prepare = prepare
        self._unnamed = list(reversed(lanes))
        self._thread = threading.local()
        self._idle_kind = "u" if len(lanes) and lanes[0].startswith("core") else ""
        self._pool = ThreadPoolExecutor(len(lanes), initializer=self._start_thread)

    def _start_thread(self) -> None:
        self._prepare()
        self._thread.lane = self._unnamed.pop()
        self._thread.free_at = self._loop.time()
        if self._nice and sys.platform == "linux":  # elsewhere the priority is that of the whole process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        if self._accelerator is not None:
            self._accelerator.begin_lane()

    async def run(self, *steps: Step, ended: Ended | None = None) -> Any:
        job = _Job(steps, self._loop.time(), ended)
        await self._loop.run_in_executor(self._pool, self._execute, job)
        self._record(job)
        return job.value[0]

    def _execute(self, job: _Job) -> None:
        job.lane, job.free_at = self._thread.lane, self._thread.free_at
        clock = self._loop.time
        for place, (_, function) in enumerate(job.steps):
            start, used = clock(), self._used_s()
            job.value = (function(*job.value),)
            if self._accelerator is not None:
                self._accelerator.end_stage()
            if self._speed < 1:
                used = self._used_s() - used
                time.sleep(max(0.0, used / self._speed - (clock() - start) if used else 0.0))
            job.times.append((start, clock()))
            if job.ended is not None:
                self._loop.call_soon_threadsafe(job.ended, place, job.value[0])
        self._thread.free_at = job.times[-1][1]

    def _record(self, job: _Job) -> None:
        # Runs in the loop's thread, because the recorder is not shared between threads.
        first = job.steps[0][0]
        if self._idle_kind:
            _, epoch, iteration, micro_batch = work_label(first)
            waited_until = max(job.free_at, job.submitted_at)
            self._recorder.waited(
                job.lane, self._idle_kind, epoch, iteration, micro_batch, job.free_at, waited_until, first.device
            )
        for (work, _), (start, end) in zip(job.steps, job.times, strict=True):
            self._recorder.busy(job.lane, *work_label(work), start, end, work.device)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Job:
    """One job in a thread."""

    __slots__ = ("ended", "free_at", "lane", "steps", "submitted_at", "times", "value")

    def __init__(self, steps: tuple[Step, ...], submitted_at: float, ended: Ended | None) -> None:
        self.steps = steps
        self.ended = ended
        self.submitted_at = submitted_at
        self.times: list[tuple[float, float]] = []
        self.value: tuple[Any, ...] = ()
        self.lane = ""
        self.free_at = submitted_at
