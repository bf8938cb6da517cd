"""The compression of the exact encodings relative to raw float32, on tensors that cross a cut in real training.

Plain PyTorch training with pipar's defaults (group norm, SGD, batches of 100) on real CIFAR-10 images, a subset of
them so that all networks together take minutes on one core. After the first and the tenth epoch, activations and
gradients of micro-batches of 10 samples are encoded as in a run: after a ReLU the zeros are left out, and so are the
gradients at the zeros, which reach no weight. Needs the dataset (PIPAR_DATA).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.record import Claim
from pipar.cutting.split import split_model
from pipar.data.shard import Shard
from pipar.job.workload import Workload
from pipar.nn.optimizers import OptimizerSettings
from pipar.nn.runtime import keep_freed_memory, one_thread
from pipar.settings.config_file import load_config
from pipar.tensors.relu_outputs import rectified_cuts
from pipar.wire.encodings import chunk_sizes
from pipar.wire.tensor_codec import encode

BATCH, MICRO_BATCH = 100, 10
EPOCHS = (1, 10)
#: Batches whose activations and gradients are encoded, with the weights after an epoch.
BATCHES = 3


@dataclass(frozen=True)
class Case:
    """A network, its number of training images, its measured cuts, and the claim for P = 1."""

    model: str
    images: int
    split_points: tuple[int, ...]
    most: float


CASES = (
    Case("vgg5", 5000, (1, 2, 3), most=0.62),
    Case("vgg16", 300, (1, 2, 4), most=0.48),
    Case("resnet18", 2000, (1, 2, 4), most=0.72),
    Case("mobilenetv3_small", 2000, (1, 2, 3, 4), most=0.92),
)


@dataclass(frozen=True)
class Crossing:
    """The tensors that cross the cut for one micro-batch."""

    activation: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
    gradient: np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:  # noqa: ARG001
    claims: list[Claim] = []
    rows: list[dict[str, Any]] = []
    keep_freed_memory()
    with one_thread():
        for case in CASES:
            rows += _measure_network(case)
            worst = max(row["share"] for row in rows if (row["model"], row["P"]) == (case.model, 1))
            name = f"bytes up and down / raw float32, {case.model}, P = 1, the worse of epochs 1 and 10"
            claims.append(Claim(name, worst, "", most=case.most))
            print(claims[-1], flush=True)
    subset = {case.model: case.images for case in CASES}
    return claims, {"images": subset, "micro_batch": MICRO_BATCH, "batches_encoded": BATCHES, "rows": rows}


def _measure_network(case: Case) -> Iterator[dict[str, Any]]:
    """Yield a row for each epoch and split point."""
    settings = ["data.name=cifar10", f"data.samples_per_device={case.images}", f"model.name={case.model}"]
    workload = Workload(load_config(None, [*settings, "devices.count=1"]))
    shard, model = workload.samples.keep_only_shard(workload.names[0]), workload.build_model().train()
    after_relu = rectified_cuts(model, workload.samples.input_shape)
    for epoch in range(1, max(EPOCHS) + 1):
        loss = train(model, workload.optimizer(), shard, epoch)
        for split_point in case.split_points if epoch in EPOCHS else ():
            crossed = list(crossings(model, shard, epoch + 1, split_point))
            where = {"model": case.model, "P": split_point, "epoch": epoch, "train_loss": loss}
            row = where | _shares(crossed, after_relu=split_point in after_relu)
            print(row, flush=True)
            yield row


def train(model: nn.Sequential, optimizer: OptimizerSettings, shard: Shard, epoch: int) -> float:
    """Train an epoch and return the mean loss; momentum starts at zero, as is pipar's default."""
    steps = optimizer.over(model)
    assert steps is not None
    total, order = 0.0, shard.order(epoch)
    for at in range(0, len(order), BATCH):
        inputs, labels = shard.batch(epoch, order[at : at + BATCH])
        steps.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        torch.autograd.backward(loss)
        steps.step()
        total += loss.item() * len(labels)
    return total / len(order)


def crossings(model: nn.Sequential, shard: Shard, epoch: int, split_point: int) -> Iterator[Crossing]:
    """Yield the tensors at the cut for micro-batches of an epoch's first batches, with the current weights."""
    device_part, server_part = split_model(model, split_point)
    order = shard.order(epoch)[: BATCHES * BATCH]
    for at in range(0, len(order), MICRO_BATCH):
        inputs, labels = shard.batch(epoch, order[at : at + MICRO_BATCH])
        with torch.no_grad():
            activation: torch.Tensor = device_part(inputs)
        activation.requires_grad_()
        loss = F.cross_entropy(server_part(activation), labels, reduction="sum") / BATCH
        (gradient,) = torch.autograd.grad(loss, activation)
        yield Crossing(activation.detach().contiguous().numpy(), gradient.contiguous().numpy())


def _shares(crossed: list[Crossing], *, after_relu: bool) -> dict[str, Any]:
    """Return the bytes as shares of raw float32, by direction and encoding, and those of a run."""
    # Zeros are compared by bits: -0.0 is a different value.
    kept = [one.activation.view(np.uint32) != 0 for one in crossed]
    raw = sum(one.activation.nbytes for one in crossed)
    table = {}
    for encoding in ("sparse", "planes", "sparse-planes") if after_relu else ("planes",):
        masks = kept if encoding.startswith("sparse") else [None] * len(crossed)
        up = sum(encoded_bytes(one.activation, encoding) for one in crossed)
        down = sum(encoded_bytes(one.gradient, encoding, mask) for one, mask in zip(crossed, masks, strict=True))
        table[encoding] = {"up": up / raw, "down": down / raw, "both": (up + down) / (2 * raw)}
    chosen = "sparse-planes" if after_relu else "planes"
    zeros = 1 - float(np.mean([mask.mean() for mask in kept]))
    return {"encoding": chosen, "share": table[chosen]["both"], "zeros": zeros, "shares": table}


def encoded_bytes(
    values: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    encoding: str,
    kept: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] | None = None,
) -> int:
    """Return the bytes of all chunks of a tensor."""
    flat, flat_kept = values.ravel(), None if kept is None else kept.ravel()
    at, size = 0, 0
    for count in chunk_sizes(values.shape, values.itemsize):
        rows = slice(at, at + count)
        buffers = encode(flat[rows], encoding, kept=None if flat_kept is None else flat_kept[rows])
        size += sum(memoryview(buffer).nbytes for buffer in buffers)
        at += count
    assert at == flat.size
    return size
