"""Measured profiles on disk, by everything that times depend on and the machine; and other texts next to them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from pipar.errors import ConfigError
from pipar.profiling.profile import FORMAT, Profile


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/pipar/profiles; by default ~/.cache/pipar/profiles."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipar" / "profiles"


def machine_fingerprint(accelerator: str = "") -> str:
    """Return what a machine's times depend on, without its name: system, processor, cores, torch and accelerator."""
    torch = metadata.version("torch")
    cpu = f"{platform.system()} {platform.machine()}, {_processor()}, {os.cpu_count()} cores, torch {torch}"
    return f"{cpu}, {accelerator}" if accelerator else cpu


def usable_cores() -> int:
    """Return the number of cores that this process may run on; a container often has fewer than its machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_profile(key: Mapping[str, object], folder: Path | None = None) -> Profile | None:
    """Return the profile of this key on this machine; None if there is none, or its file is damaged."""
    try:
        return Profile.load(_path(key, folder))
    except ConfigError:
        return None


def keep_profile(key: Mapping[str, object], profile: Profile, folder: Path | None = None) -> None:
    """Keep a profile for the next time; if the folder cannot be written, the next run measures again."""
    _write(_path(key, folder), profile.to_json())


def find_text(key: Mapping[str, object], kind: str) -> str | None:
    """Return a text of this kind and key that was kept on this machine; None if there is none that can be read."""
    try:
        return _path(key, None, f"{kind}.json").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def keep_text(key: Mapping[str, object], text: str, kind: str) -> None:
    """Keep a text for the next time, next to profiles; if the folder cannot be written, it is not kept."""
    _write(_path(key, None, f"{kind}.json"), text)


def _write(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(0o700, parents=True, exist_ok=True)  # what is in it is used without asking
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)


def _path(key: Mapping[str, object], folder: Path | None, ending: str = "json") -> Path:
    everything = {**key, "machine": machine_fingerprint(), "format": FORMAT}
    digest = hashlib.sha256(json.dumps(everything, sort_keys=True, default=str).encode()).hexdigest()
    return (folder or cache_folder()) / f"{digest[:32]}.{ending}"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"
