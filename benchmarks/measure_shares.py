"""Measure the compression at each cut of known networks: `python -m benchmarks.measure_shares DATA` writes the file.

On CIFAR-10, after some steps of training, because gradients and zeros at the very start are not typical. The planner
reads the file for named machines; a measured profile has its own shares.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import pipar.profiling
from pipar.data.datasets import load_dataset
from pipar.data.images import Images
from pipar.networks.blocks import NORMS
from pipar.networks.models import NETWORKS, build_model
from pipar.profiling.coding_costs import run_through
from pipar.profiling.measurement_task import Batch
from pipar.profiling.operation_counts import shares_key
from pipar.tasks.task import classification
from pipar.tensors.relu_outputs import rectified_cuts

FILE = Path(pipar.profiling.__file__).with_name("shares.json")
SHAPE, CLASSES = (3, 32, 32), 10
BATCH, STEPS, MOST_S = 50, 60, 8.0
Shares = list[dict[str, list[float]]]


def measured(name: str, norm: str, images: Images) -> tuple[Shares, int]:
    """Return the shares at each cut, up and down, and the number of training steps before them."""
    torch.manual_seed(0)
    model = build_model(name, input_shape=SHAPE, classes=CLASSES, norm=norm).train()
    steps = train(model, images)
    inputs, targets = batch(images, steps)
    measured = Batch(inputs[: BATCH // 2], targets[: BATCH // 2], classification(CLASSES))
    crossings = run_through(model, measured, with_loss=True)
    rectified = rectified_cuts(model, SHAPE)
    every = [crossing.shares(rectified=place in rectified) for place, crossing in enumerate(crossings, start=1)]
    return [{key: [round(up, 3), round(down, 3)] for key, (up, down) in cut.items()} for cut in every], steps


def train(model: nn.Sequential, images: Images) -> int:
    """Train for a number of steps, or for some seconds if they are slow; return the number of steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    started = time.perf_counter()
    for step in range(STEPS):
        if time.perf_counter() - started > MOST_S:
            return step
        inputs, targets = batch(images, step)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return STEPS


def batch(images: Images, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.arange(number * BATCH, (number + 1) * BATCH)
    return images.normalised(images.images[rows], torch.float32), images.labels[rows]


def as_text(entries: dict[str, Any]) -> str:
    """Return JSON with one network per line."""
    lines = (f"{json.dumps(key)}: {json.dumps(entry, separators=(',', ':'))}" for key, entry in entries.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(data: Path) -> None:
    torch.set_num_threads(1)
    images = load_dataset("cifar10", path=data, train_samples=(STEPS + 1) * BATCH).train
    entries = {}
    for name in NETWORKS:
        for norm in NORMS:
            entries[shares_key(name, norm)], steps = measured(name, norm, images)
            print(f"{name} {norm}: after {steps} steps of {BATCH}", flush=True)
            FILE.write_text(as_text(entries), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
