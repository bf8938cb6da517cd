"""Tensors and model states as message bodies, and back; the errors that lossy encodings make."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from pipar.errors import ProtocolError
from pipar.execution.work import Place
from pipar.json_records import parse_json
from pipar.tensors.torch_device import to_host
from pipar.wire import bitpacking
from pipar.wire.encodings import LOSSY, chunk_sizes, row_values
from pipar.wire.lossy import Lossy, Residual
from pipar.wire.messages import DTYPES, Body, Chunks, Message, Payload, tensor_bytes
from pipar.wire.model_changes import decode_changes, encode_changes
from pipar.wire.tensor_codec import decode, encode

TORCH_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
#: The names of dtypes in safetensors. A file has the last ones first, so that all tensors are aligned for use.
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
#: Those that numpy has too.
_DTYPES_OF_NUMPY = set(_SAFETENSORS.values()) - {torch.bfloat16}
_PLACES = {dtype: (place, name) for place, (name, dtype) in enumerate(_SAFETENSORS.items())}
#: The largest norm of a peer's tensor: its square is finite in float32, as batch statistics and optimisers need it.
LARGEST_NORM = 1e18
#: Returns the random generator of a place.
Generators = Callable[..., np.random.Generator]


def tensor_body(
    tensor: torch.Tensor,
    targets: Sequence[memoryview] = (),
    *,
    encoding: str = "raw",
    kept: torch.Tensor | None = None,
    lossy: Lossy | None = None,
) -> Body:
    """Return a body with the tensor and, after it, its targets; raw values stay in the tensor's own memory.

    An encoded body has its first chunk; the others are encoded on demand. `kept` marks the values that the receiver
    expects: only those are sent.
    """
    values = to_host(tensor).contiguous().numpy()
    dtype = _DTYPE_NAMES[tensor.dtype]
    assert dtype in DTYPES
    trailing = list(targets)
    if encoding == "raw":
        return Body.of(values.data.cast("B"), *trailing, dtype=dtype, shape=values.shape)
    encode = _Encode(values.reshape(-1), encoding, row_values(values.shape), trailing, kept, lossy)
    sizes = chunk_sizes(values.shape, values.itemsize)
    if lossy is not None:
        lossy.begin()
    chunks = Chunks(len(sizes), partial(encode.chunk, [0, *accumulate(sizes)]))
    chunks.add(chunks.encode_next())
    size = values.nbytes + sum(view.nbytes for view in trailing)
    return Body(size, dtype=dtype, shape=values.shape, encoding=encoding, chunks=chunks)


@dataclass(frozen=True)
class _Encode:
    values: np.ndarray[Any, Any]
    encoding: str
    row: int
    trailing: list[memoryview]
    kept: torch.Tensor | None
    lossy: Lossy | None

    def chunk(self, bounds: list[int], number: int) -> Payload:
        part = slice(bounds[number], bounds[number + 1])
        kept = None if self.kept is None else self.kept.numpy().reshape(-1)[part]
        buffers = encode(self.values[part], self.encoding, kept=kept, row=self.row, lossy=self.lossy)
        return Payload.of(*buffers, *(self.trailing if number == len(bounds) - 2 else []))


def read_tensor(message: Message, encoding: str = "raw", kept: torch.Tensor | None = None) -> torch.Tensor:
    """Return the tensor of a message in its own memory: the only copy on the way in.

    Raise ProtocolError unless it has the agreed encoding. `kept` marks the values that the sender has sent.
    """
    body = message.body
    size = tensor_bytes(message)
    if body.encoding != encoding:
        raise ProtocolError(f"{message} is encoded as {body.encoding}, not as {encoding}.")
    if kept is not None and tuple(kept.shape) != body.shape:
        raise ProtocolError(f"{message} has the shape {body.shape}, but its activations have {tuple(kept.shape)}.")
    if encoding != "raw":
        return torch.from_numpy(_decoded(body, body.size_bytes - size, kept))
    out = np.empty(body.shape, dtype=body.dtype)
    _gather(body.buffers, out.reshape(-1).view(np.uint8)[:size])
    return torch.from_numpy(out)


def _decoded(body: Body, trailing: int, kept: torch.Tensor | None) -> np.ndarray[Any, Any]:
    """Return the values of an encoded tensor; `trailing` other bytes follow its last chunk.

    Memory for the whole tensor is allocated only after its first chunk was decoded: a few bytes may announce any size.
    """
    keeps, row = None if kept is None else kept.numpy().reshape(-1), row_values(body.shape)
    sizes = chunk_sizes(body.shape, np.dtype(body.dtype).itemsize)
    *payloads, last = body.buffers
    payloads.append(last[: last.nbytes - trailing])
    flat = np.empty(sizes[0], body.dtype)
    start = 0
    for values, payload in zip(sizes, payloads, strict=True):
        if start == sizes[0]:
            first, flat = flat, np.empty(sum(sizes), body.dtype)
            flat[:start] = first
        part = slice(start, start + values)
        decode(payload, body.encoding, flat[part], kept=None if keeps is None else keeps[part], row=row)
        start += values
    return flat.reshape(body.shape)


def not_zero(tensor: torch.Tensor) -> torch.Tensor:
    """Return on the CPU where a tensor is not a positive zero, compared by bits as in the sparse encodings."""
    return torch.from_numpy(bitpacking.not_zero(to_host(tensor).contiguous().numpy()))


def _gather(buffers: tuple[memoryview, ...], out: np.ndarray[Any, Any]) -> None:
    """Copy the first bytes of the concatenated buffers into `out`."""
    start = 0
    for buffer in buffers:
        part = buffer[: out.size - start]
        out[start : start + part.nbytes] = np.frombuffer(part, np.uint8)
        start += part.nbytes


#: What to do about values that a training cannot continue with.
DIVERGED = "Unless the device is faulty, the training has diverged: a smaller optimizer.learning_rate may help."


def check_finite(tensors: Iterable[torch.Tensor], of: str, advice: str = DIVERGED) -> None:
    """Raise if a value is infinite or NaN: averaging would spread it to all devices."""
    for tensor in tensors:
        if tensor.is_floating_point() and not _is_finite(tensor):
            raise ProtocolError(f"{of} has values that are infinite or not a number. {advice}")


def check_range(tensors: Iterable[torch.Tensor], of: str, advice: str = DIVERGED) -> None:
    """Raise if a peer's value is infinite, NaN or so large that computing with it would overflow."""
    for tensor in tensors:
        if tensor.is_floating_point() and not torch.linalg.vector_norm(tensor).item() <= LARGEST_NORM:
            check_finite([tensor], of, advice)
            raise ProtocolError(f"{of} has values that are too large: their norm exceeds {LARGEST_NORM:g}. {advice}")


def unmasked(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the values that masks have: infinite ones, and the lowest of its dtype."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.masked_fill(tensor.isinf() | (tensor == torch.finfo(tensor.dtype).min), 0.0)


def _is_finite(tensor: torch.Tensor) -> bool:
    # A sum needs no memory and is finite only if all values are. A sum of huge values may overflow: then check each.
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def last_bytes(buffers: tuple[memoryview, ...], size: int) -> bytes:
    """Return the last `size` bytes of the concatenated buffers."""
    parts: list[memoryview] = []
    for buffer in reversed(buffers):
        if size:
            parts.append(buffer[max(0, buffer.nbytes - size) :])
            size -= parts[-1].nbytes
    return b"".join(reversed(parts))


class EncodingErrors:
    """The errors of a lossy encoding of one part's tensors, and the residuals that carry them over.

    Devices are kept apart: where they share a server-side model, no device may receive another one's residual.
    """

    def __init__(self, rounding: Generators | None) -> None:
        self._rounding = rounding
        # By the part of a place after its micro-batch, which is the device, and the tensor's number at the cut.
        self._lossy: dict[tuple[Place, int], Lossy] = {}

    def of(self, tensor: torch.Tensor, encoding: str, place: Place, number: int = 0) -> Lossy | None:
        """Return the residual and random numbers for encoding this tensor; None if the encoding is exact."""
        if encoding not in LOSSY:
            return None
        key = (place[3:], number)
        if key not in self._lossy:
            self._lossy[key] = Lossy(residual=Residual(tensor[0].numel()))
        lossy = self._lossy[key]
        drawn = (*place, number) if number else place
        lossy.rng = None if self._rounding is None else self._rounding(*drawn)
        return lossy

    def take(self) -> tuple[float, float] | None:
        """Return the sums of squared errors and of squared values since the last call; None if all were exact."""
        if not self._lossy:
            return None
        every = self._lossy.values()
        sums = (sum(one.squared_error for one in every), sum(one.squared_norm for one in every))
        for one in every:
            one.squared_error = one.squared_norm = 0.0
        return sums

    def keep_only(self, devices: Collection[str]) -> None:
        """Drop the residuals of all other devices."""
        for key in [key for key in self._lossy if not set(key[0]) <= set(devices)]:
            del self._lossy[key]


# --- model states


def state_body(state: Mapping[str, torch.Tensor]) -> Body:
    """Return a model's tensors as the bytes of a safetensors file: a header and views of the tensors' memory.

    Only tensors that are not contiguous are copied. So no tensor may be modified until its bytes have been read.
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


def changes_body(state: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor]) -> Body:
    """Return a model's tensors as changes relative to `base`, which the receiver has; whole if that is shorter."""
    whole = state_body(state)
    outlines = [{name: (one.dtype, one.shape) for name, one in tensors.items()} for tensors in (state, base)]
    if outlines[0] != outlines[1] or not {tensor.dtype for tensor in state.values()} <= _DTYPES_OF_NUMPY:
        return whole
    coded = Body.of(*encode_changes(arrays(state), arrays(base)), encoding="changes")
    return coded if coded.size_bytes < whole.size_bytes else whole


def arrays(state: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors as numpy arrays that share their memory."""
    return {name: tensor.detach().numpy() for name, tensor in state.items()}


def read_state(body: Body, base: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors body, as views if it is one writable buffer.

    A body of changes is applied to `base`.
    """
    view = body.contiguous()
    if body.encoding == "changes":
        if base is None or not {tensor.dtype for tensor in base.values()} <= _DTYPES_OF_NUMPY:
            raise ProtocolError("The peer sent the changes of a model that this side does not have.")
        return {name: torch.from_numpy(array) for name, array in decode_changes(view, arrays(base)).items()}
    try:
        return dict(_tensors(memoryview(bytearray(view)) if view.readonly else view))
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):  # a peer's header may contain anything
        raise ProtocolError("The peer sent a model that is not valid safetensors.") from None


def _tensors(view: memoryview) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that the header lists; raise unless they cover all bytes, each byte once."""
    (length,) = struct.unpack_from("<Q", view) if view.nbytes >= 8 else (view.nbytes,)
    data = view[8 + length :]
    header: Any = parse_json(bytes(view[8 : 8 + length]))
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


def weights_sha256(state: Mapping[str, torch.Tensor]) -> str:
    """Return a hash over the tensors in name order: equal hashes mean equal weights, bit for bit."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).numpy().data.cast("B"))
    return digest.hexdigest()
