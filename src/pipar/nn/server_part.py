"""The layers after the cut, with the loss: the server's side of each micro-batch of one device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from pipar.errors import ProtocolError
from pipar.execution.schedule import StepCount
from pipar.execution.work import Place
from pipar.nn.at_once import InOrder, WeightSharingCopy, unused_copy
from pipar.nn.loss_sum import LossSum
from pipar.nn.micro_batches import Activation, Decoded, tensors_at
from pipar.nn.optimizers import FIRST_STEP, OptimizerSettings
from pipar.nn.parts import Part
from pipar.tasks.losses import Targets
from pipar.tasks.task import COUNT_ROUNDING, Task
from pipar.tensors import crossing
from pipar.tensors.bodies import (
    DIVERGED,
    Generators,
    check_range,
    not_zero,
    read_tensor,
    tensor_body,
    unmasked,
)
from pipar.tensors.crossing import Received, read_activations
from pipar.tensors.inputs import mapped
from pipar.tensors.torch_device import CPU, TorchDevice
from pipar.wire.encodings import chunk_bytes, is_sparse
from pipar.wire.messages import (
    EMPTY,
    ITEM_BYTES,
    SEVERAL,
    Body,
    Message,
    tensor_bytes,
)

#: In the first round, little has been trained that could have diverged.
_EARLY = (
    "In the first round, its samples (check them for missing values) or the first weights are likelier causes than a "
    "training that has diverged, for which a smaller optimizer.learning_rate may help."
)

_ITS_LOSS = "The loss of a micro-batch"


@dataclass
class _BatchCount:
    """The counts of a batch's pieces so far: a device must not give its batch more weight than it has."""

    so_far: float = 0.0
    announced: float | None = None

    def add(self, own: float, announced: float) -> None:
        """Add a piece; raise ProtocolError if the pieces of its batch do not agree, or count more than the batch."""
        self.so_far += own
        if self.announced not in (None, announced) or self.so_far > announced * (1 + COUNT_ROUNDING):
            raise ProtocolError(
                f"The counts of a batch's micro-batches add up to {self.so_far:g} so far, but the latest gives "
                f"{announced:g} as the count of the whole batch."
            )
        self.announced = announced


@dataclass(frozen=True)
class ForwardedAtOnce:
    """A micro-batch between its forward and its backward, with the copy of the network that computes it."""

    copied: WeightSharingCopy
    decoded: Decoded
    activation: Activation
    loss: torch.Tensor


class TorchServerPart(Part):
    """M^s_k: layers P+1..Q on the server, with the loss."""

    def __init__(
        self,
        module: nn.Sequential,
        optimizer: OptimizerSettings,
        *,
        task: Task,
        proximal: float = 0.0,
        rounding: Generators | None = None,
        returns_gradients: bool = True,
        device: TorchDevice = CPU,
        at_once: bool = False,
    ) -> None:
        super().__init__(module, optimizer, proximal=proximal, rounding=rounding, device=device)
        self._task = task
        self._counted = _BatchCount()
        self._returns_gradients = returns_gradients  # False: the device has nothing to train
        # A leaf that requires a gradient cannot be overwritten. A network cut before nn.ReLU(inplace=True) would try
        # to, also through a view of its input, such as nn.Flatten returns.
        self._overwrites_input = any(getattr(layer, "inplace", False) for layer in module.modules())
        self._takes: list[tuple[torch.Size, torch.dtype]] | None = None  # of one sample's tensors, as first received
        self._losses = LossSum()
        self._checks_losses = False
        # Of micro-batches that are computed at the same time, if they may be; their copies are made from this one.
        self._in_order: InOrder | None = None
        self._unused = unused_copy(module) if at_once else None
        self._prepare()

    def _prepare(self) -> None:
        """Prepare what a subclass adds, when everything else is constructed."""

    def decode(self, message: Message, encoding: str) -> Decoded:
        several = message.body.encoding == SEVERAL
        activation = read_activations(message, encoding) if several else read_tensor(message, encoding)
        if self._takes not in (None, _outline(activation)):
            raise ProtocolError(f"{message} has a different shape or dtype than the activations before it.")
        given = (one if one.requires_grad or not several else unmasked(one) for one in tensors_at(activation))
        what = f"What the device has computed from batch {message.iteration} of round {message.epoch}"
        check_range(given, what, DIVERGED if message.epoch > 1 else _EARLY)
        targets, count = self._task.read(message)
        return Decoded(activation, targets, message.batch_samples, count)

    def forward(self, decoded: Decoded) -> tuple[Activation, torch.Tensor]:
        """Return the activations and the loss of one micro-batch: its share of the batch's mean loss."""
        self._count(decoded)
        activation, loss = self._forward(self.module, decoded)
        self._losses.add(loss, decoded.batch_samples)
        return activation, loss

    def _count(self, decoded: Decoded) -> None:
        if self._task.sends_count:
            self._counted.add(self._task.loss.count(decoded.targets), decoded.batch_count)

    def _forward(self, module: nn.Module, decoded: Decoded) -> tuple[Activation, torch.Tensor]:
        """Return the activations of one micro-batch where these layers are, and its loss after them."""
        activation = self._put(decoded.activation)
        if isinstance(activation, torch.Tensor):
            activation.requires_grad_(self._returns_gradients)
        with self._torch_device.computing():
            targets = mapped(decoded.targets, self._torch_device.put)
            loss = self._loss(module, activation, targets, decoded.batch_count)
        # Masks, and targets other than labels, may have any effect on it.
        self._checks_losses = isinstance(activation, Received) or not self._task.has_labels
        if loss.is_cpu and self._checks_losses:
            check_range([loss], _ITS_LOSS)
        return activation, loss

    def forward_at_once(self, decoded: Decoded) -> ForwardedAtOnce:
        """Return the same while other micro-batches of the batch are computed; the loss counts after its backward."""
        copied = self._order.borrow()
        return ForwardedAtOnce(copied, decoded, *self._forward(copied.network, decoded))

    def backward_at_once(self, micro_batch: int, forwarded: ForwardedAtOnce) -> Activation:
        """Do what `backward` does, while others are computed; gradients and losses add up in order of the numbers."""
        torch.autograd.backward(forwarded.loss)

        def add_loss() -> None:
            self._count(forwarded.decoded)
            self._losses.add(forwarded.loss, forwarded.decoded.batch_samples)

        self._order.add(micro_batch, forwarded.copied, add_loss)
        return forwarded.activation

    @property
    def _order(self) -> InOrder:
        assert self._in_order is not None, "begin_batch_at_once comes first."
        return self._in_order

    def begin_batch_at_once(self) -> None:
        """The micro-batches that come next, the first of a batch, may be computed at the same time, on CPUs."""
        assert self._torch_device.is_cpu
        assert self._unused is not None, "It is not made for that."
        if self._in_order is None:
            self._in_order = InOrder(self.module, self._unused)
        self._in_order.begin_batch()

    def _put(self, received: Activation) -> Activation:
        if isinstance(received, Received):
            return Received(tuple(map(self._torch_device.put, received.tensors)), received.parts)
        return self._torch_device.put(received)

    def step(self, at: StepCount = FIRST_STEP, others: float = 0.0) -> None:
        losses = self._losses.read()  # from an accelerator, where none was checked before
        if self._checks_losses:
            check_range([torch.tensor(losses, dtype=torch.float64)], _ITS_LOSS)
        super().step(at, others)
        self._counted = _BatchCount()

    def _loss(self, module: nn.Module, activation: Activation, targets: Targets, count: float) -> torch.Tensor:
        """Return the loss; raise ProtocolError if these layers cannot take what a device sent."""
        given = tensors_at(activation)
        try:
            output = module(*(one.clone() for one in given) if self._overwrites_input else given)
            loss = self._task.share(output, targets, count)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            # Later it is not the shape's fault; an index out of range is always the device's.
            if self._takes is not None and not isinstance(error, IndexError):
                raise
            shapes = ", ".join(f"{tuple(one.shape)} in {one.dtype}" for one in given)
            raise ProtocolError(f"The layers after the cut do not take activations of {shapes}: {error}") from error
        self._takes = _outline(activation)
        return loss

    def backward(self, forwarded: tuple[Activation, torch.Tensor]) -> Activation:
        """Accumulate g(M^s_k | a_n) and return a_n with its gradient g(a_n), if the device needs that."""
        activation, loss = forwarded
        torch.autograd.backward(loss)
        return activation

    def discard(self) -> None:
        super().discard()
        self._losses.take()
        self._counted = _BatchCount()
        self._in_order = None

    def chunk_bytes(self, message: Message, encoding: str) -> list[int]:
        """Return the sizes of the gradient's chunks: it has the shape of the activations in the message."""
        tensor_bytes(message)
        if message.body.encoding == SEVERAL:
            return crossing.chunk_bytes(crossing.gradient_parts(message.body.parts))
        return chunk_bytes(message.body.shape, ITEM_BYTES[message.body.dtype], encoding)

    def encode(self, activation: Activation, encoding: str, place: Place = ()) -> Body:
        """Return the gradient of a micro-batch's activations; an empty body if the device has nothing to train."""
        if not self._returns_gradients:
            return EMPTY
        if isinstance(activation, Received):
            return crossing.gradient_body(activation, encoding, self._encoding_errors, place)
        kept = not_zero(activation) if is_sparse(encoding) else None
        assert activation.grad is not None
        return tensor_body(
            activation.grad, encoding=encoding, kept=kept, lossy=self._encoding_errors.of(activation, encoding, place)
        )

    def take_loss(self) -> float:
        """Return the loss summed over the samples since the last call."""
        return self._losses.take()


def _outline(activation: Activation) -> list[tuple[torch.Size, torch.dtype]]:
    return [(one.shape[1:], one.dtype) for one in tensors_at(activation)]
