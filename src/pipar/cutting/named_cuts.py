"""A network that is cut after modules that the user names, and nowhere else; or a sequence that uses weights twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from pipar.cutting.chain import NoChainError, chained_stages, check_names
from pipar.cutting.cut_check import differs, dtype_of
from pipar.cutting.cut_points import CutList, NotOffered
from pipar.cutting.exporting import NoRecordingError
from pipar.cutting.line import (
    Line,
    Progress,
    fitting,
    line_at,
    line_of_stages,
    whole_line,
    with_effects,
)
from pipar.cutting.listing import cuts_at, layer_cuts
from pipar.cutting.recorded_graph import memory_of
from pipar.cutting.traced import CutPoint, TracedNetwork
from pipar.errors import ModelError
from pipar.tensors.inputs import Inputs


def named_line(
    network: nn.Module, names: Sequence[str], example: Inputs, progress: Progress = lambda _, __: None
) -> Line:
    """Return a network as a line of stages, one up to the end of each named module and one for the rest.

    Modules that run one after another are the stages themselves; otherwise recorded operations are divided. Raise
    ModelError if the network cannot be cut after one of them, or would then not train as the uncut network.
    """
    if not names:
        return whole_line(network, example)
    check_names(network, names)
    progress("Checking the cuts after the named modules", 0.0)
    try:
        line = _chained_line(network, names, example)
    except NoChainError as reason:
        progress("Recording the operations of the network", 0.1)
        line = _recorded_line(network, names, example, str(reason))
    progress("Checking the cuts after the named modules", 0.9)
    return with_effects(line, example)


def _chained_line(network: nn.Module, names: Sequence[str], example: Inputs) -> Line:
    stages = chained_stages(network, names, example)
    line = line_of_stages(stages, network)
    line.cuts = layer_cuts(dict(stages), example, "named")
    if differs(line, example):
        raise ModelError(
            f"the network cannot be cut after {_listed(names)}, because a step through the separate modules differs "
            "from that of the network: name other modules, or train it whole with model.cut_points = []."
        )
    return line


def _recorded_line(network: nn.Module, names: Sequence[str], example: Inputs, no_chain: str) -> Line:
    try:
        traced = TracedNetwork.of(network, example)
    except NoRecordingError as error:
        raise ModelError(
            f"{type(network).__name__} cannot be cut after {_listed(names)}: they do not run one after another, "
            f"because {no_chain}, and torch.export cannot record its operations: {error.cause}. Name other modules, or "
            "train it whole with --method fl, or with model.cut_points = []."
        ) from error
    points = [fitting(point, dtype_of(network)) for point in traced.cut_points_after(names)]
    for point in points:
        if point.reason is not None:
            raise _impossible(point, point.reason)
    line = line_at(points, traced, network)
    if differs(line, example):
        wrong = next((one for one in points if differs(line_at([one], traced, network), example)), points[0])
        raise _impossible(wrong, "a step through it differs from that of the uncut network")
    line.cuts = CutList("named", len(line), cuts_at(traced, points))
    return line


def _impossible(point: CutPoint, reason: str) -> ModelError:
    return ModelError(
        f"the network cannot be cut after '{point.module}', because {reason}: name another module in model.cut_points; "
        "`pipar cuts` without that key lists all cuts."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def uses_twice(network: nn.Sequential) -> bool:
    """Return True if a module, weight or buffer occurs in two children of a sequence."""
    seen: set[object] = set()
    for name, layer in network._modules.items():
        if layer is None:
            continue
        inside: set[object] = {*map(id, layer.modules()), *(memory_of(one) for _, one in _named_tensors(name, layer))}
        if inside & seen:
            return True
        seen |= inside
    return False


def unshared_line(network: nn.Sequential, example: Inputs) -> Line:
    """Return an nn.Sequential as a line of its children that is not cut between two uses of a weight."""
    children = {name: layer for name, layer in network._modules.items() if layer is not None}
    reasons = [_shared_across(children, place) for place in range(1, len(children))]
    stages, refused = dict[str, nn.Module](), list[NotOffered]()
    group: list[nn.Module] = []
    for (name, layer), reason in zip(children.items(), [*reasons, None], strict=True):
        group.append(layer)
        if reason is None:
            stages[name], group = nn.Sequential(*group), []
        else:
            refused.append(NotOffered(len(stages), name, name, 1, reason))
    line = line_of_stages(stages, network)
    line.cuts = replace(layer_cuts(stages, example, "children"), not_offered=tuple(refused))
    return with_effects(line, example)


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
