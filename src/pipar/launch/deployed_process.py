"""What both programs of a deployment need: the settings of devices, and an orderly end on SIGTERM and SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import torch

from pipar.nn.runtime import keep_freed_memory
from pipar.settings.config import Config, DeviceSection, DeviceSpec, device_specs
from pipar.settings.links import Link
from pipar.settings.optimizers import OWN

_NO_LINK = Link()


def listed_specs(config: Config) -> list[DeviceSpec]:
    """Return the devices of the configuration; a link or a speed is emulated only if the configuration gives it."""
    return list(device_specs(as_deployed(config)))


def as_deployed(config: Config) -> Config:
    """Return the configuration without links and speeds that it does not give: a deployment's devices are real."""
    return config.model_copy(update={"devices": tuple(_as_given(group) for group in config.devices)})


def unlisted_spec(config: Config, name: str) -> DeviceSpec:
    """Return the settings of a device that is not in [[devices]]: it follows [plan], and is not emulated.

    It computes on what all groups of devices compute on, if that is the same.
    """
    common = {(group.torch_device, group.autocast) for group in config.devices}
    torch_device, autocast = common.pop() if len(common) == 1 else ("cpu", "off")
    plan = config.plan
    return DeviceSpec(
        name,
        _NO_LINK,
        1.0,
        None,
        plan.split_point,
        plan.micro_batches,
        torch_device=torch_device,
        autocast=autocast,
    )


def _as_given(group: DeviceSection) -> DeviceSection:
    update: dict[str, Any] = {}
    if "link" not in group.model_fields_set:
        update["link"] = _NO_LINK
    if "speed" not in group.model_fields_set:
        update["speed"] = 1.0
    return group.model_copy(update=update)


def prepare_process(config: Config) -> None:
    """Set torch up for this process: one thread, freed memory kept, slow imports done."""
    # The first backward from a given gradient imports it, with sympy: better now than during training.
    from torch.fx.experimental import symbolic_shapes  # noqa: F401

    if config.optimizer.kind == OWN:
        # It is imported when such an optimiser is made, for more than a second: better now than during training.
        from torch import _dynamo  # noqa: F401
    torch.set_num_threads(1)
    keep_freed_memory()


@contextlib.asynccontextmanager
async def until_left(task: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a task beside the block; when the block is left, end it and wait for its end."""
    running = asyncio.ensure_future(task)
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def run_until_signal(main: Coroutine[Any, Any, None]) -> signal.Signals | None:
    """Run a coroutine; SIGTERM and SIGINT cancel it. Return the signal that did, None if it ended by itself.

    Afterwards both signals have their earlier handlers again.
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
