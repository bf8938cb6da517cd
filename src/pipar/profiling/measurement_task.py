"""What to measure: a network, and batches for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipar.nn.inputs import InputForm, Inputs, in_dtype, mapped
from pipar.nn.optimizers import OptimizerSettings

#: Called with the share of the measurement that is done.
Progress = Callable[[float], None]


@dataclass(frozen=True)
class Task:
    """The arguments of `measure_profile`."""

    model: nn.Sequential
    model_name: str
    form: InputForm
    classes: int
    batch_size: int
    dtype: torch.dtype
    load: Callable[[int], object] | None
    progress: Progress
    budget_s: float
    memory_bytes: int | None
    rectified: Collection[int] | None
    optimizer: OptimizerSettings


@dataclass(frozen=True)
class Batch:
    inputs: Inputs
    targets: Tensor

    @classmethod
    def random(cls, size: int, form: Sequence[int] | InputForm, classes: int, dtype: torch.dtype) -> Batch:
        generator = torch.Generator().manual_seed(size)
        inputs = InputForm.given(form).random(size, dtype, generator)
        return cls(inputs, torch.randint(classes, (size,), generator=generator))


def some_samples(count: int, task: Task) -> Batch:
    """Return some of the loaded samples, or random ones if there are none of the right shape."""
    loaded = task.load(task.batch_size) if task.load is not None else None
    match loaded:
        case (Tensor() | tuple() | dict() as inputs, Tensor() as targets) if InputForm.of(inputs) == task.form:
            return Batch(in_dtype(mapped(inputs, lambda tensor: tensor[:count]), task.dtype), targets[:count])
        case _:
            return Batch.random(count, task.form, task.classes, task.dtype)


def state_bytes(module: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in [*module.parameters(), *module.buffers()])


def free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
