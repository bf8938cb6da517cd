"""Questions about recorded operations: which read a sample, write a buffer, use a weight, or belong to a module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

SIZE = torch.ops.aten.sym_size.int
#: A block of operations, with gradients or without.
_BLOCK = "wrap_with_set_grad_enabled"
_DETACHING = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)


def arguments(node: fx.Node) -> Iterable[fx.Node]:
    return () if node.target is SIZE else node.all_input_nodes


def reading_input(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Return the values that depend on samples; the number of samples in a batch does not count.

    Random values count, too: the other side of a cut would draw others.
    """
    found: set[fx.Node] = set()
    for node in nodes:
        is_drawn = node.op == "call_function" and _is_random(module, node)
        if node.op == "placeholder" or is_drawn or any(value in found for value in arguments(node)):
            found.add(node)
    return frozenset(found)


def _is_random(module: fx.GraphModule, call: fx.Node) -> bool:
    """Return True if a call draws random numbers, also inside a block such as torch.no_grad."""
    if torch.Tag.nondeterministic_seeded in getattr(call.target, "tags", ()):
        return True
    inside = ((block, one) for block, _ in _blocks(module, call) for one in block.graph.nodes)
    return any(one.op == "call_function" and _is_random(block, one) for block, one in inside)


def in_order(nodes: Iterable[fx.Node], reads_input: frozenset[fx.Node]) -> list[fx.Node]:
    """Return the calls in their order, but each one that reads no input right before the first that needs it."""
    calls = [node for node in nodes if node.op == "call_function"]
    order: dict[fx.Node, None] = {}

    def place(call: fx.Node) -> None:
        if call.op == "call_function" and call not in order:
            for value in call.all_input_nodes:
                place(value)
            order[call] = None

    for call in calls:
        if call in reads_input or not call.users:
            place(call)
    for call in calls:
        place(call)
    return list(order)


def written_buffers(module: fx.GraphModule, calls: Iterable[fx.Node]) -> Iterable[str]:
    for value in _written(module, calls):
        if value.op == "get_attr":
            yield str(value.target)


def _written(module: fx.GraphModule, calls: Iterable[fx.Node]) -> Iterable[fx.Node]:
    """Return the values that calls write to, also inside a block such as torch.no_grad, which is a graph of its own."""
    for call in calls:
        schema = getattr(call.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            pairs = zip(call.args, schema.arguments, strict=False)
            given = [value for value, one in pairs if one.alias_info is not None and one.alias_info.is_write]
            given += [
                call.kwargs[one.name]
                for one in schema.arguments
                if one.name in call.kwargs and one.alias_info is not None and one.alias_info.is_write
            ]
            yield from (value for value in given if isinstance(value, fx.Node))
        for block, operands in _blocks(module, call):
            inside = list(block.graph.nodes)
            names = [node for node in inside if node.op == "placeholder"]
            written = set(_written(block, [node for node in inside if node.op == "call_function"]))
            yield from (value for name, value in zip(names, operands, strict=False) if name in written)


def _blocks(module: fx.GraphModule, call: fx.Node) -> Iterable[tuple[fx.GraphModule, Sequence[fx.Node]]]:
    """Return the graphs that a call runs, such as those of a block of torch.no_grad, with what they are given."""
    for place, value in enumerate(call.args):
        if isinstance(value, fx.Node) and value.op == "get_attr":
            block = attribute(module, str(value.target))
            if isinstance(block, fx.GraphModule):
                yield block, [one for one in call.args[place + 1 :] if isinstance(one, fx.Node)]


def is_detaching(node: fx.Node) -> bool:
    """Return True if the results of a call have no gradient: it detaches, or is a block of torch.no_grad."""
    is_block = str(node.target) == _BLOCK
    return node.target in _DETACHING or (is_block and node.args[0] is False)


def attribute(module: nn.Module, name: str) -> Any:
    """Return a weight, a buffer, a constant or a block of operations by its dotted name."""
    owner, _, key = name.rpartition(".")
    return getattr(module.get_submodule(owner), key)


def uses(module: fx.GraphModule, calls: Sequence[fx.Node]) -> dict[str, list[int]]:
    """Return the calls that use each weight or buffer; two names of one tensor have the uses of both."""
    by_tensor: dict[object, list[int]] = {}
    names: dict[str, object] = {}
    for number, call in enumerate(calls):
        for value in call.all_input_nodes:
            for name, tensor in _tensors_of(module, value):
                names[name] = memory_of(tensor)
                by_tensor.setdefault(names[name], []).append(number)
    return {name: by_tensor[identity] for name, identity in names.items()}


def memory_of(tensor: Tensor) -> tuple[str, int]:
    """Return what two tensors have in common if they are one, or share their memory: training one changes both."""
    return ("memory", tensor.data_ptr()) if tensor.numel() else ("empty", id(tensor))


def _tensors_of(module: fx.GraphModule, value: fx.Node) -> Iterable[tuple[str, Tensor]]:
    """Return the weight or buffer that a value is, or those of a block that it is."""
    if value.op != "get_attr":
        return
    found, name = attribute(module, str(value.target)), str(value.target)
    if isinstance(found, Tensor):
        yield name, found
    elif isinstance(found, nn.Module):
        yield from found.named_parameters(name)
        yield from found.named_buffers(name)


def module_of(call: fx.Node) -> str:
    paths = [str(path) for path, _ in (call.meta.get("nn_module_stack") or {}).values()]
    # torch.export puts a name of its own on top of what it adds.
    return next((path for path in reversed(paths) if not path.startswith("_empty_nn_module")), "")


def operation(call: fx.Node) -> str:
    """Return the name of an operation as PyTorch's users know it."""
    name = str(getattr(call.target, "__name__", call.target)).partition(".")[0].rstrip("_")
    return "no_grad" if name == _BLOCK and call.args[0] is False else name


def shape_text(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "()"
