"""What coding the values at the cut saves and costs: real images and gradients, 10 samples at a time, one core."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from benchmarks.record import Claim
from pipar.coding.chunks import chunk_sizes, row_values
from pipar.coding.codec import decode, encode
from pipar.coding.encodings import EXACT
from pipar.data.datasets import load_dataset
from pipar.nn.models import build_model
from pipar.nn.runtime import one_thread
from pipar.nn.split import split_model

_IMAGES, _BATCH, _MICRO_BATCH = 100, 20, 10
_EPOCHS = (1, 10)  # training changes how many values are zero, and how large gradients are
_ROUNDS = 60
_LEAST_RATE_MB_S = 300
# Of the bytes of float32, up and down together, behind the first layer.
_MOST_SHARE = {"vgg5": 0.62, "vgg16": 0.48, "resnet18": 0.72, "mobilenetv3_small": 0.92}
_DENSE = ("mobilenetv3_small",)  # hard-swish has no exact zeros


@dataclass(frozen=True)
class Crossing:
    """What crosses the cut for one micro-batch."""

    activation: NDArray[np.float32]
    gradient: NDArray[np.float32]


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:  # noqa: ARG001
    claims: list[Claim] = []
    details: dict[str, object] = {"images": _IMAGES, "batch_size": _BATCH, "micro_batch": _MICRO_BATCH}
    with one_thread():
        for network, most in _MOST_SHARE.items():
            for epoch, crossings in _training(network):
                shares = [_shares(crossing, sparse=network not in _DENSE) for crossing in crossings]
                up, down = (statistics.mean(share[way] for share in shares) for way in (0, 1))
                details[f"{network} after {epoch} epochs"] = {"share_up": up, "share_down": down}
                what = f"bytes up and down / raw, {network} P=1 on cifar10 after epoch {epoch}"
                claims.append(Claim(what, (up + down) / 2, "", most=most))
                if network == "vgg5" and epoch == _EPOCHS[-1]:
                    claims += _speed_claims(crossings[0].activation)
    return claims, details


def _training(network: str) -> Iterator[tuple[int, list[Crossing]]]:
    """Train on a few images of CIFAR-10, and yield what crosses the cut behind the first layer after some epochs."""
    images = load_dataset("cifar10", train_samples=_IMAGES, validation=0, test=0).train
    model = build_model(network, input_shape=(3, 32, 32), classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(1, _EPOCHS[-1] + 1):
        for inputs, labels in images.batches(_BATCH, torch.float32):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if epoch in _EPOCHS:
            pieces = list(images.batches(_MICRO_BATCH, torch.float32))[:5]
            yield epoch, [_crossing(model, inputs, labels) for inputs, labels in pieces]


def _crossing(model: nn.Sequential, inputs: torch.Tensor, labels: torch.Tensor) -> Crossing:
    device, server = split_model(model, 1)
    activation = device(inputs).detach().requires_grad_()
    (F.cross_entropy(server(activation), labels, reduction="sum") / _BATCH).backward()
    assert activation.grad is not None
    return Crossing(activation.detach().numpy(), activation.grad.numpy())


def _shares(crossing: Crossing, *, sparse: bool) -> tuple[float, float]:
    """Return which share of their bytes activations and gradients need; behind a ReLU the server knows what is kept."""
    if not sparse:
        return _share(crossing.activation, "planes"), _share(crossing.gradient, "planes")
    kept = crossing.activation.view(np.uint32) != 0
    return _share(crossing.activation, "sparse-planes"), _share(crossing.gradient, "sparse-planes", kept)


def _share(tensor: NDArray[np.float32], encoding: str, kept: NDArray[np.bool_] | None = None) -> float:
    masks = [None] * len(_chunks(tensor)) if kept is None else _chunks(tensor, kept)
    payloads = [
        b"".join(encode(chunk, encoding, kept=mask)) for chunk, mask in zip(_chunks(tensor), masks, strict=True)
    ]
    return sum(map(len, payloads)) / tensor.nbytes


def _chunks(tensor: NDArray[Any], values: NDArray[Any] | None = None) -> list[NDArray[Any]]:
    """Return the values (the tensor's own, or as many others) in the tensor's chunks."""
    flat = (tensor if values is None else values).ravel()
    return np.split(flat, np.cumsum(chunk_sizes(tensor.shape, tensor.itemsize))[:-1])


def _speed_claims(activation: NDArray[np.float32]) -> list[Claim]:
    """Return how many bytes of uncoded values a core codes and decodes in a second; `planes` without zeros, too."""
    dense = activation - np.float32(0.1)
    given = [(f"{encoding}, ReLU", activation, encoding) for encoding in EXACT if encoding != "raw"]
    given.append(("planes, no zeros", dense, "planes"))
    claims = []
    for what, tensor, encoding in given:
        for way, seconds in zip(("encode", "decode"), _seconds(tensor, encoding), strict=True):
            name = f"{way} {what}, {tensor.nbytes} bytes"
            claims.append(Claim(name, tensor.nbytes / seconds / 1e6, "MB/s", least=_LEAST_RATE_MB_S))
    return claims


def _seconds(tensor: NDArray[np.float32], encoding: str) -> tuple[float, float]:
    """Return the median seconds of this thread for coding and for decoding a tensor."""
    out, row = np.empty_like(tensor).ravel(), row_values(tensor.shape)
    encoding_s, decoding_s = [], []
    for _ in range(_ROUNDS):
        start = time.thread_time()
        coded = [encode(chunk, encoding, row=row) for chunk in _chunks(tensor)]
        encoding_s.append(time.thread_time() - start)
        payloads = [b"".join(buffers) for buffers in coded]
        start = time.thread_time()
        for payload, chunk in zip(payloads, _chunks(tensor, out), strict=True):
            decode(memoryview(payload), encoding, chunk, row=row)
        decoding_s.append(time.thread_time() - start)
        assert out.tobytes() == tensor.tobytes()
    return statistics.median(encoding_s), statistics.median(decoding_s)
