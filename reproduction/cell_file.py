"""`cells.jsonl`: one line for each cell that was run, with its hash, configuration and result.

A sweep appends lines as results arrive; `benchmarks` checks in the lines that tables name, sorted by hash.
"""

from __future__ import annotations

import errno
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipar.errors import InputError
from pipar.settings.config_file import config_from, dump_config
from pipar.storage.run_json import strict_json
from pipar.storage.whole_files import write_atomically
from reproduction.experiment import Outcome

FILE = "cells.jsonl"
#: A line: `hash`, `how`, `options`, `config`, `cpu_s` and `result`.
Record = dict[str, Any]


def read_cells(folder: Path) -> dict[str, Record]:
    """Return the records of a folder by hash.

    A line that is not whole is ignored. If two lines have the same hash, the last one counts.
    """
    try:
        lines = (folder / FILE).read_bytes().splitlines()
    except OSError:
        return {}
    records = (record for line in lines if (record := _parsed(line)) is not None)
    return {record["hash"]: record for record in records}


def _parsed(line: bytes) -> Record | None:
    with suppress(ValueError):
        record = json.loads(line)
        if isinstance(record, dict) and isinstance(record.get("hash"), str) and _is_whole(record):
            return record
    return None


def _is_whole(record: Record) -> bool:
    return isinstance(record.get("config"), dict) and isinstance(record.get("result"), dict)


def append_outcome(folder: Path, outcome: Outcome) -> None:
    """Append a cell's line to the file of a folder.

    Labels are left out: another experiment labels the same cell differently.
    """
    cell = outcome.cell
    record: Record = {
        "hash": cell.hash,
        "how": cell.how,
        "options": dict(cell.options),
        "config": tomllib.loads(dump_config(config_from(cell.config))),
        "cpu_s": outcome.cpu_s,
        "result": dict(outcome.result),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _append(folder / FILE, _line(record))
    except OSError as error:
        raise InputError(f"Cannot write {folder / FILE}: {error.strerror}.") from None


def _append(path: Path, line: bytes) -> None:
    """Append a line in a single write: a crash can tear only the last line, and the next one starts after it."""
    with path.open("a+b", buffering=0) as file:
        if (end := file.tell()) and os.pread(file.fileno(), 1, end - 1) != b"\n":
            line = b"\n" + line
        if file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file.fileno())


def write_cells(folder: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write the file of a folder with these records and no others, sorted by hash."""
    lines = map(_line, sorted(records, key=lambda record: str(record["hash"])))
    write_atomically(folder / FILE, b"".join(lines))


def _line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(strict_json(dict(record))) + "\n").encode()
