"""What is trained on what: the network and each device's samples, from the configuration or from the user's objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import nn

from pipar.config import Config, device_specs
from pipar.data.catalog import SYNTHETIC_SAMPLES
from pipar.data.datasets import Dataset, Images, dataset_images, factory_images, load_dataset
from pipar.data.partition import even_sizes, partition
from pipar.data.shard import Shard
from pipar.errors import DataError, ModelError
from pipar.factory import call_factory
from pipar.nn.learner import Batches
from pipar.nn.models import build_model, check_fits, check_sequential
from pipar.nn.steps import Optimizer
from pipar.nn.tensors import TORCH_DTYPES

_EVALUATION_BATCH = 250


@dataclass(frozen=True)
class Own:
    """Objects that the user passed in Python instead of naming them in the configuration.

    The model travels to the processes that this one starts as the bytes that cloudpickle makes of it, so that
    classes written in a notebook work; nothing of it is read from anybody else.
    """

    model: bytes | None = None
    training: Mapping[str, Images] | None = None  # by device name
    validation: Images | None = None
    test: Images | None = None

    @classmethod
    def of(cls, config: Config, model: Any, datasets: Any, validation: Any, test: Any) -> Own:
        """Return the user's objects, checked; a single dataset is partitioned over the devices."""
        names = [spec.name for spec in device_specs(config)]
        return cls(
            model=None if model is None else cloudpickle.dumps(check_sequential(model)),
            training=None if datasets is None else _by_device(config, datasets, names),
            validation=None if validation is None else dataset_images(validation),
            test=None if test is None else dataset_images(test),
        )

    def only(self, device: str) -> Own:
        """Return what one device needs of it."""
        training = None if self.training is None else {device: self.training[device]}
        return Own(self.model, training)


def _by_device(config: Config, datasets: Any, names: list[str]) -> dict[str, Images]:
    if isinstance(datasets, Mapping):
        if sorted(datasets) != names:
            raise DataError(
                f"datasets are given for {', '.join(sorted(datasets))}, but the devices are {', '.join(names)}."
            )
        return {name: dataset_images(datasets[name]) for name in names}
    if isinstance(datasets, Sequence) and not hasattr(datasets, "__getitems__") and not isinstance(datasets, tuple):
        if len(datasets) != len(names):
            raise DataError(f"{len(datasets)} datasets are given for {len(names)} devices: give one each.")
        return {name: dataset_images(one) for name, one in zip(names, datasets, strict=True)}
    images = dataset_images(datasets)
    rows = _partition(config, images, _sizes(config, len(images), len(names)))
    return {name: images.take(own) for name, own in zip(names, rows, strict=True)}


def _sizes(config: Config, available: int, devices: int) -> list[int]:
    wanted = config.data.samples_per_device
    if isinstance(wanted, list):
        return list(wanted)
    return even_sizes(available, devices) if wanted is None else [wanted] * devices


def _partition(config: Config, images: Images, sizes: list[int]) -> list[Any]:
    data = config.data
    return partition(
        images.labels.numpy(),
        sizes,
        scheme=data.partition,
        seed=config.run.seed,
        alpha=data.alpha,
        shards_per_device=data.shards_per_device,
    )


class Workload:
    """The network and the data of one training; loads what is asked for, once."""

    def __init__(self, config: Config, own: Own | None = None) -> None:
        self.config = config
        self.own = own or Own()
        self.names = [spec.name for spec in device_specs(config)]
        self.dtype = TORCH_DTYPES[config.model.dtype]

    @property
    def data_name(self) -> str:
        if self.own.training is not None:
            return "own"
        return self.config.data.factory or self.config.data.name

    @property
    def model_name(self) -> str:
        if self.own.model is not None:
            return "own"
        return self.config.model.factory or self.config.model.name

    @property
    def _has_own_sets(self) -> bool:
        return self.own.training is not None or self.config.data.factory is not None

    @cached_property
    def _dataset(self) -> Dataset:
        data = self.config.data
        synthetic = data.name == "synthetic"
        return load_dataset(
            data.name,
            path=Path(data.path) if data.path else None,
            seed=self.config.run.seed,
            validation=data.validation,
            test=data.test,
            train_samples=sum(self._synthetic_sizes()) if synthetic else None,
            classes=data.classes,
            shape=data.shape,
        )

    def _synthetic_sizes(self) -> list[int]:
        return _sizes(self.config, SYNTHETIC_SAMPLES * len(self.names), len(self.names))

    @cached_property
    def _shards(self) -> dict[str, Shard]:
        images = self._dataset.train
        rows = _partition(self.config, images, _sizes(self.config, len(images), len(self.names)))
        return {name: self._shard(images, own, name) for name, own in zip(self.names, rows, strict=True)}

    def _shard(self, images: Images, rows: Any, name: str) -> Shard:
        return Shard(images, rows, name, self.config.run.seed, self.config.data.augment, self.dtype)

    def shard(self, device: str) -> Shard:
        """Return the samples of one device."""
        if not self._has_own_sets:
            return self._shards[device]
        images = self._own_images(device)
        return self._shard(images, torch.arange(len(images)).numpy(), device)

    def _own_images(self, device: str) -> Images:
        if self.own.training is not None:
            return self.own.training[device]
        assert self.config.data.factory is not None
        images = factory_images(self.config.data.factory, device)
        if images is None:
            raise DataError(f"data.factory {self.config.data.factory} returned None for the training data of {device}.")
        return images

    def own_shard(self, device: str) -> Shard:
        """Return a copy of one device's samples and let go of the rest: what a device's process keeps in memory."""
        shard = self.shard(device).materialised()
        _ = self.input_shape, self.classes  # the network is built later, and needs to know
        self.__dict__.pop("_shards", None)
        self.__dict__.pop("_dataset", None)
        return shard

    def held_out(self, which: str) -> Images | None:
        """Return the "validation" or the "test" set; None if there is none."""
        if self.own.training is not None:
            return self.own.validation if which == "validation" else self.own.test
        if self.config.data.factory is not None:
            return factory_images(self.config.data.factory, which)
        images = self._dataset.validation if which == "validation" else self._dataset.test
        return images if len(images) else None

    def held_out_batches(self, which: str) -> Batches:
        """Return a held-out set as batches that are normalised when they are asked for."""
        images = self.held_out(which)
        if images is None:
            return []
        starts = range(0, len(images), _EVALUATION_BATCH)
        sizes = [min(_EVALUATION_BATCH, len(images) - start) for start in starts]
        return [
            (size, partial(_rows, images, start, size, self.dtype)) for start, size in zip(starts, sizes, strict=True)
        ]

    def sizes(self) -> dict[str, int]:
        """Return how many samples each device has."""
        if self._has_own_sets:
            return {name: len(self.shard(name)) for name in self.names}
        return {name: len(shard) for name, shard in self._shards.items()}

    @cached_property
    def input_shape(self) -> tuple[int, ...]:
        if self._has_own_sets:
            return self.shard(self.names[0]).images.shape
        return self._dataset.input_shape

    @cached_property
    def classes(self) -> int:
        if not self._has_own_sets:
            return self._dataset.classes
        if self.config.data.classes is not None:
            return self.config.data.classes
        sets = [self.shard(name).images for name in self.names]
        return 1 + max(int(images.labels.max()) for images in sets)

    def build_model(self) -> nn.Sequential:
        """Return the network with its first weights: the same each time for the same seed."""
        seed, section = self.config.run.seed, self.config.model
        if self.own.model is not None:
            model = cloudpickle.loads(self.own.model)  # made by this process or by the one that started it
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
        """Return the network after running a batch through it: sizes that do not fit are found before training."""
        model = self.build_model()
        check_fits(model, self.input_shape, self.classes)
        return model

    def optimizer(self) -> Optimizer:
        section = self.config.optimizer
        return Optimizer(section.learning_rate, section.momentum, section.weight_decay)


def _rows(images: Images, start: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rows = slice(start, start + size)
    return images.normalised(images.images[rows], dtype), images.labels[rows]


def _image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise ModelError(f"Samples of shape {shape} are no images; give (channels, height, width) or your own model.")
    return (shape[0], shape[1], shape[2])
