"""The server's mathematics: the global model, the replicas M^s_k, aggregation and evaluation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from pipar.errors import ProtocolError
from pipar.nn.aggregate import federated_average, weights_sha256
from pipar.nn.split import join_states, part_of_state, split_model
from pipar.nn.steps import Optimizer, TorchServerPart
from pipar.nn.tensors import read_state, state_body
from pipar.protocol.messages import Body
from pipar.protocol.orders import Returned

#: A held-out set: how many samples each batch has, and a function that loads it.
Batches = Sequence[tuple[int, Callable[[], tuple[torch.Tensor, torch.Tensor]]]]


class TorchLearner:
    """The global model and one server-side replica a device (or one for all, where the method shares it)."""

    def __init__(
        self,
        model: nn.Sequential,
        split_points: Mapping[str, int],
        optimizer: Optimizer,
        *,
        classes: int,
        shares_server_model: bool,
        keep_momentum: bool,
    ) -> None:
        self.model = model
        self._split_points = dict(split_points)
        self._optimizer = optimizer
        self._classes = classes
        self._shared = shares_server_model
        self._keep_momentum = keep_momentum
        self._replicas: dict[str, TorchServerPart] = {}
        self._packed: dict[int, Body] = {}

    def replica(self, device: str) -> TorchServerPart:
        """Return M^s_k; made from the global model when it is first asked for."""
        key = "" if self._shared else device
        if key not in self._replicas:
            _, module = split_model(self.model, self._split_points[device])
            self._replicas[key] = TorchServerPart(copy.deepcopy(module), self._optimizer, classes=self._classes)
        return self._replicas[key]

    def move(self, split_points: Mapping[str, int]) -> dict[str, Body]:
        """Cut these devices' networks elsewhere; return the momentum of the layers that go to each, if it is kept.

        Their replicas are made anew from the global model: between two rounds nothing else is in them.
        """
        assert not self._shared or not self._replicas
        self._split_points.update(split_points)
        leaving = {}
        for device in [name for name in split_points if name in self._replicas]:
            before = self._replicas.pop(device)
            replica = self.replica(device)
            if self._keep_momentum:
                leaving[device] = replica.take_over(before)
        return leaving

    def pack(self, device: str) -> Body:
        """Return the device's part of the global model; devices with one split point share the bytes."""
        split_point = self._split_points[device]
        if split_point not in self._packed:
            part, _ = split_model(self.model, split_point)
            self._packed[split_point] = state_body(part.state_dict())
        return self._packed[split_point]

    def aggregate(self, returned: Sequence[Returned]) -> None:
        """Make the new global model of what the devices brought back and of their replicas, in device-name order."""
        ordered = sorted(returned, key=lambda back: back.device)
        if self._shared:
            average = _average(len(ordered), ((self._device_state(back), back.samples) for back in ordered))
            self._load(join_states(average, self.replica(ordered[0].device).state()))
        else:
            # One after another: K decoded models at once would need K times the memory.
            self._load(_average(len(ordered), ((self._whole(back), back.samples) for back in ordered)))
            for back in ordered:
                replica = self.replica(back.device)
                state = part_of_state(self.model.state_dict(), replica.module)
                replica.install(state, keep_momentum=self._keep_momentum)

    def _whole(self, back: Returned) -> dict[str, torch.Tensor]:
        return join_states(self._device_state(back), self.replica(back.device).state())

    def _device_state(self, back: Returned) -> dict[str, torch.Tensor]:
        try:
            state = read_state(back.body)
        except ProtocolError as error:
            raise ProtocolError(f"{back.device} brought back no model: {error}") from None
        part, _ = split_model(self.model, self._split_points[back.device])
        wanted = {name: (tensor.shape, tensor.dtype) for name, tensor in part.state_dict().items()}
        if {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()} != wanted:
            raise ProtocolError(f"{back.device} brought back a model that is not the part it was given.")
        return state

    def _load(self, state: Mapping[str, torch.Tensor]) -> None:
        self.model.load_state_dict(state)
        self._packed.clear()

    def evaluator(self) -> Callable[[Callable[[], tuple[torch.Tensor, torch.Tensor]]], tuple[float, int]]:
        """Return a function that gives summed loss and correct answers of a batch for the model as it is now."""
        model = copy.deepcopy(self.model).eval()
        return lambda load: evaluate_batch(model, *load())

    def part_bytes(self, device: str) -> int:
        """Return the size of the device's part."""
        part, _ = split_model(self.model, self._split_points[device])
        return sum(tensor.nbytes for tensor in part.state_dict().values())

    def model_bytes(self) -> int:
        """Return the size of the whole model."""
        return sum(tensor.nbytes for tensor in self.state().values())

    def state(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()

    def packed_state(self) -> bytes:
        """Return the global model as the bytes of a safetensors file."""
        return bytes(state_body(self.state()).contiguous())

    def sha256(self) -> str:
        return weights_sha256(self.state())


def _average(count: int, models: Iterator[tuple[dict[str, torch.Tensor], int]]) -> dict[str, torch.Tensor]:
    # n * x / n may differ from x in the last bit: one model is its own average.
    return next(models)[0] if count == 1 else federated_average(models)


@torch.no_grad()
def evaluate_batch(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
    """Return the loss summed over the samples and how many of them were answered right."""
    output = model(inputs)
    loss = F.cross_entropy(output, labels, reduction="sum")
    return loss.item(), int((output.argmax(dim=1) == labels).sum())
