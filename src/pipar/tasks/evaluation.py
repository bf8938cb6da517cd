"""Scores of a model on a held-out set, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pipar.events import Scores
from pipar.monitored_metric import Monitor
from pipar.tasks.losses import ClassLoss, Targets
from pipar.tasks.metrics import NamedMetric
from pipar.tasks.task import Task
from pipar.tensors.inputs import Inputs, call

#: Loads the inputs and targets of a batch.
Load = Callable[[], tuple[Inputs, Targets]]


class Evaluator:
    """Evaluates one model on one batch after another."""

    def __init__(
        self, model: nn.Module, task: Task, metrics: Sequence[NamedMetric] = (), monitor: Monitor | None = None
    ) -> None:
        self._model = model
        self._monitor = monitor or Monitor()
        self._task = task
        self._metrics = {metric.name: metric.make() for metric in metrics}
        self._loss_sum = 0.0
        self._count = 0.0
        self._correct = self._answers = 0

    @torch.no_grad()
    def __call__(self, load: Load) -> None:
        """Take a batch into the scores."""
        inputs, targets = load()
        output = call(self._model, inputs)
        self._loss_sum += self._task.loss.total(output, targets).item()
        self._count += self._task.loss.count(targets)
        correct, answers = correct_answers(self._task.loss, output, targets)
        self._correct, self._answers = self._correct + correct, self._answers + answers
        for metric in self._metrics.values():
            metric.update(output, targets)

    def scores(self) -> Scores:
        """Return the scores over all batches so far."""
        loss = self._loss_sum / self._count if self._count else None
        metrics = {name: metric.value() for name, metric in self._metrics.items()}
        accuracy = self._correct / self._answers if self._answers else None
        return Scores(loss, accuracy, metrics, self._monitor)


def correct_answers(loss: Any, output: Any, targets: Any) -> tuple[int, int]:
    """Return how many positions have their class as the largest output, and how many count; none without classes."""
    if not isinstance(loss, ClassLoss) or targets.is_floating_point():
        return 0, 0
    answers, wanted = output.argmax(dim=-1 if loss.name == "next_token" else 1), targets.long()
    counts = wanted != loss.ignored
    return int(((answers == wanted) & counts).sum()), int(counts.sum())
