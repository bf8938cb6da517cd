"""A validation or test set as batches, each of which is loaded when it is evaluated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from pipar import random_streams
from pipar.data.images import Images
from pipar.nn.learner import Batches
from pipar.privacy.mechanisms import noisy
from pipar.settings.config import Config
from pipar.tasks.losses import Targets
from pipar.tensors.inputs import Inputs

_EVALUATION_BATCH = 250


def evaluation_batches(images: Images, config: Config, dtype: torch.dtype, which: str) -> Batches:
    """Return a held-out set as batches; inputs get the same noise as in training, if they get any."""
    scale, seed = config.privacy.pixel_scale, config.run.seed
    batches = []
    for number, start in enumerate(range(0, len(images), _EVALUATION_BATCH)):
        size = min(_EVALUATION_BATCH, len(images) - start)
        chance = partial(random_streams.generator, seed, "pixel", which, number)
        batches.append((size, _Batch(images, start, size, dtype, scale, chance)))
    return batches


def batches_without_noise(images: Images, dtype: torch.dtype, most: int) -> Batches:
    """Return a held-out set as batches of at most this many samples."""
    sizes = [(start, min(most, len(images) - start)) for start in range(0, len(images), most)]
    return [(size, _Batch(images, start, size, dtype)) for start, size in sizes]


@dataclass(frozen=True)
class _Batch:
    """A batch of a held-out set, loaded by calling it, with the same noise on inputs as in training."""

    images: Images
    start: int
    size: int
    dtype: torch.dtype
    pixel_scale: float = 0.0
    chance: Callable[[], np.random.Generator] = np.random.default_rng  # of the noise

    def __call__(self) -> tuple[Inputs, Targets]:
        rows = slice(self.start, self.start + self.size)
        inputs: Inputs = self.images.normalised(self.images.rows(rows), self.dtype)
        if self.pixel_scale:
            assert isinstance(inputs, torch.Tensor)
            inputs = torch.from_numpy(noisy(inputs.numpy(), self.pixel_scale, self.chance()))
        return inputs, self.images.targets(rows, self.dtype)
