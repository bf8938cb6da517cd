"""An nn.Sequential that cannot be cut after each of its children, as a line of groups of them.

Children may share a weight, or a Python object that no parameter shows; and what one returns may be something that
cannot be sent.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipar.cutting.cut_check import differs, differs_in, dtype_of
from pipar.cutting.cut_points import NotOffered
from pipar.cutting.listing import layer_cuts
from pipar.cutting.recorded_graph import memory_of
from pipar.cutting.stage_line import Line, line_of_stages, whole_line, with_effects
from pipar.tensors.crossing import CROSSING_DTYPES
from pipar.tensors.inputs import Inputs, call, drawn_like, in_dtype

#: Batches are tried with these numbers of samples: one of them might be the number of something else by chance.
_COUNTS = (2, 3)


def grouped_line(network: nn.Sequential, example: Inputs, *, is_known: bool) -> Line | None:
    """Return a sequence as a line of groups of its children; None if it can be cut after each child.

    The children of a known network do what their classes say, so a step through them need not be compared with one
    through the network.
    """
    children = children_of(network)
    reasons = _reasons(children, example)
    if not is_known:
        reasons = _checked(network, children, reasons, example)
    return _line(network, children, reasons, example) if any(reasons) else None


def sequence_line(network: nn.Sequential, example: Inputs) -> Line:
    """Return a sequence as a line of all of its children, with what a forward depends on."""
    children = children_of(network)
    return _line(network, children, [None] * (len(children) - 1), example)


def uses_twice(network: nn.Sequential) -> bool:
    """Return True if a module, weight or buffer occurs in two children of a sequence."""
    seen: set[object] = set()
    for name, layer in children_of(network).items():
        inside: set[object] = {*map(id, layer.modules()), *(memory_of(one) for _, one in _named_tensors(name, layer))}
        if inside & seen:
            return True
        seen |= inside
    return False


def children_of(network: nn.Sequential) -> dict[str, nn.Module]:
    """Return the children by their names; one that occurs twice has both."""
    return {name: layer for name, layer in network._modules.items() if layer is not None}


def _line(
    network: nn.Sequential, children: Mapping[str, nn.Module], reasons: Sequence[str | None], example: Inputs
) -> Line:
    line, refused = _divided(network, children, reasons)
    line.cuts = replace(layer_cuts(line.stages, example, "children"), not_offered=tuple(refused))
    return with_effects(line, example)


def _divided(
    network: nn.Sequential, children: Mapping[str, nn.Module], reasons: Sequence[str | None]
) -> tuple[Line, list[NotOffered]]:
    """Return the line without the cuts for which there is a reason, and these cuts."""
    stages, refused, group = dict[str, nn.Module](), list[NotOffered](), list[nn.Module]()
    for (name, layer), reason in zip(children.items(), [*reasons, None], strict=True):
        group.append(layer)
        if reason is None:
            stages[name], group = nn.Sequential(*group), []
        else:
            refused.append(NotOffered(len(stages), name, name, 1, reason))
    return line_of_stages(stages, network), refused


def _reasons(children: Mapping[str, nn.Module], example: Inputs) -> list[str | None]:
    """Return for each place between two children why the network cannot be cut there; None if it can."""
    found = [_shared_across(children, place) for place in range(1, len(children))]
    for count in _COUNTS:
        unsent = _unsent(children, example, count)
        found = [one or other for one, other in zip(found, unsent, strict=True)]
    return found


def _shared_across(children: Mapping[str, nn.Module], place: int) -> str | None:
    """Return why a sequence cannot be cut after this many children: a weight or buffer is on both sides."""
    before, after = [*children.items()][:place], [*children.items()][place:]
    known = {memory_of(tensor) for name, layer in before for _, tensor in _named_tensors(name, layer)}
    tensors = (named for name, layer in after for named in _named_tensors(name, layer))
    both = (path for path, tensor in tensors if memory_of(tensor) in known)
    first = next(both, None)
    return None if first is None else f"{first} is used on both sides"


def _named_tensors(name: str, layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from layer.named_parameters(name)
    yield from layer.named_buffers(name)


@torch.no_grad()
def _unsent(children: Mapping[str, nn.Module], example: Inputs, count: int) -> list[str | None]:
    """Return for each child but the last why what it returns cannot be sent; None if it can."""
    layers = list(copy.deepcopy(nn.ModuleList(children.values())).train())
    dtype = dtype_of(nn.ModuleList(layers))
    reasons = []
    with torch.random.fork_rng(devices=[]):
        value: Any = call(layers[0], in_dtype(drawn_like(example, count, seed=0), dtype))
        for layer in layers[1:]:
            reasons.append(_why_unsent(value, count))
            value = layer(value)
    return reasons


def _why_unsent(value: object, count: int) -> str | None:
    if not isinstance(value, Tensor):
        return f"what crosses it is a {type(value).__name__}, not a tensor"
    if value.shape[:1] != (count,):
        return "what crosses it has no row for each sample"
    if value.dtype not in CROSSING_DTYPES.values():
        return f"values in {str(value.dtype).removeprefix('torch.')} cross it"
    return None if value.is_floating_point() else "no floating-point value crosses it"


def _checked(
    network: nn.Sequential, children: Mapping[str, nn.Module], reasons: Sequence[str | None], example: Inputs
) -> list[str | None]:
    """Return the reasons, with those for cuts at which a step differs from that of the uncut network."""
    if not _differs(_divided(network, children, reasons)[0], example):
        return list(reasons)
    if _differs(whole_line(network, example), example):
        return list(reasons)  # no two of its steps are the same, as with random numbers of Python
    alone = ["another cut"] * len(reasons)
    return [
        reason or _difference(_divided(network, children, [*alone[:place], None, *alone[place + 1 :]])[0], example)
        for place, reason in enumerate(reasons)
    ]


def _difference(line: Line, example: Inputs) -> str | None:
    return "a step through it differs from that of the uncut network" if _differs(line, example) else None


def _differs(line: Line, example: Inputs) -> bool:
    """Return whether a step on two samples in float64 differs, or if that is impossible, one in another dtype."""
    try:
        return differs_in(line, example, 2, torch.float64)
    except RuntimeError:  # two dtypes in one operation, or a shape that another stage has kept
        return differs(line, example)
