"""What is trained: the network, its samples and the task, from the configuration or from the user's own objects."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn

from pipar.cutting.constant_activations import steady_layers
from pipar.cutting.cut_points import CutList
from pipar.cutting.frozen import check_stays_frozen, check_trains, freeze
from pipar.cutting.listing import layer_cuts
from pipar.cutting.split import named_layers
from pipar.cutting.stage_line import Line
from pipar.errors import ConfigError, ModelError
from pipar.events import Observer, ignore
from pipar.job.device_evaluation import HeldOutSamples, Judgement, Outline
from pipar.job.passed_function import OWN
from pipar.job.samples import Samples
from pipar.job.user_network import UserNetworkCutter
from pipar.job.user_objects import UserObjects
from pipar.leakage.table import Subject
from pipar.methods import METHODS
from pipar.monitored_metric import ON_DEVICES, VAL_LOSS, Monitor
from pipar.networks.models import (
    build_model,
    check_fits,
    check_module,
    example_output,
)
from pipar.nn.optimizers import OptimizerSettings, ParameterGroup
from pipar.nn.runtime import one_thread
from pipar.nn.start_weights import load_weights
from pipar.profiling.memory import Memory
from pipar.settings.config import Config, device_specs, refuse_cut_points
from pipar.settings.metrics import is_own, shown_name
from pipar.tasks.losses import ClassLoss
from pipar.tasks.metrics import NamedMetric, named_metrics
from pipar.tasks.task import Task
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
        #: Is told how far the network is prepared.
        self.observe: Observer = ignore
        self.user_objects = own or UserObjects()
        self.names = [spec.name for spec in device_specs(config)]
        self.dtype = TORCH_DTYPES[config.model.dtype]
        #: Noise is derived from the run's seed in simulations, and from secret ones on real devices.
        self.samples = Samples(
            config,
            self.user_objects,
            noise_seed=config.run.seed if noise_seed is None else noise_seed,
            label_seed=label_seed,
            expected_targets=self._expected_targets,
            expected_classes=self._expected_classes,
        )
        self._line: Line | None = None  # of a network that is not an nn.Sequential
        self._is_plain = False  # an nn.Sequential of the user's that needs no line

    @property
    def model_name(self) -> str:
        if self.user_objects.model is not None:
            return "own"
        return self.config.model.factory or self.config.model.name

    @property
    def subject(self) -> Subject:
        """What is attacked if this network's cuts are measured."""
        return Subject.of(self.config, self.model_name, self.samples.name, self.samples.input_shape)

    def evaluation_samples(self, device: str, memory: Memory | None = None) -> HeldOutSamples | None:
        """Return a device's evaluation samples with the network that it evaluates."""
        images = self.samples.evaluation_images(device)
        return None if images is None else HeldOutSamples(images, self._judgement, memory)

    @cached_property
    def _judgement(self) -> Judgement:
        return Judgement(Outline(self.build_model()), self.task, self.metrics, self.dtype)

    def for_processes(self) -> UserObjects:
        """Return the objects with which other processes make the same workload from the same configuration."""
        return replace(self.user_objects, form=self.samples.form, targets=self.task.form, classes=self.samples.classes)

    @cached_property
    def task(self) -> Task:
        """The loss, with the targets of all devices."""
        return Task(self.samples.loss, self.samples.target_form, self.samples.classes, self.dtype)

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
            output = example_output(model, self.samples.form)
            targets = self.task.random(2, torch.Generator().manual_seed(0))
            for metric in self.metrics:
                metric.checked(output, targets)

    def _expected_targets(self) -> InputForm:
        """Return the form of targets where no device's data is known: as validation or the network's output says.

        Validation first: from an output, classes cannot be told from probabilities of classes.
        """
        samples = self.samples
        held_out = samples.held_out_targets()
        if held_out is not None:
            return held_out
        expected = samples.loss.form_for(example_output(self.network(), samples.form), samples.classes)
        if expected is None:
            raise ConfigError(
                f"The server does not know the form of the targets of the loss {samples.loss.name}: let data.factory "
                "return a 'validation' set, which has the same form."
            )
        return expected

    def _expected_classes(self) -> int | None:
        """Return the classes for which a network of the user's has outputs; None where that does not give a number."""
        loss = self.samples.loss
        if not isinstance(loss, ClassLoss) or self.config.model.factory is None:
            return None
        return loss.classes_of(example_output(self.network(), self.samples.form))

    @one_thread()  # with two, a step of the checks takes several times as long on a busy machine
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
            input_shape=_image_shape(self.samples.form),
            classes=self.samples.classes,
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
        cut = UserNetworkCutter(
            self.config.model.cut_points, self.samples.form, self.task, self.dtype, self.observe, splits=splits
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
        return layer_cuts(named_layers(model), self.samples.form.example(2, self.dtype), "children")

    def initial_model(self) -> nn.Sequential:
        """Return the network with the weights that the training starts from: those of a file if one is given."""
        model = self.build_model()
        if self.config.model.weights is not None:
            load_weights(model, self.config.model.weights)
        return model

    @one_thread()
    def checked_model(self, *, initial: bool = True) -> nn.Sequential:
        """Return the network after running a batch through it, so that sizes that do not fit raise before training.

        With `initial` it has the weights that the training starts from; a device gets them from the server.
        """
        model = self.initial_model() if initial else self.build_model()
        if self._line is None and not self._is_plain:  # else it was checked before it was cut
            check_fits(model, self.samples.form, self.task)
        if initial:  # a device that evaluates has metrics of its own
            self.check_metrics(model)
        check_stays_frozen(model, in_dtype(drawn_like(self.samples.form.example(2, self.dtype), 2, seed=0), self.dtype))
        return model

    @one_thread()
    def steady_layers(self, model: nn.Sequential) -> int:
        """Return how many first layers give the same activations in every epoch; 0 if the samples themselves differ."""
        if self.config.data.augment or self.config.privacy.pixel_scale:
            return 0
        return steady_layers(model, self.samples.form.example(2, self.dtype))

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
