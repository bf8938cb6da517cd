"""Recorded operations in another dtype than that in which they were recorded."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx, nn

from pipar.cutting.recorded_graph import attribute


def recast(stage: nn.Module, old: torch.dtype, new: torch.dtype) -> nn.Module:
    """Return a copy of a stage whose weights and operations have the new dtype where they had the old one.

    A network that casts to the dtype of its weights is recorded with the dtype that they had then.
    """
    copied = copy.deepcopy(stage)
    operations = getattr(copied, "operations", None)
    if isinstance(operations, fx.GraphModule):
        copied.operations = _recast(operations, old, new)
    return copied.to(new)


def _recast(operations: fx.GraphModule, old: torch.dtype, new: torch.dtype) -> fx.GraphModule:
    def replaced(value: Any) -> Any:
        return new if value is old else value

    graph = copy.deepcopy(operations.graph)
    blocks: dict[str, fx.GraphModule] = {}
    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, replaced)
        node.kwargs = fx.node.map_aggregate(node.kwargs, replaced)
        if node.op == "get_attr" and isinstance(block := attribute(operations, str(node.target)), fx.GraphModule):
            blocks[str(node.target)] = _recast(block, old, new)
    made = fx.GraphModule(operations, graph)
    for path, block in blocks.items():
        owner, _, key = path.rpartition(".")
        setattr(made.get_submodule(owner), key, block)
    return made
