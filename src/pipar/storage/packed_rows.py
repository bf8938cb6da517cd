"""Rows of JSON about every round, which are needed until the end of a training, in little memory."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

Row = dict[str, Any]
#: Rows that are compressed together: those of consecutive rounds are much alike.
_BLOCK = 64


class PackedRows(Sequence[Row]):
    """Rows in order, of which all but the last few are compressed, to about a tenth. A copy shares the memory."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._blocks: list[bytes] = []
        self._last: list[bytes] = []  # fewer than a block
        for row in rows:
            self.append(row)

    def append(self, row: Mapping[str, Any]) -> None:
        self._last.append(json.dumps(row).encode())
        if len(self._last) == _BLOCK:
            self._blocks.append(_packed(self._last))
            self._last = []

    def copy(self) -> PackedRows:
        """Return these rows; what is appended to one of the two later is not in the other."""
        copied = PackedRows()
        copied._blocks, copied._last = list(self._blocks), list(self._last)
        return copied

    def to_json(self) -> list[str]:
        """Return a text for each block."""
        blocks = [*self._blocks, *([_packed(self._last)] if self._last else [])]
        return [base64.b64encode(block).decode() for block in blocks]

    @classmethod
    def read(cls, value: Sequence[Any]) -> PackedRows:
        """Return the rows that `to_json` has written; or a list of rows, as earlier versions wrote them."""
        texts = [one for one in value if isinstance(one, str)]
        blocks = [base64.b64decode(text) for text in texts]
        rows = cls() if texts else cls(value)
        if blocks:
            rows._blocks, rows._last = blocks[:-1], []
            for row in _unpacked(blocks[-1]):
                rows.append(row)
        return rows

    def __len__(self) -> int:
        return _BLOCK * len(self._blocks) + len(self._last)

    def __iter__(self) -> Iterator[Row]:
        for block in self._blocks:
            yield from _unpacked(block)
        yield from map(json.loads, self._last)

    @overload
    def __getitem__(self, place: int) -> Row: ...

    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...

    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        if isinstance(place, slice):
            return list(self)[place]
        block, within = divmod(range(len(self))[place], _BLOCK)
        row: Row = (
            _unpacked(self._blocks[block])[within] if block < len(self._blocks) else json.loads(self._last[within])
        )
        return row

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def _packed(rows: Sequence[bytes]) -> bytes:
    return zlib.compress(b"[" + b",".join(rows) + b"]")


def _unpacked(block: bytes) -> list[Row]:
    rows: list[Row] = json.loads(zlib.decompress(block))
    return rows
