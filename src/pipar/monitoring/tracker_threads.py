"""Trackers as observers of a run, each on a thread of its own: one that hangs or fails costs the training nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from pipar.config import Config
from pipar.events import EpochResult, Event, Observer, Started, TrackerFailed
from pipar.monitoring.tracker import RunDescription, Tracker, check_installed, describe, make_tracker

#: How long the end of a run waits for trackers that have not written everything down yet.
PATIENCE_S = 60.0

Make = Callable[[str], Tracker]


class TrackerThread:
    """Tells one tracker what happens, in order, from a thread of its own; what it fails with ends it.

    It begins when it is started: its package is imported then, for seconds of a core.
    """

    def __init__(self, name: str, make: Make = make_tracker) -> None:
        self.name = name
        self._make = make
        self._orders: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()
        self._failure = ""
        # Whatever a tracker does, it does not keep the program from ending.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin(self, run: RunDescription) -> None:
        self._orders.put(lambda tracker: tracker.begin(run))

    def epoch(self, row: Mapping[str, Any]) -> None:
        self._orders.put(lambda tracker: tracker.epoch(row))

    def end(self, result: Mapping[str, Any] | None) -> None:
        self._orders.put(lambda tracker: tracker.end(result))

    def finish(self) -> None:
        """There is nothing more to be told."""
        self._orders.put(None)

    def wait(self, patience_s: float) -> None:
        """Return when everything is written down, or there is no more patience."""
        self._thread.join(max(0.0, patience_s))
        if self._thread.is_alive() and not self._failure:
            self._failure = "it did not write everything down in time"

    def take_failure(self) -> str:
        """Return why it is off, once; nothing if it is not."""
        failure = self._failure
        if failure:  # its thread may fail at this moment: what is not read is not forgotten
            self._failure = ""
        return failure

    def _work(self) -> None:
        try:
            tracker = self._make(self.name)
            while (order := self._orders.get()) is not None:
                order(tracker)
        except Exception as error:  # noqa: BLE001 - the thread ends here, and the failure becomes an event
            self._failure = f"{type(error).__name__}: {error}"


class Tracking:
    """Passes the events of one run on, and tells its trackers of the epochs; `observe` is an Observer."""

    def __init__(self, config: Config, observe: Observer, threads: Sequence[TrackerThread]) -> None:
        self._config = config
        self._pass_on = observe
        self._threads = threads
        self._run: RunDescription | None = None
        self._has_begun = self._has_ended = False

    def observe(self, event: Event) -> None:
        """Take one event; it is quick, whatever the trackers do with it."""
        self._pass_on(event)
        if isinstance(event, Started) and self._run is None:
            self._run = describe(self._config, event)
            self._tell(TrackerThread.start)  # not before: nothing else may compute while a machine is measured
        elif isinstance(event, EpochResult):
            self._begin()
            self._tell(lambda thread: thread.epoch(event.to_dict()))
        self._tell_failures()

    def end(self, result: Mapping[str, Any] | None) -> None:
        """Tell the trackers how the run ended."""
        if self._has_begun and not self._has_ended:
            self._tell(lambda thread: thread.end(result))
            self._has_ended = True

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Return when everything is written down; who is not ready in time is off, too."""
        self.end(None)
        self._tell(TrackerThread.finish)
        if not self._has_begun:
            return  # a mistake that was found early is not held up by packages that take seconds to import
        deadline = time.monotonic() + patience_s
        self._tell(lambda thread: thread.wait(deadline - time.monotonic()))
        self._tell_failures()

    def _begin(self) -> None:
        """Begin with the first epoch: a run that comes to nothing leaves no files behind."""
        if self._run is not None and not self._has_begun:
            run = self._run
            self._tell(lambda thread: thread.begin(run))
            self._has_begun = True

    def _tell(self, order: Callable[[TrackerThread], None]) -> None:
        for thread in self._threads:
            order(thread)

    def _tell_failures(self) -> None:
        # On the thread of the events, so that whoever observes hears of one thing at a time.
        for thread in self._threads:
            if reason := thread.take_failure():
                self._pass_on(TrackerFailed(thread.name, reason))


@contextmanager
def tracked(config: Config, observe: Observer, *, make: Make = make_tracker) -> Iterator[Tracking]:
    """Give what tells `observe` and the trackers of the configuration; at the end, all that they heard is written down.

    Raise one sentence if a tracker is not installed.
    """
    check_installed(config.run.trackers)
    tracking = Tracking(config, observe, [TrackerThread(name, make) for name in config.run.trackers])
    try:
        yield tracking
    finally:
        tracking.close()
