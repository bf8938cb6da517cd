"""What a number depends on: its configuration, sources, libraries and images; if one changes, it is computed again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path, PurePath

import pipar
from pipar.data.catalog import data_folder, dataset_info, find

#: Packages of pipar on which no number of a virtual testbed depends: what users see and operate.
_NEVER = ("cli", "live_page", "monitoring", "recording", "report", "scripting")
#: Modules of other packages that only a deployment or a replay runs.
_OTHERS = ("launch/deployed_*.py", "launch/replay*.py")
_HERE = Path(__file__).parent
#: The modules of this folder that run cells; the others list them, or make tables and figures of their results.
_RUN_CELLS = ("cells.py", "perturbed_times.py", "plan_scores.py", "replanning_cost.py")


def sources_hash(sources: Iterable[str], *measurement: Path) -> str:
    """Return a hash of these files and folders of pipar, and of the files that measure: it identifies their version."""
    package = Path(pipar.__file__).parent
    given = [package / name for name in sources]
    files = [file for path in given for file in (sorted(path.rglob("*.*")) if path.is_dir() else [path])]
    content = [path.read_bytes() for path in [*files, *measurement] if path.is_file() and path.suffix != ".pyc"]
    return hashlib.sha256(b"\0".join(content)).hexdigest()[:16]


@cache
def counted_sources() -> str:
    """Return the version of all sources on which a cell's number depends, as they were at the first call."""
    return _sources_on_disk()


def have_sources_changed() -> bool:
    """Return whether sources were edited since: processes may have imported some before the edit and some after it."""
    return _sources_on_disk() != counted_sources()


def _sources_on_disk() -> str:
    package = Path(pipar.__file__).parent
    names = sorted(path.relative_to(package).as_posix() for path in package.rglob("*.*"))
    return sources_hash(filter(counts, names), *(_HERE / name for name in _RUN_CELLS))


def counts(name: str) -> bool:
    """Return whether numbers depend on a file of pipar, given by its path below the package."""
    path = PurePath(name)
    return path.parts[0] not in _NEVER and not any(map(path.match, _OTHERS))


#: Libraries that compute with images, and so determine the last digits.
_LIBRARIES = ("torch", "numpy")


@cache
def counted_libraries() -> str:
    """Return the versions of the libraries that compute losses and weights."""
    return ", ".join(f"{name} {metadata.version(name)}" for name in _LIBRARIES)


@cache
def counted_images(dataset: str, path: str | None) -> str | None:
    """Return a hash of the images of a known dataset; None if it has no files here, or needs none."""
    info = dataset_info(dataset)
    place = find(info, data_folder(None if path is None else Path(path)))
    if place is None:
        return None
    content = hashlib.sha256()
    for need in info.needs:
        # As the dataset is read: a file that exists both plain and compressed is read plain.
        file = place / need if (place / need).exists() else place / f"{need}.gz"
        content.update(_content(file).encode())
    return content.hexdigest()[:16]


def _content(path: Path) -> str:
    """Return a hash of a file; for a folder with its many pictures, their names and sizes."""
    if path.is_dir():
        return "\n".join(f"{one.relative_to(path)} {one.stat().st_size}" for one in sorted(path.rglob("*.*")))
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
