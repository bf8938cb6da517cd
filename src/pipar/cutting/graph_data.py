"""Recorded operations as plain data that JSON can hold, and back; without pickle.

Only torch's own operators on tensors and a few functions of Python can be named, so that a file cannot make anything
else run. torch.fx writes names into the source that it compiles: none that is more than a name is accepted.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

_FUNCTIONS = {
    f"operator.{name}": getattr(operator, name)
    for name in (
        "getitem",
        "add",
        "sub",
        "mul",
        "floordiv",
        "truediv",
        "mod",
        "neg",
        "pow",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
    )
} | {f"torch.{name}": getattr(torch, name) for name in ("sym_max", "sym_min", "sym_int", "sym_float", "sym_not")}
_NAMES = {function: name for name, function in _FUNCTIONS.items()}
#: Operators that run a graph of their own, as for torch.no_grad.
_BLOCKS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
#: Operators that take no tensor. Others without one, such as aten.from_file, do more than compute.
_FACTORIES = frozenset(
    [
        "arange",
        "bartlett_window",
        "blackman_window",
        "empty",
        "empty_permuted",
        "empty_strided",
        "eye",
        "full",
        "hamming_window",
        "hann_window",
        "kaiser_window",
        "linspace",
        "logspace",
        "normal",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "range",
        "scalar_tensor",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
        "tril_indices",
        "triu_indices",
        "zeros",
    ]
)
_PATH = re.compile(r"[\w-]+(\.[\w-]+)*", re.ASCII)  # of a weight
_PLAIN = (bool, int, float, str, type(None))
#: Kinds of arguments that are attributes of torch: torch.float32, torch.strided, torch.channels_last.
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)


class NotPlainError(ValueError):
    """Operations have an argument or a target that is not stored; or stored data has one that is not known."""


def graph_to_data(graph: fx.Graph) -> list[dict[str, Any]]:
    """Return the operations as plain data; raise NotPlainError if one cannot be stored."""
    return [
        {
            "op": node.op,
            "name": node.name,
            "target": _target_name(node),
            "args": _plain(node.args),
            "kwargs": _plain(node.kwargs),
        }
        for node in graph.nodes
    ]


def graph_from_data(data: list[dict[str, Any]]) -> fx.Graph:
    """Return the operations of plain data; raise NotPlainError if they name anything else than known operators."""
    graph, known = fx.Graph(), dict[str, fx.Node]()
    for one in data:
        args, kwargs = _restored(one["args"], known), _restored(one["kwargs"], known)
        if one["op"] not in ("placeholder", "get_attr", "call_function", "output"):
            raise NotPlainError(f"{one['op']} is not an operation of a recording")
        target = _operator(one["target"]) if one["op"] == "call_function" else _name(one["op"], one["target"])
        known[one["name"]] = graph.create_node(one["op"], target, args, kwargs, _identifier(one["name"]))
    return graph


def attributes_of(data: list[dict[str, Any]]) -> set[str]:
    """Return the names of the weights, buffers and constants that operations read."""
    return {one["target"] for one in data if one["op"] == "get_attr"}


def tensor_to_data(tensor: Tensor) -> dict[str, Any]:
    """Return a constant as plain data."""
    flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    name = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": name, "shape": list(tensor.shape), "bytes": flat.numpy().tobytes().hex()}


def tensor_from_data(data: Mapping[str, Any]) -> Tensor:
    """Return a constant of plain data."""
    dtype = getattr(torch, data["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise NotPlainError(f"{dtype} is not a dtype")
    content = bytearray.fromhex(data["bytes"])
    if not content:
        return torch.empty(data["shape"], dtype=dtype)
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(data["shape"])


def _target_name(node: fx.Node) -> str:
    target = node.target
    if node.op != "call_function":
        return str(target)
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        return str(target)
    if target in _NAMES:
        return _NAMES[target]
    if isinstance(target, torch._ops.HigherOrderOperator) and str(target) in _BLOCKS:
        return f"block.{target}"
    raise NotPlainError(f"{target} is not an operator that is stored")


def _operator(name: str) -> Any:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    parts = name.split(".")
    if parts[0] == "block" and parts[-1] in _BLOCKS:
        from torch._higher_order_ops import wrap  # imports torch's compiler

        return getattr(wrap, parts[-1])
    if len(parts) != 3 or parts[0] != "aten":
        raise NotPlainError(f"{name} is not an operator that is stored")
    found = getattr(getattr(torch.ops.aten, parts[1], None), parts[2], None)
    if not isinstance(found, torch._ops.OpOverload):
        raise NotPlainError(f"{name} is not an operator of this torch")
    takes_tensor = any("Tensor" in str(one.type) for one in found._schema.arguments if not one.kwarg_only)
    if not takes_tensor and parts[1] not in _FACTORIES:
        raise NotPlainError(f"{name} is not an operator on tensors")
    return found


def _name(op: str, target: str) -> str:
    """Return what an operation reads: an input, or a weight by its path."""
    if op == "get_attr" and _PATH.fullmatch(target):
        return target
    return _identifier(target)


def _identifier(name: str) -> str:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise NotPlainError(f"{name!r} is not a name of an operation's value")
    return name


def _plain(value: Any) -> Any:
    match value:
        case fx.Node():
            return {"node": value.name}
        case tuple():
            return {"tuple": [_plain(one) for one in value]}
        case list():
            return [_plain(one) for one in value]
        case dict():
            return {"dict": [[key, _plain(one)] for key, one in value.items()]}
        case slice():
            return {"slice": [_plain(one) for one in (value.start, value.stop, value.step)]}
        case torch.device():
            return {"device": str(value)}
    if isinstance(value, _OF_TORCH):
        return {"torch": str(value).removeprefix("torch.")}
    if type(value) in _PLAIN:
        return value
    raise NotPlainError(f"a {type(value).__name__} is not stored")


def _restored(data: Any, known: Mapping[str, fx.Node]) -> Any:
    if isinstance(data, list):
        return [_restored(one, known) for one in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    match kind:
        case "node":
            return known[content]
        case "tuple":
            return tuple(_restored(one, known) for one in content)
        case "dict":
            return {_identifier(key): _restored(one, known) for key, one in content}
        case "slice":
            return slice(*(_restored(one, known) for one in content))
        case "device":
            return torch.device(content)
        case "torch" if isinstance(found := getattr(torch, content, None), _OF_TORCH):
            return found
    raise NotPlainError(f"{kind} {content} is not known")
