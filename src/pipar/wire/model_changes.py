"""A model as its exact changes since a model that the receiver has.

Read as integers, the bits of a weight and of the same weight one round earlier are close to each other: the upper bytes
of their difference are mostly zeros, which an entropy coder compresses well. A tensor without changes costs one byte.

Both sides have tensors of the same names, dtypes and shapes, so these are not sent, and the receiver knows the size of
everything that it decodes. The payload has one byte for the form of each tensor, in the order of their names, then the
parts of all tensors. `SAME` has no part; `WHOLE` has the tensor's own bytes; `CHANGED` has the byte planes of its
differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipar.errors import ProtocolError
from pipar.wire.bitpacking import LEAST_SECTION_BYTES, Buffer, Reader, buffer, section, total_bytes

Tensors = Mapping[str, NDArray[Any]]

SAME, WHOLE, CHANGED = range(3)
#: Values whose differences are computed at a time; they fit a core's cache.
_STRETCH = 65_536
_UNSIGNED = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}


def encode_changes(tensors: Tensors, base: Tensors) -> tuple[Buffer, ...]:
    """Return buffers that, joined, encode these tensors for a receiver that has `base`, which has the same shapes."""
    forms = bytearray()
    parts: list[Buffer] = []
    for name in sorted(base):
        form, buffers = _encode_one(tensors[name], base[name])
        forms.append(form)
        parts += buffers
    return bytes(forms), *parts


def decode_changes(payload: memoryview, base: Tensors) -> dict[str, NDArray[Any]]:
    """Return the tensors of a payload; raise ProtocolError if it does not fit `base`."""
    reader = Reader(payload)
    forms = bytes(reader.take(len(base)))
    _check_forms(forms, base, payload.nbytes)
    tensors = {name: _decode_one(reader, form, base[name]) for name, form in zip(sorted(base), forms, strict=True)}
    reader.end()
    return tensors


def _encode_one(tensor: NDArray[Any], before: NDArray[Any]) -> tuple[int, tuple[Buffer, ...]]:
    assert (tensor.dtype, tensor.shape) == (before.dtype, before.shape)
    bits, known = _bits(tensor), _bits(before)
    if np.array_equal(bits, known):
        return SAME, ()
    planes = tuple(
        part
        for at in range(0, bits.size, _STRETCH)
        for part in _planes(_folded(bits[at : at + _STRETCH] - known[at : at + _STRETCH]))
    )
    return (CHANGED, planes) if total_bytes(planes) < bits.nbytes else (WHOLE, buffer(bits))


def _decode_one(reader: Reader, form: int, before: NDArray[Any]) -> NDArray[Any]:
    if form == SAME:
        return before.copy()
    if form == WHOLE:
        return _checked(reader.array(before.size, before.dtype.str).reshape(before.shape))
    known = _bits(before)

    def stretch(at: int) -> NDArray[Any]:
        part = known[at : at + _STRETCH]
        changed: NDArray[Any] = part + _unfolded(_read_planes(reader, part.size, part.dtype))
        return changed

    # Read before memory is allocated for the whole tensor: a few bytes may announce a large one.
    first = stretch(0) if known.size else known
    out = np.empty_like(before, order="C")
    bits = out.reshape(-1).view(known.dtype)
    bits[: first.size] = first
    for at in range(_STRETCH, bits.size, _STRETCH):
        bits[at : at + _STRETCH] = stretch(at)
    return _checked(out)


def _check_forms(forms: bytes, base: Tensors, payload_bytes: int) -> None:
    """Raise if a form is unknown or the payload is too short for the announced parts, before any part is read."""
    least = len(forms)
    for name, form in zip(sorted(base), forms, strict=True):
        if form > CHANGED:
            raise ProtocolError(f"The peer sent a model with a tensor of form {form}, which is unknown.")
        stretches = -(-base[name].size // _STRETCH) * base[name].itemsize
        least += {SAME: 0, WHOLE: base[name].nbytes, CHANGED: stretches * LEAST_SECTION_BYTES}[form]
    if least > payload_bytes:
        raise ProtocolError(
            f"The peer sent a model of {payload_bytes} bytes that ends too early: the parts that it announces need "
            f"at least {least}."
        )


def _checked(tensor: NDArray[Any]) -> NDArray[Any]:
    """Return the tensor; raise if it has booleans other than 0 and 1, whose meaning torch does not define."""
    if tensor.dtype == np.bool_ and tensor.size and tensor.view(np.uint8).max() > 1:
        raise ProtocolError("The peer sent a model with a boolean that is neither 0 nor 1.")
    return tensor


def _bits(tensor: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(tensor).reshape(-1).view(_UNSIGNED[tensor.itemsize])


def _folded(difference: NDArray[Any]) -> NDArray[Any]:
    """Return small unsigned numbers for small differences of either sign: 0, -1, 1, -2 become 0, 1, 2, 3 (zigzag)."""
    top = np.array(difference.itemsize * 8 - 1, difference.dtype)
    one = np.array(1, difference.dtype)
    folded: NDArray[Any] = (difference << one) ^ (np.array(0, difference.dtype) - (difference >> top))
    return folded


def _unfolded(folded: NDArray[Any]) -> NDArray[Any]:
    one = np.array(1, folded.dtype)
    difference: NDArray[Any] = (folded >> one) ^ (np.array(0, folded.dtype) - (folded & one))
    return difference


def _planes(values: NDArray[Any]) -> tuple[Buffer, ...]:
    """Return one section for each byte of the values, the highest first; each is coded if that makes it shorter."""
    columns = values.view(np.uint8).reshape(-1, values.itemsize)
    every = (section(np.ascontiguousarray(columns[:, place])) for place in reversed(range(values.itemsize)))
    return tuple(part for plane in every for part in plane)


def _read_planes(reader: Reader, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    columns = np.empty((count, dtype.itemsize), np.uint8)
    for place in reversed(range(dtype.itemsize)):
        columns[:, place] = reader.section(count)
    return columns.reshape(-1).view(dtype)
