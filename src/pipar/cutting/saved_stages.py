"""A line of recorded stages as plain data, and back: for another start with the same network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor, fx, nn

from pipar.cutting.cut_check import differs_in, dtype_of
from pipar.cutting.cut_points import CutList
from pipar.cutting.forward_effects import ForwardEffects
from pipar.cutting.graph_data import (
    NotPlainError,
    attributes_of,
    graph_from_data,
    graph_to_data,
    tensor_from_data,
    tensor_to_data,
)
from pipar.cutting.recorded_graph import attribute
from pipar.cutting.stage_line import Line, Stage, line_of_stages
from pipar.tensors.inputs import Inputs

#: Constants of a network that need more than this are not kept.
_MOST_BYTES = 16 * 2**20


def line_to_data(line: Line) -> dict[str, Any] | None:
    """Return a whole line of recorded stages as plain data, without its weights; None if it has anything else."""
    own = _tensors(line.whole)
    stages, constants, blocks = [], dict[str, Tensor](), dict[str, Any]()
    try:
        for name, stage in line.stages.items():
            if not isinstance(stage, Stage):
                return None
            graph = graph_to_data(stage.operations.graph)
            for path in attributes_of(graph) - own.keys():
                found = attribute(stage.operations, path)
                if isinstance(found, fx.GraphModule):
                    blocks[path] = _block_to_data(found)
                else:
                    constants[path] = found
            stages.append({"name": name, "graph": graph, "names": list(stage.names)})
    except (NotPlainError, AttributeError):
        return None
    if line.cuts is None or sum(one.nbytes for one in constants.values()) > _MOST_BYTES:
        return None
    return {
        "stages": stages,
        "blocks": blocks,
        "constants": {path: tensor_to_data(one) for path, one in constants.items()},
        "cuts": line.cuts.to_dict(),
        "effects": asdict(line.effects),
    }


def line_from_data(data: Mapping[str, Any], network: nn.Module, example: Inputs) -> Line | None:
    """Return the line of a network; None if the data are damaged, or the stages do not compute what the network does.

    That is checked with a step on two samples in the network's own dtype.
    """
    try:
        line = _line(data, network)
        return None if differs_in(line, example, 2, dtype_of(network)) else line
    except Exception:  # noqa: BLE001 - whatever is wrong with a file, the network is recorded again
        return None


def _line(data: Mapping[str, Any], network: nn.Module) -> Line:
    own: dict[str, Any] = {path: tensor_from_data(one) for path, one in data["constants"].items()}
    own |= {path: fx.GraphModule({}, graph_from_data(one)) for path, one in data["blocks"].items()}
    own |= _tensors(network)
    stages: dict[str, nn.Module] = {}
    for one in data["stages"]:
        graph = graph_from_data(one["graph"])
        operations = fx.GraphModule({path: own[path] for path in attributes_of(one["graph"])}, graph)
        stages[one["name"]] = Stage(operations, one["names"])
    line = line_of_stages(stages, network)
    line.cuts = CutList.from_dict(data["cuts"])
    line.effects = ForwardEffects(**{name: bool(value) for name, value in data["effects"].items()})
    return line


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(network.named_parameters(remove_duplicate=False)),
        **dict(network.named_buffers(remove_duplicate=False)),
    }


def _block_to_data(block: fx.GraphModule) -> list[dict[str, Any]]:
    """Return the operations of a block, such as one of torch.no_grad; it must have no weights of its own."""
    graph = graph_to_data(block.graph)
    if attributes_of(graph):
        raise NotPlainError("a block has attributes")
    return graph
