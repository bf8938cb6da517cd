"""What a configuration asks of a dataset: whether the dataset can give it, and the sizes of the sets that result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pipar.data.catalog import TINY_IMAGENET_CLASSES, DatasetInfo
from pipar.errors import DataError


@dataclass(frozen=True)
class Request:
    """Which part of a dataset is asked for; None means the dataset's default."""

    path: Path | None = None
    seed: int = 0
    validation: int | None = None
    test: int | None = None
    train_samples: int | None = None
    classes: int | None = None
    shape: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Counts:
    """Numbers of samples for training, validation and test."""

    train: int
    validation: int
    test: int


def check_request(info: DatasetInfo, request: Request) -> None:
    """Raise DataError if the dataset can never satisfy the request; its files are not needed for this."""
    for key in ("validation", "test", "train_samples"):
        if (getattr(request, key) or 0) < 0:
            _refuse(key, getattr(request, key), "it must be 0 or more")
    if request.train_samples == 0:
        _refuse("train_samples", 0, "it must be at least 1")
    _check_classes(info, request.classes)
    if request.shape not in (None, info.shape) and info.name != "synthetic":
        _refuse("shape", request.shape, f"{info.name} has images of {info.shape}")
    if request.shape is not None and (len(request.shape) != 3 or min(request.shape) < 1):
        _refuse("shape", request.shape, "it must be three positive numbers (channels, height, width)")


def _check_classes(info: DatasetInfo, classes: int | None) -> None:
    if classes is not None and classes < 1:
        _refuse("classes", classes, "it must be at least 1")
    if classes not in (None, info.classes) and info.name not in ("tiny_imagenet", "synthetic"):
        _refuse("classes", classes, f"{info.name} has {info.classes} classes")
    if info.name == "tiny_imagenet" and (classes or 0) > TINY_IMAGENET_CLASSES:
        _refuse("classes", classes, f"{info.name} has {TINY_IMAGENET_CLASSES} classes")


def _refuse(key: str, value: object, why: str) -> NoReturn:
    raise DataError(f"{key} = {value} is not allowed: {why}.")


def published_counts(info: DatasetInfo, request: Request) -> Counts:
    """Return the sizes of the sets by the publisher's numbers, without the dataset's files."""
    classes = request.classes or info.classes
    train, test = (part * classes // info.classes for part in (info.train, info.test))
    return cut_counts(info, request, train, test)


def synthetic_counts(request: Request) -> Counts:
    """Return the requested sizes, or their defaults."""
    return Counts(_given(request.train_samples, 5000), _given(request.validation, 200), _given(request.test, 800))


def cut_counts(info: DatasetInfo, request: Request, train: int, test: int) -> Counts:
    """Return the size of each set, given the sizes of the publisher's `train` and `test` parts.

    The held-out sets are cut from the test part. Digits have only one part: the rest of it is for training.
    """
    one_part = info.name == "digits"
    available = train + test if one_part else test
    validation = _given(request.validation, 200 if one_part else min(2000, test // 5))
    held = _given(request.test, 400 if one_part else min(8000, max(test - validation, 0)))
    if validation + held > available:
        raise DataError(
            f"{info.name} has {available} samples to hold out, but {validation} for validation and {held} for test are "
            "requested: lower one of them."
        )
    return Counts(available - validation - held if one_part else train, validation, held)


def _given(asked: int | None, usual: int) -> int:
    return usual if asked is None else asked
