"""Measure what a round's changes are of the known networks' bytes: `python -m benchmarks.measure_changes` writes it.

By the function that profiles are measured with, on made-up images, behind a few steps: at the very first one residual
blocks that begin with a weight of zero hold back the gradients of all that is in them. The planner reads the file for
machines that it knows by name; a machine that is measured measures its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

import pipar.profiling
from pipar.nn.blocks import NORMS
from pipar.nn.models import NETWORKS, build_model
from pipar.profiling.coding_costs import changes_in_a_round, run_through
from pipar.profiling.operation_counts import shares_key

FILE = Path(pipar.profiling.__file__).with_name("changes.json")
SHAPE, CLASSES, SAMPLES, STEPS = (3, 32, 32), 10, 8, 3
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def measured(name: str, norm: str, dtype: torch.dtype) -> float:
    """Return the share of a network's bytes that five steps down one gradient leave to be sent."""
    model = build_model(name, input_shape=SHAPE, classes=CLASSES, norm=norm, dtype=dtype).train()
    generator = torch.Generator().manual_seed(SAMPLES)
    inputs = torch.randn(SAMPLES, *SHAPE, generator=generator).to(dtype)
    targets = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(STEPS):
        run_through(model, inputs, targets, with_loss=True)
        optimizer.step()
        optimizer.zero_grad()
    run_through(model, inputs, targets, with_loss=True)
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
