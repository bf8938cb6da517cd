"""Virtual time in which every machine has its own clock: those of two machines may differ by days."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

from pipar.execution.clock import VirtualTimeLoop

#: The machine that a task runs on; the world itself runs on none.
MACHINE: contextvars.ContextVar[str] = contextvars.ContextVar("machine", default="")
_SKEW_S: contextvars.ContextVar[float] = contextvars.ContextVar("skew", default=0.0)


class WorldLoop(VirtualTimeLoop):
    """Virtual time; a task reads the clock of its machine, and its timers are set by that clock."""

    def time(self) -> float:
        return super().time() + _SKEW_S.get()

    def true_time(self) -> float:
        """Return the time of the world."""
        return super().time()

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when - _SKEW_S.get(), callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self,
        executor: Any,  # noqa: ARG002
        function: Callable[..., Any],
        *args: Any,
    ) -> asyncio.Future[Any]:
        """Run the function now: virtual time does not wait for threads."""
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:  # noqa: BLE001 - the caller gets it
            future.set_exception(error)
        return future

    def call_at_true(self, when: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """As `call_at`, by the time of the world."""
        return super().call_at(when, callback, *args)


def running_loop() -> WorldLoop:
    """Return the event loop of the world."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, WorldLoop)
    return loop


def on_machine(machine: str, skew_s: float) -> contextvars.Context:
    """Return a context for the tasks of a machine whose clock is ahead by this time."""
    context = contextvars.copy_context()
    context.run(MACHINE.set, machine)
    context.run(_SKEW_S.set, skew_s)
    return context


def machine_here() -> str:
    """Return an identifier of the running task's machine, as `clock_machine` does of a real one."""
    return MACHINE.get()
