"""Files that are complete or absent, and what happens while a disk is full."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from pipar.errors import StorageError
from pipar.storage.whole_files import PRIVATE, append_whole, keep_trying, write_atomically


class FullFor:
    """A disk that is full for the first `times` calls."""

    def __init__(self, times: int) -> None:
        self.times, self.calls = times, 0

    def __call__(self, *_: object) -> str:
        self.calls += 1
        if self.calls <= self.times:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return "written"


def test_what_cannot_be_written_is_said_and_tried_again_until_it_is_written() -> None:
    said: list[str] = []
    pauses: list[float] = []
    assert keep_trying(FullFor(7), "The result", said.append, sleep=pauses.append) == "written"
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert said[0] == (
        "The result could not be written: No space left on device. Make sure that there is enough space. The next "
        "attempt is in 1 s."
    )
    assert len(said) == 7


@pytest.mark.parametrize(("patience_s", "attempts"), [(0.0, 1), (1.0, 2), (60.0, 6)])
def test_patience_ends(patience_s: float, attempts: int) -> None:
    disk = FullFor(1000)
    with pytest.raises(StorageError, match="could not be written: No space left"):
        keep_trying(disk, "The result", lambda _: None, patience_s=patience_s, sleep=lambda _: None)
    assert disk.calls == attempts


def test_another_error_is_not_tried_again() -> None:
    def wrong() -> None:
        raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        keep_trying(wrong, "It", print)


def test_a_row_is_appended_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, really_write = tmp_path / "rounds.jsonl", os.write
    append_whole(path, b"one\n")
    full = FullFor(10)

    def half(descriptor: int, data: memoryview) -> int:
        return really_write(descriptor, data[:3]) if len(data) > 3 else len(full(data))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space"):
            append_whole(path, b"second\n")
    assert path.read_bytes() == b"one\n"
    append_whole(path, b"second\n")
    assert path.read_bytes() == b"one\nsecond\n"


def test_private_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        append_whole(tmp_path / "rows", b"row")
        write_atomically(tmp_path / "model", b"weights", mode=PRIVATE)
        write_atomically(tmp_path / "page", b"for everyone")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"rows": 0o600, "model": 0o600, "page": 0o644}
