"""The models of a job: the server's learner, the devices' parts, their random numbers and the final test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import nn

from pipar import random_streams
from pipar.aggregation.named_aggregators import make_aggregator
from pipar.cutting.frozen import frozen_layers
from pipar.cutting.placing import placed
from pipar.cutting.split import layer_bytes, split_model
from pipar.errors import OrdersError
from pipar.events import Scores
from pipar.job.job import Job
from pipar.job.torch_devices import device_torch_device, server_torch_device
from pipar.job.workload import Workload
from pipar.nn.device_part import DeviceSettings, TorchDevicePart
from pipar.nn.learner import LearnerSettings, TorchLearner
from pipar.nn.runtime import one_thread
from pipar.tensors.torch_device import CPU, TorchDevice
from pipar.wire.orders import Orders


def make_learner(job: Job, workload: Workload, *, trusts_devices: bool = True) -> TorchLearner:
    """Return the server's learner, with the initial weights; devices of other owners are not trusted."""
    torch_device = server_torch_device(job.config)
    settings = LearnerSettings(
        workload.optimizer(),
        workload.task,
        shares_server_model=job.method.shares_server_model,
        keep_state=job.keep_state,
        proximal=job.config.server.proximal,
        seed=job.config.run.seed,
        trusts_devices=trusts_devices,
        cache_bytes=job.config.server.activation_cache,
        frozen_layers=job.server_profile.frozen_layers,
        metrics=workload.metrics,
        monitor=workload.monitor,
        torch_device=torch_device,
        at_once=job.config.server.threads != 1 and torch_device.is_cpu,
    )
    aggregator = make_aggregator(job.config.server.aggregator, job.config.server.aggregation)
    return TorchLearner(workload.initial_model(), job.split_points, settings, aggregator)


def part_builder(workload: Workload, device: str) -> Callable[[Orders], TorchDevicePart]:
    """Return a function that builds a device's part from its orders; the weights come from the server."""
    torch_device = device_torch_device(workload.config, device)

    def build(orders: Orders) -> TorchDevicePart:
        model = workload.build_model()
        _check_frozen(model, orders)
        _check_optimizer(workload, orders)
        _check_task(workload, orders)
        part, rest = split_model(model, orders.plan.split_point)
        return TorchDevicePart(
            placed(part, torch_device),
            replace(workload.optimizer(), learning_rate=orders.learning_rate or None),
            has_loss=len(rest) == 0,
            task=workload.task,
            settings=DeviceSettings(orders.proximal, orders.keeps_base, orders.is_steady),
            rounding=partial(random_streams.generator, workload.config.run.seed, "rounding", device, "up"),
            device=torch_device,
        )

    return build


def _check_frozen(model: nn.Sequential, orders: Orders) -> None:
    """Raise OrdersError if the server would leave layers untrained that this device's network trains."""
    own = frozen_layers(model)
    if orders.frozen_layers > own:
        raise OrdersError(
            f"The server trains nothing in the first {orders.frozen_layers} layers, but this device's network trains "
            f"layer {own + 1}: start both with the same [model]."
        )


def _check_optimizer(workload: Workload, orders: Orders) -> None:
    """Raise OrdersError if the server would train its layers with other settings than this device its own."""
    section = workload.config.optimizer
    if orders.optimizer != section.fingerprint or orders.norms != int(section.clips_across):
        raise OrdersError(
            "The server and this device have different settings in [optimizer], so the two parts of the network would "
            "be trained differently: start both with the same [optimizer]."
        )


def _check_task(workload: Workload, orders: Orders) -> None:
    """Raise OrdersError if the server would minimise another loss than this device."""
    if orders.task != workload.config.task.fingerprint:
        raise OrdersError(
            "The server and this device have different settings in [task], so they would minimise different losses: "
            "start both with the same [task]; only task.metrics may differ."
        )


def part_sizes(model: nn.Sequential) -> tuple[int, ...]:
    """Return the bytes of a network's first layer, of its first two layers, and so on: weights and buffers."""
    return tuple(accumulate(layer_bytes(model)))


def seed_dropout(seed: int, owner: str, torch_device: TorchDevice = CPU) -> None:
    """Seed torch's generators, which dropout draws from, for one device or the server."""
    number = int(random_streams.generator(seed, "dropout", owner).integers(2**63))
    torch.default_generator.manual_seed(number)
    torch_device.seed(number)


@contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """Make the mathematics depend on the seed only; the caller's thread count and random state are restored."""
    with one_thread(), torch.random.fork_rng(devices=[]):
        seed_dropout(seed, "everyone")  # devices and server share one generator, in an order that virtual time fixes
        yield


def scores_on_test_set(
    learner: TorchLearner, workload: Workload, stopped: Callable[[], bool] = lambda: False
) -> Scores:
    """Return the scores of the global model on the test set.

    They are empty if there is no test set, or if `stopped` returns True before the end.
    """
    evaluate = learner.evaluator()
    with one_thread():
        for _, load in workload.samples.held_out_batches("test"):
            if stopped():
                return Scores()
            evaluate(load)
    return evaluate.scores()
