"""The errors of lossy encodings: how large they are, and what is carried over to the next micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import torch

from pipar.execution.stages import Place
from pipar.wire.encodings import LOSSY
from pipar.wire.lossy import Lossy, Residual

#: Gives the random numbers that belong to a place.
Generators = Callable[..., np.random.Generator]


class EncodingErrors:
    """What a lossy encoding of one part's tensors has lost, and makes up for.

    To each device its own: who shares a server-side model must not get what another one has lost.
    """

    def __init__(self, rounding: Generators | None) -> None:
        self._rounding = rounding
        self._lossy: dict[Place, Lossy] = {}  # by what a place has behind its micro-batch

    def of(self, tensor: torch.Tensor, encoding: str, place: Place) -> Lossy | None:
        """Return what the encoding of this tensor needs beside its values; nothing if it is exact."""
        if encoding not in LOSSY:
            return None
        device = place[3:]
        if device not in self._lossy:
            self._lossy[device] = Lossy(residual=Residual(tensor[0].numel()))
        lossy = self._lossy[device]
        lossy.rng = None if self._rounding is None else self._rounding(*place)
        return lossy

    def take(self) -> tuple[float, float] | None:
        """Return the squared errors and the squared values since the last call, summed; None if all was exact."""
        if not self._lossy:
            return None
        every = self._lossy.values()
        sums = (sum(one.squared_error for one in every), sum(one.squared_norm for one in every))
        for one in every:
            one.squared_error = one.squared_norm = 0.0
        return sums

    def keep_only(self, devices: Collection[str]) -> None:
        """Make up for nothing any more that others have lost."""
        for device in [device for device in self._lossy if not set(device) <= set(devices)]:
            del self._lossy[device]
