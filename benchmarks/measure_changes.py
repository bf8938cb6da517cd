"""Measure the compression of changes for the known networks: `python -m benchmarks.measure_changes` writes the file.

It uses the function that measures profiles, on synthetic images, after a few steps: at the first step, residual blocks
whose last weight starts at zero pass no gradients to their layers. The planner reads the file for named machines; a
measured profile has its own share.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

import pipar.profiling
from pipar.networks.blocks import NORMS
from pipar.networks.models import NETWORKS, build_model
from pipar.profiling.coding_costs import changes_in_a_round, run_through
from pipar.profiling.measurement_task import Batch
from pipar.profiling.operation_counts import shares_key
from pipar.tasks.task import classification

FILE = Path(pipar.profiling.__file__).with_name("changes.json")
SHAPE, CLASSES, SAMPLES, STEPS = (3, 32, 32), 10, 8, 3
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def measured(name: str, norm: str, dtype: torch.dtype) -> float:
    """Return the size of the changes after five steps along one gradient, as a share of the network's bytes."""
    model = build_model(name, input_shape=SHAPE, classes=CLASSES, norm=norm, dtype=dtype).train()
    generator = torch.Generator().manual_seed(SAMPLES)
    inputs = torch.randn(SAMPLES, *SHAPE, generator=generator).to(dtype)
    targets = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    batch = Batch(inputs, targets, classification(CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(STEPS):
        run_through(model, batch, with_loss=True)
        optimizer.step()
        optimizer.zero_grad()
    run_through(model, batch, with_loss=True)
    share, _ = changes_in_a_round(model)
    return round(share, 3)


def main() -> None:
    torch.set_num_threads(1)
    entries = {}
    for name in NETWORKS:
        for norm in NORMS:
            entries[shares_key(name, norm)] = {key: measured(name, norm, dtype) for key, dtype in DTYPES.items()}
            print(f"{name} {norm}: {entries[shares_key(name, norm)]}", flush=True)
    lines = (f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
