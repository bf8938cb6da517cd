"""The results of a training's epochs, which are needed until its end, in little memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from pipar.events import EpochResult
from pipar.storage.packed_rows import PackedRows


class EpochLog(Sequence[EpochResult]):
    """Results in order, packed: with many devices or epochs, the objects would need a hundred times the memory."""

    def __init__(self, results: Iterable[EpochResult] = ()) -> None:
        self._rows = PackedRows(result.to_dict() for result in results)

    def append(self, result: EpochResult) -> None:
        self._rows.append(result.to_dict())

    def rows(self) -> list[dict[str, Any]]:
        """Return all results as dictionaries."""
        return list(self._rows)

    def packed(self) -> PackedRows:
        """Return the results so far as rows that do not change."""
        return self._rows.copy()

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[EpochResult]:
        return (EpochResult(**row) for row in self._rows)

    @overload
    def __getitem__(self, place: int) -> EpochResult: ...

    @overload
    def __getitem__(self, place: slice) -> list[EpochResult]: ...

    def __getitem__(self, place: int | slice) -> EpochResult | list[EpochResult]:
        if isinstance(place, slice):
            return [EpochResult(**row) for row in self._rows[place]]
        return EpochResult(**self._rows[place])
