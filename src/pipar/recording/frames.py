"""The file of a flight: a sequence of zstd frames, each of which holds one line of JSON.

`zstd -dc FILE` prints the lines. A frame has a checksum, so a file that a crash cut off is read up to that point.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import zstandard

from pipar.errors import InputError
from pipar.json_records import parse_json

#: A frame that claims to hold more is not one of a recorder: a round of a thousand devices has about 5 MB.
_MOST_BYTES = 64_000_000
_MAGIC = b"\x28\xb5\x2f\xfd"
_LEVEL = 9
#: The compressed size of a frame is not known before it is read: this much of the file is tried first, then more.
_FIRST_PIECE, _LARGEST_PIECE = 4096, 1 << 20
_LONGEST_HEADER = 18


def pack_record(record: dict[str, Any]) -> bytes:
    """Return a record as one frame."""
    line = json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(line.encode())


def read_records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the complete records of a file, and how many bytes at its end cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror}.") from None
    records: list[dict[str, Any]] = []
    view, at = memoryview(data), 0
    while (found := _record_at(view, at)) is not None:
        record, at = found
        records.append(record)
    return records, len(data) - at


def _record_at(data: memoryview, start: int) -> tuple[dict[str, Any], int] | None:
    """Return the record that starts there, and where it ends; None if there is none that is complete."""
    header = bytes(data[start : start + _LONGEST_HEADER])
    if not header.startswith(_MAGIC):
        return None
    try:
        if not 0 < zstandard.frame_content_size(header) <= _MOST_BYTES:
            return None
        content, end = _unpack_frame(data, start)
        record = parse_json(content)
    except (zstandard.ZstdError, ValueError, RecursionError):
        return None
    return (record, end) if isinstance(record, dict) else None


def _unpack_frame(data: memoryview, start: int) -> tuple[bytes, int]:
    """Return the content of a frame, and where it ends; raise ValueError if the data ends before.

    The reader copies what it got after the end of the frame, so it gets little at a time.
    """
    reader, parts = zstandard.ZstdDecompressor().decompressobj(), []
    at, size = start, _FIRST_PIECE
    while not reader.eof:
        piece = data[at : at + size]
        if not piece:
            raise ValueError("the frame is cut off")
        parts.append(reader.decompress(piece))
        at, size = at + len(piece), min(2 * size, _LARGEST_PIECE)
    return b"".join(parts), at - len(reader.unused_data)
