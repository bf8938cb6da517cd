"""What a deployment's server knows before any device has joined, without the devices' data."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch

from pipar.cutting.split import named_layers
from pipar.cutting.stage_line import writes_weights
from pipar.data.catalog import dataset_info
from pipar.data.images import Images
from pipar.data.user_samples import factory_images
from pipar.errors import ConfigError, DataError
from pipar.events import Observer, Scores
from pipar.job.declared_form import declared_form
from pipar.job.job import Job
from pipar.job.model_setup import scores_on_test_set
from pipar.job.plans import check_common
from pipar.job.prepare import check_given_plans, check_server_threads, sample_bytes
from pipar.job.profiles import measured_profile
from pipar.job.torch_devices import accelerator_memory
from pipar.job.user_objects import UserObjects
from pipar.job.workload import Workload
from pipar.launch.deployed_process import unlisted_spec
from pipar.leakage.limit import LeakageLimit
from pipar.methods import METHODS
from pipar.monitored_metric import ON_DEVICES
from pipar.networks.models import counts_forwards, uses_batch_statistics, uses_dropout
from pipar.nn.adapters import uses_adapters
from pipar.nn.learner import Batches, TorchLearner
from pipar.privacy.budget import choose_noise
from pipar.settings.config import Config, device_specs
from pipar.tensors.inputs import InputForm


def server_workload(config: Config) -> Workload:
    """Return the workload of a server: of the devices' data it knows only what a sample is."""
    if config.data.factory is None:
        info = dataset_info(config.data.name)
        known, classes = InputForm.given(config.data.shape or info.shape), config.data.classes or info.classes
        return Workload(config, UserObjects(form=known, classes=classes))
    # A network that comes with pipar has as many outputs; one of the user's own is asked.
    if config.data.classes is None and config.model.factory is None:
        raise ConfigError(
            f"data.factory = {config.data.factory!r} is called on devices only, so the server cannot count the labels: "
            "also give data.classes."
        )
    form, validation = declared_form(config.data), None
    if form is None:
        validation = factory_images(config.data.factory, "validation", config.task)
        if validation is None:
            raise ConfigError(
                f"data.factory = {config.data.factory!r} returns None for 'validation', and the server calls it for no "
                "device, so it does not know what a sample is: return a validation set, or give data.shape for one "
                "tensor of floating-point numbers, or data.inputs for integers, tuples and dictionaries."
            )
        form = validation.form
    own = UserObjects(form=form, validation=validation, knows_no_data=True, takes_classes_of_network=True)
    return Workload(config, own)


def job_without_devices(workload: Workload, observe: Observer) -> Job:
    """Return the job of a server before any device has joined."""
    config = workload.config
    choose_noise(config)  # raises on a wrong privacy budget, before the network is measured
    check_server_threads(config)
    workload.observe = observe
    model = workload.checked_model()
    workload.optimizer().check(model)
    config.optimizer.learning_schedule.check_function(config.run.epochs)
    _check_plans(config, len(model), workload.model_name)
    limit = LeakageLimit.of(config, workload.subject)
    return Job(
        config=config,
        specs=(),
        sizes={},
        server_profile=measured_profile(
            _workload_to_measure(workload), model, observe, on=(config.server.torch_device, config.server.autocast)
        ),
        server_memory_bytes=accelerator_memory(config, ())[0],
        device_profiles={},
        batch_statistics=uses_batch_statistics(model),
        dropout=uses_dropout(model),
        counts_forwards=counts_forwards(model),
        writes_weights=writes_weights(model),
        adapters=uses_adapters(model),
        plans={},
        dataset=workload.samples.name,
        model=workload.model_name,
        leaky_cuts={} if limit is None else limit.leaky_cuts(list(named_layers(model))),
        leakage_guess=None if limit is None else limit.table.guess,
        sample_bytes=sample_bytes(workload.samples.input_shape, config.model.dtype),
        target_size=workload.task.size,
        most_samples=most_samples(config),
        steady_layers=workload.steady_layers(model),
        inputs=str(workload.samples.form),
    )


def _check_plans(config: Config, layers: int, model: str) -> None:
    """Raise PlanError if a device would get a plan that it cannot have: later, its joining would end the training."""
    specs = [*device_specs(config), unlisted_spec(config, "")]
    check_given_plans(config, specs, layers, model)
    if METHODS[config.run.method].shares_server_model:
        check_common({spec.split_point for spec in specs if spec.split_point != "auto"})


def most_samples(config: Config) -> int | None:
    """Return how many samples a device may report: as configured, or those of the whole dataset if they are known.

    They are its weight in the global model, and of a device with the whole network the server sees none.
    """
    if config.server.max_samples is not None or config.data.factory is not None:
        return config.server.max_samples
    return dataset_info(config.data.name).train or None


def _workload_to_measure(workload: Workload) -> Workload:
    """Return a workload to profile the network with: it has blank samples if the server does not have the dataset."""
    name = workload.names[0]
    if workload.config.data.factory is None:
        with contextlib.suppress(DataError):
            workload.samples.shard(name)
            return workload
    blank = Images(workload.samples.form.example(1, torch.float32), workload.task.example(1))
    own = replace(workload.user_objects, training={name: blank}, targets=workload.task.form)
    return Workload(workload.config, own)


def validation_batches(workload: Workload) -> Batches:
    """Return the batches of the validation set; none if the server does not have the files of a named dataset."""
    missing = () if workload.config.data.factory else (DataError,)  # a factory says so by returning None
    with contextlib.suppress(*missing):
        return workload.samples.held_out_batches("validation")
    return []


def check_validation_set(workload: Workload) -> None:
    """Raise if the validation set does not fit, or is missing where the best model is to be found with it."""
    config = workload.config
    batches = validation_batches(workload)
    if config.run.monitor.startswith(ON_DEVICES):
        return  # devices say when they join whether they evaluate models
    if config.run.keep == "best" and not batches:
        raise ConfigError(
            "run.keep = 'best' needs a validation set, and this server has none: put the dataset on its machine, or "
            "unset run.keep."
        )


def known_test_scores(learner: TorchLearner, workload: Workload) -> Scores:
    """Return the scores of the global model on the test set; none if the server does not have it."""
    try:
        return scores_on_test_set(learner, workload)
    except DataError:
        return Scores()
