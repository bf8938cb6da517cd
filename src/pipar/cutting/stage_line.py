"""Any network as a line of stages, which can be cut after each of them like an nn.Sequential."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby, pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipar.cutting.cut_check import differs, dtype_of
from pipar.cutting.cut_points import CutList
from pipar.cutting.forward_effects import ForwardEffects, effects_of
from pipar.cutting.listing import recorded_cuts, whole_network
from pipar.cutting.traced import CutPoint, TracedNetwork
from pipar.errors import ModelError
from pipar.tensors.crossing import CROSSING_DTYPES
from pipar.tensors.inputs import Inputs, call
from pipar.wire.frames import MAX_WORDS

#: Is told what is done now, and the share that is done.
Progress = Callable[[str, float], None]
#: More cuts than this are not worth the time that it takes to measure each of them.
MOST_CUTS = 40


class Stage(nn.Module):
    """Operations between two cuts: from what crosses the first to what crosses the second, a tensor or a tuple."""

    #: Another layer that returns a tuple gives it to the next one as a single argument.
    gives_several = True

    def __init__(self, operations: fx.GraphModule, names: Sequence[str] = ()) -> None:
        super().__init__()
        self.operations = operations
        self.names = tuple(names)  # of the network's inputs, if this is the first stage and they are a dictionary

    def __deepcopy__(self, memo: dict[int, Any]) -> Stage:
        """Return a copy with its own weights. It shares the operations: GraphModule would compile them again."""
        copied, own = Stage.__new__(Stage), self.operations
        memo[id(self)] = copied
        memo[id(own)] = operations = object.__new__(type(own))
        memo[id(own.graph)] = own.graph
        operations.__dict__.update(copy.deepcopy(own.__dict__, memo))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor | tuple[Tensor, ...]:
        values: tuple[Tensor, ...] = self.operations(*given, *(named[name] for name in self.names))
        return values[0] if len(values) == 1 else values


class Line(nn.Sequential):
    """The stages of a network in their order; weights have the names that they have in the user's own module.

    The line of the whole network also has that module, and a call of the line is a call of the module.
    """

    #: A stage may overwrite what it is given.
    inplace = True

    def __init__(
        self, stages: Mapping[str, nn.Module], owned: Mapping[str, dict[str, Tensor]], whole: nn.Module | None = None
    ) -> None:
        super().__init__()
        # In dictionaries and lists, modules are not registered: their weights have other names there.
        self.stages, self._owned, self._whole = dict(stages), dict(owned), [whole]
        if whole is None:
            self._register_owned()
        else:
            self._parameters, self._buffers = whole._parameters, whole._buffers
            self.__dict__["_modules"] = whole._modules
            self._non_persistent_buffers_set = whole._non_persistent_buffers_set
        self.effects = ForwardEffects()
        self.cuts: CutList | None = None  # of the line of a whole network

    def _register_owned(self) -> None:
        for path, tensor in chain.from_iterable(owned.items() for owned in self._owned.values()):
            owner, key = _container(self, path), path.rpartition(".")[2]
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(key, tensor)
            else:
                owner.register_buffer(key, tensor)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.stages.values())

    def __len__(self) -> int:
        return len(self.stages)

    @property
    def whole(self) -> nn.Module:
        """Return the user's own module."""
        assert self._whole[0] is not None
        return self._whole[0]

    def part(self, names: Sequence[str]) -> Line:
        """Return some of the stages, with the weights that they own."""
        part = Line({name: self.stages[name] for name in names}, {name: self._owned[name] for name in names})
        for path, module in part.named_modules():
            # How much of a batch its running averages take: of what a module is, only its weights are registered.
            if path and (share := getattr((self._whole[0] or self).get_submodule(path), "momentum", None)):
                module.momentum = share
        return part

    def owned_bytes(self, name: str) -> int:
        """Return the bytes of the weights and buffers of one stage."""
        return sum(tensor.nbytes for tensor in self._owned[name].values())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Line:
        """Change all tensors; parameters stay the same objects, but the stages must get the new buffers."""
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        new = {id(old): self.get_buffer(name) for name, old in before.items()}
        for module in chain.from_iterable(stage.modules() for stage in self.stages.values()):
            for key, buffer in module._buffers.items():
                if buffer is not None and not any(buffer is known for known in new.values()):
                    module._buffers[key] = new[id(buffer)] if id(buffer) in new else fn(buffer)
        for owned in self._owned.values():
            owned.update({path: new[id(tensor)] for path, tensor in owned.items() if id(tensor) in new})
        return self

    def forward(self, *given: Tensor, **named: Tensor) -> Any:
        if self._whole[0] is not None:
            return self._whole[0](*given, **named)
        first, *others = self.stages.values()
        crossing = first(*given, **named)
        for stage in others:
            crossing = call(stage, crossing)
        return crossing

    def train(self, mode: bool = True) -> Line:
        super().train(mode)
        for stage in self.stages.values():
            stage.train(mode)  # the user's own modules, if they were not recorded
        if self._whole[0] is not None:
            self._whole[0].train(mode)  # last: it may keep some of its modules in eval mode
        return self


def line_of(network: nn.Module, example: Inputs, progress: Progress = lambda _, __: None) -> Line:
    """Return a network as a line of stages that can be cut between any two of them.

    `example` is a batch of two inputs. A cut at which outputs, gradients or buffers would differ from those of the
    uncut network is left out. Raise ModelError if the network's operations cannot be recorded, or if it
    returns more than one tensor.
    """
    progress("Recording the operations of the network", 0.0)
    traced = TracedNetwork.of(network, example)
    _check_output(traced)
    progress("Finding its cuts", 0.5)
    points = [fitting(point, dtype_of(network)) for point in traced.cut_points()]
    work = traced.operations_before(example)
    chosen = checked = thinned([point for point in points if point.reason is None], work)
    line = line_at(chosen, traced, network)
    progress("Checking its cuts", 0.6)
    if differs(line, example):
        checked = [point for point in chosen if not differs(line_at([point], traced, network), example)]
        line = line_at(checked, traced, network)
    progress("Checking its cuts", 0.9)
    line.cuts = recorded_cuts(traced, points, chosen, checked, work)
    return with_effects(line, example)


def _check_output(traced: TracedNetwork) -> None:
    returned = len(traced.output.args[0])  # type: ignore[arg-type]
    if returned != 1:
        raise ModelError(f"the network returns {returned} tensors, but it must return one tensor of logits.")


def whole_line(network: nn.Module, example: Inputs) -> Line:
    """Return a network that is not to be cut as a line of one stage."""
    line = Line({"network": network}, {"network": network.state_dict(keep_vars=True)}, network)
    line.cuts = whole_network()
    return with_effects(line, example)


def with_effects(line: Line, example: Inputs) -> Line:
    """Return the line with what a forward of its network depends on besides samples and weights."""
    is_recorded = all(isinstance(stage, Stage) for stage in line)
    line.effects = effects_of(line.whole, example, is_recorded=is_recorded)
    return line


def writes_weights(model: nn.Sequential) -> bool:
    """Return True if a forward of a network in eval mode changes its weights. A sequence that does is a line."""
    return isinstance(model, Line) and model.effects.writes_weights


def line_at(chosen: Sequence[CutPoint], traced: TracedNetwork, network: nn.Module) -> Line:
    """Return the line of a network that is cut at these places."""
    names = [point.module for point in chosen] + ["output"]
    stages: dict[str, nn.Module] = {}
    for wanted, (start, end) in zip(names, pairwise([None, *chosen, None]), strict=True):
        operations = traced.stage(start, end)
        stages[_unique(wanted, stages)] = Stage(operations, traced.names if start is None else ())
    return line_of_stages(stages, network)


def line_of_stages(stages: Mapping[str, nn.Module], network: nn.Module) -> Line:
    """Return the line of a network that is divided into stages; each owns the weights that it uses first."""
    owned: dict[str, dict[str, Tensor]] = {}
    left = network.state_dict(keep_vars=True)
    for name, stage in stages.items():
        used = {id(tensor) for tensor in chain(stage.parameters(), stage.buffers())}
        # Under all of its names, if a weight has several.
        owned[name] = {path: left.pop(path) for path, tensor in [*left.items()] if id(tensor) in used}
    owned[next(reversed(owned))].update(left)  # what no operation uses
    return Line(stages, owned, network)


def thinned(points: Sequence[CutPoint], operations: Sequence[int]) -> list[CutPoint]:
    """Return the cuts that can be best: of those with the same work before them, the one with the fewest bytes.

    If that leaves more than `MOST_CUTS`, cuts at which as many bytes cross as at both neighbours, or more, are left out
    first, such as those inside residual blocks; among these, the ones with the least work between their neighbours. The
    first cut and the last one stay: no others leave as little to the device and to the server.
    """
    kept = _least(points, lambda point: operations[point.after])
    while len(kept) > MOST_CUTS:
        del kept[min(range(1, len(kept) - 1), key=lambda place: _loss_without(place, kept, operations))]
    return kept


def _loss_without(place: int, points: Sequence[CutPoint], operations: Sequence[int]) -> tuple[bool, int]:
    """Return what is lost without a cut: whether a neighbour has more bytes, and the work between the neighbours."""
    before, after = points[place - 1], points[place + 1]
    has_most_bytes = points[place].row_bytes >= max(before.row_bytes, after.row_bytes)
    return not has_most_bytes, operations[after.after] - operations[before.after]


def _least(points: Sequence[CutPoint], work: Callable[[CutPoint], int]) -> list[CutPoint]:
    groups = (list(group) for _, group in groupby(points, key=work))
    return [min(reversed(group), key=lambda point: point.row_bytes) for group in groups]


def fitting(point: CutPoint, dtype: torch.dtype) -> CutPoint:
    """Return a cut point, with a reason if what crosses cannot be sent.

    That is if no floating-point value crosses, one in another dtype than `dtype`, or more tensors than a header can
    describe.
    """
    if point.reason is not None:
        return point
    values = [node.meta["val"] for node in point.crossing]
    floating = {value.dtype for value in values if value.is_floating_point()}
    others = (floating - {dtype}) | ({value.dtype for value in values} - set(CROSSING_DTYPES.values()))
    if others:
        named = ", ".join(str(one).removeprefix("torch.") for one in sorted(others, key=str))
        return replace(point, reason=f"values in {named} cross it")
    if not floating:
        return replace(point, reason="no floating-point value crosses it")
    if sum(1 + value.ndim for value in values) > MAX_WORDS:
        return replace(point, reason=f"{len(values)} tensors cross it, more than one message can have")
    return point


def _unique(name: str, taken: Mapping[str, object]) -> str:
    number, unique = 1, name
    while unique in taken:
        number += 1
        unique = f"{name} ({number})"
    return unique


def _container(root: nn.Module, path: str) -> nn.Module:
    """Return the module that owns a dotted name, made of empty modules where it is missing."""
    module = root
    for key in path.split(".")[:-1]:
        if key not in module._modules:
            module.add_module(key, nn.Module())
        module = module.get_submodule(key)
    return module
