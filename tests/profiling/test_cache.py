"""A kept profile is found again by its key on its machine; a damaged file or an unreadable folder is only a miss."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

from pipar.profiling.cache import cache_folder, find_profile, keep_profile, machine_fingerprint
from pipar.profiling.profile import LayerProfile, Profile

KEPT = Profile("small", "float32", (1,), (LayerProfile("a", (0.1,), (0.2,), 4, 8),))
KEY = {"model": "small", "input_shape": [3, 8, 8], "batch_size": 8, "dtype": "float32", "norm": "none"}


def _files(folder: Path) -> Sequence[Path]:
    return sorted(folder.iterdir())


def test_a_kept_profile_is_found_again_in_one_file(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "down"
    assert find_profile(KEY, folder) is None
    for _ in range(2):
        keep_profile(KEY, KEPT, folder)
        assert find_profile(KEY, folder) == KEPT
    (file,) = _files(folder)
    assert file.suffix == ".json"


@pytest.mark.parametrize("change", [{"model": "other"}, {"batch_size": 9}, {"dtype": "float64"}, {"norm": "group"}])
def test_another_key_is_another_profile(tmp_path: Path, change: dict[str, object]) -> None:
    keep_profile(KEY, KEPT, tmp_path)
    assert find_profile({**KEY, **change}, tmp_path) is None


def test_the_order_of_the_key_does_not_matter(tmp_path: Path) -> None:
    keep_profile(KEY, KEPT, tmp_path)
    assert find_profile(dict(reversed(KEY.items())), tmp_path) == KEPT


def test_another_machine_does_not_use_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_profile(KEY, KEPT, tmp_path)
    monkeypatch.setattr("pipar.profiling.cache.machine_fingerprint", lambda: "another machine")
    assert find_profile(KEY, tmp_path) is None


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format": 0}', b"\xff\xfe"])
def test_a_damaged_file_is_a_miss_and_is_replaced_by_the_next_profile(tmp_path: Path, damage: bytes) -> None:
    keep_profile(KEY, KEPT, tmp_path)
    _files(tmp_path)[0].write_bytes(damage)
    assert find_profile(KEY, tmp_path) is None
    keep_profile(KEY, KEPT, tmp_path)
    assert find_profile(KEY, tmp_path) == KEPT


def test_a_folder_that_cannot_be_written_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", "utf-8")
    keep_profile(KEY, KEPT, tmp_path / "file" / "profiles")
    assert find_profile(KEY, tmp_path / "file" / "profiles") is None


def test_profiles_are_kept_where_the_system_keeps_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_profile(KEY, KEPT)
    assert len(_files(tmp_path / "pipar" / "profiles")) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "pipar" / "profiles"


def test_the_fingerprint_names_system_and_torch_and_no_host() -> None:
    fingerprint = machine_fingerprint()
    assert metadata.version("torch") in fingerprint
    assert platform.system() in fingerprint
    assert not platform.node() or platform.node() not in fingerprint
