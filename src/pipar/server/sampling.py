"""Which devices take part in a round: all of them, or some that are drawn by the seed, each equally often over time.

Those that were drawn least often so far are drawn first, and the seed decides between equals. So while the same devices
are present, the numbers of their rounds differ by at most one. Nothing depends on the order of arrival.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from pipar.settings.config import drawn_devices, draws_devices


class Draw:
    """Draws the devices of one round after another; `counts` are the rounds of each device before."""

    def __init__(
        self, share: int | float | Literal["all"] = "all", seed: int = 0, counts: Mapping[str, int] | None = None
    ) -> None:
        self._share = share
        self._seed = seed
        self._counts = dict(counts or {})
        self._present = set(self._counts)  # at the last draw

    @property
    def is_partial(self) -> bool:
        """Whether some devices may not take part in a round."""
        return draws_devices(self._share)

    @property
    def counts(self) -> dict[str, int]:
        """The rounds of each device so far; one that came late counts as level with the others."""
        return dict(self._counts)

    def next(self, epoch: int, present: Collection[str], least: int = 1) -> list[str]:
        """Return the devices of a round, in name order, and count it as theirs."""
        if not self.is_partial:
            return sorted(present)
        self._catch_up(set(present))
        ordered = self._in_order(epoch, sorted(present))
        drawn = sorted(ordered[: drawn_devices(self._share, len(ordered), least)])
        for name in drawn:
            self._counts[name] += 1
        return drawn

    def _catch_up(self, present: set[str]) -> None:
        """Let a device that joins or comes back start level with the others, instead of making up for missed rounds."""
        stayed = [self._counts[name] for name in present & self._present]
        level = min(stayed, default=0)
        for name in present - self._present:
            self._counts[name] = max(level, self._counts.get(name, 0))
        self._present = present

    def _in_order(self, epoch: int, names: list[str]) -> list[str]:
        """Return the devices in the order in which they are drawn."""
        from pipar.random_streams import generator  # imports numpy, which a training of all devices does without

        ranks = generator(self._seed, "draw", epoch).permutation(len(names))
        ranked = sorted(zip((self._counts[name] for name in names), ranks.tolist(), names, strict=True))
        return [name for _, _, name in ranked]
