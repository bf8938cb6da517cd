"""Warming up a process, so that its first epoch takes as long as the others."""

from __future__ import annotations

import torch

from pipar.cutting.placing import placed
from pipar.cutting.split import split_model
from pipar.execution.schedule import cut_batch, device_order
from pipar.job.job import Job
from pipar.job.torch_devices import device_torch_device, server_torch_device
from pipar.job.workload import Workload
from pipar.nn.device_part import TorchDevicePart
from pipar.nn.micro_batches import Crossing, MicroBatch
from pipar.nn.runtime import release_model_memory
from pipar.tensors.inputs import with_gradient


def warm_up(job: Job, workload: Workload) -> None:
    """Train a temporary model on one micro-batch of each size: kernels are chosen when a shape first occurs."""
    _train_pieces(job, workload)
    release_model_memory(_model_bytes(job))


def _train_pieces(job: Job, workload: Workload) -> None:
    computes_on = server_torch_device(job.config)
    model = placed(workload.build_model(), computes_on)
    part = TorchDevicePart(model, workload.optimizer(), has_loss=True, task=workload.task, device=computes_on)
    for samples in sorted({size for plan in set(job.plans.values()) for size in job.piece_sizes(plan)}):
        part.forward(0, _zeros(workload, samples))
        part.backward(0, None)
    part.step()


def warm_up_device(job: Job, workload: Workload, name: str) -> None:
    """Train one batch with the device's own plan and a temporary part.

    All its activations are in memory at the same time, as in training: without this, getting the memory from the system
    made the first epoch 20 % longer. A large model's memory is released again, so that it is not held twice.
    """
    _train_batch(job, workload, name)
    release_model_memory(_model_bytes(job))


def _train_batch(job: Job, workload: Workload, name: str) -> None:
    plan = job.plans[name]
    device_part, rest = split_model(workload.build_model(), plan.split_point)
    computes_on = device_torch_device(job.config, name)
    module, has_loss = placed(device_part, computes_on), len(rest) == 0
    part = TorchDevicePart(module, workload.optimizer(), has_loss=has_loss, task=workload.task, device=computes_on)
    sizes = cut_batch(
        min(job.config.run.batch_size, job.sizes[name]), plan.micro_batches, batch_statistics=job.batch_statistics
    )
    gradients = {}
    for stage in device_order(len(sizes), plan.window):
        n = stage.micro_batch
        if stage.kind == "fc":
            output = part.forward(n, _zeros(workload, sizes[n - 1]))
            gradients[n] = _zero_gradient(output) if len(rest) else None
        else:
            part.backward(n, gradients.pop(n))
    part.step()


def _zero_gradient(output: Crossing) -> torch.Tensor | list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return torch.zeros_like(output)
    return [torch.zeros_like(one) for one in with_gradient(output)]


def _model_bytes(job: Job) -> int:
    return job.server_profile.parameter_bytes(1, len(job.server_profile.layers))


def _zeros(workload: Workload, samples: int) -> MicroBatch:
    inputs = workload.samples.form.example(samples, workload.dtype)
    targets = workload.task.example(samples)
    return MicroBatch(inputs, targets, samples, count=workload.task.count(targets))
