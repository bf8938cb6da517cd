"""The samples that one device evaluates the global model on, and the whole network for them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipar.cutting.frozen import frozen_names
from pipar.cutting.split import whole_module
from pipar.cutting.stage_line import writes_weights
from pipar.data.images import Images
from pipar.errors import ProtocolError
from pipar.job.held_out import batches_without_noise
from pipar.nn.device_part import TorchDevicePart
from pipar.nn.learner import Batches
from pipar.profiling.memory import Memory
from pipar.tasks.evaluation import Evaluator
from pipar.tasks.metrics import NamedMetric
from pipar.tasks.task import Task
from pipar.tensors.bodies import read_state
from pipar.wire.messages import Body
from pipar.wire.orders import Orders


class Outline:
    """A network without weights: the modules, and the names and shapes of what they need."""

    def __init__(self, model: nn.Sequential) -> None:
        """Take a network, whose parameters are emptied."""
        self._module, self._writes_weights = whole_module(model), writes_weights(model)
        self.frozen = frozen_names(model)
        self.shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
        for weight in self._module.parameters():
            weight.data = weight.new_empty(0)

    def filled(self, state: Mapping[str, Tensor]) -> nn.Module:
        """Return the user's own module in eval mode with these tensors; weights are copied only if need be."""
        weights = {
            id(weight): nn.Parameter(state[name].clone() if self._writes_weights else state[name], requires_grad=False)
            for name, weight in self._module.named_parameters()
        }
        module = copy.deepcopy(self._module, weights).eval()
        for name, buffer in module.named_buffers():
            if name in state:  # copied, because a forward may write to it
                buffer.copy_(state[name])
        return module


@dataclass(frozen=True)
class Judgement:
    """How a device evaluates: its network, its task, and the metrics in addition to the loss."""

    outline: Outline
    task: Task
    metrics: Sequence[NamedMetric]
    dtype: torch.dtype


class HeldOutSamples:
    """A device's evaluation samples, and the frozen parameters that it has been sent for them."""

    def __init__(self, images: Images, how: Judgement, memory: Memory | None = None) -> None:
        self._images = images
        self._how = how
        self._memory = memory or Memory()
        self._frozen: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self._images)

    def batches(self, size: int) -> Batches:
        """Return all samples in batches, which are normalised when they are loaded."""
        return batches_without_noise(self._images, self._how.dtype, size)

    def lack_of_memory(self, orders: Orders | None) -> str | None:
        return self._memory.lack(len(self), orders)

    @torch.no_grad()
    def evaluator(self, part: TorchDevicePart, body: Body) -> Evaluator:
        """Return what evaluates the user's own module with the weights of the body and, for others, of the part."""
        module = self._how.outline.filled(self._state(part.state(), read_state(body) if body.size_bytes else {}))
        return Evaluator(module, self._how.task, self._how.metrics)

    def _state(self, own: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        outline = self._how.outline
        state = {**own, **self._frozen, **sent}
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
        if shapes != outline.shapes:
            wrong = min(name for name, _ in shapes.items() ^ outline.shapes.items())
            raise ProtocolError(f"The server's model to evaluate does not fit this network: {wrong!r} differs.")
        # They are sent once. A view of the message would keep all of it in memory.
        self._frozen = {name: sent[name].clone() if name in sent else state[name] for name in outline.frozen}
        return state
