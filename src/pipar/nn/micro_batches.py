"""A micro-batch on its way: cut from a batch on the device, and decoded at the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from pipar.tasks.losses import Targets
from pipar.tensors.crossing import Received
from pipar.tensors.inputs import Inputs, mapped, split_rows, tensors_of
from pipar.wire.messages import (
    NUMBER_BYTES,
    Reference,
    numbers_body,
)

#: What a device's part gives: one tensor, or several.
Crossing = torch.Tensor | tuple[torch.Tensor, ...]
#: The same at the server.
Activation = torch.Tensor | Received


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Inputs and targets of one micro-batch, and the samples and the count of its whole batch."""

    inputs: Inputs
    targets: Targets
    batch_samples: int
    sent_targets: Targets | None = None  # the targets that the server gets, if they differ
    count: float | None = None  # of the whole batch; None: its samples

    @property
    def samples(self) -> int:
        return len(tensors_of(self.targets)[0])

    @property
    def batch_count(self) -> float:
        return self.batch_samples if self.count is None else self.count


def cut_micro_batches(
    inputs: Inputs,
    targets: Targets,
    sizes: list[int],
    sent_targets: Targets | None = None,
    *,
    count: float | None = None,
) -> list[MicroBatch]:
    """Return the micro-batches of a batch, in order, as views."""
    total = sum(sizes)
    # A network may overwrite its inputs. As ordinary views, they would all count as overwritten.
    pieces = [mapped(piece, lambda tensor: tensor.data) for piece in split_rows(inputs, sizes)]
    cut = (pieces, split_rows(targets, sizes))
    others = [None] * len(sizes) if sent_targets is None else split_rows(sent_targets, sizes)
    return [MicroBatch(x, y, total, other, count) for x, y, other in zip(*cut, others, strict=True)]


def reference(numbers: bytes, batch_samples: int, count: bytes = b"") -> Reference:
    """Return a micro-batch by the 32-bit numbers of its samples' activations, which the server has kept."""
    return Reference(len(numbers) // NUMBER_BYTES, batch_samples, numbers_body(numbers, count))


class Decoded(NamedTuple):
    """A micro-batch at the server."""

    activation: Activation
    targets: Targets
    batch_samples: int
    batch_count: float  # what the whole batch counts


def tensors_at(activation: Activation) -> tuple[torch.Tensor, ...]:
    """Return the tensors that have crossed the cut."""
    return activation.tensors if isinstance(activation, Received) else (activation,)
