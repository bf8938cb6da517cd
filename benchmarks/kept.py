"""Rows of a long measurement that survive an interruption, while their sources stay the same."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from reproduction.sources import sources_hash

__all__ = ["Kept", "sources_hash"]


class Kept:
    """The rows of a file by name, one per line; rows of other sources are ignored."""

    def __init__(self, path: Path, depends: Mapping[str, object]) -> None:
        self.path = path
        self._depends = dict(depends)
        self.rows: dict[str, Any] = dict(self._read())

    def _read(self) -> Iterable[tuple[str, Any]]:
        for line in self.path.read_text("utf-8").splitlines() if self.path.exists() else []:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # truncated by an interruption
                continue
            if isinstance(entry, dict) and entry.get("depends") == self._depends and "name" in entry:
                yield entry["name"], entry["row"]

    def add(self, name: str, row: Any) -> None:
        """Append a measured row."""
        self.rows[name] = row
        self.path.parent.mkdir(exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            # The newline first: a line that an interruption has truncated must not spoil this one.
            file.write("\n" + json.dumps({"depends": self._depends, "name": name, "row": row}) + "\n")
