"""Which of a user's objects is one dataset, and which are several."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import torch

from pipar.data.images import Images
from pipar.data.user_samples import dataset_images
from pipar.settings.training_sections import TaskSection
from pipar.user_function import call_factory


def is_list_of_datasets(datasets: Any) -> TypeGuard[Sequence[Any]]:
    """Return True for a list or tuple of datasets; a list of (sample, label) pairs is a dataset itself."""
    return isinstance(datasets, list | tuple) and not (datasets and all(map(_is_pair, datasets)))


def _is_pair(item: Any) -> bool:
    # A list of two pairs is as long as a pair, but its second element is not a target.
    return isinstance(item, list | tuple) and len(item) == 2 and _is_target(item[1])


def _is_target(value: Any) -> bool:
    if value is None or isinstance(value, float | torch.Tensor | np.ndarray | np.generic):
        return True
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def factory_sets(spec: str, device: str, task: TaskSection) -> tuple[Images | None, Images | None]:
    """Return what the user's "package.module:function" returns for a device: training data, or a pair with other data
    to evaluate on.
    """
    given = call_factory(spec, device)
    is_two = isinstance(given, tuple) and len(given) == 2 and is_list_of_datasets(given)
    training, kept = given if is_two else (given, None)
    return (
        None if training is None else dataset_images(training, task),
        None if kept is None else dataset_images(kept, task),
    )
