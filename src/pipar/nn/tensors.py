"""Tensors and states to message bodies and back."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from pipar.errors import ProtocolError
from pipar.protocol.messages import DTYPES, Body, Message, tensor_bytes

TORCH_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
#: What safetensors calls them; in a file those of the last ones come first, so that all lie where they can be used.
_SAFETENSORS = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
}
_PLACES = {dtype: (place, name) for place, (name, dtype) in enumerate(_SAFETENSORS.items())}


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
    """Return a model's tensors as the bytes of a safetensors file: a header, and the memory that they lie in.

    Only what does not lie in one piece is copied. So nobody may change a tensor until its bytes have been read.
    """
    header, views, at = {}, [], 0
    for name, tensor in sorted(state.items(), key=lambda named: (-_PLACES[named[1].dtype][0], named[0])):
        offsets = [at, at + tensor.nbytes]
        header[name] = {"dtype": _PLACES[tensor.dtype][1], "shape": list(tensor.shape), "data_offsets": offsets}
        views.append(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        at += tensor.nbytes
    written = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    written += b" " * (-len(written) % 8)
    return Body.of(struct.pack("<Q", len(written)) + written, *views, encoding="safetensors")


def read_state(body: Body) -> dict[str, torch.Tensor]:
    """Return the tensors that safetensors bytes hold: views of them, if they are one buffer that may be written to."""
    view = body.contiguous()
    try:
        return dict(_tensors(memoryview(bytearray(view)) if view.readonly else view))
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):  # its header may say anything at all
        raise ProtocolError("The peer sent a model that is not valid safetensors.") from None


def _tensors(view: memoryview) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what the header says is in the bytes, if that is all of them, each once."""
    (length,) = struct.unpack_from("<Q", view) if view.nbytes >= 8 else (view.nbytes,)
    data = view[8 + length :]
    header: Any = json.loads(bytes(view[8 : 8 + length]))
    if not isinstance(header, dict):
        raise TypeError(header)
    header.pop("__metadata__", None)
    end = 0
    for name, entry in sorted(header.items(), key=lambda named: named[1]["data_offsets"]):
        dtype, shape, (start, stop) = _SAFETENSORS[entry["dtype"]], entry["shape"], entry["data_offsets"]
        are_counts = type(shape) is list and all(type(one) is int and one >= 0 for one in (*shape, start, stop))
        if not are_counts or start != end or stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(name)
        yield name, _tensor(data[start:stop], dtype, shape)
        end = stop
    if end != data.nbytes or 8 + length > view.nbytes:
        raise ValueError(end)


def _tensor(view: memoryview, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if not view.nbytes:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(view, dtype=dtype).reshape(shape)
    return tensor if tensor.data_ptr() % dtype.itemsize == 0 else tensor.clone()
