"""Reading intact and damaged files."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipar.data.formats import read_cifar, read_idx, read_idx_pair, read_pictures
from pipar.errors import DataError


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return bytes((0, 0, 8, array.ndim)) + sizes + array.tobytes()


PIXELS = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("packed", [False, True])
def test_idx_is_read_packed_or_not(tmp_path: Path, packed: bool) -> None:
    raw = idx(PIXELS)
    (tmp_path / ("x.gz" if packed else "x")).write_bytes(gzip.compress(raw) if packed else raw)
    assert np.array_equal(read_idx(tmp_path / "x"), PIXELS)


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"", "begins with nothing"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x00", "not an IDX file of bytes"),
        (idx(PIXELS)[:-1], "its header says 40"),
        (idx(PIXELS) + b"x", "41 bytes"),
        (idx(PIXELS)[:6], "damaged"),
    ],
)
def test_a_damaged_idx_file_is_refused(tmp_path: Path, raw: bytes, sentence: str) -> None:
    (tmp_path / "x").write_bytes(raw)
    with pytest.raises(DataError, match=sentence):
        read_idx(tmp_path / "x")


@pytest.mark.parametrize(
    "raw",
    [b"not gzip", gzip.compress(idx(PIXELS))[:-9], gzip.compress(b"x" * 99)[:20] + b"y" * 30],
    ids=[
        "not gzip",
        "cut off",
        "overwritten",
    ],  # gzip bytes contain the time, but parallel workers must agree on test names
)
def test_a_damaged_gz_file_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x.gz").write_bytes(raw)
    with pytest.raises(DataError, match=r"x\.gz is damaged"):
        read_idx(tmp_path / "x")


def test_idx_labels_must_fit_the_images_and_the_classes(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(idx(PIXELS))
    (tmp_path / "y").write_bytes(idx(np.array([1, 9], np.uint8)))
    pixels, labels = read_idx_pair(tmp_path / "x", tmp_path / "y", 10)
    assert (pixels.shape, labels.tolist()) == ((2, 1, 3, 4), [1, 9])
    with pytest.raises(DataError, match="label 9, but labels go from 0 to 8"):
        read_idx_pair(tmp_path / "x", tmp_path / "y", 9)
    (tmp_path / "y").write_bytes(idx(np.array([1], np.uint8)))
    with pytest.raises(DataError, match="1 labels"):
        read_idx_pair(tmp_path / "x", tmp_path / "y", 10)


@pytest.mark.parametrize("label_bytes", [1, 2])
def test_cifar_records_of_several_files_keep_their_order_and_last_label(tmp_path: Path, label_bytes: int) -> None:
    rng = np.random.default_rng(0)
    records = rng.integers(0, 10, (5, label_bytes + 3072), np.uint8)
    (tmp_path / "a").write_bytes(records[:2].tobytes())
    (tmp_path / "b").write_bytes(records[2:].tobytes())
    pixels, labels = read_cifar([tmp_path / "a", tmp_path / "b"], label_bytes=label_bytes, classes=10)
    assert np.array_equal(labels, records[:, label_bytes - 1])
    assert np.array_equal(pixels.reshape(5, -1), records[:, label_bytes:])


def test_a_damaged_cifar_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for raw in (b"", bytes(3072)):
        path.write_bytes(raw)
        with pytest.raises(DataError, match="not a whole number of records"):
            read_cifar([path], label_bytes=1, classes=10)
    path.write_bytes(b"\x0a" + bytes(3072))
    with pytest.raises(DataError, match="label 10"):
        read_cifar([path], label_bytes=1, classes=10)


def test_images_become_rgb_planes_and_grey_ones_too(tmp_path: Path) -> None:
    Image.new("RGB", (4, 2), (10, 20, 30)).save(tmp_path / "c.png")
    Image.new("L", (4, 2), 7).save(tmp_path / "g.png")
    pixels = read_pictures([tmp_path / "c.png", tmp_path / "g.png"], (2, 4))
    assert pixels.shape == (2, 3, 2, 4)
    assert pixels[:, :, 0, 0].tolist() == [[10, 20, 30], [7, 7, 7]]


def test_an_image_of_another_size_and_a_file_that_is_no_image_are_refused(tmp_path: Path) -> None:
    Image.new("L", (4, 2), 7).save(tmp_path / "g.png")
    with pytest.raises(DataError, match="4x2 pixels, but should be 2x2"):
        read_pictures([tmp_path / "g.png"], (2, 2))
    (tmp_path / "g.png").write_bytes((tmp_path / "g.png").read_bytes()[:40])
    with pytest.raises(DataError, match="cannot be read as an image"):
        read_pictures([tmp_path / "g.png"], (2, 4))
    with pytest.raises(DataError, match="cannot be read as an image"):
        read_pictures([tmp_path / "none.png"], (2, 4))
