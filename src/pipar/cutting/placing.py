"""A copy of a network on a device of torch, also of one whose operations were recorded on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from pipar.cutting.stage_line import Line, Stage
from pipar.tensors.torch_device import TorchDevice


def placed(module: nn.Sequential, device: TorchDevice, known: Mapping[int, Tensor] | None = None) -> nn.Sequential:
    """Return the module itself on the CPU, else a copy of it on the device; tied weights stay tied.

    `known` are the tensors that are there already, by the identity of those of the module.
    """
    stages = module.stages.values() if isinstance(module, Line) and not device.is_cpu else ()
    # The weights of stages are those of the line; their constants are not registered in it.
    constants = {id(one): device.put(one.detach()) for stage in stages for one in stage.buffers()}
    copied: nn.Sequential = device.place(module, {**constants, **(known or {})})
    if isinstance(copied, Line) and not device.is_cpu:
        for stage in copied.stages.values():
            if isinstance(stage, Stage):
                stage.operations = _relocated(stage.operations, device.device)
    return copied


def _relocated(operations: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Return the operations with the tensors that they make on this device; also those of blocks such as no_grad."""

    def here(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    graph = copy.deepcopy(operations.graph)  # copies of a stage share theirs
    for node in graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, here), map_aggregate(node.kwargs, here)
    moved = fx.GraphModule(operations, graph)
    for name, block in list(moved.named_children()):
        if isinstance(block, fx.GraphModule):
            setattr(moved, name, _relocated(block, device))
    return moved.train(operations.training)
