"""The file formats of image datasets: IDX, CIFAR's binary records, and folders of image files."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipar.errors import DataError

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]

_UNSIGNED_BYTE = 0x08


def read_idx(path: Path) -> Pixels:
    """Return the array of bytes in an IDX file: `path`, or `path`.gz if only that exists."""
    raw = _file_bytes(path)
    if len(raw) < 4 or raw[:3] != bytes((0, 0, _UNSIGNED_BYTE)):
        raise DataError(f"{path} is not an IDX file of bytes: it begins with {raw[:4].hex() or 'nothing'}.")
    header = 4 + 4 * raw[3]
    shape = tuple(int.from_bytes(raw[at : at + 4], "big") for at in range(4, header, 4))
    if len(raw) != header + math.prod(shape):
        raise DataError(f"{path} is damaged: {len(raw)} bytes, but its header says {header + math.prod(shape)}.")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def read_idx_pair(images: Path, labels: Path, classes: int) -> tuple[Pixels, Labels]:
    """Return [n, 1, h, w] images and [n] labels of an image file and its label file."""
    pixels, marks = read_idx(images), read_idx(labels)
    if pixels.ndim != 3 or marks.shape != pixels.shape[:1]:
        raise DataError(f"{labels} has {len(marks)} labels of shape {marks.shape[1:]}, but {images} is {pixels.shape}.")
    return pixels[:, np.newaxis], checked_labels(marks, classes, labels)


def read_cifar(
    paths: Sequence[Path], *, label_bytes: int, classes: int, shape: tuple[int, int, int] = (3, 32, 32)
) -> tuple[Pixels, Labels]:
    """Return the images and labels of all records in all files.

    A record is `label_bytes` bytes, of which the last is the label, and then one plane per channel. A file may have any
    number of records.
    """
    width = label_bytes + math.prod(shape)
    records = [_records(path, width) for path in paths]
    # Copied directly from the mapped files: the whole set is in memory once, not twice.
    pixels = np.empty((sum(map(len, records)), *shape), np.uint8)
    np.concatenate([part[:, label_bytes:] for part in records], out=pixels.reshape(len(pixels), -1))
    marks = [checked_labels(part[:, label_bytes - 1], classes, path) for part, path in zip(records, paths, strict=True)]
    return pixels, np.concatenate(marks)


def read_pictures(paths: Sequence[Path], size: tuple[int, int]) -> Pixels:
    """Return [n, 3, h, w] RGB pixels of image files of one size (height, width); grey images become RGB."""
    # In one thread on purpose: at 64x64, switching threads costs more than parallel decoding saves.
    pixels = np.empty((len(paths), *size, 3), np.uint8)
    for at, path in enumerate(paths):
        pixels[at] = _picture(path, size)
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))


def list_tiny_imagenet(folder: Path, classes: int) -> tuple[list[tuple[Path, int]], list[tuple[Path, int]]]:
    """Return (file, label) of the training and validation images of the first `classes` classes.

    Labels number the classes of wnids.txt whose training folder exists, in the order of that file.
    """
    label_of = {wnid: label for label, wnid in enumerate(_wnids(folder, classes))}
    train = [
        (path, label)
        for wnid, label in label_of.items()
        for path in sorted((folder / "train" / wnid / "images").glob("*.JPEG"))
    ]
    lines = (line.split("\t") for line in (folder / "val" / "val_annotations.txt").read_text().splitlines())
    held = [(line[0], line[1]) for line in lines if len(line) > 1]
    return train, [(folder / "val" / "images" / name, label_of[wnid]) for name, wnid in held if wnid in label_of]


def _wnids(folder: Path, classes: int) -> list[str]:
    """Return the first `classes` class names whose training folder exists."""
    listed = (folder / "wnids.txt").read_text().split()
    present = [wnid for wnid in listed if (folder / "train" / wnid).is_dir()]
    if len(present) < classes:
        raise DataError(
            f"{folder} has training images of {len(present)} classes, but {classes} are requested: lower classes."
        )
    return present[:classes]


def checked_labels(labels: NDArray[np.integer], classes: int, path: Path) -> Labels:
    """Return the labels as int64; raise DataError unless all are below `classes`."""
    if labels.size and int(labels.max()) >= classes:
        raise DataError(f"{path} is damaged: it has label {int(labels.max())}, but labels go from 0 to {classes - 1}.")
    return labels.astype(np.int64)


def _file_bytes(path: Path) -> bytes:
    if path.exists():
        return path.read_bytes()
    packed = path.with_name(f"{path.name}.gz")
    try:
        return gzip.decompress(packed.read_bytes())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{packed} is damaged and cannot be unpacked: {error}.") from error


def _records(path: Path, width: int) -> Pixels:
    size = path.stat().st_size
    if size == 0 or size % width:
        raise DataError(f"{path} is damaged: {size} bytes is not a whole number of records of {width} bytes.")
    return np.memmap(path, np.uint8, mode="r").reshape(-1, width)


def _picture(path: Path, size: tuple[int, int]) -> Pixels:
    try:
        with Image.open(path) as picture:
            pixels = np.asarray(picture.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image: {error}.") from error
    if pixels.shape[:2] != size:
        raise DataError(f"{path} is {pixels.shape[1]}x{pixels.shape[0]} pixels, but should be {size[1]}x{size[0]}.")
    return pixels
