"""Virtual time: an asyncio event loop whose clock jumps to the next timer when no coroutine can run.

The coroutines are those of production. They call `loop.time()`, `call_at` and `sleep` as usual, but the loop never
waits in real time. The same program with the same seed runs its callbacks in the same order.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import math
import selectors
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pipar.errors import TrainingError

T = TypeVar("T")


class _ClockSelector(selectors.BaseSelector):
    """A selector without files: where a real one would sleep, it moves the loop's clock."""

    def __init__(self) -> None:
        self.loop: VirtualTimeLoop | None = None
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        # The loop registers its own wake-up pipe, by number.
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = selectors.SelectorKey(fileobj, number, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert self.loop is not None
        if timeout is None:
            raise TrainingError("Deadlock in virtual time: every task of the run waits for another one.")
        if timeout > 0:
            self.loop.jump()
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def close(self) -> None:
        self._keys.clear()


class _Timer(asyncio.TimerHandle):
    """A timer that keeps its place among timers of the same time: first set, first fired."""

    __slots__ = ("_place",)

    def __init__(self, place: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._place = place

    def __lt__(self, other: Any) -> bool:
        if self._when == other._when:  # type: ignore[attr-defined]
            return bool(self._place < other._place)
        return bool(self._when < other._when)  # type: ignore[attr-defined]


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time; starts at 0.0 seconds.

    A timer fires at exactly the float it was set to: after `call_at(start + t)`, `time() == start + t`. So sums of
    stage times are equal, bit for bit, to those computed by hand.
    """

    _now: float = 0.0
    _timers: int = 0

    def __init__(self) -> None:
        selector = _ClockSelector()
        super().__init__(selector)
        selector.loop = self
        self._set(0.0)

    def time(self) -> float:
        return self._now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        self._timers += 1
        timer = _Timer(self._timers, when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def jump(self) -> None:
        """Move the clock to the next timer."""
        self._set(self._scheduled[0]._when)  # type: ignore[attr-defined]

    def leap(self, seconds: float) -> None:
        """Move the clock forward, as when a machine wakes from sleep: timers in between fire late."""
        self._set(self._now + seconds)

    def _set(self, now: float) -> None:
        self._now = now
        # asyncio also fires timers that are due within its clock's resolution. With one ulp, only timers that are due
        # now fire, so two stages that end 1 ns apart stay in order.
        self._clock_resolution = math.ulp(now)


@cache
def clock_machine() -> str:
    """Return an identifier of the machine's clock: the same for all programs since the machine was booted."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return f"{uuid.getnode():036x}"


async def sleep_until(when: float) -> None:
    """Return when the loop's clock shows `when`: exactly then in virtual time, not earlier in real time."""
    loop = asyncio.get_running_loop()
    if when > loop.time():
        woken = loop.create_future()
        timer = loop.call_at(when, _wake, woken)
        try:
            await woken
        except BaseException:
            timer.cancel()
            raise


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def run_virtually(main: Coroutine[Any, Any, T], within: AbstractContextManager[object] | None = None) -> T:
    """Run a coroutine to its end in virtual time and return its result; `within` is entered in its thread.

    Inside a running event loop, as in a notebook, it runs in a separate thread, which the caller waits for.
    """
    runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
    if _inside_a_loop():
        return _run_in_thread(runner, main, within or nullcontext())
    with runner, within or nullcontext():
        return runner.run(main)


def _inside_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run_in_thread(runner: asyncio.Runner, main: Coroutine[Any, Any, T], within: AbstractContextManager[object]) -> T:
    """Return the coroutine's result; Ctrl-C, which only this thread receives, first cancels the coroutine."""
    outcome: Future[T] = Future()
    loop = runner.get_loop()
    task = loop.create_task(main)

    def run() -> None:
        try:
            with runner, within:
                outcome.set_result(runner.run(_outcome(task)))
        except BaseException as error:  # noqa: BLE001 - the thread ends here, and the caller raises it
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="virtual time", daemon=True)
    try:
        thread.start()
        thread.join()
    except (KeyboardInterrupt, SystemExit):
        with suppress(RuntimeError):  # the loop is closed: the coroutine has ended
            loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    return outcome.result()


async def _outcome(task: asyncio.Task[T]) -> T:
    return await task
