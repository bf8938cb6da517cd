"""The hash of a cell covers the sources, libraries and images that its number comes from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import pipar
from docs import shape
from pipar.data.catalog import dataset_info
from reproduction import sources


def _images(folder: Path, content: bytes, ending: str = "") -> str:
    """Write files with the names of CIFAR-100's, and return the folder."""
    info = dataset_info("cifar100")
    place = folder.joinpath(*info.layout)
    place.mkdir(parents=True)
    for need in info.needs:
        (place / f"{need}{ending}").write_bytes(content)
    return str(folder)


def test_images_differ_by_the_content_of_their_files(tmp_path: Path) -> None:
    paths = [_images(tmp_path / str(n), content) for n, content in enumerate((b"one", b"two", b"one"))]
    one, two, same = (sources.counted_images("cifar100", path) for path in paths)
    assert one == same != two
    assert None not in (one, two)


def test_compressed_images_are_found(tmp_path: Path) -> None:
    assert sources.counted_images("cifar100", _images(tmp_path, b"one", ".gz")) is not None


def test_pictures_of_a_folder_differ_by_names_and_sizes(tmp_path: Path) -> None:
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


def test_missing_and_built_in_images_have_no_hash(tmp_path: Path) -> None:
    assert sources.counted_images("cifar100", str(tmp_path)) is None
    assert sources.counted_images("digits", None) is None


def test_libraries_have_their_versions() -> None:
    import torch

    assert f"torch {torch.__version__.partition('+')[0]}" in sources.counted_libraries()


@pytest.mark.parametrize(
    ("edited", "is_noticed"),
    [
        ("pipar/__init__.py", True),
        ("pipar/planner/simulator.py", True),
        ("pipar/launch/virtual.py", True),
        ("reproduction/cells.py", True),
        ("reproduction/plan_scores.py", True),
        ("pipar/launch/deployed_server.py", False),
        ("pipar/cli/tables.py", False),
        ("pipar/monitoring/logs.py", False),
        ("pipar/recording/recorder.py", False),
        ("pipar/launch/replay.py", False),
        ("reproduction/tables.py", False),
    ],
)
def test_an_edit_is_noticed_if_numbers_depend_on_the_file(
    edited: str, is_noticed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pipar/__init__.py", "pipar/planner/timing.py", "reproduction/cells.py", edited):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before = 1")
    monkeypatch.setattr(sources, "_HERE", tmp_path / "reproduction")
    monkeypatch.setattr(pipar, "__file__", os.fspath(tmp_path / "pipar" / "__init__.py"))
    now = sources._sources_on_disk()
    monkeypatch.setattr(sources, "counted_sources", lambda: now)
    assert not sources.have_sources_changed()
    (tmp_path / edited).write_text("after = 2")
    assert sources.have_sources_changed() == is_noticed


@pytest.mark.slow
def test_modules_that_do_not_count_are_imported_to_show_track_record_and_report_a_run_only() -> None:
    modules = shape.modules()
    counted = [module for module in modules if sources.counts(module.replace(".", "/") + ".py")]
    others = modules.keys() - counted
    imported = {
        (module, target)
        for module in counted
        for target in shape.imported_modules(module, modules[module], modules)
        if target in others and module != "__main__"
    }
    assert imported == {
        ("__init__", "scripting.plans"),
        ("launch.run", "monitoring.progress_display"),
        ("launch.run", "monitoring.tracker_threads"),
        ("launch.run", "recording.recorder"),
        ("launch.run", "report.__init__"),
        ("launch.processes", "recording.recorder"),
    }
    assert {module for module in others if module.startswith("launch.")} >= {"launch.deployed_server"}


def test_every_module_that_runs_cells_counts() -> None:
    found, left = set(), ["cells"]
    while left:
        name = left.pop()
        found.add(f"{name}.py")
        source = (shape.ROOT / "reproduction" / f"{name}.py").read_text("utf-8")
        targets = {one.target for one in shape.imports(source) if one.target.startswith("reproduction.")}
        own = {target.split(".")[1] for target in targets}
        left += [name for name in own if f"{name}.py" not in found]
    assert found == set(sources._RUN_CELLS)
