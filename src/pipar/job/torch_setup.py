"""The mathematics of a job: its learner, its devices' parts, the final test. All that needs torch to be imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from pipar import random_streams
from pipar.execution.schedule import cut_batch, device_order
from pipar.job.job import Job
from pipar.job.workload import Workload
from pipar.nn.learner import TorchLearner
from pipar.nn.micro_batches import MicroBatch
from pipar.nn.named_aggregators import make_aggregator
from pipar.nn.parts import TorchDevicePart
from pipar.nn.runtime import one_thread, release_model_memory
from pipar.nn.split import split_model
from pipar.wire.orders import Orders


def make_learner(job: Job, workload: Workload) -> TorchLearner:
    """Return the server's mathematics, with the first weights."""
    return TorchLearner(
        workload.build_model(),
        job.split_points,
        workload.optimizer(),
        classes=workload.classes,
        shares_server_model=job.method.shares_server_model,
        keep_momentum=job.keep_momentum,
        proximal=job.config.server.proximal,
        seed=job.config.run.seed,
        aggregator=make_aggregator(job.config.server.aggregator, job.config.server.aggregation),
    )


def part_builder(workload: Workload, device: str) -> Callable[[Orders], TorchDevicePart]:
    """Return what builds a device's part when its plan is known; the weights come from the server."""

    def build(orders: Orders) -> TorchDevicePart:
        part, rest = split_model(workload.build_model(), orders.plan.split_point)
        return TorchDevicePart(
            part,
            workload.optimizer(),
            has_loss=len(rest) == 0,
            proximal=orders.proximal,
            rounding=partial(random_streams.generator, workload.config.run.seed, "rounding", device, "up"),
            keeps_base=orders.keeps_base,
        )

    return build


def warm_up(job: Job, workload: Workload) -> None:
    """Train a model that is thrown away on one micro-batch of each size, so that the first epoch is like the others.

    Kernels are chosen for each shape when they first meet it.
    """
    _train_pieces(job, workload)
    release_model_memory(_model_bytes(job))


def _train_pieces(job: Job, workload: Workload) -> None:
    part = TorchDevicePart(workload.build_model(), workload.optimizer(), has_loss=True)
    for samples in sorted({size for plan in set(job.plans.values()) for size in job.piece_sizes(plan)}):
        part.forward(0, _zeros(workload, samples))
        part.backward(0, None)
    part.step()


def warm_up_device(job: Job, workload: Workload, name: str) -> None:
    """Train one batch by the device's own plan with a part that is thrown away.

    All its activations are in memory at once, as they will be: fetching that memory from the system made a first epoch
    20 % longer. That of a large model is fetched twice all the same, or it would be there beside the one that comes.
    """
    _train_batch(job, workload, name)
    release_model_memory(_model_bytes(job))


def _train_batch(job: Job, workload: Workload, name: str) -> None:
    plan = job.plans[name]
    device_part, rest = split_model(workload.build_model(), plan.split_point)
    part = TorchDevicePart(device_part, workload.optimizer(), has_loss=len(rest) == 0)
    sizes = cut_batch(
        min(job.config.run.batch_size, job.sizes[name]), plan.micro_batches, batch_statistics=job.batch_statistics
    )
    gradients = {}
    for stage in device_order(len(sizes), plan.window):
        n = stage.micro_batch
        if stage.kind == "fc":
            output = part.forward(n, _zeros(workload, sizes[n - 1]))
            gradients[n] = torch.zeros_like(output) if len(rest) else None
        else:
            part.backward(n, gradients.pop(n))
    part.step()


def _model_bytes(job: Job) -> int:
    return job.server_profile.parameter_bytes(1, len(job.server_profile.layers))


def _zeros(workload: Workload, samples: int) -> MicroBatch:
    inputs = torch.zeros((samples, *workload.input_shape), dtype=workload.dtype)
    return MicroBatch(inputs, torch.zeros(samples, dtype=torch.int64), samples)


def seed_dropout(seed: int, owner: str) -> None:
    """Seed the generator that dropout draws from, torch's default one, for one device or the server."""
    torch.default_generator.manual_seed(int(random_streams.generator(seed, "dropout", owner).integers(2**63)))


@contextmanager
def repeatable(seed: int) -> Iterator[None]:
    """Make the mathematics depend on the seed alone; the caller's threads and random numbers are left as they were."""
    with one_thread(), torch.random.fork_rng(devices=[]):
        seed_dropout(seed, "everyone")  # devices and server take turns at one generator, always the same ones
        yield


def measure_test_accuracy(
    learner: TorchLearner, workload: Workload, stopped: Callable[[], bool] = lambda: False
) -> float | None:
    """Return the share of the test set that the global model answers right.

    None if there is no test set, or if `stopped` before all of it was answered.
    """
    batches, correct = workload.held_out_batches("test"), 0
    evaluate = learner.evaluator()
    with one_thread():
        for _, load in batches:
            if stopped():
                return None
            correct += evaluate(load)[1]
    return correct / sum(samples for samples, _ in batches) if batches else None
