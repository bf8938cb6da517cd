"""What one sample is, as the configuration says it: a tensor, several as a list, or several by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: The integers of each dtype, from the lowest to the highest.
_RANGES = {
    "bool": (0, 1),
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
}
_KEYS = ("shape", "dtype", "lowest", "highest")
_HINT = 'write { shape = [64], dtype = "int64", highest = 999 }, a list of such tables, or one for each name'


@dataclass(frozen=True)
class SampleTensor:
    """One tensor of a sample; integers with the range of their values."""

    shape: tuple[int, ...]
    dtype: str | None = None  # None: floating point, in the network's dtype
    lowest: int = 0
    highest: int = 0


#: One tensor, several that the network takes in their order, or several that it takes by name.
SampleTensors = SampleTensor | tuple[SampleTensor, ...] | dict[str, SampleTensor]


def sample_tensors(tree: Any) -> SampleTensors:
    """Return what `data.inputs` says; raise ValueError if it cannot be read."""
    if isinstance(tree, list | tuple) and tree:
        return tuple(_tensor(one, f"tensor {place}") for place, one in enumerate(tree))
    if not isinstance(tree, Mapping) or not tree:
        raise ValueError(f"is not allowed: {_HINT}")
    # A tensor that is called "shape" is a table.
    if "shape" in tree and not isinstance(tree["shape"], Mapping):
        return _tensor(tree, "the tensor")
    return {str(name): _tensor(tree[name], f"'{name}'") for name in sorted(tree)}


def checked_sample_tensors(tree: Any) -> Any:
    """Return `data.inputs` as it is written, if it can be read."""
    if tree is not None:
        sample_tensors(tree)
    return tree


def _tensor(table: Any, which: str) -> SampleTensor:
    if not isinstance(table, Mapping) or not table.keys() <= set(_KEYS):
        raise ValueError(f"is not allowed: {which} is {table!r}; {_HINT}")
    sides, dtype = table.get("shape"), table.get("dtype")
    if not isinstance(sides, list | tuple) or not all(_is_whole(side) and side >= 1 for side in sides):
        raise ValueError(f"is not allowed: the shape of {which} is {sides!r}; write its sides, as in [64]")
    if dtype is None:
        if len(table) > 1:
            raise ValueError(f"is not allowed: {which} has a range but no dtype; those of integers are {_dtypes()}")
        return SampleTensor(tuple(sides))
    if dtype not in _RANGES:
        raise ValueError(
            f"is not allowed: the dtype of {which} is {dtype!r}; allowed are {_dtypes()}, and none for floating-point "
            "numbers"
        )
    return SampleTensor(tuple(sides), dtype, *_range(table, dtype, which))


def _range(table: Mapping[str, Any], dtype: str, which: str) -> tuple[int, int]:
    """Return the lowest and the highest value of integers."""
    least, most = _RANGES[dtype]
    lowest, highest = table.get("lowest", 0), table.get("highest", most if dtype == "bool" else None)
    if highest is None:
        raise ValueError(f"is not allowed: {which} has no highest; give the highest integer that its values may have")
    if not (_is_whole(lowest) and _is_whole(highest) and least <= lowest <= highest <= most):
        raise ValueError(
            f"is not allowed: {which} has values from {lowest!r} to {highest!r}, which is no range of {dtype}"
        )
    return lowest, highest


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _dtypes() -> str:
    return ", ".join(_RANGES)
