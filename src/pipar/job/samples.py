"""The samples of a training: each device's, and the held-out sets."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch

from pipar.data.catalog import SYNTHETIC_SAMPLES
from pipar.data.datasets import load_dataset
from pipar.data.images import Dataset, Images
from pipar.data.partition import device_sizes, held_out_rows
from pipar.data.shard import SamplePrivacy, Shard
from pipar.data.user_datasets import factory_sets
from pipar.data.user_samples import factory_images
from pipar.errors import ConfigError, DataError
from pipar.job.declared_form import declared_form
from pipar.job.held_out import evaluation_batches
from pipar.job.passed_function import OWN
from pipar.job.user_objects import UserObjects, partitioned
from pipar.nn.learner import Batches
from pipar.settings.config import Config, check_private_evaluation, device_specs
from pipar.settings.metrics import shown_name
from pipar.tasks.losses import ClassLoss, Loss, OwnLoss, named_loss
from pipar.tasks.task import ONE_LABEL, Task
from pipar.tensors.bodies import TORCH_DTYPES
from pipar.tensors.inputs import InputForm
from pipar.user_function import load_factory


class Samples:
    """Every set of samples is loaded once, when it is first asked for."""

    def __init__(
        self,
        config: Config,
        own: UserObjects,
        *,
        noise_seed: int,
        label_seed: int | None,
        expected_targets: Callable[[], InputForm],
        expected_classes: Callable[[], int | None],
    ) -> None:
        self._config = config
        self._own = own
        self._noise_seed = noise_seed
        self._label_seed = label_seed  # None: `noise_seed`
        self._expected_targets = expected_targets  # where no device's data is known
        self._expected_classes = expected_classes  # in a deployment
        self._names = [spec.name for spec in device_specs(config)]
        self._dtype = TORCH_DTYPES[config.model.dtype]
        self._own_shards: dict[str, Shard] = {}
        self._evaluation: dict[str, Images | None] = {}  # by device
        self._found: dict[str, Images | None] = {}  # held-out sets
        self._held_out: dict[str, Images | None] = {}  # those that were checked

    @property
    def name(self) -> str:
        if self._own.training is not None:
            return "own"
        return self._config.data.factory or self._config.data.name

    @property
    def _has_user_sets(self) -> bool:
        return self._own.training is not None or self._config.data.factory is not None

    @property
    def has_catalog_form(self) -> bool:
        """True if the form of a named dataset is known without its files."""
        return not self._has_user_sets and self._own.form is not None

    @cached_property
    def _dataset(self) -> Dataset:
        data = self._config.data
        sizes = device_sizes(self._config, SYNTHETIC_SAMPLES * len(self._names))
        return load_dataset(
            data.name,
            path=Path(data.path) if data.path else None,
            seed=self._config.run.seed,
            validation=data.validation,
            test=data.test,
            train_samples=sum(sizes.values()) if data.name == "synthetic" else None,
            classes=data.classes,
            shape=data.image_shape,
        )

    @cached_property
    def _shards(self) -> dict[str, Shard]:
        images = self._dataset.train
        return {name: self._shard(images, rows, name) for name, rows in partitioned(self._config, images).items()}

    def _shard(self, images: Images, rows: Any, name: str) -> Shard:
        """Return the samples of one device, without those that it evaluates models on."""
        config = self._config
        share = config.data.evaluate_on_devices
        if share:
            rows, kept = held_out_rows(name, rows, share, config.run.seed)
            self._evaluation[name] = images.take(kept)
        privacy, task = self._sample_privacy, self._task_for(images)
        return Shard(images, rows, name, config.run.seed, config.data.augment, self._dtype, privacy, task)

    @property
    def _sample_privacy(self) -> SamplePrivacy | None:
        privacy = self._config.privacy
        if privacy.pixel_epsilon is None and privacy.label_epsilon is None:
            return None
        # The classes may be those of all shards' labels, of which this one is the first.
        return SamplePrivacy(
            self._noise_seed, privacy.pixel_scale, privacy.label_epsilon, lambda: self.classes, self._label_seed
        )

    def shard(self, device: str) -> Shard:
        """Return the samples of one device."""
        if not self._has_user_sets:
            return self._shards[device]
        if device not in self._own_shards:  # a factory may be slow, so it is called once for each name
            images, kept = self._own_images(device)
            if kept is not None:
                self._evaluation[device] = kept
            self._own_shards[device] = self._shard(images, torch.arange(len(images)).numpy(), device)
        return self._own_shards[device]

    def _own_images(self, device: str) -> tuple[Images, Images | None]:
        """Return the training samples of a device, and those to evaluate on if the user has given them apart."""
        if self._own.training is not None:
            return self._own.training[device], None
        assert self._config.data.factory is not None
        images, kept = factory_sets(self._config.data.factory, device, self._config.task)
        if kept is not None and self._config.data.evaluate_on_devices:
            raise ConfigError(
                f"data.evaluate_on_devices = {self._config.data.evaluate_on_devices:g} holds out samples of {device}, "
                "but data.factory returns others to evaluate on: give only one of them."
            )
        if images is None:
            raise DataError(
                f"data.factory {self._config.data.factory} returned None for the training data of {device}: return a "
                "dataset for every device."
            )
        return images, kept

    def keep_only_shard(self, device: str) -> Shard:
        """Return a copy of one device's samples and release all others, to keep a device's process small."""
        shard = self.shard(device).materialised()
        self._evaluation = {device: self.evaluation_images(device)}
        _ = self.form, self.target_form, self.classes  # needed later to build the network
        self.__dict__.pop("_shards", None)
        self.__dict__.pop("_dataset", None)
        self._own_shards.clear()
        return shard

    def sizes(self) -> dict[str, int]:
        """Return the number of samples of each device."""
        if self._has_user_sets:
            return {name: len(self.shard(name)) for name in self._names}
        return {name: len(shard) for name, shard in self._shards.items()}

    def evaluation_images(self, device: str) -> Images | None:
        """Return the samples that a device evaluates models on and does not train on; None if it has none."""
        given = self._own.evaluation
        if given is None and device not in self._evaluation:
            _ = self.shard(device)  # from which they are held out
        images = self._evaluation.get(device) if given is None else given[device]
        if images is not None:
            self._refuse_noise()
            self._refuse_metrics()
        return images

    def evaluation_sizes(self) -> dict[str, int]:
        """Return the number of evaluation samples of each device that has some."""
        found = {name: self.evaluation_images(name) for name in self._names}
        return {name: len(images) for name, images in found.items() if images is not None}

    def _refuse_noise(self) -> None:
        """Raise ConfigError if samples are protected by noise: the values of an evaluation have none."""
        try:
            check_private_evaluation(self._config.privacy)
        except ValueError as error:
            raise ConfigError(f"{error}.") from None

    def _refuse_metrics(self) -> None:
        """Raise ConfigError if a metric has the name of something else that devices send."""
        taken = {"samples", "loss", "accuracy"}
        for name in self._config.task.metrics:
            if name == "accuracy" and not isinstance(self.loss, ClassLoss):
                continue  # devices have no other accuracy
            if shown_name(name) in taken:
                raise ConfigError(
                    f"The metric '{shown_name(name)}' has the name of a value that evaluation on devices has anyway: "
                    "leave it out, or give your own function another name."
                )

    def held_out(self, which: str) -> Images | None:
        """Return the "validation" or the "test" set; None if there is none. One given by the user takes precedence."""
        if which not in self._held_out:
            images = self._find_held_out(which)
            if images is not None:
                self._check_images(images, f"the {which} set")
            self._held_out[which] = images
        return self._held_out[which]

    def _find_held_out(self, which: str) -> Images | None:
        if which not in self._found:
            self._found[which] = self._load_held_out(which)
        return self._found[which]

    def _load_held_out(self, which: str) -> Images | None:
        given = self._own.validation if which == "validation" else self._own.test
        if given is not None or self._own.training is not None:
            return given
        if self._config.data.factory is not None:
            return factory_images(self._config.data.factory, which, self._config.task)
        images = self._dataset.validation if which == "validation" else self._dataset.test
        return images if len(images) else None

    def held_out_batches(self, which: str) -> Batches:
        """Return a held-out set as batches that are normalised when they are loaded."""
        images = self.held_out(which)
        return [] if images is None else evaluation_batches(images, self._config, self._dtype, which)

    def held_out_targets(self) -> InputForm | None:
        """Return the form of the targets of the validation set; None if there is none."""
        images = self._find_held_out("validation")
        return None if images is None else images.target_form

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample; if it is not a single tensor, the number of its values."""
        return self.form.shape

    @cached_property
    def form(self) -> InputForm:
        """What one sample is; integers with the range of all devices' samples."""
        if self._own.form is not None:
            return self._own.form
        if not self._has_user_sets:
            return InputForm.given(self._dataset.input_shape)
        declared = self._declared_form
        if declared is not None:
            return declared
        first = self.shard(self._names[0]).images.form
        if all(tensor.dtype is None for tensor in first.tensors):
            return first
        others = (self.shard(name).images.form for name in self._names[1:])
        return reduce(InputForm.joined, (other for other in others if other == first), first)

    @property
    def _declared_form(self) -> InputForm | None:
        """The form of a factory's samples by the configuration, if that says it."""
        is_declared = self._own.training is None and self._config.data.factory is not None
        return declared_form(self._config.data) if is_declared else None

    @cached_property
    def classes(self) -> int:
        if self._own.classes is not None:
            return self._own.classes
        if not self._has_user_sets:
            return self._dataset.classes
        if self._config.data.classes is not None:
            return self._config.data.classes
        if self._own.takes_classes_of_network and (outputs := self._expected_classes()) is not None:
            return outputs
        if self._own.knows_no_data:
            return 0
        sets = [self.shard(name).images for name in self._names]
        form, loss = sets[0].target_form, self.loss
        if isinstance(loss, ClassLoss) and form.tensors[0].dtype is not None:
            return max(loss.classes_in(images.labels) for images in sets)
        if form == ONE_LABEL:
            return 1 + max(images.target_form.tensors[0].high for images in sets)
        return math.prod(form.shape)  # outputs of a network

    @cached_property
    def loss(self) -> Loss:
        """What is minimised."""
        own = self._own.loss
        if own is None:
            return named_loss(self._config.task, load_factory)
        count = self._config.task.count
        counting = getattr(own.get(), "count", None) if count is None else load_factory(count)
        return OwnLoss(own.get(), counting, self._config.task.loss.removeprefix(f"{OWN}:"))

    @cached_property
    def target_form(self) -> InputForm:
        if self._own.targets is not None:
            return self._own.targets
        if not self._has_user_sets:
            return ONE_LABEL
        if self._own.knows_no_data:
            return self._expected_targets()
        forms = [self.shard(name).images.target_form for name in self._names]
        return reduce(InputForm.joined, (form for form in forms if form == forms[0]))

    def _task_for(self, images: Images) -> Task:
        """Return the task of one device, which is of no use for other devices' targets."""
        return Task(self.loss, images.target_form, 0, self._dtype)

    def check_samples(self) -> None:
        """Raise DataError if the devices' samples differ in shape, or have labels beyond the number of classes."""
        if self._has_user_sets:
            for name in self._names:
                self._check_images(self.shard(name).images, f"the data of {name}")
        for name in self._names if self._has_own_evaluation else ():
            images = self.evaluation_images(name)
            if images is not None:
                self._check_images(images, f"the evaluation data of {name}")

    @property
    def _has_own_evaluation(self) -> bool:
        return self._own.evaluation is not None or self._config.data.factory is not None

    def _check_images(self, images: Images, whose: str) -> None:
        self._check_form(images, whose)
        if images.target_form != self.target_form:
            raise DataError(
                f"{whose} has targets of {images.target_form}, but those of {self._names[0]} have {self.target_form}: "
                "give all the same shape and dtype."
            )
        wrong = self.loss.wrong_target(images.labels, self.classes)
        if wrong is not None:
            hint = "set data.classes if there are more" if "highest label" in wrong else "check task.loss and the data"
            raise DataError(f"{whose} has {wrong}: {hint}.")

    def _check_form(self, images: Images, whose: str) -> None:
        declared = self._declared_form
        if declared is None:
            if images.form == self.form:
                return
            raise DataError(
                f"{whose} has samples of shape {images.form}, but those of {self._names[0]} have {self.form}: give "
                "all the same shape."
            )
        key = "data.shape" if self._config.data.inputs is None else "data.inputs"
        if images.form != declared:
            raise DataError(
                f"{whose} has samples of {images.form}, but {key} says {declared}: correct one of them; data.inputs "
                "takes integers, several tensors and names."
            )
        if (beyond := declared.value_beyond(images.form)) is not None:
            raise DataError(
                f"{whose} has samples with the value {beyond}, which is outside of the range that data.inputs gives: "
                "correct lowest or highest, or the data."
            )
