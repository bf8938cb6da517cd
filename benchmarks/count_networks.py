"""Count the known networks for the images of the known datasets: `python -m benchmarks.count_networks` writes the file.

The planner reads it instead of importing torch; a test compares it with the results of this module.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pipar.profiling
from pipar.data.catalog import CATALOG
from pipar.networks.blocks import NORMS
from pipar.networks.models import NETWORKS, build_model
from pipar.profiling.operation_counter import count_layers
from pipar.profiling.operation_counts import FEW_CLASSES, MANY_CLASSES, counts_key, pack_counts, rectified_at
from pipar.tensors.relu_outputs import rectified_cuts

FILE = Path(pipar.profiling.__file__).with_name("networks.json")
Case = tuple[str, str, tuple[int, int, int]]


def cases() -> Iterator[Case]:
    """Yield every combination of network, norm and image shape, except images too small for a network."""
    shapes = sorted({info.shape for info in CATALOG})
    for name, network in NETWORKS.items():
        for norm in NORMS:
            yield from ((name, norm, shape) for shape in shapes if min(shape[1:]) >= network.min_side)


def counted(case: Case) -> dict[str, list[Any]]:
    """Return the file's entry for one network."""
    _, _, shape = case
    few, many = _hollow(case, FEW_CLASSES), _hollow(case, MANY_CLASSES)
    rectified = rectified_cuts(few, shape)  # the classes do not matter before the last layer
    return pack_counts(*(rectified_at(count_layers(model, shape), rectified) for model in (few, many)))


def _hollow(case: Case, classes: int) -> nn.Sequential:
    name, norm, shape = case
    with torch.device("meta"):  # no initial weights are drawn
        return build_model(name, input_shape=shape, classes=classes, norm=norm)


def as_text(entries: dict[str, dict[str, list[Any]]]) -> str:
    """Return JSON with one network per line, so that a diff shows which network changed."""
    lines = (f"{json.dumps(key)}: {json.dumps(entry, separators=(',', ':'))}" for key, entry in entries.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(as_text({counts_key(*case): counted(case) for case in cases()}), "utf-8")
