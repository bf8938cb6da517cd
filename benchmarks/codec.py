"""How fast the values at the cut are encoded: VGG-5 on real CIFAR-10 images, 328 KB at a time, one core.

The compression is measured by `exact_wire`. Needs the dataset (PIPAR_DATA).
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.exact_wire import Crossing, crossings, train
from benchmarks.record import Claim
from pipar.job.workload import Workload
from pipar.nn.runtime import one_thread
from pipar.settings.config_file import load_config
from pipar.wire.bitpacking import not_zero
from pipar.wire.encodings import EXACT, chunk_sizes, is_sparse
from pipar.wire.tensor_codec import decode, encode

_IMAGES = 1000
_EPOCHS = 3
_ROUNDS = 60
_LEAST_RATE_MB_S = 300

Values = NDArray[np.float32]
Mask = NDArray[np.bool_]


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:  # noqa: ARG001
    with one_thread():
        crossing = _trained_crossing()
        claims = [claim for encoding in EXACT if encoding != "raw" for claim in _claims(crossing, encoding)]
    return claims, {"images": _IMAGES, "epochs": _EPOCHS, "rounds": _ROUNDS}


def _trained_crossing() -> Crossing:
    """Return the tensors at the cut after VGG-5's first layer for one micro-batch, after a little training."""
    workload = Workload(
        load_config(None, ["data.name=cifar10", f"data.samples_per_device={_IMAGES}", "devices.count=1"])
    )
    shard, model = workload.samples.keep_only_shard(workload.names[0]), workload.build_model().train()
    for epoch in range(1, _EPOCHS + 1):
        train(model, workload.optimizer(), shard, epoch)
    return next(crossings(model, shard, _EPOCHS + 1, split_point=1))


def _claims(crossing: Crossing, encoding: str) -> list[Claim]:
    """Return how many bytes of raw values a core encodes and decodes per second, in each direction."""
    known = not_zero(crossing.activation.ravel()) if is_sparse(encoding) else None
    claims = []
    for what, tensor, kept in (("activations", crossing.activation, None), ("gradients", crossing.gradient, known)):
        for way, seconds in zip(("encode", "decode"), _seconds(tensor, encoding, kept), strict=True):
            name = f"{way} {what}, {encoding}, {tensor.nbytes} bytes"
            claims.append(Claim(name, tensor.nbytes / seconds / 1e6, "MB/s", least=_LEAST_RATE_MB_S))
    return claims


def _seconds(tensor: Values, encoding: str, kept: Mask | None) -> tuple[float, float]:
    """Return the median CPU seconds of encoding and of decoding a tensor."""
    out = np.empty_like(tensor)
    values, places = _chunks(tensor, tensor), _chunks(tensor, out)
    masks: list[Mask | None] = [None] * len(values) if kept is None else list(_chunks(tensor, kept))
    encoding_s, decoding_s = [], []
    for _ in range(_ROUNDS):
        start = time.thread_time()
        coded = [encode(chunk, encoding, kept=mask) for chunk, mask in zip(values, masks, strict=True)]
        encoding_s.append(time.thread_time() - start)
        payloads = [memoryview(b"".join(buffers)) for buffers in coded]
        start = time.thread_time()
        for payload, chunk, mask in zip(payloads, places, masks, strict=True):
            decode(payload, encoding, chunk, kept=mask)
        decoding_s.append(time.thread_time() - start)
    wanted = tensor.ravel() if kept is None else np.where(kept, tensor.ravel(), np.float32(0))
    assert out.tobytes() == wanted.tobytes()
    return statistics.median(encoding_s), statistics.median(decoding_s)


def _chunks(tensor: Values, values: NDArray[Any]) -> list[NDArray[Any]]:
    """Return the values in chunks of the tensor's chunk sizes."""
    return np.split(values.ravel(), np.cumsum(chunk_sizes(tensor.shape, tensor.itemsize))[:-1])
