"""Several micro-batches of one replica at the same time, with the gradients and losses of one after another.

Each micro-batch is computed by a copy of the network that shares its weights, and gets gradients of its own. They are
added to those of the replica in the order of the micro-batches, whichever is computed first. So every number is added
to the same numbers in the same order as if they were computed one after another: the weights have the same bits.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

#: Adds the loss of a micro-batch to those before it; called in their order.
AddLoss = Callable[[], None]


class WeightSharingCopy:
    """A copy of a network whose parameters share the memory of the network's own, and have other gradients.

    It is copied from `unused` if that is given, what `unused_copy` returned.
    """

    def __init__(self, network: nn.Sequential, unused: nn.Sequential | None = None) -> None:
        source = network if unused is None else unused
        self._own = list(network.parameters())
        self._shared = [nn.Parameter(weight.detach(), requires_grad=weight.requires_grad) for weight in self._own]
        same: dict[int, object] = {
            id(own): shared for own, shared in zip(source.parameters(), self._shared, strict=True)
        }
        same |= {id(old): buffer for old, buffer in zip(source.buffers(), network.buffers(), strict=True)}
        self.network: nn.Sequential = copy.deepcopy(source, same)

    def follow(self) -> None:
        """Share the weights as they are now: something may have given the network other memory for them."""
        for own, shared in zip(self._own, self._shared, strict=True):
            if own.data_ptr() != shared.data_ptr():
                shared.data = own.data

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Return the gradient of each parameter, and have none any more."""
        taken = [shared.grad for shared in self._shared]
        for shared in self._shared:
            shared.grad = None
        return taken


def unused_copy(network: nn.Sequential) -> nn.Sequential:
    """Return what copies of a network can be made from later; it has the buffers of the network, and no weights.

    A network that keeps an activation as an attribute cannot be copied itself after its first forward.
    """
    unused = WeightSharingCopy(network).network
    for weight in unused.parameters():
        weight.data = torch.empty(0, dtype=weight.dtype)
    return unused


@dataclass(frozen=True)
class _Computed:
    gradients: list[torch.Tensor | None]
    add_loss: AddLoss


class InOrder:
    """Copies of one network, and the order in which their gradients are added. Any thread may use it.

    They are made from `unused`, what `unused_copy` returned before the network's first forward.
    """

    def __init__(self, network: nn.Sequential, unused: nn.Sequential) -> None:
        self._network = network
        self._unused = unused
        self._lock = threading.Lock()
        self._free: list[WeightSharingCopy] = []
        self._computed: dict[int, _Computed] = {}  # by micro-batch: those that come after one that is not computed
        self._next = 1

    def borrow(self) -> WeightSharingCopy:
        """Return a copy that no other micro-batch uses."""
        with self._lock:
            copied = self._free.pop() if self._free else WeightSharingCopy(self._network, self._unused)
        copied.follow()
        return copied

    def add(self, micro_batch: int, copied: WeightSharingCopy, add_loss: AddLoss) -> None:
        """Add what a copy has computed, and what waits for it, unless an earlier micro-batch is still missing."""
        with self._lock:
            self._computed[micro_batch] = _Computed(copied.take_gradients(), add_loss)
            self._free.append(copied)
            while (computed := self._computed.pop(self._next, None)) is not None:
                self._next += 1
                computed.add_loss()
                self._accumulate(computed.gradients)

    @torch.no_grad()
    def _accumulate(self, gradients: list[torch.Tensor | None]) -> None:
        """Add as autograd does: the first gradient is taken over, others are added in place."""
        for weight, gradient in zip(self._network.parameters(), gradients, strict=True):
            if gradient is None:
                continue
            if weight.grad is None:
                weight.grad = gradient
            else:
                weight.grad += gradient

    def begin_batch(self) -> None:
        """The next micro-batch is the first one of a batch."""
        with self._lock:
            assert not self._computed, "A micro-batch of the last batch has not been added."
            self._next = 1
