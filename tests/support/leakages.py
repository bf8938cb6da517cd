"""Hand-written leakage files: VGG-5 on digits; the first cuts leak most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipar.leakage.table import CutLeakage, LeakageTable, RebuildQuality

LEAKS = {1: 0.9, 2: 0.6, 3: 0.5, 4: 0.2}


def cut(split_point: int, leaks: float) -> CutLeakage:
    """Return a cut at which the strongest of two attacks has this pixel correlation."""
    return CutLeakage(
        split_point, 0.7, {"small": RebuildQuality(leaks / 2, 10.0), "decoder": RebuildQuality(leaks, 20.0)}
    )


def table(leaks: Mapping[int, float] = LEAKS, **changes: Any) -> LeakageTable:
    made = LeakageTable(
        "vgg5", "group", "digits", (1, 32, 32), ("conv1", "conv2", "conv3", "fc4", "fc5"),
        seed=0, weights="made up", pixel_scale=0.0, images=16, compared=256, others=500, guess=0.1,
        attacks={"small": "a few steps", "decoder": "a network"},
        cuts=tuple(cut(p, leak) for p, leak in leaks.items()),
    )  # fmt: skip
    return replace(made, **changes)


def written(folder: Path, leaks: Mapping[int, float] = LEAKS, **changes: Any) -> Path:
    """Write such a file and return its path."""
    path = folder / "leakage.json"
    path.write_text(table(leaks, **changes).to_json(), "utf-8")
    return path
