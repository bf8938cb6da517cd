"""Samples and targets in memory, and what a dataset is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipar.tasks.task import target_form
from pipar.tensors.inputs import InputForm, in_dtype, mapped, tensors_of

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Images:
    """Samples and targets; uint8 samples are normalised by `mean` and `std` of pixels / 255, others are not changed.

    Most are images with labels, so `images` and `labels` are one tensor each; a user's own may be a tuple or a
    dictionary of tensors.
    """

    images: Any = field(repr=False)  # Inputs
    labels: Any = field(repr=False)  # Targets
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    flip: bool = False

    def __len__(self) -> int:
        return len(tensors_of(self.labels)[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample; if it is not a single tensor, the number of its values."""
        return self.form.shape

    @cached_property
    def target_form(self) -> InputForm:
        """What the targets of one sample are."""
        return target_form(self.labels)

    def targets(self, at: Tensor | slice, dtype: torch.dtype) -> Any:
        """Return the targets of some samples, floating-point numbers in this dtype."""
        return in_dtype(mapped(self.labels, lambda tensor: tensor[at]), dtype)

    @cached_property
    def form(self) -> InputForm:
        """What one sample is."""
        return InputForm.of(self.images)

    def rows(self, at: Tensor | slice) -> Any:
        """Return a copy of some samples, as they are stored: a network may overwrite its inputs."""
        # Indexing with a tensor copies already.
        return mapped(self.images, lambda tensor: tensor[at].clone() if isinstance(at, slice) else tensor[at])

    def take(self, rows: Indices) -> Images:
        """Return a copy of these rows."""
        at = torch.from_numpy(np.asarray(rows, np.int64))
        labels = mapped(self.labels, lambda tensor: tensor[at])
        return Images(self.rows(at), labels, self.mean, self.std, self.flip)

    def normalised(self, samples: Any, dtype: torch.dtype) -> Any:
        """Return samples of this set as network inputs: (pixel / 255 - mean) / std in `dtype`; integers unchanged."""
        return mapped(samples, lambda tensor: self._normalised(tensor, dtype))

    def _normalised(self, samples: Tensor, dtype: torch.dtype) -> Tensor:
        if samples.dtype != torch.uint8:
            return samples.to(dtype) if samples.is_floating_point() else samples
        broadcast = (-1,) + (1,) * (samples.ndim - 2)
        mean = torch.tensor(self.mean, dtype=torch.float64).view(broadcast)
        std = torch.tensor(self.std, dtype=torch.float64).view(broadcast)
        return samples.to(dtype).mul_((1 / (255 * std)).to(dtype)).sub_((mean / std).to(dtype))

    def batches(self, size: int, dtype: torch.dtype) -> Iterator[tuple[Any, Any]]:
        """Yield all samples in order, normalised, in batches of `size`, for validation and test."""
        for start in range(0, len(self), size):
            at = slice(start, start + size)
            yield self.normalised(self.rows(at), dtype), self.targets(at, dtype)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training set for the devices and two held-out sets for the server; a held-out set may be empty."""

    name: str
    train: Images
    validation: Images
    test: Images
    classes: int

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.train.shape
