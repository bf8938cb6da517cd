"""Micro-batches of one device that the server computes at the same time; they are answered in their order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from pipar.server.session import Session


class Turn:
    """When the answer to one micro-batch may be sent: after the answer to the one before is complete."""

    def __init__(self, before: Turn | None = None) -> None:
        self._before = before
        self._after: Turn | None = None
        self._waiting: list[Callable[[], object]] = []
        self._is_computed = False
        self._is_complete = False
        if before is not None:
            before._after = self

    def send(self, send: Callable[[], object]) -> None:
        """Send something of the answer, now or as soon as it may be."""
        if self._is_now:
            send()
        else:
            self._waiting.append(send)

    def end(self) -> None:
        """Nothing more belongs to the answer."""
        self._is_computed = True
        self._settle()

    @property
    def _is_now(self) -> bool:
        return self._before is None or self._before._is_complete

    def _settle(self) -> None:
        if not self._is_now:
            return
        waiting, self._waiting, self._before = self._waiting, [], None
        for send in waiting:
            send()
        self._is_complete = self._is_computed
        if self._is_complete and self._after is not None:
            self._after._settle()


class SeveralAtOnce:
    """Runs the work for micro-batches of one device, at most `most` at the same time.

    If one fails, the error is raised where the next message of the device is read, and by `begin` and `finish`.
    """

    def __init__(self, session: Session, most: int) -> None:
        self._session = session
        self._most = most
        self._running: set[asyncio.Task[None]] = set()
        self._turn: Turn | None = None
        self._failure: BaseException | None = None

    async def begin(self, work: Callable[[Turn], Coroutine[Any, Any, None]]) -> None:
        """Begin the work for the next micro-batch as soon as there is room for it; it sends its answer in its turn."""
        while len(self._running) >= self._most:
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        self._raise_failure()
        self._turn = Turn(self._turn)
        task = asyncio.get_running_loop().create_task(work(self._turn))
        self._running.add(task)
        task.add_done_callback(self._ended)

    async def finish(self) -> None:
        """Return when all work that has begun is done."""
        while self._running:
            await asyncio.wait(self._running)
        self._raise_failure()
        self._turn = None

    def stop(self) -> None:
        """Wait for nothing any more; what is being computed is of no use."""
        for task in self._running:
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and self._failure is None:
            self._failure = error
            self._session.fail(error)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
