"""Tensors and states to message bodies and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import safetensors
import safetensors.torch
import torch

from pipar.errors import ProtocolError
from pipar.protocol.messages import DTYPES, Body, Message, tensor_bytes

TORCH_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def tensor_body(tensor: torch.Tensor, labels: torch.Tensor | None = None) -> Body:
    """Return a body over the tensor's own memory, with its labels as int32 behind it."""
    values = tensor.detach().contiguous()
    dtype = _DTYPE_NAMES[values.dtype]
    assert dtype in DTYPES
    buffers = [values.numpy().data.cast("B")]
    if labels is not None:
        buffers.append(labels.to(torch.int32).numpy().data.cast("B"))
    return Body.of(*buffers, dtype=dtype, shape=tuple(values.shape))


def read_tensor(message: Message) -> torch.Tensor:
    """Return the tensor of a message as memory of its own: the one copy on the way in."""
    size = tensor_bytes(message)
    values = np.frombuffer(message.body.contiguous()[:size], dtype=message.body.dtype)
    return torch.from_numpy(values.reshape(message.body.shape).copy())


def check_finite(tensors: Iterable[torch.Tensor], of: str) -> None:
    """Raise if a value is infinite or no number at all: one of them, averaged, would be everybody's."""
    for tensor in tensors:
        if tensor.is_floating_point() and not _is_finite(tensor):
            raise ProtocolError(
                f"{of} has values that are infinite or not a number. Unless the device is broken, the training has "
                "diverged: a smaller optimizer.learning_rate may help."
            )


def _is_finite(tensor: torch.Tensor) -> bool:
    # What is not finite stays in a sum, and a sum needs no memory. That of huge values may overflow: look at each.
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def read_labels(message: Message, classes: int) -> torch.Tensor:
    """Return the labels behind a message's tensor, each of them a class that the network has."""
    size = tensor_bytes(message)
    labels = torch.from_numpy(np.frombuffer(message.body.contiguous()[size:], dtype="int32").astype("int64"))
    if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise ProtocolError(f"{message} carries a label outside 0..{classes - 1}.")
    return labels


def state_body(state: Mapping[str, torch.Tensor]) -> Body:
    """Return a model's tensors as safetensors bytes."""
    tensors: dict[str, torch.Tensor] = {}
    taken: set[int] = set()
    for name, tensor in state.items():
        # safetensors refuses tensors that share memory, as tied weights do.
        shared = tensor.untyped_storage().data_ptr() in taken
        laid_out = tensor.detach().contiguous()
        tensors[name] = laid_out.clone() if shared else laid_out
        taken.add(tensor.untyped_storage().data_ptr())
    return Body.of(safetensors.torch.save(tensors), encoding="safetensors")


def whole_bytes(body: Body) -> bytes:
    """Return all of a body as bytes, without a copy where they are such already: a large model is large."""
    view = body.contiguous()
    is_all = isinstance(view.obj, bytes) and len(view.obj) == view.nbytes
    return view.obj if is_all and isinstance(view.obj, bytes) else bytes(view)


def read_state(body: Body) -> dict[str, torch.Tensor]:
    """Return the tensors that safetensors bytes hold."""
    try:
        return safetensors.torch.load(whole_bytes(body))
    except (safetensors.SafetensorError, ValueError, KeyError):
        raise ProtocolError("The peer sent a model that is not valid safetensors.") from None
