"""The cores and memory that the system lets this process use."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Limits:
    """The limits of a container's control group; None is unlimited."""

    cores: float | None = None
    memory_bytes: int | None = None
    memory_used: int = 0


def limits(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Limits:
    """Return the tightest limits of this process's control groups, version 2 or 1."""
    paths = _group_paths(own)
    cores = [_core_limit(folder) for path in paths for folder in (root / path, root / "cpu" / path)]
    memory = [_memory_limit(folder) for path in paths for folder in (root / path, root / "memory" / path)]
    known = [limit for limit in memory if limit is not None]
    least = min((limit for limit in cores if limit is not None), default=None)
    return Limits(least, *min(known, key=lambda limit: limit[0] - limit[1])) if known else Limits(least)


def _group_paths(own: Path) -> list[str]:
    """Return the paths of this process's groups and their parents; "" is the root."""
    paths = [""]
    for line in _text(own).splitlines():
        parts = Path(line.rpartition(":")[2].strip("/")).parts
        paths += ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    return list(dict.fromkeys(paths))


def _core_limit(folder: Path) -> float | None:
    words = _text(folder / "cpu.max").split() or [
        _text(folder / "cpu.cfs_quota_us").strip(),
        _text(folder / "cpu.cfs_period_us").strip(),
    ]
    if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
        return int(words[0]) / int(words[1])
    return None


def _memory_limit(folder: Path) -> tuple[int, int] | None:
    """Return the limit of a group, and how much it uses."""
    for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        limit = _text(folder / most).strip()
        if limit.isdecimal() and int(limit) < 2**60:  # in version 1, no limit is a number near 2**63
            has = _text(folder / used).strip()
            return int(limit), int(has) if has.isdecimal() else 0
    return None


def _text(path: Path) -> str:
    """Return a file's content; "" if it cannot be read."""
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text("utf-8")
    return ""


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the bytes available to a new program; None if unknown."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(meminfo), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
