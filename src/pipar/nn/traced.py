"""A network as the operations that torch.export records, and every place where it can be cut between two of them.

The operations are those of a forward in train mode, with a batch of any size. A cut is offered where each value that
crosses it has one row for each sample, and no weight is used on both sides. Values that depend on no sample, no trained
weight and no random number, such as positions, are computed on both sides and do not cross.
"""

from __future__ import annotations

import copy
import io
import logging
import operator
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from pipar.errors import ModelError
from pipar.nn.chain import is_inside, places_after
from pipar.nn.inputs import Inputs, rebuilt, tensors_of
from pipar.nn.own_backward import own_backward

_ASSERTIONS = (torch.ops.aten._assert_tensor_metadata.default,)
_DETACHING = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)
_SIZE = torch.ops.aten.sym_size.int
_RECURRENT = tuple(getattr(torch.ops.aten, name).input for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


class NoRecordingError(ModelError):
    """The operations of a network cannot be recorded; `cause` is why."""

    def __init__(self, network: str, cause: str) -> None:
        super().__init__(
            f"{network} cannot be cut, because torch.export cannot record its operations: {cause}. Name modules that "
            "run one after another in model.cut_points, or train it whole with --method fl, or with "
            "model.cut_points = []."
        )
        self.cause = cause


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
        if cause := _lost(network, example):
            raise NoRecordingError(type(network).__name__, cause)
        graph_module = _exported(network, example).module(check_guards=False)
        assert isinstance(graph_module, fx.GraphModule)
        graph = graph_module.graph
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in _ASSERTIONS:
                graph.erase_node(node)
        reads_input = _reading_input(graph_module, graph.nodes)
        calls = _in_order(graph.nodes, reads_input)
        return cls(
            graph_module,
            tuple(node for node in graph.nodes if node.op == "placeholder"),
            tuple(calls),
            next(node for node in graph.nodes if node.op == "output"),
            reads_input,
            frozenset(_written_buffers(graph_module, calls)),
            _uses(graph_module, calls),
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
        return _module_of(call) if call in self.reads_input or not call.users else ""

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
        return value not in self.reads_input and all(map(self.is_constant, _arguments(value)))

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
                is_cut = is_discrete or node.target is _SIZE or _is_detaching(node)
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
            return CutPoint(after, module, reason="no weight is before it: the samples themselves would cross")
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
        return () if call.target is _SIZE and self._is_batch(call.meta["val"]) else call.all_input_nodes

    def _is_batch(self, size: object) -> bool:
        return str(size) == str(self.inputs[0].meta["val"].shape[0])

    def _no_row(self, value: fx.Node) -> str | None:
        """Return why a value cannot be sent sample by sample; None if it can."""
        tensor = value.meta.get("val")
        if isinstance(tensor, _NUMBERS):
            return f"{value} is a number that depends on the data"
        if not isinstance(tensor, Tensor):
            return f"{value} is no tensor"
        if not all(isinstance(size, int) or self._is_batch(size) for size in tensor.shape):
            return f"the shape of {value}, {_shape_text(tensor)}, depends on the data"
        if not tensor.shape or not self._is_batch(tensor.shape[0]) or any(map(self._is_batch, tensor.shape[1:])):
            return f"{value} of shape {_shape_text(tensor)} has no row for each sample"
        return None

    def _module_before(self, after: int) -> str:
        """Return the largest module that ends with this operation; otherwise the last that ended, and the operation."""
        later = [_module_of(call) for call in self.calls[after + 1 :]]
        for number in range(after, -1, -1):
            parts = _module_of(self.calls[number]).split(".")
            prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
            ended = (name for name in prefixes if name and not any(is_inside(other, name) for other in later))
            if module := next(ended, None):
                return module if number == after else f"{module}, {_operation(self.calls[after])}"
        return _operation(self.calls[after])


def _lost(network: nn.Module, example: Inputs) -> str | None:
    """Return why a recording would have other gradients than the network; None if it has not."""
    try:
        own = own_backward(network, example)
    except Exception as error:
        raise NoRecordingError(type(network).__name__, _cause(error, "")) from error
    return None if own is None else f"{own}, and a recording would have other gradients"


def _exported(network: nn.Module, example: Inputs) -> torch.export.ExportedProgram:
    batch = {0: torch.export.Dim("batch", min=1)}
    given = tensors_of(example)
    shapes = (batch,) if isinstance(example, Tensor) else (tuple(batch for _ in given),)
    modes = [(module, module.training) for module in network.modules()]
    said = io.StringIO()
    try:
        with torch.random.fork_rng(devices=[]), _told_to(said), _taking_tensors(network, example):
            return torch.export.export(network.train(), given, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise NoRecordingError(type(network).__name__, _cause(error, said.getvalue())) from error
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _taking_tensors(network: nn.Module, example: Inputs) -> Iterator[None]:
    """Let a network that takes a tuple or a dictionary take its tensors one after another, in their order.

    Then torch.export records them in this order, whatever the signature of the network's own forward is.
    """
    if isinstance(example, Tensor):
        yield
        return
    own, had_own = network.forward, "forward" in vars(network)
    network.forward = lambda *given: _called(own, rebuilt(example, given))
    try:
        yield
    finally:
        if had_own:
            network.forward = own
        else:
            del network.forward


def _called(forward: Any, inputs: Inputs) -> Any:
    return forward(**inputs) if isinstance(inputs, dict) else forward(*tensors_of(inputs))


@contextmanager
def _told_to(stream: io.StringIO) -> Iterator[None]:
    """Let torch print into a stream what it prints before it raises, and warn and log nothing."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    enabled = [logger for logger in loggers if not logger.disabled]
    for logger in enabled:
        logger.disabled = True
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(stream):
            yield
    finally:
        for logger in enabled:
            logger.disabled = False


def _cause(error: Exception, said: str) -> str:
    """Return why operations cannot be recorded: the line of code if torch names one, and its first sentence."""
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    sentence = re.sub(r"\s+", " ", first).strip().rstrip(".")[:200]
    if "data-dependent" not in sentence:
        return sentence
    places = re.findall(r"# File: (\S+) in .*?, code: (.*)", said)
    where = f" in {Path(places[-1][0]).name}, `{places[-1][1].strip()}`" if places else ""
    return f"what it does depends on the values that it is given{where}"


def _arguments(node: fx.Node) -> Iterable[fx.Node]:
    return () if node.target is _SIZE else node.all_input_nodes


def _reading_input(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Return the values that depend on samples; the number of samples in a batch does not count.

    Random values count, too: the other side of a cut would draw others.
    """
    found: set[fx.Node] = set()
    for node in nodes:
        is_drawn = node.op == "call_function" and _is_random(module, node)
        if node.op == "placeholder" or is_drawn or any(value in found for value in _arguments(node)):
            found.add(node)
    return frozenset(found)


def _is_random(module: fx.GraphModule, call: fx.Node) -> bool:
    """Return True if a call draws random numbers, also inside a block such as torch.no_grad."""
    if torch.Tag.nondeterministic_seeded in getattr(call.target, "tags", ()):
        return True
    inside = ((block, one) for block, _ in _blocks(module, call) for one in block.graph.nodes)
    return any(one.op == "call_function" and _is_random(block, one) for block, one in inside)


def _in_order(nodes: Iterable[fx.Node], reads_input: frozenset[fx.Node]) -> list[fx.Node]:
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


def _written_buffers(module: fx.GraphModule, calls: Iterable[fx.Node]) -> Iterable[str]:
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


def _is_detaching(node: fx.Node) -> bool:
    """Return True if the results of a call have no gradient: it detaches, or is a block of torch.no_grad."""
    is_block = str(node.target) == "wrap_with_set_grad_enabled"
    return node.target in _DETACHING or (is_block and node.args[0] is False)


def attribute(module: nn.Module, name: str) -> Any:
    """Return a weight, a buffer, a constant or a block of operations by its dotted name."""
    owner, _, key = name.rpartition(".")
    return getattr(module.get_submodule(owner), key)


def _uses(module: fx.GraphModule, calls: Sequence[fx.Node]) -> dict[str, list[int]]:
    """Return the calls that use each weight or buffer; two names of one tensor have the uses of both."""
    by_tensor: dict[int, list[int]] = {}
    names: dict[str, int] = {}
    for number, call in enumerate(calls):
        for value in call.all_input_nodes:
            for name, tensor in _tensors_of(module, value):
                names[name] = id(tensor)
                by_tensor.setdefault(id(tensor), []).append(number)
    return {name: by_tensor[identity] for name, identity in names.items()}


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


def _module_of(call: fx.Node) -> str:
    paths = [str(path) for path, _ in (call.meta.get("nn_module_stack") or {}).values()]
    # torch.export puts a name of its own on top of what it adds.
    return next((path for path in reversed(paths) if not path.startswith("_empty_nn_module")), "")


def _operation(call: fx.Node) -> str:
    return str(getattr(call.target, "__name__", call.target)).partition(".")[0].rstrip("_")


def _shape_text(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "()"


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
        elif node.target is _SIZE and node.args[0] not in self.known:
            self.known[node] = self.graph.call_function(_SIZE, (self._first, 0))  # the only size that varies
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
