"""What to measure: a network, and batches for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipar.nn.optimizers import OptimizerSettings, sgd
from pipar.tasks.losses import Targets
from pipar.tasks.task import Task, target_form
from pipar.tensors.inputs import InputForm, Inputs, in_dtype, mapped, tensors_of
from pipar.tensors.torch_device import CPU, TorchDevice

#: Called with the share of the measurement that is done.
Progress = Callable[[float], None]


def _ignore(share: float) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What to measure, and how long.

    If the network does not fit into `memory_bytes`, or into the memory that the system gives this process, the profile
    is of as many first layers as do. Batches too large for them are not run; their times are in proportion to the
    largest batch that was.
    """

    model: nn.Sequential
    model_name: str
    form: InputForm  # of one sample
    training: Task
    batch_size: int
    dtype: torch.dtype = torch.float32
    load: Callable[[int], object] | None = None  # loads this many samples, in another thread
    progress: Progress = _ignore
    budget_s: float = 2.0
    memory_bytes: int | None = None
    torch_device: TorchDevice = CPU  # what the layers compute on
    rectified: Collection[int] | None = None  # split points after a ReLU, if known: finding them takes more forwards
    optimizer: OptimizerSettings = sgd(learning_rate=0.0)  # noqa: RUF009 - frozen


@dataclass(frozen=True)
class Batch:
    inputs: Inputs
    targets: Targets
    task: Task

    def __len__(self) -> int:
        return len(tensors_of(self.targets)[0])

    @classmethod
    def random(cls, size: int, form: Sequence[int] | InputForm, task: Task, dtype: torch.dtype) -> Batch:
        generator = torch.Generator().manual_seed(size)
        inputs = InputForm.given(form).random(size, dtype, generator)
        return cls(inputs, task.random(size, generator), task)

    def on(self, device: TorchDevice) -> Batch:
        """Return the batch where a network is that computes on this device."""
        return Batch(mapped(self.inputs, device.put), mapped(self.targets, device.put), self.task)

    def loss(self, output: Any) -> Tensor:
        """Return the mean loss of the batch, computed as in training."""
        return self.task.share(output, self.targets, self.task.count(self.targets))


def some_samples(count: int, measured: Measurement) -> Batch:
    """Return some of the loaded samples, or random ones if there are none of the right shape."""
    loaded, task = measured.load(measured.batch_size) if measured.load is not None else None, measured.training
    match loaded:
        case (Tensor() | tuple() | dict() as inputs, Tensor() | tuple() | dict() as targets) if (
            InputForm.of(inputs) == measured.form and target_form(targets) == task.form
        ):
            first = mapped(targets, lambda tensor: tensor[:count])
            return Batch(in_dtype(mapped(inputs, lambda tensor: tensor[:count]), measured.dtype), first, task)
        case _:
            return Batch.random(count, measured.form, task, measured.dtype)


def state_bytes(module: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in [*module.parameters(), *module.buffers()])


def free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
