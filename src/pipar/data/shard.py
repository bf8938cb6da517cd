"""The samples of one device: their order in an epoch, their batches, and the noise on them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipar import random_streams
from pipar.data.images import Images, Indices
from pipar.errors import DataError
from pipar.nn.micro_batches import MicroBatch, cut_micro_batches, reference
from pipar.privacy.mechanisms import noisy, randomised_labels
from pipar.tasks.task import Task, classification
from pipar.tensors.inputs import mapped

_PADDING = 4


@dataclass(frozen=True)
class SamplePrivacy:
    """Protection of a device's samples: noise on the inputs that it trains on, and randomised labels for the server."""

    noise_seed: int
    pixel_scale: float = 0.0  # of PixelDP's noise; 0 means none
    label_epsilon: float | None = None  # of randomised response; None: the server gets the true labels
    classes: Callable[[], int] = lambda: 0  # number of classes; called only if needed
    label_seed: int | None = None  # of the labels, if a restarted device must send the same ones


_LABELS = classification(0)


@dataclass(frozen=True, eq=False)
class Shard:
    """The samples of one device: rows of a set of images that many shards share without copies."""

    images: Images
    indices: Indices = field(repr=False)
    device: str
    seed: int = 0
    augment: bool = False
    dtype: torch.dtype = torch.float32
    privacy: SamplePrivacy | None = None
    task: Task = field(default=_LABELS, repr=False)
    # The augmentation of the last epoch, which every batch of it needs.
    _drawn: dict[int, NDArray[np.int8]] = field(default_factory=dict, init=False, repr=False)
    # The place of each position in the order of an earlier epoch.
    _numbers: dict[int, NDArray[np.uint32]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        form = self.images.form
        if self.augment and not (form.is_floats and len(form.shape) == 3):
            raise DataError(
                f"samples of {form} cannot be cropped: set augment = false, "
                "or give images of (channels, height, width)."
            )
        if self._has_noise and not form.is_floats:
            raise DataError(
                f"privacy.pixel_epsilon adds noise to pixels and other floating-point numbers in one tensor, but "
                f"samples are {form}: unset it, or protect updates with privacy.noise_multiplier."
            )

        if self.privacy is not None and self.privacy.label_epsilon is not None and not self._has_plain_labels:
            raise DataError(
                "privacy.label_epsilon randomises one class of each sample, for cross_entropy and nll without "
                f"class_weights, but targets are {self.images.target_form} for {self.task.name}: unset it."
            )

    @property
    def _has_plain_labels(self) -> bool:
        return self.task.has_labels and not self.task.sends_count

    def __len__(self) -> int:
        return len(self.indices)

    def order(self, epoch: int) -> Indices:
        """Return the order in which this epoch visits the positions 0..len-1."""
        return random_streams.generator(self.seed, "order", self.device, epoch).permutation(len(self))

    def batch(self, epoch: int, positions: Indices) -> tuple[Any, Any]:
        """Return the samples at these positions, augmented and normalised in `dtype`, and their targets.

        The augmentation of a sample depends on the epoch and its position, not on its batch.
        """
        rows = torch.from_numpy(np.asarray(self.indices[positions], np.int64))
        samples = mapped(self.images.images, lambda tensor: tensor.index_select(0, rows))
        if self.augment:
            assert isinstance(samples, Tensor)
            samples = _augmented(samples, self._draws(epoch)[positions], flip=self.images.flip)
        return self.images.normalised(samples, self.dtype), self.images.targets(rows, self.dtype)

    def micro_batches(self, epoch: int, positions: Indices, sizes: list[int]) -> list[MicroBatch]:
        """Return the batch at these positions, before noise is added, cut into micro-batches of these sizes."""
        inputs, targets = self.batch(epoch, positions)
        sent = (
            None if self._sent_labels is None else self._sent_labels[torch.from_numpy(np.asarray(positions, np.int64))]
        )
        return cut_micro_batches(inputs, targets, sizes, sent, count=self.task.count(targets))

    def references(self, kept: int, positions: Indices, sizes: list[int]) -> list[Any]:
        """Return the batch at these positions as micro-batches that refer to the order of an earlier epoch."""
        if kept not in self._numbers:
            self._numbers.clear()
            self._numbers[kept] = np.argsort(self.order(kept)).astype("<u4")
        numbers, ends = self._numbers[kept][positions], np.cumsum(sizes)
        count = self._count_bytes(positions)
        return [
            reference(numbers[end - size : end].tobytes(), len(positions), count)
            for size, end in zip(sizes, ends, strict=True)
        ]

    def _count_bytes(self, positions: Indices) -> bytes:
        """Return what the batch at these positions counts, if the server cannot know it."""
        if not self.task.sends_count:
            return b""
        rows = torch.from_numpy(np.asarray(self.indices[positions], np.int64))
        return self.task.count_bytes(self.images.targets(rows, self.dtype))

    @property
    def varies(self) -> bool:
        """Whether a sample differs between epochs."""
        return self.augment or self._has_noise

    @property
    def noised_bytes(self) -> int:
        """The bytes of one sample's input if noise is added to it, else 0."""
        return math.prod(self.images.shape) * self.dtype.itemsize if self._has_noise else 0

    @property
    def _has_noise(self) -> bool:
        return self.privacy is not None and self.privacy.pixel_scale > 0.0

    def with_noise(self, epoch: int, positions: Indices, pieces: list[MicroBatch]) -> list[MicroBatch]:
        """Return a batch with PixelDP's noise, drawn from one stream: it does not depend on how the batch is cut."""
        if self.privacy is None or self.privacy.pixel_scale == 0.0:
            return pieces
        scale = self.privacy.pixel_scale
        rng = random_streams.generator(self.privacy.noise_seed, "pixel", self.device, epoch, int(positions[0]))
        noised = (
            mapped(piece.inputs, lambda inputs: torch.from_numpy(noisy(inputs.numpy(), scale, rng))) for piece in pieces
        )
        return [replace(piece, inputs=inputs) for piece, inputs in zip(pieces, noised, strict=True)]

    @cached_property
    def _sent_labels(self) -> Tensor | None:
        """The label sent to the server for each position; drawn once, as repeated draws would reveal the true one.

        The key of the draw includes the labels and epsilon: two draws with the same random numbers would reveal how
        their labels differ.
        """
        privacy = self.privacy
        if privacy is None or privacy.label_epsilon is None:
            return None
        labels = self.images.labels[torch.from_numpy(np.asarray(self.indices, np.int64))].numpy()
        classes, epsilon = privacy.classes(), privacy.label_epsilon
        seed = privacy.noise_seed if privacy.label_seed is None else privacy.label_seed
        of = hashlib.sha256(np.ascontiguousarray(labels).data).hexdigest()
        rng = random_streams.generator(seed, "label", self.device, classes, float(epsilon).hex(), of)
        return torch.from_numpy(randomised_labels(labels, classes=classes, epsilon=epsilon, rng=rng))

    def materialised(self) -> Shard:
        """Return the same shard over a copy of its own rows, so that the rest of the dataset can be freed."""
        return replace(self, images=self.images.take(self.indices), indices=np.arange(len(self)))

    def _draws(self, epoch: int) -> NDArray[np.int8]:
        """Return (down, right, mirrored) for each position, drawn for the whole epoch."""
        drawn = self._drawn.get(epoch)
        if drawn is None:
            rng = random_streams.generator(self.seed, "augment", self.device, epoch)
            drawn = rng.integers(0, (2 * _PADDING + 1, 2 * _PADDING + 1, 2), (len(self), 3), np.int8)
            self._drawn.clear()
            self._drawn[epoch] = drawn
        return drawn


def _augmented(samples: Tensor, draws: NDArray[np.int8], *, flip: bool) -> Tensor:
    """Return each image padded with 4 black pixels, cropped at its drawn offset, and mirrored if drawn."""
    count, channels, height, width = samples.shape
    inside = (slice(_PADDING, _PADDING + height), slice(_PADDING, _PADDING + width))
    pixels = samples.numpy()
    padded = np.zeros((count, channels, height + 2 * _PADDING, width + 2 * _PADDING), pixels.dtype)
    padded[:, :, *inside] = pixels
    # All 81 possible crops as a view: selecting one per image copies whole rows, four times faster than a gather.
    cuts = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
    chosen = cuts[np.arange(count), :, draws[:, 0], draws[:, 1]]
    if flip:
        mirrored = np.flatnonzero(draws[:, 2])
        chosen[mirrored] = chosen[mirrored, :, :, ::-1]
    return torch.from_numpy(chosen)
