"""What both programs of a deployment need: their devices' settings, and an end on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

from pipar.config import Config, DeviceSection, DeviceSpec, device_specs
from pipar.links import Link
from pipar.nn.runtime import keep_freed_memory

_NO_LINK = Link()


def listed_specs(config: Config) -> list[DeviceSpec]:
    """Return the devices of the configuration; a link or a speed is emulated only where it is written down."""
    given = config.model_copy(update={"devices": tuple(_as_given(group) for group in config.devices)})
    return list(device_specs(given))


def unlisted_spec(name: str) -> DeviceSpec:
    """Return a device of its own speed on a link of its own."""
    return DeviceSpec(name, _NO_LINK, 1.0, None, "auto", "auto")


def _as_given(group: DeviceSection) -> DeviceSection:
    update: dict[str, Any] = {}
    if "link" not in group.model_fields_set:
        update["link"] = _NO_LINK
    if "speed" not in group.model_fields_set:
        update["speed"] = 1.0
    return group.model_copy(update=update)


def prepare_process() -> None:
    import torch._dynamo  # the first optimiser would import it, for more than a second, while the server waits

    torch.set_num_threads(1)
    keep_freed_memory()


def run_until_signal(main: Coroutine[Any, Any, None]) -> signal.Signals | None:
    """Run a coroutine to its end; SIGTERM and SIGINT cut it short, and the one that did is returned.

    Behind it they do what they did before.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    async def supervised() -> signal.Signals | None:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(main)
        received: list[signal.Signals] = []

        def stop(number: signal.Signals) -> None:
            received.append(number)
            task.cancel()

        for number in handlers:
            loop.add_signal_handler(number, stop, number)
        try:
            await task
        except asyncio.CancelledError:
            if not received:
                raise
        return received[0] if received else None

    try:
        return asyncio.run(supervised())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
