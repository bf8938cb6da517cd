"""The network and each device's samples, from the configuration or from the user's own objects."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from pipar.cutting.cut_points import CutList
from pipar.cutting.frozen import check_stays_frozen, check_trains, freeze
from pipar.cutting.line import Line
from pipar.cutting.listing import layer_cuts
from pipar.cutting.split import named_layers
from pipar.cutting.steady import steady_layers
from pipar.data.catalog import SYNTHETIC_SAMPLES
from pipar.data.datasets import load_dataset
from pipar.data.images import Dataset, Images
from pipar.data.own_samples import factory_images
from pipar.data.own_sets import factory_sets
from pipar.data.partition import device_sizes, held_out_rows
from pipar.data.shard import SamplePrivacy, Shard
from pipar.errors import ConfigError, DataError, ModelError
from pipar.events import Observer, ignore
from pipar.job.device_evaluation import HeldOutSamples, Judgement, Outline
from pipar.job.held_out import evaluation_batches
from pipar.job.own_function import OWN
from pipar.job.own_network import OwnNetworkCutter
from pipar.job.user_objects import UserObjects, partitioned
from pipar.methods import METHODS
from pipar.monitored_metric import ON_DEVICES, VAL_LOSS, Monitor
from pipar.networks.models import (
    build_model,
    check_fits,
    check_module,
    example_output,
)
from pipar.nn.learner import Batches
from pipar.nn.optimizers import OptimizerSettings, ParameterGroup
from pipar.nn.start_weights import load_weights
from pipar.profiling.memory import Memory
from pipar.settings.config import Config, check_private_evaluation, device_specs, refuse_cut_points
from pipar.settings.metrics import is_own, shown_name
from pipar.tasks.losses import ClassLoss, Loss, OwnLoss, named_loss
from pipar.tasks.metrics import NamedMetric, named_metrics
from pipar.tasks.task import ONE_LABEL, Task
from pipar.tensors.bodies import TORCH_DTYPES
from pipar.tensors.inputs import InputForm, drawn_like, in_dtype
from pipar.user_function import call_factory, load_factory


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
        #: Is told how far the network is prepared.
        self.observe: Observer = ignore
        self._label_seed = label_seed  # None: `noise_seed`
        self.user_objects = own or UserObjects()
        self.names = [spec.name for spec in device_specs(config)]
        self.dtype = TORCH_DTYPES[config.model.dtype]
        self._own_shards: dict[str, Shard] = {}
        self._evaluation: dict[str, Images | None] = {}  # by device
        self._found: dict[str, Images | None] = {}  # held-out sets
        self._held_out: dict[str, Images | None] = {}  # those that were checked
        self._line: Line | None = None  # of a network that is no nn.Sequential
        self._is_plain = False  # an nn.Sequential of the user's that needs no line

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
        return {name: self._shard(images, rows, name) for name, rows in partitioned(self.config, images).items()}

    def _shard(self, images: Images, rows: Any, name: str) -> Shard:
        """Return the samples of one device, without those that it evaluates models on."""
        config = self.config
        share = config.data.evaluate_on_devices
        if share:
            rows, kept = held_out_rows(name, rows, share, config.run.seed)
            self._evaluation[name] = images.take(kept)
        privacy, task = self._sample_privacy, self._task_for(images)
        return Shard(images, rows, name, config.run.seed, config.data.augment, self.dtype, privacy, task)

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
            images, kept = self._own_images(device)
            if kept is not None:
                self._evaluation[device] = kept
            self._own_shards[device] = self._shard(images, torch.arange(len(images)).numpy(), device)
        return self._own_shards[device]

    def evaluation_images(self, device: str) -> Images | None:
        """Return the samples that a device evaluates models on and does not train on; None if it has none."""
        given = self.user_objects.evaluation
        if given is None and device not in self._evaluation:
            _ = self.shard(device)  # from which they are held out
        images = self._evaluation.get(device) if given is None else given[device]
        if images is not None:
            self._refuse_noise()
            self._refuse_metrics()
        return images

    def evaluation_sizes(self) -> dict[str, int]:
        """Return the number of evaluation samples of each device that has some."""
        found = {name: self.evaluation_images(name) for name in self.names}
        return {name: len(images) for name, images in found.items() if images is not None}

    def evaluation_samples(self, device: str, memory: Memory | None = None) -> HeldOutSamples | None:
        """Return a device's evaluation samples with the network that it evaluates."""
        images = self.evaluation_images(device)
        return None if images is None else HeldOutSamples(images, self._judgement, memory)

    def _refuse_noise(self) -> None:
        """Raise ConfigError if samples are protected by noise: the values of an evaluation have none."""
        try:
            check_private_evaluation(self.config.privacy)
        except ValueError as error:
            raise ConfigError(f"{error}.") from None

    def _refuse_metrics(self) -> None:
        """Raise ConfigError if a metric has the name of something else that devices send."""
        taken = {"samples", "loss", "accuracy"}
        for name in self.config.task.metrics:
            if name == "accuracy" and not isinstance(self.loss, ClassLoss):
                continue  # devices have no other accuracy
            if shown_name(name) in taken:
                raise ConfigError(
                    f"The metric '{shown_name(name)}' has the name of a value that evaluation on devices has anyway: "
                    "leave it out, or give your own function another name."
                )

    @cached_property
    def _judgement(self) -> Judgement:
        return Judgement(Outline(self.build_model()), self.task, self.metrics, self.dtype)

    def _own_images(self, device: str) -> tuple[Images, Images | None]:
        """Return the training samples of a device, and those to evaluate on if the user has given them apart."""
        if self.user_objects.training is not None:
            return self.user_objects.training[device], None
        assert self.config.data.factory is not None
        images, kept = factory_sets(self.config.data.factory, device, self.config.task)
        if kept is not None and self.config.data.evaluate_on_devices:
            raise ConfigError(
                f"data.evaluate_on_devices = {self.config.data.evaluate_on_devices:g} holds out samples of {device}, "
                "but data.factory returns others to evaluate on: give only one of them."
            )
        if images is None:
            raise DataError(
                f"data.factory {self.config.data.factory} returned None for the training data of {device}: return a "
                "dataset for every device."
            )
        return images, kept

    def keep_only_shard(self, device: str) -> Shard:
        """Return a copy of one device's samples and release all others, to keep a device's process small."""
        shard = self.shard(device).materialised()
        self._evaluation = {device: self.evaluation_images(device)}
        _ = self.form, self.task  # needed later to build the network
        self.__dict__.pop("_shards", None)
        self.__dict__.pop("_dataset", None)
        self._own_shards.clear()
        return shard

    def for_processes(self) -> UserObjects:
        """Return the objects with which other processes make the same workload from the same configuration."""
        return replace(self.user_objects, form=self.form, targets=self.task.form, classes=self.classes)

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
        given = self.user_objects.validation if which == "validation" else self.user_objects.test
        if given is not None or self.user_objects.training is not None:
            return given
        if self.config.data.factory is not None:
            return factory_images(self.config.data.factory, which, self.config.task)
        images = self._dataset.validation if which == "validation" else self._dataset.test
        return images if len(images) else None

    def held_out_batches(self, which: str) -> Batches:
        """Return a held-out set as batches that are normalised when they are loaded."""
        images = self.held_out(which)
        return [] if images is None else evaluation_batches(images, self.config, self.dtype, which)

    def check_samples(self) -> None:
        """Raise DataError if the devices' samples differ in shape, or have labels beyond the number of classes."""
        if self._has_own_sets:
            for name in self.names:
                self._check_images(self.shard(name).images, f"the data of {name}")
        for name in self.names if self._has_own_evaluation else ():
            images = self.evaluation_images(name)
            if images is not None:
                self._check_images(images, f"the evaluation data of {name}")

    def _check_images(self, images: Images, whose: str) -> None:
        if images.form != self.form:
            raise DataError(
                f"{whose} has samples of shape {images.form}, but those of {self.names[0]} have {self.form}: give "
                "all the same shape."
            )
        if images.target_form != self.task.form:
            raise DataError(
                f"{whose} has targets of {images.target_form}, but those of {self.names[0]} have {self.task.form}: "
                "give all the same shape and dtype."
            )
        wrong = self.loss.wrong_target(images.labels, self.classes)
        if wrong is not None:
            hint = "set data.classes if there are more" if "highest label" in wrong else "check task.loss and the data"
            raise DataError(f"{whose} has {wrong}: {hint}.")

    def sizes(self) -> dict[str, int]:
        """Return the number of samples of each device."""
        if self._has_own_sets:
            return {name: len(self.shard(name)) for name in self.names}
        return {name: len(shard) for name, shard in self._shards.items()}

    @property
    def _has_own_evaluation(self) -> bool:
        return self.user_objects.evaluation is not None or self.config.data.factory is not None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample; if it is no single tensor, the number of its values."""
        return self.form.shape

    @cached_property
    def form(self) -> InputForm:
        """What one sample is; integers with the range of all devices' samples."""
        if self.user_objects.form is not None:
            return self.user_objects.form
        if not self._has_own_sets:
            return InputForm.given(self._dataset.input_shape)
        first = self.shard(self.names[0]).images.form
        if all(tensor.dtype is None for tensor in first.tensors):
            return first
        others = (self.shard(name).images.form for name in self.names[1:])
        return reduce(InputForm.joined, (other for other in others if other == first), first)

    @cached_property
    def classes(self) -> int:
        if self.user_objects.classes is not None:
            return self.user_objects.classes
        if not self._has_own_sets:
            return self._dataset.classes
        if self.config.data.classes is not None:
            return self.config.data.classes
        sets = [self.shard(name).images for name in self.names]
        form, loss = sets[0].target_form, self.loss
        if isinstance(loss, ClassLoss) and form.tensors[0].dtype is not None:
            return max(loss.classes_in(images.labels) for images in sets)
        if form == ONE_LABEL:
            return 1 + max(images.target_form.tensors[0].high for images in sets)
        return math.prod(form.shape)  # outputs of a network

    @cached_property
    def loss(self) -> Loss:
        """What is minimised."""
        own = self.user_objects.loss
        if own is None:
            return named_loss(self.config.task, load_factory)
        count = self.config.task.count
        counting = getattr(own.get(), "count", None) if count is None else load_factory(count)
        return OwnLoss(own.get(), counting, self.config.task.loss.removeprefix(f"{OWN}:"))

    @cached_property
    def task(self) -> Task:
        """The loss, with the targets of all devices."""
        return Task(self.loss, self._target_form, self.classes, self.dtype)

    @cached_property
    def metrics(self) -> list[NamedMetric]:
        """The metrics of held-out sets."""
        return named_metrics({name: self._metric(name) for name in self.config.task.metrics}, self.task)

    @cached_property
    def monitor(self) -> Monitor:
        """What the best model goes by."""
        wanted = self.config.run.monitor
        if wanted == VAL_LOSS:
            return Monitor()
        known = {metric.name: metric.higher_is_better for metric in self.metrics}
        known |= {ON_DEVICES + name: higher for name, higher in {"loss": False, "accuracy": True, **known}.items()}
        if wanted not in known:
            names = ", ".join([VAL_LOSS, *known])
            raise ConfigError(
                f"run.monitor = '{wanted}' is neither '{VAL_LOSS}' nor a metric of this training: write one of "
                f"{names}, or add it to task.metrics."
            )
        return Monitor(wanted, known[wanted])

    def _metric(self, name: str) -> Callable[..., Any] | None:
        """Return a user's function; None for a metric that pipar knows."""
        given = self.user_objects.metrics.get(shown_name(name)) if name.startswith(f"{OWN}:") else None
        if given is not None:
            return given.get()
        return load_factory(name) if is_own(name) else None

    def check_metrics(self, model: nn.Module) -> None:
        """Raise ConfigError if a metric cannot be computed of what the network returns, or is not known."""
        _ = self.monitor
        if self.metrics:
            output = example_output(model, self.form)
            targets = self.task.random(2, torch.Generator().manual_seed(0))
            for metric in self.metrics:
                metric.checked(output, targets)

    @property
    def _target_form(self) -> InputForm:
        if self.user_objects.targets is not None:
            return self.user_objects.targets
        if not self._has_own_sets:
            return ONE_LABEL
        if self.user_objects.knows_no_data:
            return self.expected_targets()
        forms = [self.shard(name).images.target_form for name in self.names]
        return reduce(InputForm.joined, (form for form in forms if form == forms[0]))

    def expected_targets(self) -> InputForm:
        """Return the form of targets where no device's data is known: as validation or the network's output says.

        Validation first: from an output, classes cannot be told from probabilities of classes.
        """
        held_out = self.held_out_targets()
        if held_out is not None:
            return held_out
        expected = self.loss.form_for(example_output(self.network(), self.form), self.classes)
        if expected is None:
            raise ConfigError(
                f"The server does not know the form of the targets of the loss {self.loss.name}: let data.factory "
                "return a 'validation' set, which has the same form."
            )
        return expected

    def held_out_targets(self) -> InputForm | None:
        """Return the form of the targets of the validation set; None if there is none."""
        try:
            images = self._find_held_out("validation")
        except DataError:  # the server of a deployment need not have it
            return None
        return None if images is None else images.target_form

    def _task_for(self, images: Images) -> Task:
        """Return the task of one device, which is of no use for other devices' targets."""
        return Task(self.loss, images.target_form, 0, self.dtype)

    def build_model(self) -> nn.Sequential:
        """Return the network with its first weights, which depend only on the seed; it can be cut after each layer."""
        if self._line is not None:
            return copy.deepcopy(self._line)
        model = self.network()
        freeze(model, self.config.model.freeze)
        check_trains(model)
        return self._cuttable(model)

    def network(self) -> nn.Module:
        """Return a copy of the user's own module, or the network of the configuration; nothing is cut."""
        seed, section = self.config.run.seed, self.config.model
        if self.user_objects.model is not None:
            return self.user_objects.model.copy().to(self.dtype)
        if section.factory is not None:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                return check_module(call_factory(section.factory)).to(self.dtype)
        refuse_cut_points(self.config)
        return build_model(
            section.name,
            input_shape=_image_shape(self.form),
            classes=self.classes,
            norm=section.norm,
            dtype=self.dtype,
            seed=seed,
        )

    def _cuttable(self, model: nn.Module) -> nn.Sequential:
        """Return a network that can be cut after each layer: itself, or a line of stages that is made of it."""
        is_own = self.user_objects.model is not None or self.config.model.factory is not None
        if not is_own or self._is_plain:
            return cast(nn.Sequential, model)
        splits = METHODS[self.config.run.method].splits
        cut = OwnNetworkCutter(
            self.config.model.cut_points, self.form, self.task, self.dtype, self.observe, splits=splits
        ).cut(model)
        if not isinstance(cut, Line):
            self._is_plain = True
            return cut
        self._line = cut
        return copy.deepcopy(cut)

    def cuts(self) -> CutList:
        """Return where the network can be cut, and what crosses there."""
        model = self.checked_model(initial=False)
        if isinstance(model, Line):
            assert model.cuts is not None
            return model.cuts
        return layer_cuts(named_layers(model), self.form.example(2, self.dtype), "children")

    def initial_model(self) -> nn.Sequential:
        """Return the network with the weights that the training starts from: those of a file if one is given."""
        model = self.build_model()
        if self.config.model.weights is not None:
            load_weights(model, self.config.model.weights)
        return model

    def checked_model(self, *, initial: bool = True) -> nn.Sequential:
        """Return the network after running a batch through it, so that sizes that do not fit raise before training.

        With `initial` it has the weights that the training starts from; a device gets them from the server.
        """
        model = self.initial_model() if initial else self.build_model()
        if self._line is None and not self._is_plain:  # else it was checked before it was cut
            check_fits(model, self.form, self.task)
        if initial:  # a device that evaluates has metrics of its own
            self.check_metrics(model)
        check_stays_frozen(model, in_dtype(drawn_like(self.form.example(2, self.dtype), 2, seed=0), self.dtype))
        return model

    def steady_layers(self, model: nn.Sequential) -> int:
        """Return how many first layers give the same activations in every epoch; 0 if the samples themselves differ."""
        if self.config.data.augment or self.config.privacy.pixel_scale:
            return 0
        return steady_layers(model, self.form.example(2, self.dtype))

    def optimizer(self) -> OptimizerSettings:
        section, own = self.config.optimizer, self.user_objects.optimizer
        return OptimizerSettings(
            section.name,
            section.learning_rate,
            section.arguments,
            section.factory if own is None else own.get(),
            groups=tuple(ParameterGroup(group.match, group.settings) for group in section.groups),
            decay_norms_and_biases=section.decay_norms_and_biases,
            schedule=section.learning_schedule,
            clip_norm=section.clip_norm,
        )


def _image_shape(form: InputForm) -> tuple[int, int, int]:
    shape = form.shape
    if len(shape) != 3 or not form.is_floats:
        raise ModelError(
            f"Samples are {form}, but this network takes images: give (channels, height, width), or your own model."
        )
    return (shape[0], shape[1], shape[2])
