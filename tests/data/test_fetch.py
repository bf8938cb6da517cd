"""Downloads from a local server: complete, damaged, truncated and hostile."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipar.data.catalog import DatasetInfo, RemoteFile, dataset_info
from pipar.data.datasets import load_dataset
from pipar.data.fetch import fetch, fetch_files, unpack
from pipar.errors import DataError


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the URL at which it is served."""
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


def remote(name: str, content: bytes) -> RemoteFile:
    checksums = (hashlib.md5(content).hexdigest(), hashlib.sha256(content).hexdigest())
    return RemoteFile(f"https://example.org/data/{name}", len(content), *checksums)


def tar_of(files: dict[str, bytes], *, link: tuple[str, str] | None = None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        if link:
            member = tarfile.TarInfo(link[0])
            member.type, member.linkname = tarfile.SYMTYPE, link[1]
            tar.addfile(member)
    return out.getvalue()


def zip_of(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return out.getvalue()


RECORDS = b"".join(bytes((0, label)) + bytes([label]) * 3072 for label in range(20))
CIFAR = {"cifar-100-binary/train.bin": RECORDS, "cifar-100-binary/test.bin": RECORDS[: 3074 * 10]}


def cifar100(content: bytes, name: str = "cifar-100-binary.tar.gz") -> DatasetInfo:
    return replace(dataset_info("cifar100"), files=(remote(name, content),))


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else []


@pytest.mark.parametrize("name", ["cifar-100-binary.tar.gz", "cifar-100-binary.zip"])
def test_an_archive_is_downloaded_unpacked_and_loads(served: tuple[Path, str], tmp_path: Path, name: str) -> None:
    content = zip_of(CIFAR) if name.endswith("zip") else tar_of(CIFAR)
    (served[0] / name).write_bytes(content)
    seen: list[tuple[str, int, int]] = []
    place = fetch_files(
        cifar100(content, name), tmp_path / "data", base_url=served[1], progress=lambda *step: seen.append(step)
    )
    assert place == tmp_path / "data" / "cifar-100-binary"
    assert everything_in(tmp_path / "data") == [
        "cifar-100-binary",
        "cifar-100-binary/test.bin",
        "cifar-100-binary/train.bin",
    ]
    assert seen[-1] == (name, len(content), len(content))
    assert load_dataset("cifar100", path=tmp_path / "data").train.labels.tolist() == list(range(20))


def idx_dataset(folder: Path) -> DatasetInfo:
    files = []
    for need in dataset_info("mnist").needs:
        content = gzip.compress(need.encode())
        (folder / f"{need}.gz").write_bytes(content)
        files.append(remote(f"{need}.gz", content))
    return replace(dataset_info("mnist"), files=tuple(files))


def test_single_files_are_installed_in_their_layout(served: tuple[Path, str], tmp_path: Path) -> None:
    info = idx_dataset(served[0])
    place = fetch_files(info, tmp_path / "data", base_url=served[1])
    assert place == tmp_path / "data" / "MNIST" / "raw"
    assert everything_in(place) == sorted(f"{need}.gz" for need in info.needs)


def test_existing_files_are_not_downloaded_again(served: tuple[Path, str], tmp_path: Path) -> None:
    info = idx_dataset(served[0])
    first = fetch_files(info, tmp_path / "data", base_url=served[1])
    for path in served[0].iterdir():
        path.unlink()
    assert fetch_files(info, tmp_path / "data", base_url=served[1]) == first


def test_files_from_before_a_failure_are_kept_and_not_downloaded_again(
    served: tuple[Path, str], tmp_path: Path
) -> None:
    info = idx_dataset(served[0])
    last = served[0] / info.files[-1].name
    content = last.read_bytes()
    last.unlink()
    with pytest.raises(DataError, match="404"):
        fetch_files(info, tmp_path / "data", base_url=served[1])
    for file in info.files[:-1]:
        (served[0] / file.name).unlink()
    last.write_bytes(content)
    assert fetch_files(info, tmp_path / "data", base_url=served[1]) is not None


def test_a_damaged_installed_file_is_replaced(served: tuple[Path, str], tmp_path: Path) -> None:
    info = idx_dataset(served[0])
    broken = tmp_path / "data" / "MNIST" / "raw" / info.files[0].name
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"half")
    fetch_files(info, tmp_path / "data", base_url=served[1])
    assert broken.read_bytes() == (served[0] / broken.name).read_bytes()


@pytest.mark.parametrize(
    ("serve", "sentence"),
    [
        (lambda good: good[:-100], "stopped after"),
        (lambda good: good[:0], "stopped after 0 of"),
        (lambda good: good[:50] + b"?" + good[51:], "damaged or another file"),
        (lambda good: good + b"more", "damaged or another file"),
        (None, "the server answers 404"),
    ],
)
def test_a_bad_download_leaves_no_files(served: tuple[Path, str], tmp_path: Path, serve: object, sentence: str) -> None:
    good = tar_of(CIFAR)
    if callable(serve):
        (served[0] / "cifar-100-binary.tar.gz").write_bytes(serve(good))
    with pytest.raises(DataError, match=sentence):
        fetch_files(cifar100(good), tmp_path / "data", base_url=served[1])
    assert everything_in(tmp_path / "data") == []


def test_a_truncated_response_is_noticed(tmp_path: Path) -> None:
    class Short(Quiet):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"x" * 10)

    with ThreadingHTTPServer(("127.0.0.1", 0), Short) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        with pytest.raises(DataError, match=r"stopped after|cannot be downloaded"):
            fetch("cifar10", tmp_path, base_url=f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()
        thread.join()
    assert everything_in(tmp_path) == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/", "nonsense", "http://"])
def test_an_unreachable_server_is_reported_in_one_sentence(tmp_path: Path, url: str) -> None:
    with pytest.raises(DataError, match="cannot be downloaded"):
        fetch("mnist", tmp_path, base_url=url)


HOSTILE = {
    "up.tar.gz": tar_of({"../evil": b"x"}),
    "absolute.tar.gz": tar_of({"/tmp/evil": b"x"}),
    "link.tar.gz": tar_of({}, link=("cifar-100-binary/train.bin", "/etc/hostname")),
    "up.zip": zip_of({"a/../../evil": b"x"}),
    "absolute.zip": zip_of({"/evil": b"x"}),
    "windows.zip": zip_of({"C:evil": b"x"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_archive_that_leads_out_of_its_folder_is_refused(
    served: tuple[Path, str], tmp_path: Path, name: str
) -> None:
    (served[0] / name).write_bytes(HOSTILE[name])
    with pytest.raises(DataError, match="is not unpacked"):
        fetch_files(cifar100(HOSTILE[name], name), tmp_path / "data", base_url=served[1])
    assert everything_in(tmp_path / "data") == []
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize("name", ["x.tar.gz", "x.zip"])
def test_a_damaged_archive_is_refused(tmp_path: Path, name: str) -> None:
    good = tar_of(CIFAR) if name == "x.tar.gz" else zip_of(CIFAR)
    for at, content in enumerate((b"no archive", good[: len(good) // 2])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match="damaged"):
            unpack(tmp_path / name, tmp_path / str(at))


def test_an_archive_of_another_dataset_is_refused(served: tuple[Path, str], tmp_path: Path) -> None:
    for files in ({"readme": b"hello"}, {"cifar-100-binary/readme": b"hello"}):
        content = tar_of(files)
        (served[0] / "cifar-100-binary.tar.gz").write_bytes(content)
        with pytest.raises(DataError, match="is not cifar100: it lacks"):
            fetch_files(cifar100(content), tmp_path / "data", base_url=served[1])
        assert everything_in(tmp_path / "data") == []


def test_an_incomplete_folder_is_not_overwritten(served: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "cifar-100-binary").mkdir()
    (tmp_path / "cifar-100-binary" / "train.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match="move it away"):
        fetch_files(cifar100(tar_of(CIFAR)), tmp_path, base_url=served[1])
    assert (tmp_path / "cifar-100-binary" / "train.bin").read_bytes() == b"mine"


def test_an_interrupted_download_leaves_no_files(served: tuple[Path, str], tmp_path: Path) -> None:
    content = tar_of(CIFAR)
    (served[0] / "cifar-100-binary.tar.gz").write_bytes(content)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_files(cifar100(content), tmp_path / "data", base_url=served[1], progress=interrupt)
    assert everything_in(tmp_path / "data") == []


def test_a_folder_that_is_not_writable_is_reported_in_one_sentence(served: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="could not be written"):
        fetch_files(cifar100(tar_of(CIFAR)), tmp_path / "file" / "data", base_url=served[1])


def test_built_in_datasets_need_no_download_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    assert fetch("digits", tmp_path) is None
    assert fetch("synthetic", tmp_path) is None
    with pytest.raises(DataError, match="no dataset 'imagenet'"):
        fetch("imagenet", tmp_path)
