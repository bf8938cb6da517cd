"""Labels in messages: as bytes, and read again."""

from __future__ import annotations

from torch import Tensor

from pipar.tasks.task import classification
from pipar.wire.messages import Message


def label_bytes(labels: Tensor) -> list[memoryview]:
    """Return what follows the activations of samples with these labels."""
    return classification(0).buffers(labels, 1.0)


def read_labels(message: Message, classes: int) -> Tensor:
    targets, _ = classification(classes).read(message)
    assert isinstance(targets, Tensor)
    return targets
