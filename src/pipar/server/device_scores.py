"""Values by device become a mean over devices and the mean over the worst tenth of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

_DECILE = 10


def mean_over_devices(values: Mapping[str, Mapping[str, float]], names: Mapping[str, bool]) -> dict[str, float]:
    """Return the mean of each value over the devices that have it; each device counts once.

    `names` says of each value whether higher is better.
    """
    known = {name: _known(values, name) for name in names}
    return {name: sum(found) / len(found) for name, found in known.items() if found}


def worst_decile(values: Mapping[str, Mapping[str, float]], names: Mapping[str, bool]) -> dict[str, float]:
    """Return, for each value, the mean over the tenth of the devices in which it is worst; at least one device."""
    worst = {}
    for name, higher_is_better in names.items():
        ordered = sorted(_known(values, name), reverse=not higher_is_better)
        if ordered:
            tenth = ordered[: math.ceil(len(ordered) / _DECILE)]
            worst[name] = sum(tenth) / len(tenth)
    return worst


def _known(values: Mapping[str, Mapping[str, float]], name: str) -> list[float]:
    """Return a value of all devices on which it could be computed: a metric of too few samples is not a number.

    A loss that is not a number is that of a model that has diverged, and counts as infinite.
    """
    found = [of[name] for _, of in sorted(values.items()) if name in of]
    if name == "loss":
        return [math.inf if math.isnan(value) else value for value in found]
    return [value for value in found if not math.isnan(value)]
