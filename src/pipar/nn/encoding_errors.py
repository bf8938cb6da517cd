"""The errors of lossy encodings: how large they are, and what is carried over to the next micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import torch

from pipar.execution.stages import Place
from pipar.wire.encodings import LOSSY
from pipar.wire.lossy import Lossy, Residual

#: Returns the random generator of a place.
Generators = Callable[..., np.random.Generator]


class EncodingErrors:
    """The errors of a lossy encoding of one part's tensors, and the residuals that carry them over.

    Devices are kept apart: where they share a server-side model, no device may receive another one's residual.
    """

    def __init__(self, rounding: Generators | None) -> None:
        self._rounding = rounding
        self._lossy: dict[Place, Lossy] = {}  # by the part of a place after its micro-batch: the device

    def of(self, tensor: torch.Tensor, encoding: str, place: Place) -> Lossy | None:
        """Return the residual and random numbers for encoding this tensor; None if the encoding is exact."""
        if encoding not in LOSSY:
            return None
        device = place[3:]
        if device not in self._lossy:
            self._lossy[device] = Lossy(residual=Residual(tensor[0].numel()))
        lossy = self._lossy[device]
        lossy.rng = None if self._rounding is None else self._rounding(*place)
        return lossy

    def take(self) -> tuple[float, float] | None:
        """Return the sums of squared errors and of squared values since the last call; None if all were exact."""
        if not self._lossy:
            return None
        every = self._lossy.values()
        sums = (sum(one.squared_error for one in every), sum(one.squared_norm for one in every))
        for one in every:
            one.squared_error = one.squared_norm = 0.0
        return sums

    def keep_only(self, devices: Collection[str]) -> None:
        """Drop the residuals of all other devices."""
        for device in [device for device in self._lossy if not set(device) <= set(devices)]:
            del self._lossy[device]
