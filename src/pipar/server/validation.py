"""The validation of each round's global model, during the next round."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pipar.errors import TrainingError
from pipar.events import DeviceScores, Scores
from pipar.execution.lanes import Lanes
from pipar.execution.work import Work
from pipar.server.interfaces import Evaluator, Learner, Services
from pipar.wire.messages import EMPTY, Body

#: The scores of a model on the devices, to come; None if no device evaluates it.
_OnDevices = asyncio.Task[DeviceScores] | None


class Validation:
    """Validates one model after another at the lowest priority; the losses go to the results."""

    def __init__(
        self,
        learner: Learner,
        batches: Sequence[tuple[int, Any]],
        background: Lanes,
        services: Services,
    ) -> None:
        self._learner = learner
        self._batches = batches
        self._background = background
        self._results = services.results
        self._best = services.best
        self._running: asyncio.Task[None] | None = None
        self._copied = asyncio.Event()

    def start(self, epoch: int, on_devices: _OnDevices = None) -> None:
        """Validate the global model that an epoch ended with, which devices may be evaluating meanwhile."""
        self._copied = asyncio.Event()
        validate = self._validate(epoch, self._running, self._copied, on_devices)
        self._running = asyncio.get_running_loop().create_task(validate)

    async def copied(self) -> None:
        """Return when the last validation has its copy of the global model, which may then change."""
        if self._running is not None:
            await self._copied.wait()

    async def _validate(
        self, epoch: int, before: asyncio.Task[None] | None, copied: asyncio.Event, on_devices: _OnDevices
    ) -> None:
        try:
            await self._evaluate(epoch, before, copied, on_devices)
        except Exception as error:  # noqa: BLE001 - the task ends here, and waiters get the error
            self._results.fail(TrainingError(f"The validation of epoch {epoch} failed: {error}"))
        finally:
            copied.set()

    async def _evaluate(
        self, epoch: int, before: asyncio.Task[None] | None, copied: asyncio.Event, on_devices: _OnDevices
    ) -> None:
        if not self._batches and (self._best is None or on_devices is None):
            copied.set()
            self._results.add_validation(epoch, Scores(devices=await _scores(on_devices)))
            return
        copy = Work("validate", epoch, samples=0)
        evaluate, model = await self._background.run((copy, self._copy))
        copied.set()
        if before is not None:
            await before
        for samples, batch in self._batches:
            work = Work("validate", epoch, samples=samples)
            await self._background.run((work, partial(evaluate, batch)))
        scores = replace(evaluate.scores(), devices=await _scores(on_devices))
        if self._best is not None and scores.compared is not None:
            await self._background.run((copy, partial(self._best.offer, epoch, scores.compared, model)))
        self._results.add_validation(epoch, scores)

    def _copy(self) -> tuple[Evaluator, Body]:
        """Return what evaluates the current global model, and the model itself if it may be kept; both share it."""
        return self._learner.evaluator(), EMPTY if self._best is None else self._learner.packed_state()


async def _scores(on_devices: _OnDevices) -> DeviceScores | None:
    return None if on_devices is None else await on_devices
