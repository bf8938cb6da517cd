"""Trackers on separate threads: one that hangs or fails does not disturb the training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from pipar.events import EpochResult, Event, Observer, Started, TrackerFailed
from pipar.monitoring.tracker import RunDescription, Tracker, check_installed, describe, make_tracker
from pipar.settings.config import Config

#: How long the end of a run waits for trackers that are still writing.
PATIENCE_S = 60.0

Make = Callable[[str], Tracker]


class TrackerThread:
    """Calls one tracker, in order, from its own thread; an exception of the tracker ends it.

    Nothing runs before `start`, which imports the tracker's package: that takes a core for seconds.
    """

    def __init__(self, name: str, make: Make = make_tracker) -> None:
        self.name = name
        self._make = make
        self._orders: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()
        self._failure = ""
        # A daemon: a tracker that hangs must not keep the program from ending.
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
        """End the thread after the calls made so far."""
        self._orders.put(None)

    def wait(self, patience_s: float) -> None:
        """Return when the tracker has written everything, or after `patience_s`."""
        self._thread.join(max(0.0, patience_s))
        if self._thread.is_alive() and not self._failure:
            self._failure = "it did not write everything in time"

    def take_failure(self) -> str:
        """Return why the tracker failed, once; afterwards, and without a failure, an empty text."""
        failure = self._failure
        if failure:  # the thread may fail at this moment: do not clear a failure that was not read
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
    """Passes the events of one run on, and its epochs to the trackers; `observe` is an Observer."""

    def __init__(self, config: Config, observe: Observer, threads: Sequence[TrackerThread]) -> None:
        self._config = config
        self._pass_on = observe
        self._threads = threads
        self._run: RunDescription | None = None
        self._has_begun = self._has_ended = False

    def observe(self, event: Event) -> None:
        """Pass on one event, without waiting for the trackers."""
        self._pass_on(event)
        if isinstance(event, Started) and self._run is None:
            self._run = describe(self._config, event)
            self._for_each(TrackerThread.start)  # not earlier: it would disturb the measurement of the machine
        elif isinstance(event, EpochResult):
            self._begin()
            self._for_each(lambda thread: thread.epoch(event.to_dict()))
        self._report_failures()

    def end(self, result: Mapping[str, Any] | None) -> None:
        """Give the trackers the result of the run."""
        if self._has_begun and not self._has_ended:
            self._for_each(lambda thread: thread.end(result))
            self._has_ended = True

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Return when the trackers have written everything; one that takes too long counts as failed."""
        self.end(None)
        self._for_each(TrackerThread.finish)
        if not self._has_begun:
            return  # an early error is shown immediately, without waiting for packages that take seconds to import
        deadline = time.monotonic() + patience_s
        self._for_each(lambda thread: thread.wait(deadline - time.monotonic()))
        self._report_failures()

    def _begin(self) -> None:
        """Begin with the first epoch, so that a run without one leaves no files."""
        if self._run is not None and not self._has_begun:
            run = self._run
            self._for_each(lambda thread: thread.begin(run))
            self._has_begun = True

    def _for_each(self, order: Callable[[TrackerThread], None]) -> None:
        for thread in self._threads:
            order(thread)

    def _report_failures(self) -> None:
        # On the thread of the events: observers are never called by two threads.
        for thread in self._threads:
            if reason := thread.take_failure():
                self._pass_on(TrackerFailed(thread.name, reason))


@contextmanager
def tracked(config: Config, observe: Observer, *, make: Make = make_tracker) -> Iterator[Tracking]:
    """Yield a `Tracking` for `observe` and the configured trackers; they have written everything when the block ends.

    Raise an InputError if a tracker is not installed.
    """
    check_installed(config.run.trackers)
    tracking = Tracking(config, observe, [TrackerThread(name, make) for name in config.run.trackers])
    try:
        yield tracking
    finally:
        tracking.close()
