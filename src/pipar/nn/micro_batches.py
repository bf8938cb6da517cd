"""Micro-batches: a batch of samples cut into pieces that are computed and sent one by one."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Inputs and labels of one micro-batch, and the number of samples in its whole batch."""

    inputs: torch.Tensor
    labels: torch.Tensor
    batch_samples: int
    sent_labels: torch.Tensor | None = None  # the labels that the server gets, if they differ

    @property
    def samples(self) -> int:
        return len(self.labels)


def cut_micro_batches(
    inputs: torch.Tensor, labels: torch.Tensor, sizes: list[int], sent_labels: torch.Tensor | None = None
) -> list[MicroBatch]:
    """Return the micro-batches of a batch, in order, as views."""
    total = len(labels)
    cut = (torch.split(inputs, sizes), torch.split(labels, sizes))
    others = [None] * len(sizes) if sent_labels is None else torch.split(sent_labels, sizes)
    return [MicroBatch(x, y, total, other) for x, y, other in zip(*cut, others, strict=True)]
