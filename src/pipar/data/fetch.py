"""Downloading the known datasets: files in the data folder are complete and have the publisher's checksum."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from pipar.data.catalog import DatasetInfo, RemoteFile, data_folder, dataset_info, find
from pipar.errors import DataError

# Called with the file's name, the bytes so far and the total bytes.
Progress = Callable[[str, int, int], None]

_BLOCK = 1 << 18
_TIMEOUT_S = 60


def fetch(
    name: str, folder: Path | None = None, *, base_url: str | None = None, progress: Progress | None = None
) -> Path | None:
    """Download the missing files of a known dataset and return its folder; None for a built-in one.

    `base_url` replaces everything before the file names, for a mirror. No partial file ever has its final name, and an
    interrupted download leaves no files.
    """
    return fetch_files(dataset_info(name), data_folder(folder), base_url=base_url, progress=progress)


def fetch_files(
    info: DatasetInfo, folder: Path, *, base_url: str | None = None, progress: Progress | None = None
) -> Path | None:
    """Like `fetch`, for any entry, even one that is not in the catalog."""
    if info.builtin:
        return None
    if (found := find(info, folder)) is not None:
        return found
    try:
        for file in info.files:
            url = file.url if base_url is None else f"{base_url.rstrip('/')}/{file.name}"
            _fetch_one(info, file, url, folder, progress or _silent)
    except OSError as error:
        raise DataError(f"{info.name} could not be written to {folder}: {error}.") from error
    return find(info, folder)


def _fetch_one(info: DatasetInfo, file: RemoteFile, url: str, folder: Path, progress: Progress) -> None:
    """Install one file, or the contents of its archive; a complete copy is not downloaded again."""
    target = folder.joinpath(*info.layout)
    if file.is_archive and target.exists():
        raise DataError(
            f"{target} exists but is not complete: move it away and run `pipar data get {info.name}` again."
        )
    if _is_whole(target / file.name, file):
        return
    with _workspace(folder) as work:
        arrived = work / file.name
        _download(file, url, arrived, progress)
        if file.is_archive:
            _install_archive(info, arrived, folder)
        else:
            target.mkdir(parents=True, exist_ok=True)
            arrived.replace(target / file.name)


def _install_archive(info: DatasetInfo, archive: Path, folder: Path) -> None:
    unpacked = archive.with_name("unpacked")
    unpack(archive, unpacked)
    if find(info, unpacked) is None:
        wanted = "/".join(info.layout)
        raise DataError(f"{archive.name} is not {info.name}: it lacks some of {', '.join(info.needs)} in {wanted}.")
    (unpacked / info.layout[0]).replace(folder / info.layout[0])


def _is_whole(path: Path, file: RemoteFile) -> bool:
    if not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == file.sha256


def unpack(archive: Path, folder: Path) -> None:
    """Write the regular files of a .tar.gz or .zip into `folder`; refuse other entries and paths that leave it."""
    folder.mkdir(parents=True)
    try:
        for name, stream in _members(archive):
            target = folder.joinpath(_safe(name, archive))
            target.parent.mkdir(parents=True, exist_ok=True)
            with stream, target.open("wb") as out:
                shutil.copyfileobj(stream, out)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{archive.name} is damaged and cannot be unpacked: {error}.") from error


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield name and content of each file.

    tarfile's data filter would do this, but the Python 3.11 of Raspberry Pi OS does not have it.
    """
    if archive.name.endswith(".zip"):
        with zipfile.ZipFile(archive) as packed:
            for entry in packed.infolist():
                if not entry.is_dir():
                    yield entry.filename, packed.open(entry)
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isdir():
                continue
            content = tar.extractfile(member) if member.isreg() else None
            if content is None:
                raise DataError(f"{archive.name} is not unpacked: {member.name} is a link or a device, not a file.")
            yield member.name, content


def _safe(name: str, archive: Path) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
        raise DataError(f"{archive.name} is not unpacked: {name} leads out of its folder.")
    return path


def _download(file: RemoteFile, url: str, target: Path, progress: Progress) -> None:
    """Download the URL to `target` and compare size and checksums with the catalog."""
    md5, sha256, size = hashlib.md5(usedforsecurity=False), hashlib.sha256(), 0
    with target.open("wb") as out:
        for block in _blocks(url):
            out.write(block)
            md5.update(block)
            sha256.update(block)
            size += len(block)
            progress(file.name, size, file.size_bytes)
            if size > file.size_bytes:
                break  # Another file, perhaps an endless one; the checksum below will not match.
    if size < file.size_bytes:
        raise DataError(f"The download of {url} stopped after {size} of {file.size_bytes} bytes: try again.")
    if (md5.hexdigest(), sha256.hexdigest()) != (file.md5, file.sha256):
        raise DataError(f"{url} is damaged or another file: its checksum is {md5.hexdigest()}, not {file.md5} (MD5).")


def _blocks(url: str) -> Iterator[bytes]:
    """Yield the body of a download; every failure becomes a DataError."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
            while block := response.read(_BLOCK):
                yield block
    except urllib.error.HTTPError as error:
        error.close()
        raise DataError(f"{url} cannot be downloaded: the server answers {error.code} {error.reason}.") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(f"{url} cannot be downloaded: {reason}.") from error


@contextmanager
def _workspace(folder: Path) -> Iterator[Path]:
    """Provide a temporary folder on the same disk as `folder`, so that moving files out of it is atomic."""
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".fetch-{os.getpid()}-", dir=folder))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _silent(name: str, size_bytes: int, total_bytes: int) -> None:
    """Show no progress."""
