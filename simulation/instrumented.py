"""The production learner and parts, instrumented: they count samples, and a device can be made to send bad weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pipar.cutting.split import split_model
from pipar.execution.schedule import StepCount
from pipar.execution.spans import SERVER
from pipar.job.workload import Workload
from pipar.nn.device_part import DeviceSettings, TorchDevicePart
from pipar.nn.learner import TorchLearner
from pipar.nn.micro_batches import MicroBatch
from pipar.nn.server_part import TorchServerPart
from pipar.tensors.bodies import state_body
from pipar.wire.messages import Body, Message
from pipar.wire.orders import Orders, TrainedPart
from simulation.tampering import HUGE


class CountingReplica:
    """A replica that counts the samples on which it was trained since it was built or installed."""

    def __init__(self, part: TorchServerPart) -> None:
        self.part = part
        self.begun = 0  # samples of a batch that has had no step yet
        self.stepped = 0  # samples of batches that have had their step

    def decode(self, message: Message, encoding: str) -> Any:
        decoded = self.part.decode(message, encoding)
        self.begun += message.samples
        return decoded

    def measure_gradient(self) -> float:
        return self.part.measure_gradient()

    def step(self, at: StepCount, others: float = 0.0) -> None:
        self.part.step(at, others)
        self.stepped, self.begun = self.stepped + self.begun, 0

    def install(self, *arguments: Any, **options: Any) -> None:
        self.part.install(*arguments, **options)
        self.begun = self.stepped = 0

    def discard(self) -> None:
        self.part.discard()
        self.begun = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)


#: Receives what went into an aggregation: the returned parts, and for each device the samples on which its replica was
#: trained, in batches with and without their step (nothing if the server-side model is shared).
OnAggregate = Callable[[Sequence[TrainedPart], Mapping[str, tuple[int, int]]], None]


class CountingLearner(TorchLearner):
    """The production learner with replicas that count."""

    on_aggregate: OnAggregate

    def replica(self, device: str) -> Any:
        part: Any = super().replica(device)
        if not isinstance(part, CountingReplica):
            part = self._replicas["" if self._shared else device] = CountingReplica(part)  # type: ignore[assignment]
        return part

    def replica_bytes(self) -> dict[str, int]:
        """Return the size of the replica of each device; a shared one is the server's own."""
        return {
            key or SERVER: sum(tensor.nbytes for tensor in replica.state().values())
            for key, replica in self._replicas.items()
        }

    def aggregate(self, returned: Sequence[TrainedPart], *, keep_before: bool = False) -> None:
        replicas = {} if self._shared else {back.device: self.replica(back.device) for back in returned}
        counts = {name: (replica.stepped, replica.begun) for name, replica in replicas.items()}
        super().aggregate(returned, keep_before=keep_before)
        self.on_aggregate(returned, counts)


class PoisonablePart(TorchDevicePart):
    """A device's part that packs weights which are not finite whenever `is_poisoned` returns True.

    While `exaggerates` returns True, its activations are finite and huge.
    """

    is_poisoned: Callable[[], bool]
    exaggerates: Callable[[], bool]

    def forward(self, micro_batch: int, piece: MicroBatch) -> torch.Tensor:
        output = super().forward(micro_batch, piece)
        assert isinstance(output, torch.Tensor)
        if not self._has_loss and self.exaggerates():
            output = self._outputs[micro_batch] = (output + 1.0) * HUGE
        return output

    def pack(self, *, changes: bool = False) -> Body:
        if not self.is_poisoned():
            return super().pack(changes=changes)
        return state_body({name: _without_meaning(tensor) for name, tensor in self.state().items()})


def _without_meaning(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape that is not finite; counters stay what they are."""
    return torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else tensor


def poisonable_builder(
    workload: Workload, is_poisoned: Callable[[], bool], exaggerates: Callable[[], bool]
) -> Callable[[Orders], TorchDevicePart]:
    """Return a function that builds a device's part, as `part_builder` does."""

    def build(orders: Orders) -> TorchDevicePart:
        part, rest = split_model(workload.build_model(), orders.plan.split_point)
        settings = DeviceSettings(keeps_base=orders.keeps_base)
        poisonable = PoisonablePart(part, workload.optimizer(), has_loss=len(rest) == 0, settings=settings)
        poisonable.is_poisoned, poisonable.exaggerates = is_poisoned, exaggerates
        return poisonable

    return build
