"""`device_metrics` of a result as rows: the model on each device's own samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Of these, the first one that a training has decides which devices are the worst.
_TELLING = ("accuracy", "loss")


@dataclass(frozen=True)
class DeviceRow:
    """One device: its values by name, or why it has none."""

    device: str
    samples: int | None = None
    values: Mapping[str, float | None] = field(default_factory=dict)
    reason: str = ""


def value_names(metrics: Mapping[str, Any]) -> list[str]:
    """Return the names of the values, in their order: loss, accuracy, then the metrics."""
    return list(metrics.get("mean") or ())


def device_rows(metrics: Mapping[str, Any], most: int) -> tuple[list[DeviceRow], int]:
    """Return the rows of all devices by name, or of the worst ones if there are too many; and how many are left out.

    Devices without values are shown, too.
    """
    rows = [
        DeviceRow(name, of.get("samples"), {key: value for key, value in of.items() if key != "samples"})
        for name, of in (metrics.get("devices") or {}).items()
    ]
    rows += [DeviceRow(name, reason=why) for name, why in (metrics.get("missing") or {}).items()]
    if len(rows) <= most:
        return sorted(rows, key=lambda row: row.device), 0
    worst_first = sorted(rows, key=lambda row: (*_goodness(row, metrics), row.device))
    return worst_first[:most], len(rows) - most


def _goodness(row: DeviceRow, metrics: Mapping[str, Any]) -> tuple[bool, float]:
    """Return a key that sorts the worst device first, and those without values last."""
    names = value_names(metrics)
    name = next((one for one in _TELLING if one in names), names[0] if names else "")
    value = row.values.get(name)
    if value is None:  # JSON has no number for a loss that has diverged
        return not row.values, -math.inf
    return False, value if (metrics.get("higher_is_better") or {}).get(name, name != "loss") else -value
