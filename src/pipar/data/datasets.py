"""The known datasets: reading them, and cutting them into training, validation and test sets."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pipar import random_streams
from pipar.data import formats
from pipar.data.catalog import DatasetInfo, dataset_info, locate
from pipar.data.formats import Labels, Pixels
from pipar.data.images import Dataset, Images, Indices
from pipar.data.request import Counts, Request, check_request, cut_counts, synthetic_counts
from pipar.errors import DataError
from pipar.units import format_bytes

# The held-out sets do not depend on the run's seed, so that runs stay comparable.
_HELD_OUT_SEED = 0
_SYNTHETIC_CHUNK = 1024


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
