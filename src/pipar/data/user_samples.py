"""The samples of a user's dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from pipar.data.images import Images
from pipar.data.user_targets import user_target
from pipar.errors import DataError
from pipar.settings.training_sections import TaskSection
from pipar.tensors.inputs import Inputs, rebuilt, tensors_of
from pipar.user_function import call_factory

_CLASSES = TaskSection()


def dataset_images(dataset: Any, task: TaskSection = _CLASSES) -> Images:
    """Return all items of a torch Dataset: pairs of a sample and its target.

    A sample is a tensor, a PIL image, an array, or a tuple or a dictionary of tensors, as the network is called with
    it. A tensor is channels first; images and arrays are height x width x channels, as in torchvision. Floats and
    integers are not changed; uint8 is normalised with mean and deviation 0.5, the same on every device. A target is
    what the task's loss takes; that of a text may be None: its next tokens.
    """
    if isinstance(dataset, DataLoader):
        raise DataError("a DataLoader is not a dataset: give its dataset (loader.dataset); pipar makes the batches.")
    if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__"):
        raise DataError(f"a {type(dataset).__name__} is not a dataset: give a torch Dataset of (sample, label) pairs.")
    items = dataset if not hasattr(dataset, "__len__") else (dataset[at] for at in range(len(dataset)))
    samples: list[Inputs] = []
    targets: list[Inputs] = []
    for at, item in enumerate(items):
        sample, target = _item(item, at, task)
        if samples:
            _check_alike(sample, samples[0], f"item {at} of the dataset", "item 0")
            _check_alike(target, targets[0], f"the target of item {at} of the dataset", "that of item 0")
        samples.append(sample)
        targets.append(target)
    if not samples:
        raise DataError("the dataset is empty: a factory must return at least one item, or None if it has no such set.")
    stacked = _stacked(samples)
    channels = stacked.shape[1] if isinstance(stacked, Tensor) and stacked.ndim > 1 else 1
    middle = (0.5,) * channels
    return Images(stacked, _stacked(targets), middle, middle)


def _check_alike(given: Inputs, first: Inputs, what: str, other: str) -> None:
    """Raise DataError unless two samples have the same structure, dtypes and shapes."""
    this, wanted = _outline(given), _outline(first)
    if this != wanted:
        raise DataError(f"{what} is {this}, but {other} is {wanted}: all items must have one dtype and shape.")


def _outline(sample: Inputs) -> str:
    outlines = [f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors_of(sample)]
    if isinstance(sample, dict):
        return ", ".join(f"{name} {outline}" for name, outline in zip(sorted(sample), outlines, strict=True))
    return f"a tuple of {', '.join(outlines)}" if isinstance(sample, tuple) else outlines[0]


def _stacked(samples: Sequence[Inputs]) -> Inputs:
    """Return samples of one structure as a batch."""
    columns = map(torch.stack, zip(*map(tensors_of, samples), strict=True))
    return rebuilt(samples[0], columns)


def factory_images(spec: str, name: str, task: TaskSection = _CLASSES) -> Images | None:
    """Return the images that the user's "package.module:function" returns for a device's name, "validation" or "test".

    None if the function returns None: it has no such set.
    """
    dataset = call_factory(spec, name)
    return None if dataset is None else dataset_images(dataset, task)


def _item(item: Any, at: int, task: TaskSection) -> tuple[Inputs, Inputs]:
    try:
        sample, mark = item
    except (TypeError, ValueError) as error:
        raise DataError(f"item {at} of the dataset is not a pair of a sample and a target.") from error
    taken = _sample(sample, at)
    return taken, user_target(mark, taken, f"item {at} of the dataset", task)


def _sample(sample: Any, at: int) -> Inputs:
    if isinstance(sample, Mapping):
        # In the order of the names: dictionaries of one dataset may have their keys in any order.
        return {str(name): _member(sample[name], f"{name!r} in item {at}") for name in sorted(sample)}
    if isinstance(sample, tuple):
        return tuple(_member(one, f"tensor {place} in item {at}") for place, one in enumerate(sample))
    return _plain(sample if isinstance(sample, Tensor) else _channels_first(np.array(sample)), f"item {at}")


def _member(value: Any, which: str) -> Tensor:
    """Return one tensor of a tuple or a dictionary; arrays, lists and numbers are taken as they are."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{which} of the dataset is a {type(value).__name__}: a tuple or a dictionary must have tensors."
        ) from error
    if tensor.dtype == torch.uint8:
        raise DataError(
            f"{which} of the dataset is uint8, which is taken for pixels only in a sample of one tensor: give floats, "
            "or integers of another dtype."
        )
    return _plain(tensor, which)


def _plain(tensor: Tensor, which: str) -> Tensor:
    """Return a tensor that numpy and the network can use: floats that numpy lacks as float32."""
    if tensor.is_complex():
        raise DataError(f"{which} of the dataset is {tensor.dtype}: samples must be floating point, integers or bool.")
    tensor = tensor.detach().cpu()
    # numpy, which augments, has no bfloat16; float32 represents all of its values.
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _channels_first(array: NDArray[Any]) -> Tensor:
    if array.dtype.kind not in "uifb":
        raise DataError(f"a sample of the dataset is an array of {array.dtype}: it must be of numbers.")
    if array.ndim == 2:
        array = array[:, :, np.newaxis]
    return torch.from_numpy(np.ascontiguousarray(array.transpose(2, 0, 1) if array.ndim == 3 else array))
