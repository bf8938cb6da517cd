"""The lock on a run's folder: one process at a time, none after a crash."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipar.errors import InputError
from pipar.storage.run_lock import folder_locked


def test_a_folder_in_use_is_refused_with_the_process_that_uses_it(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "it"
    says = rf"it is in use by process {os.getpid()} on \S+ \(`pipar server a.toml`, since \S+\): stop it first, or give"
    with folder_locked(folder, "pipar server a.toml"):
        (folder / "result.json").touch()
        with pytest.raises(InputError, match=says), folder_locked(folder, "pipar server b.toml"):
            pass
        with pytest.raises(InputError, match=says), folder_locked(folder, "pipar run"):
            pass
    with folder_locked(folder, "pipar server b.toml"):
        pass
    assert [path.name for path in folder.iterdir()] == ["result.json"]


def test_a_folder_that_stays_empty_is_removed(tmp_path: Path) -> None:
    with folder_locked(tmp_path / "it", "pipar server"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_lock_that_a_killed_process_has_left_does_not_block(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from pipar.storage.run_lock import folder_locked
with folder_locked(Path({str(tmp_path)!r}), "pipar server"):
    print("held", flush=True)
    time.sleep(600)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=f"process {holder.pid} on"), folder_locked(tmp_path, "pipar server"):
            pass
        holder.send_signal(signal.SIGKILL)
    assert (tmp_path / ".lock").exists()
    with folder_locked(tmp_path, "pipar server"):
        pass


def test_a_lock_whose_content_cannot_be_read_is_still_a_lock(tmp_path: Path) -> None:
    with folder_locked(tmp_path, "pipar server"):
        for content in ("", "{", "[]", '{"process": 1}'):
            (tmp_path / ".lock").write_text(content)
            with pytest.raises(InputError, match="is in use by another process"), folder_locked(tmp_path, "pipar run"):
                pass


def test_a_lock_file_that_is_replaced_by_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match=re.escape("Cannot make the run's folder")), folder_locked(tmp_path / "it", ""):
        pass
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_file_that_was_removed_by_its_holder_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "result.json").touch()
    really_open, opened = os.open, []

    def late(path: Path, flags: int, mode: int = 0o777) -> int:
        handle = really_open(path, flags, mode)
        if not opened:  # its holder ends between opening and locking
            path.unlink()
        opened.append(handle)
        return handle

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", late)
        first = folder_locked(tmp_path, "pipar server")
        first.__enter__()
    assert len(opened) == 2
    with pytest.raises(InputError, match="is in use"), folder_locked(tmp_path, "pipar server"):
        pass
    first.__exit__(None, None, None)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(InputError), folder_locked(Path("runs/it"), "pipar server"):
        pass
