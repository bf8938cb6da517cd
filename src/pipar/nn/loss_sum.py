"""The losses of micro-batches, summed: on an accelerator they stay there until the batch is complete."""

from __future__ import annotations

import torch

from pipar.tensors.torch_device import numbers


class LossSum:
    """Sums losses in float64, each times the samples of its batch, in the order in which they were added."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._waiting: list[tuple[torch.Tensor, int]] = []  # on an accelerator: reading each would wait for it
        self.last: float | None = None  # the loss that was added last, once it was read

    def add(self, loss: torch.Tensor, samples: int) -> None:
        """Add the loss of a micro-batch: its share of the mean loss of a batch with this many samples."""
        self._waiting.append((loss.detach(), samples))
        if loss.is_cpu:
            self.read()

    def read(self) -> list[float]:
        """Read the losses that were added since the last time, in one copy, and return them."""
        found = numbers(loss for loss, _ in self._waiting)
        for value, (_, samples) in zip(found, self._waiting, strict=True):
            self._sum += value * samples
            self.last = value
        self._waiting.clear()
        return found

    def take(self) -> float:
        """Return the sum since the last call."""
        self.read()
        taken, self._sum = self._sum, 0.0
        return taken
