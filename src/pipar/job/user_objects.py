"""Objects that a user passes in Python instead of naming them in the configuration, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipar.data.catalog import dataset_info
from pipar.data.images import Images
from pipar.data.partition import device_sizes, partition
from pipar.data.user_datasets import is_list_of_datasets
from pipar.data.user_samples import dataset_images
from pipar.errors import ConfigError, DataError
from pipar.job.passed_function import OF_PARAMETERS, PassedFunction, checked_function
from pipar.job.passed_module import PassedModule
from pipar.networks.models import (
    check_module,
)
from pipar.settings.config import Config, device_names
from pipar.tasks.task import ONE_LABEL
from pipar.tensors.inputs import InputForm


@dataclass(frozen=True)
class UserObjects:
    """Objects that the user passed in Python instead of naming them in the configuration.

    The common form and classes are sent to child processes with them, so that no process has to look at the data of
    another device.
    """

    model: PassedModule | None = None
    training: Mapping[str, Images] | None = None  # by device name
    evaluation: Mapping[str, Images] | None = None  # likewise: what devices evaluate models on
    validation: Images | None = None
    test: Images | None = None
    form: InputForm | None = None  # of one sample
    targets: InputForm | None = None  # of one sample's targets
    classes: int | None = None
    loss: PassedFunction | None = None
    metrics: Mapping[str, PassedFunction] = field(default_factory=dict)  # by name
    optimizer: PassedFunction | None = None  # makes the optimiser of a part
    knows_no_data: bool = False  # as the server of a deployment, where a factory is called on devices only
    takes_classes_of_network: bool = False  # in a deployment: no machine sees the labels of all devices

    @classmethod
    def of(
        cls,
        config: Config,
        model: Any,
        datasets: Any,
        validation: Any,
        test: Any,
        loss: Any = None,
        metrics: Mapping[str, Any] | None = None,
        optimizer: Any = None,
        evaluation: Any = None,
    ) -> UserObjects:
        """Return the user's objects, checked; a single dataset is partitioned over the devices."""
        return cls(
            model=None if model is None else PassedModule(check_module(model)),
            training=None if datasets is None else _by_device(config, datasets),
            evaluation=None if evaluation is None else _evaluation_by_device(config, evaluation),
            validation=None if validation is None else dataset_images(validation, config.task),
            test=None if test is None else dataset_images(test, config.task),
            loss=None if loss is None else checked_function(loss, "loss"),
            metrics={name: checked_function(one, f"The metric {name!r}") for name, one in (metrics or {}).items()},
            optimizer=None if optimizer is None else checked_function(optimizer, "optimizer", OF_PARAMETERS),
        )

    def with_catalog_form(self, config: Config) -> UserObjects:
        """Return the objects with what the catalogue says of a named dataset, whose files are then not needed."""
        if self.training is not None or config.data.factory is not None:
            return self
        info = dataset_info(config.data.name)
        form = InputForm.given(config.data.shape or info.shape)
        return replace(self, form=form, classes=config.data.classes or info.classes)

    def only(self, device: str) -> UserObjects:
        """Return the part that one device needs."""
        training = None if self.training is None else {device: self.training[device]}
        evaluation = None if self.evaluation is None else {device: self.evaluation[device]}
        return replace(self, training=training, evaluation=evaluation, validation=None, test=None)


def _evaluation_by_device(config: Config, datasets: Any) -> dict[str, Images]:
    if not isinstance(datasets, Mapping) and not is_list_of_datasets(datasets):
        raise DataError(
            "evaluation_datasets is a single dataset: give one for each device, as a list or a mapping by name, or "
            "set data.evaluate_on_devices to a share of each device's samples."
        )
    if config.data.evaluate_on_devices:
        raise ConfigError(
            f"data.evaluate_on_devices = {config.data.evaluate_on_devices:g} holds out samples of the training data, "
            "but evaluation_datasets gives others: give only one of them."
        )
    return _by_device(config, datasets, "evaluation_datasets")


def _by_device(config: Config, datasets: Any, what: str = "datasets") -> dict[str, Images]:
    names = device_names(config)
    if isinstance(datasets, Mapping):
        if sorted(datasets) != sorted(names):
            given, wanted = ", ".join(sorted(datasets)), ", ".join(sorted(names))
            raise DataError(f"{what} are given for {given}, but the devices are {wanted}: give one for each device.")
        return {name: dataset_images(datasets[name], config.task) for name in names}
    if is_list_of_datasets(datasets):
        if len(datasets) != len(names):
            raise DataError(f"{len(datasets)} {what} are given for {len(names)} devices: give one for each device.")
        return {name: dataset_images(one, config.task) for name, one in zip(names, datasets, strict=True)}
    images = dataset_images(datasets, config.task)
    return {name: images.take(rows) for name, rows in partitioned(config, images).items()}


def partitioned(config: Config, images: Images) -> dict[str, Any]:
    """Return the rows of the images that each device gets."""
    data, sizes = config.data, device_sizes(config, len(images))
    if data.partition != "iid" and images.target_form != ONE_LABEL:
        raise DataError(
            f"data.partition = '{data.partition}' gives devices different shares of classes, but these samples have no "
            "classes: write data.partition = 'iid', or give one dataset for each device."
        )
    rows = partition(
        images.labels.numpy() if data.partition != "iid" else np.zeros(len(images), np.int64),
        list(sizes.values()),
        scheme=data.partition,
        seed=config.run.seed,
        alpha=data.alpha,
        shards_per_device=data.shards_per_device,
    )
    return dict(zip(sizes, rows, strict=True))
