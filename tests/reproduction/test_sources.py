"""Numbers are told apart by what they come from: sources, libraries, images."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import pipar
from pipar.data.catalog import dataset_info
from reproduction import sources


def _images(folder: Path, content: bytes, ending: str = "") -> str:
    """Write files that are called as those of CIFAR-100, and return the folder."""
    info = dataset_info("cifar100")
    place = folder.joinpath(*info.layout)
    place.mkdir(parents=True)
    for need in info.needs:
        (place / f"{need}{ending}").write_bytes(content)
    return str(folder)


def test_images_are_told_apart_by_what_is_in_their_files(tmp_path: Path) -> None:
    paths = [_images(tmp_path / str(n), content) for n, content in enumerate((b"one", b"two", b"one"))]
    one, two, same = (sources.counted_images("cifar100", path) for path in paths)
    assert one == same != two
    assert None not in (one, two)


def test_packed_images_are_found(tmp_path: Path) -> None:
    assert sources.counted_images("cifar100", _images(tmp_path, b"one", ".gz")) is not None


def test_pictures_of_a_folder_are_told_apart_by_names_and_sizes(tmp_path: Path) -> None:
    def pictures(name: str, size: int) -> str:
        place = tmp_path / f"{name}{size}" / "tiny-imagenet-200"
        for folder in ("train", "val/images"):
            (place / folder).mkdir(parents=True)
        for file in ("wnids.txt", "val/val_annotations.txt"):
            (place / file).touch()
        (place / "train" / name).write_bytes(bytes(size))
        return str(place.parent)

    folders = [pictures("a.jpg", 1), pictures("a.jpg", 2), pictures("b.jpg", 1)]
    assert len({sources.counted_images("tiny_imagenet", folder) for folder in folders}) == 3


def test_images_that_are_not_here_or_come_with_pipar_have_no_version(tmp_path: Path) -> None:
    assert sources.counted_images("cifar100", str(tmp_path)) is None
    assert sources.counted_images("digits", None) is None


def test_libraries_have_their_versions() -> None:
    import torch

    assert f"torch {torch.__version__.partition('+')[0]}" in sources.counted_libraries()


def test_an_edited_source_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, here = tmp_path / "pipar", tmp_path / "reproduction"
    (package / "planner").mkdir(parents=True)
    here.mkdir()
    files = [package / "__init__.py", package / "planner" / "simulator.py", here / "cells.py", here / "tables.py"]
    for file in files:
        file.write_text("before = 1")
    monkeypatch.setattr(sources, "_HERE", here)
    monkeypatch.setattr(pipar, "__file__", os.fspath(package / "__init__.py"))
    now = sources._sources_on_disk()
    monkeypatch.setattr(sources, "counted_sources", lambda: now)
    (here / "tables.py").write_text("after = 2")
    assert not sources.have_sources_changed(), "tables compute nothing"
    (package / "planner" / "simulator.py").write_text("after = 2")
    assert sources.have_sources_changed()
