"""Many independent computations in several processes of this machine, which end at once with their parent's Ctrl-C."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import TypeVar

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")


def map_in_workers(
    compute: Callable[[_Given], _Result],
    given: Iterable[_Given],
    processes: int,
    *,
    preload: str,
    prepare: Callable[[], None] | None = None,
) -> Generator[_Result, None, None]:
    """Yield results as they are finished, in any order.

    The module `preload` is imported once for all workers; each of them calls `prepare` first. If the caller closes the
    generator or an exception passes, running computations end with their processes.
    """
    # Workers are forked from a process that has only imported: torch does not survive a fork after it has started
    # threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(processes, mp_context=context, initializer=prepare) as pool:
        try:
            with _interrupts_held():  # an interrupted start would leave processes that nothing knows of
                computing = [pool.submit(compute, one) for one in given]
            for done in as_completed(computing):
                yield done.result()
        except BaseException:
            for child in multiprocessing.active_children():
                if child not in others:
                    child.terminate()
            raise  # without its processes the pool cancels the rest, and leaving it returns immediately


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold back Ctrl-C until the end of the block; processes that start meanwhile never receive it.

    A terminal sends it to all processes, and their parent handles it.
    """
    held: list[int] = []
    resource_tracker.ensure_running()  # it would unblock the signal
    previous = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, previous)
        if held:
            signal.raise_signal(signal.SIGINT)
