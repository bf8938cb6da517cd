"""The processes of one run on this machine: starting them, receiving their events, and ending them."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event as EventFlag
from operator import attrgetter
from queue import SimpleQueue
from typing import Any

from pipar.errors import InputError, LinkError, PiparError, TrainingError
from pipar.events import Event, Listening, Observer, Pictured, Progress
from pipar.execution.spans import SERVER, Span

#: Modules that the fork server imports once for all processes.
_PRELOAD = ["pipar.launch.preloaded"]
#: An optimiser of a user's own imports it when it is made, which takes more than a second.
_COMPILER = "torch._dynamo"
_PROGRESS_EVERY_S = 0.2
#: A process that has not ended this long after SIGTERM is killed.
_TERMINATE_S = 20.0
#: After a failure, the other processes have this long to report theirs, which may be its cause.
_COLLECT_FAILURES_S = 1.0
#: A child that ends waits this long for the parent to receive its events; a parent that ends the child receives none.
_FLUSH_S = 5.0


@dataclass(frozen=True)
class Failure:
    """Why a child process failed, as it is sent to the parent.

    `is_about_peer` is set if the child only reports that its peer is gone or has given up.
    """

    message: str
    is_input: bool = False
    is_about_peer: bool = False

    @classmethod
    def of(cls, error: Exception) -> Failure:
        text = str(error) if isinstance(error, PiparError) else f"{type(error).__name__}: {error}"
        return cls(text, isinstance(error, InputError), isinstance(error, LinkError | TrainingError))

    def rank(self, owner: str) -> int:
        """Return a rank by distance from the cause: bad input, a device's own error, the server's, one about a peer."""
        if self.is_input:
            return 0
        return 2 if owner == SERVER else 3 if self.is_about_peer else 1

    def error(self) -> PiparError:
        return (InputError if self.is_input else TrainingError)(self.message)


@dataclass(frozen=True)
class TimelineRows:
    """The lanes of an epoch as they are sent to the parent: plain rows are pickled ten times as fast as spans."""

    epoch: int
    rows: list[tuple[Any, ...]]
    is_whole: bool
    left_out: int

    @classmethod
    def of(cls, picture: Pictured) -> TimelineRows:
        return cls(picture.epoch, [_row_of(span) for span in picture.spans], picture.is_whole, picture.left_out)

    def to_event(self) -> Pictured:
        return Pictured(self.epoch, tuple(Span(*row) for row in self.rows), self.is_whole, self.left_out)


_row_of: Callable[[Span], tuple[Any, ...]] = attrgetter(*(one.name for one in fields(Span)))


@dataclass(frozen=True)
class ProcessEnvironment:
    """Directory, import path and environment variables of this run, sent to each child.

    The fork server outlives a run, so a child would otherwise have those of the first run.
    """

    folder: str = field(default_factory=os.getcwd)
    path: list[str] = field(default_factory=lambda: list(sys.path))
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def apply(self) -> None:
        """Apply them to this process."""
        os.chdir(self.folder)
        sys.path[:] = self.path
        os.environ.clear()
        os.environ.update(self.environment)


def start_fork_server(*, own_optimizer: bool = False) -> None:
    """Start the process that forks children; it imports what they need while this one prepares the training.

    Nothing happens if it runs already. Children start without it too, after waiting for these imports.
    """
    _context(own_optimizer=own_optimizer)
    with _without_main():
        forkserver.ensure_running()


def _context(*, own_optimizer: bool = False) -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, _COMPILER] if own_optimizer else _PRELOAD)
    return context


def new_signal() -> EventFlag:
    """Return a flag that this process sets and its children read."""
    return multiprocessing.get_context("forkserver").Event()


class ChildProcesses:
    """The processes of one run, and the events that they send."""

    def __init__(self, observe: Observer) -> None:
        self._observe = observe
        self._context = _context()
        self._processes: dict[str, BaseProcess] = {}
        self._connections: dict[Connection, str] = {}
        self._address = ""
        self._failures: dict[str, Failure] = {}

    def start(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        """Start a process that calls `target` with an EventSender and the arguments."""
        ours, theirs = self._context.Pipe(duplex=False)
        parameters = (theirs, ProcessEnvironment(), target, *arguments)
        process = self._context.Process(target=_run_child, args=parameters, name=name, daemon=True)
        with _without_main():
            process.start()
        theirs.close()
        self._processes[name] = process
        self._connections[ours] = name

    def wait_for_server(self) -> str:
        """Wait until the server listens; return its address."""
        while not self._address:
            self._receive_or_raise()
        return self._address

    def wait_for_end(self) -> None:
        """Pass events on to the observer until all processes have ended."""
        while self._connections:
            self._receive_or_raise()

    def _receive_or_raise(self) -> None:
        """Wait for events; raise the cause if a process has failed."""
        self._receive(None)
        if self._failures:
            self._collect_failures()
            raise min(self._failures.items(), key=lambda item: item[1].rank(item[0]))[1].error()

    def _collect_failures(self) -> None:
        # One failure causes others, and the first one received need not be the cause.
        deadline = time.monotonic() + _COLLECT_FAILURES_S
        while self._connections and (left_s := deadline - time.monotonic()) > 0:
            self._receive(left_s)

    def _receive(self, timeout_s: float | None) -> None:
        for connection in wait(list(self._connections), timeout_s):
            assert isinstance(connection, Connection)
            try:
                event = connection.recv()
            except (EOFError, OSError):  # the process has ended, maybe in the middle of an event
                self._on_end(self._connections.pop(connection))
                continue
            self._on_event(self._connections[connection], event)

    def _on_event(self, name: str, event: Event | TimelineRows | Failure) -> None:
        if isinstance(event, Failure):
            self._failures.setdefault(name, event)
            return
        if isinstance(event, TimelineRows):
            event = event.to_event()
        if isinstance(event, Listening):
            self._address = event.address
        self._observe(event)

    def _on_end(self, name: str) -> None:
        process = self._processes[name]
        process.join()
        code = process.exitcode or 0
        if code != 0:
            how = f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
            self._failures.setdefault(name, Failure(f"The process of {name} {how}."))

    def end(self) -> None:
        """End all processes that still run, the server first, so that it saves while its devices are there."""
        for process in self._processes.values():
            if process.is_alive():
                process.terminate()
                process.join(_TERMINATE_S)
            if process.is_alive():
                process.kill()
                process.join()
        for connection in self._connections:
            connection.close()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep children from importing the caller's script: without a __main__ guard it would start its training again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _run_child(
    connection: Connection, environment: ProcessEnvironment, target: Callable[..., None], *arguments: Any
) -> None:
    """Run the program of one child; send its failure to the parent."""
    # Only children need torch here; a parent may not have imported it yet.
    import torch

    from pipar.nn.runtime import keep_freed_memory

    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes of the group; the parent ends its children
    environment.apply()
    torch.set_num_threads(1)
    keep_freed_memory()
    sender = EventSender(connection)
    try:
        target(sender, *arguments)
    except Exception as error:  # noqa: BLE001 - the process ends here, and the parent reports why
        sender.send(Failure.of(error))
        sys.exit(1)
    finally:
        sender.finish()


class EventSender:
    """Sends events to the parent, in order, from a separate thread; ends the process if the parent is gone.

    A picture is larger than the pipe's buffer: without the thread, training would wait until the parent receives it.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: SimpleQueue[Event | Failure | None] = SimpleQueue()
        self._has_picture = False  # in the queue
        self._last_progress = 0.0
        self._is_finished = False
        self._thread = threading.Thread(target=self._send_queue, name="event sender", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_parent, name="parent watcher", daemon=True).start()

    def observe(self, event: Event) -> None:
        """Send an event. Progress is dropped above a few times a second, a picture while another one is queued."""
        now = time.monotonic()
        if isinstance(event, Progress):
            if now - self._last_progress < _PROGRESS_EVERY_S:
                return
            self._last_progress = now
        elif isinstance(event, Pictured):
            if self._has_picture:
                return
            self._has_picture = True
        self.send(event)

    def send(self, event: Event | Failure) -> None:
        self._queue.put(event)

    def finish(self) -> None:
        """Return when all events are sent, or the parent does not receive them."""
        self._queue.put(None)
        self._thread.join(_FLUSH_S)
        self._is_finished = True

    def _send_queue(self) -> None:
        while (event := self._queue.get()) is not None:
            try:
                self._connection.send(TimelineRows.of(event) if isinstance(event, Pictured) else event)
            except OSError:  # the parent is gone
                self._end()
                return
            if isinstance(event, Pictured):
                self._has_picture = False

    def _watch_parent(self) -> None:
        """End the process when the other end of the pipe is closed, because the parent was killed.

        A server whose devices were never started sends no events, so a failed send would not show it.
        """
        poll = select.poll()
        poll.register(self._connection, 0)  # a closed pipe is reported without being asked for
        poll.poll()
        if not self._is_finished:
            self._end()

    @staticmethod
    def _end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class GracefulTermination:
    """Handles SIGTERM: it cancels the running coroutine, and later code can ask whether it came.

    The event loop's own signal handlers end with the loop, after which SIGTERM would end a process while it saves.
    """

    def __init__(self) -> None:
        self._requested = False
        self._cancel: Callable[[], object] = lambda: None
        signal.signal(signal.SIGTERM, lambda *_: self._request())

    def requested(self) -> bool:
        return self._requested

    def _request(self) -> None:
        self._requested = True
        self._cancel()

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine until it ends or SIGTERM cancels it."""
        try:
            asyncio.run(self._supervised(main))
        except asyncio.CancelledError:
            if not self._requested:
                raise

    async def _supervised(self, main: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(main)
        self._cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        try:
            if self._requested:
                task.cancel()
            await task
        finally:
            self._cancel = lambda: None
