"""The target of one item of a user's dataset, as the task's loss takes it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipar.errors import DataError
from pipar.settings.training_sections import TaskSection
from pipar.tensors.inputs import Inputs


def user_target(given: Any, sample: Inputs, where: str, task: TaskSection) -> Inputs:
    """Return the target of an item: a number, an array or a tensor; several as a tuple or a dictionary.

    A single integer is a class unless the loss is one of numbers. None is for the next tokens of the sample itself.
    """
    if given is None:
        return _shifted(sample, where, task)
    if task.takes_classes and (label := _label(given)) is not None:
        if label < 0:
            raise DataError(f"{where} has label {label}: labels start at 0.")
        return torch.tensor(label)
    if isinstance(given, Mapping):
        return {str(name): _tensor(given[name], f"the target {name!r} of {where}") for name in sorted(given)}
    if isinstance(given, tuple):
        return tuple(_tensor(one, f"target {place} of {where}") for place, one in enumerate(given))
    tensor = _tensor(given, f"the target of {where}")
    if task.takes_classes and tensor.is_floating_point() and not tensor.ndim:
        raise DataError(
            f"{where} has the target {tensor.item():g}, but {task.loss} takes the number of a class: for numbers, set "
            "task.loss = 'mse' or another loss of numbers."
        )
    if task.takes_classes or tensor.is_floating_point():
        return tensor
    if task.is_own:
        return tensor if tensor.dtype == torch.bool else tensor.long()
    return tensor.double()


def _label(given: Any) -> int | None:
    """Return a single integer; None for anything else."""
    try:
        return operator.index(given)
    except TypeError:
        return None


def _tensor(value: Any, which: str) -> Tensor:
    try:
        tensor = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{which} is a {type(value).__name__}: give a number, an array or a tensor, or several in a tuple or a "
            "dictionary."
        ) from error
    if tensor.is_complex():
        raise DataError(f"{which} is {tensor.dtype}: targets must be floating point, integers or bool.")
    if not tensor.numel():
        raise DataError(f"{which} is empty: give at least one number.")
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _shifted(sample: Inputs, where: str, task: TaskSection) -> Tensor:
    """Return each token's next one; the last token has none, and padding counts as none."""
    if task.loss != "next_token":
        raise DataError(f"{where} has no target, which only the loss next_token can do without.")
    named = isinstance(sample, dict)
    tokens = sample.get("input_ids") if isinstance(sample, dict) else sample
    if not isinstance(tokens, Tensor) or tokens.ndim != 1 or tokens.is_floating_point():
        wanted = "'input_ids' with one row of integers" if named else "one row of integers"
        raise DataError(f"{where} has no target, and its next tokens are not known: its sample must be {wanted}.")
    following = torch.cat([tokens[1:], tokens.new_full((1,), 0)]).long()
    following[-1] = task.ignore_index
    mask = sample.get("attention_mask") if isinstance(sample, dict) else None
    if mask is not None:
        following[:-1][mask[1:] == 0] = task.ignore_index
    return following
