"""The results of a training's epochs, which are needed until its end, in little memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, overload

from pipar.events import EpochResult


class EpochLog(Sequence[EpochResult]):
    """Results in order, kept as JSON: with many devices, that is a tenth of the memory of the objects."""

    def __init__(self, results: Iterable[EpochResult] = ()) -> None:
        self._rows = [_row(result) for result in results]

    def append(self, result: EpochResult) -> None:
        self._rows.append(_row(result))

    def rows(self) -> list[dict[str, Any]]:
        """Return all results as dictionaries."""
        rows: list[dict[str, Any]] = json.loads(b"[" + b",".join(self._rows) + b"]")
        return rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> EpochResult: ...

    @overload
    def __getitem__(self, place: slice) -> list[EpochResult]: ...

    def __getitem__(self, place: int | slice) -> EpochResult | list[EpochResult]:
        if isinstance(place, slice):
            return [EpochResult(**json.loads(row)) for row in self._rows[place]]
        return EpochResult(**json.loads(self._rows[place]))


def _row(result: EpochResult) -> bytes:
    return json.dumps(result.to_dict()).encode()
