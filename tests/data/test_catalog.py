"""The catalog of datasets, and where they are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipar.data.catalog import CATALOG, data_folder, dataset_info, known_datasets


def test_every_file_has_its_own_checksums_and_comes_over_https() -> None:
    files = [file for info in CATALOG for file in info.files]
    assert all((len(file.md5), len(file.sha256)) == (32, 64) for file in files)
    assert all(file.url.startswith("https://") for file in files)
    assert len({file.md5 for file in files}) == len({file.sha256 for file in files}) == len(files) == 11


def test_every_entry_is_consistent() -> None:
    for info in CATALOG:
        assert len(info.mean) == len(info.std) == info.shape[0]
        assert bool(info.files) == bool(info.layout) == bool(info.needs)
        assert info.note


def test_a_complete_dataset_is_found_and_an_incomplete_one_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    (folder / "train.bin").touch()
    assert {info.found for info in known_datasets(tmp_path)} == {None}
    (folder / "test.bin").touch()
    assert {info.name: info.found for info in known_datasets(tmp_path) if info.found} == {"cifar100": folder}


def test_the_data_folder_is_the_given_one_else_the_environments_else_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPAR_DATA", str(tmp_path))
    assert data_folder(Path("here")) == Path("here")
    assert data_folder() == tmp_path
    monkeypatch.setenv("PIPAR_DATA", "")
    assert data_folder() == Path.home() / ".cache" / "pipar" / "data"


def test_built_in_datasets_need_no_files() -> None:
    assert [info.name for info in CATALOG if info.builtin] == ["digits", "synthetic"]
    assert not dataset_info("mnist").builtin
