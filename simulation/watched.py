"""The mathematics of a simulated world: the production learner and parts, with what they do counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pipar.execution.spans import SERVER
from pipar.job.workload import Workload
from pipar.nn.learner import TorchLearner
from pipar.nn.parts import TorchDevicePart, TorchServerPart
from pipar.nn.split import split_model
from pipar.nn.tensors import state_body
from pipar.wire.messages import Body, Message
from pipar.wire.orders import Orders, TrainedPart


class CountedPart:
    """A replica that counts the samples which it has been trained on since it was made or installed."""

    def __init__(self, part: TorchServerPart) -> None:
        self.part = part
        self.begun = 0  # samples whose gradients no step has applied yet
        self.stepped = 0

    def decode(self, message: Message, encoding: str) -> Any:
        decoded = self.part.decode(message, encoding)
        self.begun += message.samples
        return decoded

    def step(self) -> None:
        self.part.step()
        self.stepped, self.begun = self.stepped + self.begun, 0

    def install(self, *arguments: Any, **options: Any) -> None:
        self.part.install(*arguments, **options)
        self.begun = self.stepped = 0

    def discard(self) -> None:
        self.part.discard()
        self.begun = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)


#: Gets what went into an aggregation: what came back, and the samples that each replica was trained on, in batches that
#: have had their step and in one that has not (nothing of a model that is shared).
Aggregated = Callable[[Sequence[TrainedPart], Mapping[str, tuple[int, int]]], None]


class CountedLearner(TorchLearner):
    """The production learner, over replicas that count."""

    aggregated: Aggregated

    def replica(self, device: str) -> Any:
        part: Any = super().replica(device)
        if not isinstance(part, CountedPart):
            part = self._replicas["" if self._shared else device] = CountedPart(part)  # type: ignore[assignment]
        return part

    def replica_bytes(self) -> dict[str, int]:
        """Return how large the replica of each device is; one that is shared is the server's own."""
        return {
            key or SERVER: sum(tensor.nbytes for tensor in replica.state().values())
            for key, replica in self._replicas.items()
        }

    def aggregate(self, returned: Sequence[TrainedPart], *, keep_before: bool = False) -> None:
        replicas = {} if self._shared else {back.device: self.replica(back.device) for back in returned}
        counts = {name: (replica.stepped, replica.begun) for name, replica in replicas.items()}
        super().aggregate(returned, keep_before=keep_before)
        self.aggregated(returned, counts)


class BreakablePart(TorchDevicePart):
    """A device's part whose next model has a weight that is no number, if it `is_poisoned`."""

    is_poisoned: Callable[[], bool]

    def pack(self, *, changes: bool = False) -> Body:
        if not self.is_poisoned():
            return super().pack(changes=changes)
        return state_body({name: torch.full_like(tensor, torch.nan) for name, tensor in self.state().items()})


def breakable_builder(workload: Workload, is_poisoned: Callable[[], bool]) -> Callable[[Orders], TorchDevicePart]:
    """Return what builds a device's part, as `part_builder` does."""

    def build(orders: Orders) -> TorchDevicePart:
        part, rest = split_model(workload.build_model(), orders.plan.split_point)
        breakable = BreakablePart(part, workload.optimizer(), has_loss=len(rest) == 0, keeps_base=orders.keeps_base)
        breakable.is_poisoned = is_poisoned
        return breakable

    return build
