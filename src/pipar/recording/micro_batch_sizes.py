"""Which micro-batches an epoch of one device has, and the number of samples in each."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from pipar.execution.schedule import cut_batch, cut_epoch

#: Kinds of work on a whole batch; all others of an iteration are on one micro-batch.
_OF_BATCHES = frozenset({"load", "noise", "step"})
_NOWHERE = (0, 0)


@dataclass(frozen=True)
class Places:
    """The samples at each place (iteration, micro-batch), and its position among the places with as many samples.

    Micro-batch 0 is the whole batch. Places outside of an epoch, as of models, have no samples.
    """

    at: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    @classmethod
    @lru_cache(maxsize=256)
    def of(
        cls, samples: int, micro_batches: int, batch_size: int, *, batch_statistics: bool, passes: int = 1
    ) -> Places:
        """Return the places of an epoch with this number of samples."""
        places: Places = cls()
        counts: dict[tuple[bool, int], int] = {}

        def add(place: tuple[int, int], size: int) -> None:
            kind = (place[1] > 0, size)
            position = counts.get(kind, 0)
            places.at[place] = size, position
            counts[kind] = position + 1

        batches = cut_epoch(samples, batch_size, batch_statistics=batch_statistics, passes=passes)
        for iteration, batch in enumerate(batches, start=1):
            add((iteration, 0), batch)
            pieces = cut_batch(batch, micro_batches, batch_statistics=batch_statistics)
            for number, piece in enumerate(pieces, start=1):
                add((iteration, number), piece)
        return places

    def find(self, kind: str, iteration: int, micro_batch: int) -> tuple[int, int]:
        """Return the samples of a piece of work, and its position among those with as many."""
        return self.at.get((iteration, 0 if kind in _OF_BATCHES else micro_batch), _NOWHERE)
