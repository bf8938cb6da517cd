"""What a number depends on beside its configuration: with other sources, libraries or images it is computed again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path

import pipar
from pipar.data.catalog import data_folder, dataset_info, find

#: Packages of pipar that no number of a virtual testbed depends on: what people see and operate.
_NEVER = ("cli", "dashboard", "monitoring", "report")
_HERE = Path(__file__).parent
#: What runs cells, of this folder; the rest is lists of them, and tables.
_RUN_CELLS = ("cells.py", "judged.py", "replanned.py", "perturbed_world.py")


def sources_hash(sources: Iterable[str], *measurement: Path) -> str:
    """Return what tells one version from another: a hash of these files and folders of pipar, and of who measures."""
    package = Path(pipar.__file__).parent
    given = [package / name for name in sources]
    files = [file for path in given for file in (sorted(path.rglob("*.*")) if path.is_dir() else [path])]
    content = [path.read_bytes() for path in [*files, *measurement] if path.is_file() and path.suffix != ".pyc"]
    return hashlib.sha256(b"\0".join(content)).hexdigest()[:16]


@cache
def counted_sources() -> str:
    """Return the version of all sources that the number of a cell depends on, as they were when first asked for."""
    return _sources_on_disk()


def have_sources_changed() -> bool:
    """Return whether somebody has edited sources meanwhile: processes may have imported some before and some behind."""
    return _sources_on_disk() != counted_sources()


def _sources_on_disk() -> str:
    package = Path(pipar.__file__).parent
    counted = sorted(path.name for path in package.iterdir() if path.name not in _NEVER)
    return sources_hash(counted, *(_HERE / name for name in _RUN_CELLS))


#: What computes with images, and so makes the last digits.
_LIBRARIES = ("torch", "numpy")


@cache
def counted_libraries() -> str:
    """Return the versions of what computes losses and weights."""
    return ", ".join(f"{name} {metadata.version(name)}" for name in _LIBRARIES)


@cache
def counted_images(dataset: str, path: str | None) -> str | None:
    """Return which images a known dataset has here; None if it has no files here, or needs none."""
    info = dataset_info(dataset)
    place = find(info, data_folder(None if path is None else Path(path)))
    if place is None:
        return None
    content = hashlib.sha256()
    for need in info.needs:
        # As they are read: a file that is there as itself and packed is read as itself.
        file = place / need if (place / need).exists() else place / f"{need}.gz"
        content.update(_content(file).encode())
    return content.hexdigest()[:16]


def _content(path: Path) -> str:
    """Return a hash of a file; of a folder with its many pictures, their names and sizes."""
    if path.is_dir():
        return "\n".join(f"{one.relative_to(path)} {one.stat().st_size}" for one in sorted(path.rglob("*.*")))
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
