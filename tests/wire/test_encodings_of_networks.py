"""Tensors at the cut of a real network shrink, and the device's gradients stay the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from pipar.cutting.split import split_model
from pipar.data.datasets import load_dataset
from pipar.networks.models import build_model
from pipar.wire.encodings import chunk_sizes
from pipar.wire.tensor_codec import decode, encode


def sent(tensor: NDArray[Any], encoding: str, kept: NDArray[np.bool_] | None = None) -> tuple[NDArray[Any], float]:
    """Return a tensor as its receiver gets it, and the share of its bytes that was sent."""
    values, out, start, size = tensor.ravel(), np.empty(tensor.size, tensor.dtype), 0, 0
    for length in chunk_sizes(tensor.shape, tensor.itemsize):
        part = slice(start, start + length)
        known = None if kept is None else kept.ravel()[part]
        payload = b"".join(encode(values[part], encoding, kept=known))
        decode(memoryview(payload), encoding, out[part], kept=known)
        start, size = start + length, size + len(payload)
    return out.reshape(tensor.shape), size / tensor.nbytes


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("network", "encoding", "most"),
    [("vgg5", "sparse-planes", 0.6), ("mobilenetv3_small", "planes", 0.9)],
)
def test_a_micro_batch_shrinks_and_the_devices_gradients_stay_the_same(
    network: str, encoding: str, most: float
) -> None:
    images = load_dataset("digits").train
    inputs, labels = next(images.batches(10, torch.float32))
    device, server = split_model(build_model(network, input_shape=(1, 32, 32), classes=10), 1)
    output = device(inputs)
    activation = output.detach().requires_grad_()
    F.cross_entropy(server(activation), labels).backward()
    assert activation.grad is not None
    plain, gradient = activation.detach().numpy(), activation.grad.numpy()

    received, up = sent(plain, encoding)
    assert received.tobytes() == plain.tobytes()
    kept = plain.view(np.uint32) != 0 if encoding == "sparse-planes" else None
    returned, down = sent(gradient, encoding, kept)
    assert (up + down) / 2 < most

    found = []
    for each in (gradient, returned):
        device.zero_grad()
        output.backward(torch.from_numpy(each), retain_graph=True)
        found.append([weight.grad.numpy().tobytes() for weight in device.parameters() if weight.grad is not None])
    assert found[0] == found[1]
    assert found[0]
    assert (returned.tobytes() == gradient.tobytes()) == (kept is None)  # something was left out
