"""Processes of one run on this machine: starting them, hearing from them, and ending them."""

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
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from operator import attrgetter
from queue import SimpleQueue
from typing import Any

from pipar.errors import InputError, LinkError, PiparError, TrainingError
from pipar.events import Event, Listening, Observer, Pictured, Progress
from pipar.execution.spans import SERVER, Span

#: What the fork server imports once for all processes; never grpc, which does not survive a fork. The first optimiser
#: of a process imports torch._dynamo, for more than a second.
_PRELOAD = [
    "torch",
    "torch._dynamo",
    "pipar.job.workload",
    "pipar.job.model_setup",
    "pipar.launch.assemble",
    "pipar.storage.run_folder",
]
_PROGRESS_EVERY_S = 0.2
_GRACE_S = 20.0
_LAST_WORDS_S = 1.0
#: So long a child that ends waits for the parent to take what it has said; a parent that ends it listens no more.
_FAREWELL_S = 5.0


@dataclass(frozen=True)
class Failure:
    """What a child process failed with, as it travels to this one.

    `is_about_peer` if the child only says that its peer is gone or has given up.
    """

    message: str
    is_input: bool = False
    is_about_peer: bool = False

    @classmethod
    def of(cls, error: Exception) -> Failure:
        text = str(error) if isinstance(error, PiparError) else f"{type(error).__name__}: {error}"
        return cls(text, isinstance(error, InputError), isinstance(error, LinkError | TrainingError))

    def rank(self, owner: str) -> int:
        """Return how far it is from the cause: bad input, a device's own trouble, the server's, what others heard."""
        if self.is_input:
            return 0
        return 2 if owner == SERVER else 3 if self.is_about_peer else 1

    def error(self) -> PiparError:
        return (InputError if self.is_input else TrainingError)(self.message)


@dataclass(frozen=True)
class TimelineRows:
    """A picture as it travels to this process: plain rows are pickled ten times as quickly as spans."""

    epoch: int
    rows: list[tuple[Any, ...]]
    is_whole: bool
    left_out: int

    @classmethod
    def of(cls, picture: Pictured) -> TimelineRows:
        return cls(picture.epoch, [_row_of(span) for span in picture.spans], picture.is_whole, picture.left_out)

    def picture(self) -> Pictured:
        return Pictured(self.epoch, tuple(Span(*row) for row in self.rows), self.is_whole, self.left_out)


_row_of: Callable[[Span], tuple[Any, ...]] = attrgetter(*(one.name for one in fields(Span)))


@dataclass(frozen=True)
class ProcessEnvironment:
    """What a process finds around it. The fork server keeps that of the first run, so a child is told of its own."""

    folder: str = field(default_factory=os.getcwd)
    path: list[str] = field(default_factory=lambda: list(sys.path))
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def take_up(self) -> None:
        """Make them this process's."""
        os.chdir(self.folder)
        sys.path[:] = self.path
        os.environ.clear()
        os.environ.update(self.environment)


class ChildProcesses:
    """The processes of one run, and what they say."""

    def __init__(self, observe: Observer) -> None:
        self._observe = observe
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._processes: dict[str, BaseProcess] = {}
        self._connections: dict[Connection, str] = {}
        self._address = ""
        self._failures: dict[str, Failure] = {}

    def start(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        words = (theirs, ProcessEnvironment(), target, *arguments)
        process = self._context.Process(target=_child, args=words, name=name, daemon=True)
        with _without_main():
            process.start()
        theirs.close()
        self._processes[name] = process
        self._connections[ours] = name

    def wait_for_server(self) -> str:
        """Return the server's address when it listens."""
        while not self._address:
            self._take_in()
        return self._address

    def wait_for_end(self) -> None:
        """Pass on what the processes say until all have ended."""
        while self._connections:
            self._take_in()

    def _take_in(self) -> None:
        """Wait for something to be said; raise if it was of a failure."""
        self._listen(None)
        if self._failures:
            self._hear_last_words()
            raise min(self._failures.items(), key=lambda item: item[1].rank(item[0]))[1].error()

    def _hear_last_words(self) -> None:
        # One failure brings others about, and the first one heard of need not be the one that was first.
        deadline = time.monotonic() + _LAST_WORDS_S
        while self._connections and (left_s := deadline - time.monotonic()) > 0:
            self._listen(left_s)

    def _listen(self, timeout_s: float | None) -> None:
        for connection in wait(list(self._connections), timeout_s):
            assert isinstance(connection, Connection)
            try:
                said = connection.recv()
            except (EOFError, OSError):  # at its end, or cut off in the middle of a word
                self._ended(self._connections.pop(connection))
                continue
            self._heard(self._connections[connection], said)

    def _heard(self, name: str, said: Event | TimelineRows | Failure) -> None:
        if isinstance(said, Failure):
            self._failures.setdefault(name, said)
            return
        if isinstance(said, TimelineRows):
            said = said.picture()
        if isinstance(said, Listening):
            self._address = said.address
        self._observe(said)

    def _ended(self, name: str) -> None:
        process = self._processes[name]
        process.join()
        code = process.exitcode or 0
        if code != 0:
            how = f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
            self._failures.setdefault(name, Failure(f"The process of {name} {how}."))

    def end(self) -> None:
        """End what still runs, the server first: it saves before its devices are gone. Nothing is left behind."""
        for process in self._processes.values():
            if process.is_alive():
                process.terminate()
                process.join(_GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
        for connection in self._connections:
            connection.close()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep children from importing the caller's script again: a script without a __main__ guard would start anew."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _child(
    connection: Connection, surroundings: ProcessEnvironment, target: Callable[..., None], *arguments: Any
) -> None:
    """Run one child's program; a failure becomes an event for the parent."""
    import torch

    from pipar.nn.runtime import keep_freed_memory

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    surroundings.take_up()
    torch.set_num_threads(1)
    keep_freed_memory()
    teller = EventSender(connection)
    try:
        target(teller, *arguments)
    except Exception as error:  # noqa: BLE001 - the process ends here, and the parent is told why
        teller.tell(Failure.of(error))
        sys.exit(1)
    finally:
        teller.finish()


class EventSender:
    """Tells the parent what happens, in order, from a thread of its own, and ends the process if the parent is gone.

    A picture is more than a pipe holds: a training that sent it itself would wait until the parent has taken it.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._untold: SimpleQueue[Event | Failure | None] = SimpleQueue()
        self._has_picture = False  # that is not told yet
        self._last_progress = 0.0
        self._is_finished = False
        self._thread = threading.Thread(target=self._work, name="teller", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name="parent", daemon=True).start()

    def observe(self, event: Event) -> None:
        """Tell an event: progress a few times a second at most, and one picture at a time. Others follow."""
        now = time.monotonic()
        if isinstance(event, Progress):
            if now - self._last_progress < _PROGRESS_EVERY_S:
                return
            self._last_progress = now
        elif isinstance(event, Pictured):
            if self._has_picture:
                return
            self._has_picture = True
        self.tell(event)

    def tell(self, said: Event | Failure) -> None:
        self._untold.put(said)

    def finish(self) -> None:
        """Return when everything is told, or nobody takes it."""
        self._untold.put(None)
        self._thread.join(_FAREWELL_S)
        self._is_finished = True

    def _work(self) -> None:
        while (said := self._untold.get()) is not None:
            try:
                self._connection.send(TimelineRows.of(said) if isinstance(said, Pictured) else said)
            except OSError:  # the parent is gone
                self._end()
                return
            if isinstance(said, Pictured):
                self._has_picture = False

    def _watch(self) -> None:
        """Wait until nobody has the other end of the pipe: the parent was killed, and nobody waits for a training.

        A server whose devices were never started has nothing to tell, and would not notice by telling.
        """
        gone = select.poll()
        gone.register(self._connection, 0)  # of a reader that is gone it tells unasked
        gone.poll()
        if not self._is_finished:
            self._end()

    @staticmethod
    def _end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class GracefulTermination:
    """SIGTERM as a request: it cuts a running coroutine short, and what is done behind it may look it up.

    The event loop's own handlers are gone with the loop; from then on a signal would end a process that saves.
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
        """Run a coroutine to its end, or until SIGTERM."""
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
