"""The network and each device's samples, from the configuration or from the user's own objects."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeGuard

import cloudpickle
import numpy as np
import torch
from torch import nn

from pipar import random_streams
from pipar.config import Config, device_names, device_specs
from pipar.data.catalog import SYNTHETIC_SAMPLES
from pipar.data.datasets import Dataset, Images, dataset_images, factory_images, load_dataset
from pipar.data.partition import device_sizes, partition
from pipar.data.shard import SamplePrivacy, Shard
from pipar.errors import DataError, ModelError
from pipar.nn.learner import Batches
from pipar.nn.models import build_model, check_fits, check_sequential
from pipar.nn.parts import Optimizer
from pipar.nn.tensors import TORCH_DTYPES
from pipar.privacy.mechanisms import noisy
from pipar.user_function import call_factory

_EVALUATION_BATCH = 250


@dataclass(frozen=True)
class UserObjects:
    """Objects that the user passed in Python instead of naming them in the configuration.

    The model is sent to child processes as cloudpickle bytes, so that classes defined in a notebook work; such bytes
    are never loaded from elsewhere. The common shape and classes are sent with it, so that no process has to look at
    the data of another device.
    """

    model: bytes | None = None
    training: Mapping[str, Images] | None = None  # by device name
    validation: Images | None = None
    test: Images | None = None
    input_shape: tuple[int, ...] | None = None
    classes: int | None = None

    @classmethod
    def of(cls, config: Config, model: Any, datasets: Any, validation: Any, test: Any) -> UserObjects:
        """Return the user's objects, checked; a single dataset is partitioned over the devices."""
        return cls(
            model=None if model is None else cloudpickle.dumps(check_sequential(model)),
            training=None if datasets is None else _by_device(config, datasets),
            validation=None if validation is None else dataset_images(validation),
            test=None if test is None else dataset_images(test),
        )

    def only(self, device: str) -> UserObjects:
        """Return the part that one device needs."""
        training = None if self.training is None else {device: self.training[device]}
        return replace(self, training=training, validation=None, test=None)


def is_list_of_datasets(datasets: Any) -> TypeGuard[Sequence[Any]]:
    """Return True for a list or tuple of datasets; a list of (sample, label) pairs is a dataset itself."""
    return isinstance(datasets, list | tuple) and not (datasets and all(map(_is_pair, datasets)))


def _is_pair(item: Any) -> bool:
    # A list of two pairs is as long as a pair, but its second element is not a label.
    return isinstance(item, list | tuple) and len(item) == 2 and _is_label(item[1])


def _is_label(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _by_device(config: Config, datasets: Any) -> dict[str, Images]:
    names = device_names(config)
    if isinstance(datasets, Mapping):
        if sorted(datasets) != sorted(names):
            given, wanted = ", ".join(sorted(datasets)), ", ".join(sorted(names))
            raise DataError(f"datasets are given for {given}, but the devices are {wanted}: give one for each device.")
        return {name: dataset_images(datasets[name]) for name in names}
    if is_list_of_datasets(datasets):
        if len(datasets) != len(names):
            raise DataError(f"{len(datasets)} datasets are given for {len(names)} devices: give one for each device.")
        return {name: dataset_images(one) for name, one in zip(names, datasets, strict=True)}
    images = dataset_images(datasets)
    return {name: images.take(rows) for name, rows in _partition(config, images).items()}


def _partition(config: Config, images: Images) -> dict[str, Any]:
    """Return the rows of the images that each device gets."""
    data, sizes = config.data, device_sizes(config, len(images))
    rows = partition(
        images.labels.numpy(),
        list(sizes.values()),
        scheme=data.partition,
        seed=config.run.seed,
        alpha=data.alpha,
        shards_per_device=data.shards_per_device,
    )
    return dict(zip(sizes, rows, strict=True))


class Workload:
    """The network and the data of one training; each is loaded once, when it is first asked for."""

    def __init__(
        self,
        config: Config,
        own: UserObjects | None = None,
        *,
        noise_seed: int | None = None,
        label_seed: int | None = None,
    ) -> None:
        self.config = config
        #: Seed of the privacy noise. Derived from the run's seed in simulations, secret on real devices.
        self.noise_seed = config.run.seed if noise_seed is None else noise_seed
        self._label_seed = label_seed  # None: `noise_seed`
        self.user_objects = own or UserObjects()
        self.names = [spec.name for spec in device_specs(config)]
        self.dtype = TORCH_DTYPES[config.model.dtype]
        self._own_shards: dict[str, Shard] = {}
        self._held_out: dict[str, Images | None] = {}

    @property
    def data_name(self) -> str:
        if self.user_objects.training is not None:
            return "own"
        return self.config.data.factory or self.config.data.name

    @property
    def model_name(self) -> str:
        if self.user_objects.model is not None:
            return "own"
        return self.config.model.factory or self.config.model.name

    @property
    def _has_own_sets(self) -> bool:
        return self.user_objects.training is not None or self.config.data.factory is not None

    @cached_property
    def _dataset(self) -> Dataset:
        data = self.config.data
        sizes = device_sizes(self.config, SYNTHETIC_SAMPLES * len(self.names))
        return load_dataset(
            data.name,
            path=Path(data.path) if data.path else None,
            seed=self.config.run.seed,
            validation=data.validation,
            test=data.test,
            train_samples=sum(sizes.values()) if data.name == "synthetic" else None,
            classes=data.classes,
            shape=data.image_shape,
        )

    @cached_property
    def _shards(self) -> dict[str, Shard]:
        images = self._dataset.train
        return {name: self._shard(images, rows, name) for name, rows in _partition(self.config, images).items()}

    def _shard(self, images: Images, rows: Any, name: str) -> Shard:
        config = self.config
        return Shard(images, rows, name, config.run.seed, config.data.augment, self.dtype, self._sample_privacy)

    @property
    def _sample_privacy(self) -> SamplePrivacy | None:
        privacy = self.config.privacy
        if privacy.pixel_epsilon is None and privacy.label_epsilon is None:
            return None
        # The classes may be those of all shards' labels, of which this one is the first.
        return SamplePrivacy(
            self.noise_seed, privacy.pixel_scale, privacy.label_epsilon, lambda: self.classes, self._label_seed
        )

    def shard(self, device: str) -> Shard:
        """Return the samples of one device."""
        if not self._has_own_sets:
            return self._shards[device]
        if device not in self._own_shards:  # a factory may be slow, so it is called once for each name
            images = self._own_images(device)
            self._own_shards[device] = self._shard(images, torch.arange(len(images)).numpy(), device)
        return self._own_shards[device]

    def _own_images(self, device: str) -> Images:
        if self.user_objects.training is not None:
            return self.user_objects.training[device]
        assert self.config.data.factory is not None
        images = factory_images(self.config.data.factory, device)
        if images is None:
            raise DataError(
                f"data.factory {self.config.data.factory} returned None for the training data of {device}: return a "
                "dataset for every device."
            )
        return images

    def keep_only_shard(self, device: str) -> Shard:
        """Return a copy of one device's samples and release all others, to keep a device's process small."""
        shard = self.shard(device).materialised()
        _ = self.input_shape, self.classes  # needed later to build the network
        self.__dict__.pop("_shards", None)
        self.__dict__.pop("_dataset", None)
        self._own_shards.clear()
        return shard

    def for_processes(self) -> UserObjects:
        """Return the objects with which other processes make the same workload from the same configuration."""
        return replace(self.user_objects, input_shape=self.input_shape, classes=self.classes)

    def held_out(self, which: str) -> Images | None:
        """Return the "validation" or the "test" set; None if there is none. One given by the user takes precedence."""
        if which not in self._held_out:
            images = self._find_held_out(which)
            if images is not None:
                self._check_images(images, f"the {which} set")
            self._held_out[which] = images
        return self._held_out[which]

    def _find_held_out(self, which: str) -> Images | None:
        given = self.user_objects.validation if which == "validation" else self.user_objects.test
        if given is not None or self.user_objects.training is not None:
            return given
        if self.config.data.factory is not None:
            return factory_images(self.config.data.factory, which)
        images = self._dataset.validation if which == "validation" else self._dataset.test
        return images if len(images) else None

    def held_out_batches(self, which: str) -> Batches:
        """Return a held-out set as batches that are normalised when they are loaded."""
        images = self.held_out(which)
        if images is None:
            return []
        starts = range(0, len(images), _EVALUATION_BATCH)
        sizes = [min(_EVALUATION_BATCH, len(images) - start) for start in starts]
        scale, chance = (
            self.config.privacy.pixel_scale,
            partial(random_streams.generator, self.config.run.seed, "pixel", which),
        )
        return [
            (size, _Batch(images, start, size, self.dtype, scale, partial(chance, number)))
            for number, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ]

    def check_samples(self) -> None:
        """Raise DataError if the devices' samples differ in shape, or have labels beyond the number of classes."""
        if self._has_own_sets:
            for name in self.names:
                self._check_images(self.shard(name).images, f"the data of {name}")

    def _check_images(self, images: Images, whose: str) -> None:
        if images.shape != self.input_shape:
            shape = self.input_shape
            raise DataError(
                f"{whose} has samples of shape {images.shape}, but those of {self.names[0]} have {shape}: give all the "
                "same shape."
            )
        highest = int(images.labels.max())
        if highest >= self.classes:
            end = self.classes - 1
            raise DataError(
                f"{whose} has label {highest}, but the highest label is {end}: set data.classes if there are more."
            )

    def sizes(self) -> dict[str, int]:
        """Return the number of samples of each device."""
        if self._has_own_sets:
            return {name: len(self.shard(name)) for name in self.names}
        return {name: len(shard) for name, shard in self._shards.items()}

    @cached_property
    def input_shape(self) -> tuple[int, ...]:
        if self.user_objects.input_shape is not None:
            return self.user_objects.input_shape
        if self._has_own_sets:
            return self.shard(self.names[0]).images.shape
        return self._dataset.input_shape

    @cached_property
    def classes(self) -> int:
        if self.user_objects.classes is not None:
            return self.user_objects.classes
        if not self._has_own_sets:
            return self._dataset.classes
        if self.config.data.classes is not None:
            return self.config.data.classes
        sets = [self.shard(name).images for name in self.names]
        return 1 + max(int(images.labels.max()) for images in sets)

    def build_model(self) -> nn.Sequential:
        """Return the network with its initial weights, which depend only on the seed."""
        seed, section = self.config.run.seed, self.config.model
        if self.user_objects.model is not None:
            model = cloudpickle.loads(self.user_objects.model)  # pickled by this process or by its parent
        elif section.factory is not None:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                model = check_sequential(call_factory(section.factory))
        else:
            return build_model(
                section.name,
                input_shape=_image_shape(self.input_shape),
                classes=self.classes,
                norm=section.norm,
                dtype=self.dtype,
                seed=seed,
            )
        assert isinstance(model, nn.Sequential)
        return model.to(self.dtype)

    def checked_model(self) -> nn.Sequential:
        """Return the network after running a batch through it, so that sizes that do not fit raise before training."""
        model = self.build_model()
        check_fits(model, self.input_shape, self.classes)
        return model

    def optimizer(self) -> Optimizer:
        section = self.config.optimizer
        return Optimizer(section.learning_rate, section.momentum, section.weight_decay)


@dataclass(frozen=True)
class _Batch:
    """A batch of a held-out set, loaded by calling it, with the same noise on inputs as in training."""

    images: Images
    start: int
    size: int
    dtype: torch.dtype
    pixel_scale: float
    chance: Callable[[], np.random.Generator]

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(self.start, self.start + self.size)
        inputs = self.images.normalised(self.images.images[rows], self.dtype)
        if self.pixel_scale:
            inputs = torch.from_numpy(noisy(inputs.numpy(), self.pixel_scale, self.chance()))
        return inputs, self.images.labels[rows]


def _image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise ModelError(
            f"Samples have shape {shape}, but this network takes images: give (channels, height, width), or your own "
            "model."
        )
    return (shape[0], shape[1], shape[2])
