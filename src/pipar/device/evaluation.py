"""Evaluates the global model on samples that the device keeps for this, between two rounds.

The server sends the layers that the device does not have; only numbers go back.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipar.device.interfaces import DeviceLanes, EvaluationSamples
from pipar.device.model import DeviceSideModel
from pipar.device.pipeline import WaitRecorder
from pipar.errors import PiparError, ProtocolError, describe
from pipar.events import NotEvaluated, Observer
from pipar.execution.work import Work
from pipar.transport.channel import Channel
from pipar.wire.messages import Kind, Message, json_body
from pipar.wire.orders import Orders


@dataclass(frozen=True)
class OwnEvaluation:
    """A device's answers to EVALUATE."""

    samples: EvaluationSamples | None
    lanes: DeviceLanes
    channel: Channel
    wait: WaitRecorder
    observe: Observer
    name: str

    @property
    def is_offered(self) -> bool:
        """Whether the device can evaluate whole models."""
        return self.samples is not None and self.samples.lack_of_memory(None) is None

    def introduction(self) -> dict[str, Any]:
        """Return what HELLO says of it: the number of samples, or why the device cannot evaluate."""
        if self.samples is None:
            return {}
        lack = self.samples.lack_of_memory(None)
        return {"evaluation": len(self.samples)} if lack is None else {"no_evaluation": lack}

    async def answer(self, message: Message, model: DeviceSideModel) -> None:
        """Evaluate the model of a message together with the device's installed part, and send the scores."""
        if self.samples is None:
            raise ProtocolError(f"The server sent {message}, but this device has no samples to evaluate on.")
        refusal = _refusal(model.orders) or self.samples.lack_of_memory(model.orders)
        if refusal is not None:
            content: dict[str, Any] = {"refusal": refusal}
        else:
            evaluate = asyncio.ensure_future(self._scores(self.samples, message, model))
            try:
                content = await self.wait.for_result("validate", evaluate, message.epoch, 0)
            except PiparError:
                raise
            except Exception as error:  # noqa: BLE001 - a metric may fail on the samples of one device
                self.observe(NotEvaluated(self.name, message.epoch, describe(error)))
                # Its text stays here: it may contain samples.
                content = {"refusal": f"the evaluation failed on it: {type(error).__name__}"}
            finally:
                evaluate.cancel()
        self.channel.post(Message(Kind.SCORES, message.epoch, body=json_body(content)))

    async def _scores(self, samples: EvaluationSamples, message: Message, model: DeviceSideModel) -> dict[str, Any]:
        lane, epoch = self.lanes.evaluation, message.epoch
        install = Work("install", epoch, size_bytes=message.body.size_bytes)
        evaluate = await lane.run((install, partial(samples.evaluator, model.part, message.body)))
        for size, batch in samples.batches(model.orders.batch_size):
            await lane.run((Work("validate", epoch, samples=size), partial(evaluate, batch)))
        found = evaluate.scores()
        values = {"loss": found.loss, "accuracy": found.accuracy, **found.metrics}
        known = {name: value for name, value in values.items() if value is not None}
        return {"samples": len(samples), "values": known}


def _refusal(orders: Orders) -> str | None:
    """Return why these orders forbid to send scores, which are computed from samples and have no noise."""
    return "updates get noise, and scores would be sent without it" if orders.protects else None
