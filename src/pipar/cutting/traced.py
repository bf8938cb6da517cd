"""A network as the operations that torch.export records, and every place where it can be cut between two of them.

The operations are those of a forward in train mode, with a batch of any size. A cut is offered where each value that
crosses it has one row for each sample, and no weight is used on both sides. Values that depend on no sample, no trained
weight and no random number, such as positions, are computed on both sides and do not cross.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from pipar.cutting.consecutive_modules import is_inside, places_after
from pipar.cutting.exporting import recorded
from pipar.cutting.recorded_graph import (
    SIZE,
    arguments,
    attribute,
    in_order,
    is_detaching,
    module_of,
    operation,
    reading_input,
    shape_text,
    uses,
    written_buffers,
)
from pipar.tensors.inputs import Inputs, tensors_of

_RECURRENT = tuple(getattr(torch.ops.aten, name).input for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class CutPoint:
    """A place between two operations: the module before it, what crosses there, and why it cannot be used, if so."""

    after: int  # the operation before it
    module: str
    crossing: tuple[fx.Node, ...] = ()
    reason: str | None = None

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one sample that cross."""
        return sum(value.meta["val"][0].numel() * value.meta["val"].element_size() for value in self.crossing)


@dataclass(frozen=True)
class TracedNetwork:
    """The operations of a network in an order of execution; those that read no input come right before their use."""

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    calls: tuple[fx.Node, ...]
    output: fx.Node
    reads_input: frozenset[fx.Node]
    mutated: frozenset[str]  # names of buffers that a forward changes
    used_at: Mapping[str, Sequence[int]] = field(repr=False)  # the operations that use a weight, under any of its names
    names: tuple[str, ...] = ()  # of the inputs, if they are a dictionary

    @classmethod
    def of(cls, network: nn.Module, example: Inputs) -> TracedNetwork:
        """Return the operations that a batch like this one goes through; raise ModelError if they cannot be known."""
        graph_module = recorded(network, example)
        graph = graph_module.graph
        reads_input = reading_input(graph_module, graph.nodes)
        calls = in_order(graph.nodes, reads_input)
        return cls(
            graph_module,
            tuple(node for node in graph.nodes if node.op == "placeholder"),
            tuple(calls),
            next(node for node in graph.nodes if node.op == "output"),
            reads_input,
            frozenset(written_buffers(graph_module, calls)),
            uses(graph_module, calls),
            tuple(example) if isinstance(example, dict) else (),
        )

    def cut_points(self) -> list[CutPoint]:
        """Return the place after each operation but the last."""
        return [self._cut_point(after) for after in range(len(self.calls) - 1)]

    def cut_points_after(self, names: Sequence[str]) -> list[CutPoint]:
        """Return the place after the last operation of each named module; raise ModelError unless they are in order."""
        modules = [self._called_in(call) for call in self.calls]
        return [
            replace(self._cut_point(place), module=name)
            for name, place in zip(names, places_after(names, modules), strict=True)
        ]

    def _called_in(self, call: fx.Node) -> str:
        """Return the module of a call; none for one that reads no sample, which is made where it is first needed."""
        if call.target is operator.getitem and isinstance(call.args[0], fx.Node):
            return self._called_in(call.args[0])  # one of several results belongs to the module that returned them
        return module_of(call) if call in self.reads_input or not call.users else ""

    def operations_before(self, inputs: Inputs) -> list[int]:
        """Return the floating-point operations of a forward up to each call, counted while it runs."""
        # Of a copy: a forward may write to buffers.
        return list(accumulate(_Counting(copy.deepcopy(self.stage(None, None))).count(*tensors_of(inputs))))

    def stage(self, start: CutPoint | None, end: CutPoint | None) -> fx.GraphModule:
        """Return the operations between two places as a module from what crosses the first to what crosses the second.

        It holds the network's own weights, under their own names.
        """
        first, last = (0 if start is None else start.after + 1), (len(self.calls) if end is None else end.after + 1)
        copying = _Copying(self.inputs if start is None else start.crossing)
        for call in self.calls[first:last]:
            copying.add(call)
        if end is None:
            copying.graph.output(tuple(copying.known[value] for value in self.output.all_input_nodes))
        else:
            copying.graph.output(tuple(copying.known[value] for value in end.crossing))
        return fx.GraphModule(self.module, copying.graph)

    def tensor(self, name: str) -> Tensor:
        """Return a weight or buffer by its name."""
        found = attribute(self.module, name)
        assert isinstance(found, Tensor)
        return found

    def is_trained(self, name: str) -> bool:
        return isinstance(attribute(self.module, name), nn.Parameter)

    def is_constant(self, value: fx.Node) -> bool:
        """Return True for a value that both sides of a cut can compute: from shapes, constants and fixed buffers."""
        if value.op == "get_attr":
            return not self.is_trained(str(value.target)) and value.target not in self.mutated
        return value not in self.reads_input and all(map(self.is_constant, arguments(value)))

    @cached_property
    def with_gradient(self) -> frozenset[fx.Node]:
        """The floating-point values that depend on a trained weight."""
        found: set[fx.Node] = set()
        for node in self.module.graph.nodes:
            if node.op == "get_attr":
                is_found = self.is_trained(str(node.target)) and self.tensor(str(node.target)).requires_grad
            else:
                tensor = node.meta.get("val")
                is_discrete = isinstance(tensor, Tensor) and not tensor.is_floating_point()
                is_cut = is_discrete or node.target is SIZE or is_detaching(node)
                is_found = not is_cut and any(value in found for value in node.all_input_nodes)
            if is_found:
                found.add(node)
        return frozenset(found)

    def _cut_point(self, after: int) -> CutPoint:
        module = self._module_before(after)
        for name, where in self.used_at.items():
            if min(where) <= after < max(where) and (self.is_trained(name) or name in self.mutated):
                return CutPoint(after, module, reason=f"{name} is used on both sides")
        if not any(self.is_trained(name) and min(where) <= after for name, where in self.used_at.items()):
            return CutPoint(after, module, reason="there is no weight before it, so the samples would cross")
        before = {*self.calls[: after + 1], *self.inputs}
        later = (*self.calls[after + 1 :], self.output)
        needed = dict.fromkeys(value for call in later for value in self._needs(call) if value in before)
        crossing = [value for value in needed if not self.is_constant(value)]
        for value in crossing:
            if reason := self._no_row(value):
                return CutPoint(after, module, reason=reason)
        return CutPoint(after, module, tuple(crossing), None if crossing else "nothing crosses it")

    def _needs(self, call: fx.Node) -> Iterable[fx.Node]:
        """Return what a call reads; the number of samples in a batch can be read from anything that crosses."""
        return () if call.target is SIZE and self._is_batch(call.meta["val"]) else call.all_input_nodes

    def _is_batch(self, size: object) -> bool:
        return str(size) == str(self.inputs[0].meta["val"].shape[0])

    def _no_row(self, value: fx.Node) -> str | None:
        """Return why a value cannot be sent sample by sample; None if it can."""
        tensor = value.meta.get("val")
        if isinstance(tensor, _NUMBERS):
            return f"{value} is a number that depends on the data"
        if not isinstance(tensor, Tensor):
            return f"{value} is not a tensor"
        if any(isinstance(size, torch.SymInt) and not self._is_of_batch(size) for size in tensor.shape):
            return f"the shape of {value}, {shape_text(tensor)}, depends on the data"
        first, *others = (*tensor.shape, 1)
        if self._is_batch(first) and all(isinstance(size, int) for size in others):
            return None
        if all(isinstance(size, int) for size in tensor.shape):
            return f"{value} of shape {shape_text(tensor)} has no row for each sample"
        return "samples are not the first dimension of a tensor that crosses it"

    def _is_of_batch(self, size: torch.SymInt) -> bool:
        """Return True for a size that is computed from the number of samples alone."""
        symbols: set[object] = set(size.node.expr.free_symbols)
        return symbols == set(self.inputs[0].meta["val"].shape[0].node.expr.free_symbols)

    def _module_before(self, after: int) -> str:
        """Return the largest module that ends with this operation; otherwise the last that ended, and the operation."""
        later = [module_of(call) for call in self.calls[after + 1 :]]
        for number in range(after, -1, -1):
            parts = module_of(self.calls[number]).split(".")
            prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
            ended = (name for name in prefixes if name and not any(is_inside(other, name) for other in later))
            if module := next(ended, None):
                return module if number == after else f"{module}, {operation(self.calls[after])}"
        return operation(self.calls[after])


class _Copying:
    """A new graph that gets some operations of a network, and whatever they need that does not cross a cut."""

    def __init__(self, given: Sequence[fx.Node]) -> None:
        self.graph = fx.Graph()
        self.known = {value: self.graph.placeholder(f"given_{value.name}") for value in given}
        self._first = self.known[given[0]]

    def add(self, node: fx.Node) -> None:
        if node in self.known:
            return
        if node.op == "get_attr":
            self.known[node] = self.graph.get_attr(str(node.target))
        elif node.target is SIZE and node.args[0] not in self.known:
            self.known[node] = self.graph.call_function(SIZE, (self._first, 0))  # the only size that varies
        else:
            for value in node.all_input_nodes:
                self.add(value)
            self.known[node] = self.graph.node_copy(node, lambda value: self.known[value])


class _Counting(fx.Interpreter):
    """Runs operations and counts the floating-point operations of each call."""

    def __init__(self, operations: fx.GraphModule) -> None:
        super().__init__(operations)
        self._counter = FlopCounterMode(display=False)
        self._counts: list[int] = []

    def count(self, *inputs: Tensor) -> list[int]:
        with self._counter, torch.no_grad(), torch.random.fork_rng(devices=[]):
            self.run(*inputs)
        return self._counts

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        before = self._counter.get_total_flops()
        result = super().call_function(target, args, kwargs)
        counted = self._counter.get_total_flops() - before
        self._counts.append(counted or (_recurrent_operations(*args[:3]) if target in _RECURRENT else 0))
        return result


def _recurrent_operations(inputs: Tensor, _state: object, weights: Sequence[Tensor]) -> int:
    """Return the operations of a recurrent layer, which is one kernel in float32 and not counted by torch there."""
    return 2 * inputs[..., 0].numel() * sum(weight.numel() for weight in weights if weight.ndim > 1)
