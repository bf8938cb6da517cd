"""Datasets in memory: loading the known ones, and converting a user's own."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipar import random_streams
from pipar.data import formats
from pipar.data.catalog import DatasetInfo, dataset_info, locate
from pipar.data.formats import Labels, Pixels
from pipar.data.own_targets import own_target
from pipar.data.request import Counts, Request, check_request, cut_counts, synthetic_counts
from pipar.errors import DataError
from pipar.settings.training_sections import TaskSection
from pipar.tasks.task import target_form
from pipar.tensors.inputs import InputForm, Inputs, in_dtype, mapped, rebuilt, tensors_of
from pipar.units import format_bytes
from pipar.user_function import call_factory

Indices = NDArray[np.int64]

# The held-out sets do not depend on the run's seed, so that runs stay comparable.
_HELD_OUT_SEED = 0
_SYNTHETIC_CHUNK = 1024
_CLASSES = TaskSection()


@dataclass(frozen=True, eq=False)
class Images:
    """Samples and targets; uint8 samples are normalised by `mean` and `std` of pixels / 255, others are not changed.

    Most are images with labels, so `images` and `labels` are one tensor each; a user's own may be a tuple or a
    dictionary of tensors.
    """

    images: Any = field(repr=False)  # Inputs
    labels: Any = field(repr=False)  # Targets
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    flip: bool = False

    def __len__(self) -> int:
        return len(tensors_of(self.labels)[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample; if it is no single tensor, the number of its values."""
        return self.form.shape

    @cached_property
    def target_form(self) -> InputForm:
        """What the targets of one sample are."""
        return target_form(self.labels)

    def targets(self, at: Tensor | slice, dtype: torch.dtype) -> Any:
        """Return the targets of some samples, floating-point numbers in this dtype."""
        return in_dtype(mapped(self.labels, lambda tensor: tensor[at]), dtype)

    @cached_property
    def form(self) -> InputForm:
        """What one sample is."""
        return InputForm.of(self.images)

    def rows(self, at: Tensor | slice) -> Any:
        """Return a copy of some samples, as they are stored: a network may overwrite its inputs."""
        # Indexing with a tensor copies already.
        return mapped(self.images, lambda tensor: tensor[at].clone() if isinstance(at, slice) else tensor[at])

    def take(self, rows: Indices) -> Images:
        """Return a copy of these rows."""
        at = torch.from_numpy(np.asarray(rows, np.int64))
        labels = mapped(self.labels, lambda tensor: tensor[at])
        return Images(self.rows(at), labels, self.mean, self.std, self.flip)

    def normalised(self, samples: Any, dtype: torch.dtype) -> Any:
        """Return samples of this set as network inputs: (pixel / 255 - mean) / std in `dtype`; integers unchanged."""
        return mapped(samples, lambda tensor: self._normalised(tensor, dtype))

    def _normalised(self, samples: Tensor, dtype: torch.dtype) -> Tensor:
        if samples.dtype != torch.uint8:
            return samples.to(dtype) if samples.is_floating_point() else samples
        broadcast = (-1,) + (1,) * (samples.ndim - 2)
        mean = torch.tensor(self.mean, dtype=torch.float64).view(broadcast)
        std = torch.tensor(self.std, dtype=torch.float64).view(broadcast)
        return samples.to(dtype).mul_((1 / (255 * std)).to(dtype)).sub_((mean / std).to(dtype))

    def batches(self, size: int, dtype: torch.dtype) -> Iterator[tuple[Any, Any]]:
        """Yield all samples in order, normalised, in batches of `size`, for validation and test."""
        for start in range(0, len(self), size):
            at = slice(start, start + size)
            yield self.normalised(self.rows(at), dtype), self.targets(at, dtype)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training set for the devices and two held-out sets for the server; a held-out set may be empty."""

    name: str
    train: Images
    validation: Images
    test: Images
    classes: int

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.train.shape


def load_dataset(
    name: str,
    *,
    path: Path | None = None,
    seed: int = 0,
    validation: int | None = None,
    test: int | None = None,
    train_samples: int | None = None,
    classes: int | None = None,
    shape: tuple[int, int, int] | None = None,
) -> Dataset:
    """Return a known dataset, with validation and test sets cut from the publisher's test part.

    By default, validation is the smaller of 2,000 samples and a fifth of that part, and test is up to 8,000 of the
    rest. Neither depends on `seed`, which only selects the `train_samples`. `classes` can be set for tiny_imagenet and
    synthetic, `shape` for synthetic.
    """
    info = dataset_info(name)
    request = Request(path, seed, validation, test, train_samples, classes, shape)
    check_request(info, request)
    try:
        return _LOADERS[name](info, request)
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error}.") from error


def dataset_images(dataset: Any, task: TaskSection = _CLASSES) -> Images:
    """Return all items of a torch Dataset: pairs of a sample and its target.

    A sample is a tensor, a PIL image, an array, or a tuple or a dictionary of tensors, as the network is called with
    it. A tensor is channels first; images and arrays are height x width x channels, as in torchvision. Floats and
    integers are not changed; uint8 is normalised with mean and deviation 0.5, the same on every device. A target is
    what the task's loss takes; that of a text may be None: its next tokens.
    """
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
    return taken, own_target(mark, taken, f"item {at} of the dataset", task)


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


# ---- reading the known datasets ----


@dataclass(frozen=True, eq=False)
class _Arrays:
    """A published part in memory."""

    pixels: Pixels
    labels: Labels

    def take(self, rows: Indices | None) -> tuple[Pixels, Labels]:
        return (self.pixels, self.labels) if rows is None else (self.pixels[rows], self.labels[rows])


@dataclass(frozen=True, eq=False)
class _Pictures:
    """A published part as a list of image files; only the selected ones are decoded."""

    paths: Sequence[Path]
    labels: Labels
    size: tuple[int, int]

    def take(self, rows: Indices | None) -> tuple[Pixels, Labels]:
        chosen = np.arange(len(self.paths)) if rows is None else rows
        return formats.read_pictures([self.paths[at] for at in chosen], self.size), self.labels[chosen]


_Part = _Arrays | _Pictures


def _read_idx(info: DatasetInfo, folder: Path) -> tuple[_Part, _Part]:
    train_x, train_y, test_x, test_y = (folder / need for need in info.needs)
    parts = [formats.read_idx_pair(*pair, info.classes) for pair in ((train_x, train_y), (test_x, test_y))]
    for pixels, _ in parts:
        if pixels.shape[1:] != info.shape:
            raise DataError(f"{folder} holds images of {pixels.shape[1:]}, but {info.name} has {info.shape}.")
    return _Arrays(*parts[0]), _Arrays(*parts[1])


def _read_cifar(info: DatasetInfo, folder: Path) -> tuple[_Part, _Part]:
    *train, test = (folder / need for need in info.needs)
    # CIFAR-100 has the coarse label before the fine one.
    label_bytes = 2 if info.name == "cifar100" else 1
    parts = [formats.read_cifar(paths, label_bytes=label_bytes, classes=info.classes) for paths in (train, [test])]
    return _Arrays(*parts[0]), _Arrays(*parts[1])


def _read_tiny_imagenet(info: DatasetInfo, folder: Path, classes: int) -> tuple[_Part, _Part]:
    train, test = formats.list_tiny_imagenet(folder, classes)
    return _picture_part(train, info.shape[1:], folder), _picture_part(test, info.shape[1:], folder)


def _picture_part(pairs: list[tuple[Path, int]], size: tuple[int, int], folder: Path) -> _Part:
    if not pairs:
        raise DataError(f"{folder} has no pictures in train/<class>/images or none listed in val/val_annotations.txt.")
    paths, labels = zip(*pairs, strict=True)
    return _Pictures(paths, np.array(labels, np.int64), size)


def _read_digits() -> tuple[Pixels, Labels]:
    """Return scikit-learn's digits as 1x32x32 images, read from its file: the import takes a second and much memory."""
    table = _digits_table()
    small = torch.from_numpy(table[:, :64] * (255 / 16)).float().view(-1, 1, 8, 8)
    large = torch.nn.functional.interpolate(small, size=(32, 32), mode="bilinear", align_corners=False)
    return large.round().to(torch.uint8).numpy(), table[:, 64].astype(np.int64)


def _digits_table() -> NDArray[np.float64]:
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("digits comes with scikit-learn, which is not installed: run `pip install scikit-learn`.")
    packaged = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    if packaged.exists():
        return np.loadtxt(packaged, delimiter=",")
    from sklearn.datasets import load_digits

    digits = load_digits()
    return np.column_stack([digits.data, digits.target]).astype(np.float64)


def _make_synthetic(part: str, count: int, classes: int, shape: tuple[int, int, int]) -> tuple[Pixels, Labels]:
    """Return `count` images: the pattern of their class, 64 to 191, plus noise of -64 to 63; labels alternate."""
    patterns = _patterns(classes, shape)
    labels = np.arange(count, dtype=np.int64) % classes
    pixels = patterns[labels]
    for chunk, at in enumerate(range(0, count, _SYNTHETIC_CHUNK)):
        block = pixels[at : at + _SYNTHETIC_CHUNK]
        rng = random_streams.generator(_HELD_OUT_SEED, "synthetic", part, chunk)
        # Eight bytes per draw: ten times faster than drawing bytes. The sum of 64..191 and -64..63 fits into a byte.
        words = rng.integers(0, 2**64, -(-block.size // 8), np.uint64).astype("<u8", copy=False)
        block += (words.view(np.uint8)[: block.size] >> 1).reshape(block.shape)
        block -= 64
    return pixels, labels


def _patterns(classes: int, shape: tuple[int, int, int]) -> Pixels:
    """Return one pattern of 4x4 uniform tiles per class and channel."""
    channels, height, width = shape
    tiles = random_streams.generator(_HELD_OUT_SEED, "synthetic patterns", channels).integers(
        64, 192, (classes, channels, 4, 4), np.uint8
    )
    rows, columns = np.arange(height) * 4 // height, np.arange(width) * 4 // width
    return tiles[:, :, rows[:, np.newaxis], columns]


# ---- cutting them into training, validation and test sets ----


def _published(info: DatasetInfo, request: Request) -> Dataset:
    """Return a dataset whose publisher separates training and test images."""
    folder, classes = locate(info, request.path), request.classes or info.classes
    if info.name == "tiny_imagenet":
        train, test = _read_tiny_imagenet(info, folder, classes)
    else:
        train, test = (_read_cifar if info.name.startswith("cifar") else _read_idx)(info, folder)
    counts = cut_counts(info, request, len(train.labels), len(test.labels))
    held = _held_out(
        random_streams.generator(_HELD_OUT_SEED, "held out", info.name).permutation(len(test.labels)), counts
    )
    chosen = [(train, _subset(info.name, len(train.labels), request)), (test, held[0]), (test, held[1])]
    return _dataset(info, classes, [_images(info, *part.take(rows)) for part, rows in chosen])


def _digits(info: DatasetInfo, request: Request) -> Dataset:
    part = _Arrays(*_read_digits())
    order = random_streams.generator(_HELD_OUT_SEED, "held out", info.name).permutation(len(part.labels))
    counts = cut_counts(info, request, len(order), 0)
    held = _held_out(order, counts)
    train = order[counts.validation : len(order) - counts.test]
    subset = _subset(info.name, len(train), request)
    rows = (train if subset is None else train[subset], *held)
    return _dataset(info, info.classes, [_images(info, *part.take(chosen)) for chosen in rows])


def _synthetic(info: DatasetInfo, request: Request) -> Dataset:
    classes, shape = request.classes or info.classes, request.shape or info.shape
    sizes = asdict(synthetic_counts(request))
    _check_fits(sum(sizes.values()), shape)
    made = [_make_synthetic(part, count, classes, shape) for part, count in sizes.items()]
    return _dataset(info, classes, [_images(info, *arrays) for arrays in made])


def _check_fits(count: int, shape: tuple[int, int, int]) -> None:
    """Raise DataError if synthetic samples take more than this machine's memory: it would take long to find out."""
    if not hasattr(os, "sysconf"):  # Windows
        return
    size_bytes, memory_bytes = count * math.prod(shape), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size_bytes > memory_bytes:
        raise DataError(
            f"{count} synthetic samples of {'x'.join(map(str, shape))} take {format_bytes(size_bytes)}, and this "
            f"machine has {format_bytes(memory_bytes)} of memory: give a smaller data.samples_per_device, or fewer "
            "devices."
        )


_LOADERS: dict[str, Callable[[DatasetInfo, Request], Dataset]] = {
    "digits": _digits,
    "mnist": _published,
    "fashion_mnist": _published,
    "cifar10": _published,
    "cifar100": _published,
    "tiny_imagenet": _published,
    "synthetic": _synthetic,
}


def _held_out(order: Indices, counts: Counts) -> tuple[Indices, Indices]:
    """Return the first and the last of `order`, so that changing one size does not change the other set."""
    return order[: counts.validation], order[len(order) - counts.test :]


def _subset(name: str, available: int, request: Request) -> Indices | None:
    """Return the training samples to keep, or None for all of them."""
    wanted = request.train_samples
    if wanted is None or wanted == available:
        return None
    if wanted > available:
        raise DataError(f"{name} has {available} training samples, but {wanted} are requested: lower train_samples.")
    return np.sort(random_streams.generator(request.seed, "train subset", name).permutation(available)[:wanted])


def _images(info: DatasetInfo, pixels: Pixels, labels: Labels) -> Images:
    # A copy if it is read-only, as bytes from a file are: torch warns about such memory.
    samples = torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy())
    channels = pixels.shape[1]
    return Images(
        samples,
        torch.from_numpy(labels),
        _per_channel(info.mean, channels),
        _per_channel(info.std, channels),
        info.flip,
    )


def _per_channel(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    return values if len(values) == channels else values[:1] * channels


def _dataset(info: DatasetInfo, classes: int, parts: Sequence[Images]) -> Dataset:
    train, validation, test = parts
    return Dataset(info.name, train, validation, test, classes)
