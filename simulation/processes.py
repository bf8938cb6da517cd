"""The processes of a simulated world: tasks are grouped by process, so that a process can be killed whole."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simulation.clocks import on_machine

_OWNER: contextvars.ContextVar[str] = contextvars.ContextVar("owner", default="world")
#: Cancelled tasks may start others in their `finally` blocks: cancel this many times before giving up.
_CANCEL_TIMES = 20


@dataclass
class Process:
    """A server or a device from its start to its end."""

    owner: str  # of its tasks
    machine: str = ""
    skew_s: float = 0.0  # of the machine's clock
    restart_after_s: float = 1.0
    task: asyncio.Task[None] | None = None
    is_dead: bool = False

    @property
    def is_running(self) -> bool:
        return not self.is_dead and self.task is not None and not self.task.done()

    def while_alive(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return the same function, which does nothing once the process is dead."""

        def gated(*arguments: Any) -> None:
            if not self.is_dead:
                function(*arguments)

        return gated


class Processes:
    """Knows which process every task of the event loop belongs to."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks: dict[str, dict[asyncio.Task[Any], None]] = {}  # in the order of their creation
        loop.set_task_factory(self._make_task)

    @property
    def tasks(self) -> int:
        return sum(map(len, self._tasks.values()))

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        context = options.get("context")
        owner = _OWNER.get() if context is None else context.get(_OWNER, "world")
        task = asyncio.Task(coroutine, loop=loop, **options)
        owned = self._tasks.setdefault(owner, {})
        owned[task] = None
        task.add_done_callback(lambda done: owned.pop(done, None))
        return task

    def start(self, process: Process, program: Any) -> asyncio.Task[None]:
        """Run a program; it and all tasks that it starts belong to the process."""
        context = on_machine(process.machine, process.skew_s)
        context.run(_OWNER.set, process.owner)
        process.task = self._loop.create_task(program, context=context)
        return process.task

    def kill(self, process: Process, *, restart_after_s: float) -> None:
        """Mark a process dead and cancel its tasks; `bury` waits for their end."""
        process.is_dead, process.restart_after_s = True, restart_after_s
        for task in list(self._tasks.get(process.owner, {})):
            task.cancel()

    async def bury(self, process: Process) -> None:
        """Cancel the tasks of a process, including those that are started during cancellation."""
        await self._cancel_all([process.owner])

    async def end(self) -> None:
        """Cancel all tasks of all processes but the one that calls this."""
        await self._cancel_all(list(self._tasks))

    async def _cancel_all(self, owners: list[str]) -> None:
        for _ in range(_CANCEL_TIMES):
            left = [
                task for owner in owners for task in self._tasks.get(owner, {}) if task is not asyncio.current_task()
            ]
            if not left:
                break
            for task in left:
                task.cancel()
            await asyncio.sleep(0)
