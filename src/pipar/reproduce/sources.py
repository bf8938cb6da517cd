"""Which version of the sources a number comes from: with any other line of what computes it, it is computed again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pipar

#: What no number of a virtual testbed depends on: what people see and operate, faults, and, of this package,
#: everything but what runs cells: the rest is lists of them, and tables.
_NEVER = (
    "cli", "dashboard", "deployment.py", "display.py", "doctor.py", "faults", "logs.py", "monitor.py", "plan_view.py",
    "report", "reproduce", "tables.py", "trackers",
)  # fmt: skip
_YET = ("reproduce/cells.py", "reproduce/judged.py", "reproduce/replanned.py")


def sources_hash(sources: Iterable[str], *measurement: Path) -> str:
    """Return what tells one version from another: a hash of these files and folders of pipar, and of who measures."""
    package = Path(pipar.__file__).parent
    given = [package / name for name in sources]
    files = [file for path in given for file in (sorted(path.rglob("*.*")) if path.is_dir() else [path])]
    content = [path.read_bytes() for path in [*files, *measurement] if path.is_file() and path.suffix != ".pyc"]
    return hashlib.sha256(b"\0".join(content)).hexdigest()[:16]


@cache
def counted_sources() -> str:
    """Return the version of all sources that the number of a cell depends on."""
    package = Path(pipar.__file__).parent
    return sources_hash([*sorted(path.name for path in package.iterdir() if path.name not in _NEVER), *_YET])
