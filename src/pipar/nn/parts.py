"""The layers on each side of the cut: forward and backward of a micro-batch, and the optimiser step after a batch.

For a batch of m samples, the loss of a micro-batch is the sum of its samples' losses divided by m; a task may count
something other than samples. Gradients accumulate over the N micro-batches, so at the step they equal g(M) of the mean
loss over the whole batch, as in plain training, wherever the network and the batch are cut. We differ from the paper
here: it scales both the loss and the step by 1/N.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from pipar.errors import ProtocolError
from pipar.execution.schedule import StepCount
from pipar.execution.work import Place
from pipar.nn import crossing
from pipar.nn.crossing import Received, read_activations
from pipar.nn.frozen import changing_state, frozen_bytes, frozen_names
from pipar.nn.inputs import Inputs, call, mapped, rebuilt, split_rows, tensors_of
from pipar.nn.losses import Targets
from pipar.nn.optimizers import FIRST_STEP, OptimizerSettings, divided_state, moved_state, saved_state
from pipar.nn.rectified import is_rectified
from pipar.nn.runtime import release_model_memory
from pipar.nn.tasks import COUNT_ROUNDING, Task, classification
from pipar.nn.tensors import (
    EncodingErrors,
    Generators,
    arrays,
    changes_body,
    check_range,
    not_zero,
    read_state,
    read_tensor,
    state_body,
    tensor_body,
    unmasked,
)
from pipar.privacy import mechanisms
from pipar.wire.encodings import chunk_bytes, is_sparse
from pipar.wire.messages import (
    EMPTY,
    ITEM_BYTES,
    NUMBER_BYTES,
    SEVERAL,
    Body,
    Message,
    Reference,
    numbers_body,
    tensor_bytes,
)

#: What a device's part gives: one tensor, or several.
Crossing = torch.Tensor | tuple[torch.Tensor, ...]
#: The same at the server.
Activation = torch.Tensor | Received


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Inputs and targets of one micro-batch, the number of samples in its whole batch, and what that counts."""

    inputs: Inputs
    targets: Targets
    batch_samples: int
    sent_targets: Targets | None = None  # the targets that the server gets, if they differ
    count: float | None = None  # of the whole batch; None: its samples

    @property
    def samples(self) -> int:
        return len(tensors_of(self.targets)[0])

    @property
    def batch_count(self) -> float:
        return self.batch_samples if self.count is None else self.count


def cut_micro_batches(
    inputs: Inputs,
    targets: Targets,
    sizes: list[int],
    sent_targets: Targets | None = None,
    *,
    count: float | None = None,
) -> list[MicroBatch]:
    """Return the micro-batches of a batch, in order, as views."""
    total = sum(sizes)
    cut = (split_rows(inputs, sizes), split_rows(targets, sizes))
    others = [None] * len(sizes) if sent_targets is None else split_rows(sent_targets, sizes)
    return [MicroBatch(x, y, total, other, count) for x, y, other in zip(*cut, others, strict=True)]


def reference(numbers: bytes, batch_samples: int, count: bytes = b"") -> Reference:
    """Return a micro-batch by the 32-bit numbers of its samples' activations, which the server has kept."""
    return Reference(len(numbers) // NUMBER_BYTES, batch_samples, numbers_body(numbers, count))


class Decoded(NamedTuple):
    """A micro-batch at the server."""

    activation: Activation
    targets: Targets
    batch_samples: int
    batch_count: float  # what the whole batch counts


def tensors_at(activation: Activation) -> tuple[torch.Tensor, ...]:
    """Return the tensors that have crossed the cut."""
    return activation.tensors if isinstance(activation, Received) else (activation,)


def _outline(activation: Activation) -> list[tuple[torch.Size, torch.dtype]]:
    return [(one.shape[1:], one.dtype) for one in tensors_at(activation)]


#: The batch counter of torch's normalisation layers; the server knows its value anyway, so it needs no noise.
_ITERATIONS = "num_batches_tracked"


class Part:
    """The layers on one side of the cut, with their optimiser."""

    def __init__(
        self,
        module: nn.Sequential,
        optimizer: OptimizerSettings,
        *,
        proximal: float = 0.0,
        rounding: Generators | None = None,
    ) -> None:
        self.module = module.train()
        self._encoding_errors = EncodingErrors(rounding)
        self._proximal = proximal
        self._global: dict[str, torch.Tensor] = {}  # w_global by name, if there is a proximal term
        self._optimizer = optimizer
        self._steps = optimizer.over(module)  # None: nothing is trained
        self._squared_norm: float | None = None  # of the gradient that the next step applies, once it is measured
        self._new: dict[str, nn.Parameter] = {}  # of layers that moved here from the other side of the cut

    def measure_gradient(self) -> float:
        """Return the squared norm of the accumulated gradients, with those of the proximal term."""
        if self._squared_norm is None:
            self._add_proximal_gradient()
            self._squared_norm = 0.0 if self._steps is None else self._steps.squared_norm()
        return self._squared_norm

    def step(self, at: StepCount = FIRST_STEP, others: float = 0.0) -> None:
        """Apply the accumulated gradients, as the schedule says for this step.

        If they are clipped, `others` is the squared norm of the gradients on the other side of the cut.
        """
        if self._steps is not None:
            if self._optimizer.clip_norm is None:
                self._add_proximal_gradient()
            else:
                self._steps.clip(math.sqrt(self.measure_gradient() + others), self._optimizer.clip_norm)
            self._steps.step(at)
        self._squared_norm = None

    def discard(self) -> None:
        """Discard gradients that no step has applied yet."""
        self._squared_norm = None
        if self._steps is not None:
            self._steps.zero_grad()

    def take_encoding_error(self) -> tuple[float, float] | None:
        """Return the sums of squared encoding errors and squared values since the last call; None if all were exact."""
        return self._encoding_errors.take()

    def keep_errors_of(self, devices: Collection[str]) -> None:
        """Drop the encoding residuals of all other devices."""
        self._encoding_errors.keep_only(devices)

    @torch.no_grad()
    def _add_proximal_gradient(self) -> None:
        """Add mu (w - w_global), the gradient of FedProx's term mu/2 |w - w_global|^2; Li et al. 2020."""
        for name, parameter in self.module.named_parameters() if self._global else ():
            if parameter.grad is not None:
                parameter.grad.add_(parameter - self._global[name], alpha=self._proximal)

    def set_proximal_target(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set w_global, the weights that the proximal term pulls towards.

        They are not copied: the caller must not modify them during the round.
        """
        if self._proximal > 0:
            trained = (name for name, weight in self.module.named_parameters() if weight.requires_grad)
            self._global = {name: state[name].detach() for name in trained}

    def state(self) -> dict[str, torch.Tensor]:
        return self.module.state_dict()

    def install(self, state: Mapping[str, torch.Tensor], *, keep_state: bool) -> None:
        """Load weights and buffers; unless it is kept, optimiser state is reset. Frozen parameters may be left out."""
        try:
            keys = self.module.load_state_dict(state, strict=False)
        except RuntimeError as error:
            raise ProtocolError(f"The peer's model does not fit this part of the network: {error}.") from None
        wrong = [*keys.unexpected_keys, *(name for name in keys.missing_keys if name not in self._may_be_missing())]
        if wrong:
            raise ProtocolError(f"The peer's model does not fit this part of the network: {wrong[0]!r} is in only one.")
        if not keep_state:
            self._steps = self._optimizer.over(self.module)
        self.set_proximal_target(state)

    def _may_be_missing(self) -> frozenset[str]:
        """Return the names that a model for this part need not have."""
        return frozen_names(self.module)

    def carry_state_from(self, before: Part) -> Body:
        """Copy the optimiser state of the layers that stay on this side of the cut; return that of layers that leave.

        The other side passes the returned body to its `receive_state`.
        """
        own = dict(self.module.named_parameters())
        staying, leaving = divided_state(before.optimizer_state(), own)
        self._set_state(staying)
        known = dict(before.module.named_parameters())
        self._new = {name: parameter for name, parameter in own.items() if name not in known}
        return state_body(leaving)

    def receive_state(self, body: Body) -> None:
        """Load the optimiser state of layers that came from the other side; a layer that took no step may have none."""
        self._set_state(moved_state(read_state(body), self._new, self._optimizer))
        self._new = {}

    def restore_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load what `optimizer_state` returned, leaving out layers that are not in this part."""
        self._set_state(saved_state(state, dict(self.module.named_parameters()), self._optimizer))

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Return the state of each parameter that has one, by names; the tensors are the optimiser's own."""
        return {} if self._steps is None else self._steps.state()

    def _set_state(self, state: Mapping[str, torch.Tensor]) -> None:
        if self._steps is not None:
            self._steps.load(state)


#: The task of a part for which no other is given.
_LABELS = classification(0)


class TorchDevicePart(Part):
    """M^c_k: layers 1..P on the device; for P = Q also the loss."""

    def __init__(
        self,
        module: nn.Sequential,
        optimizer: OptimizerSettings,
        *,
        has_loss: bool,
        proximal: float = 0.0,
        rounding: Generators | None = None,
        keeps_base: bool = False,
        each_alone: bool = False,
        task: Task = _LABELS,
    ) -> None:
        super().__init__(module, optimizer, proximal=proximal, rounding=rounding)
        self._task = task
        self._keeps_base = keeps_base
        self._each_alone = each_alone  # compute each sample by itself
        self._base: dict[str, torch.Tensor] | None = (
            None  # the last received model, if changes relative to it are needed
        )
        self._is_installed = False  # a model has come, with the frozen parameters
        self._has_loss = has_loss
        self.last_loss: float | None = None  # mean over the last batch, if the device computes it
        self._outputs: dict[int, Crossing] = {}  # by micro-batch, until its backward
        self.loss_sum = 0.0

    def forward(self, micro_batch: int, piece: MicroBatch) -> Crossing:
        """Return the activations a_n at the cut; for P = Q the loss, which stays on the device."""
        output = self._one_by_one(piece) if self._each_alone else call(self.module, piece.inputs)
        if self._has_loss:
            output = self._task.share(output, piece.targets, piece.batch_count)
            self.last_loss = output.item()
            self.loss_sum += self.last_loss * piece.batch_samples
        activation: Crossing = output
        self._outputs[micro_batch] = activation
        return activation

    def _one_by_one(self, piece: MicroBatch) -> Any:
        """Return the activations of each sample by itself: in a batch, their last bits depend on its other samples."""
        alone = (mapped(one, torch.clone) for one in split_rows(piece.inputs, [1] * piece.samples))
        rows = [call(self.module, one) for one in alone]
        return rebuilt(rows[0], map(torch.cat, zip(*map(tensors_of, rows), strict=True)))

    def release(self, micro_batch: int) -> None:
        """Free the activations of a micro-batch that has no backward."""
        del self._outputs[micro_batch]

    def backward(self, micro_batch: int, gradient: torch.Tensor | Sequence[torch.Tensor] | None) -> None:
        """Accumulate g(M^c_k | g(a_n)), and free the activations of this micro-batch."""
        output = self._outputs.pop(micro_batch)
        if isinstance(output, tuple):
            torch.autograd.backward([one for one in output if one.requires_grad], gradient)
            return
        assert not isinstance(gradient, Sequence)
        if gradient is not None and gradient.shape != output.shape:
            raise ProtocolError(f"A gradient of shape {tuple(gradient.shape)} came for {tuple(output.shape)}.")
        if output.requires_grad:  # not where the part has no weights
            torch.autograd.backward(output, gradient)

    def take_loss(self) -> float:
        """Return the loss summed over the samples since the last call."""
        loss, self.loss_sum = self.loss_sum, 0.0
        return loss

    def discard(self) -> None:
        """Discard an epoch: its gradients, losses and optimiser state; the server sends new weights."""
        super().discard()
        self._encoding_errors.take()
        self._outputs.clear()
        self.loss_sum = 0.0
        self._steps = self._optimizer.over(self.module)

    def chunk_bytes(self, activation: Crossing, encoding: str) -> list[int]:
        if isinstance(activation, tuple):
            return crossing.chunk_bytes(list(map(crossing.part_of, activation)))
        return chunk_bytes(tuple(activation.shape), activation.element_size(), encoding)

    def encode(self, activation: Crossing, piece: MicroBatch, encoding: str, place: Place = ()) -> Body:
        sent = piece.targets if piece.sent_targets is None else piece.sent_targets
        targets = self._task.buffers(sent, piece.batch_count)
        if isinstance(activation, tuple):
            return crossing.activation_body(activation, targets, encoding, self._encoding_errors, place)
        lossy = self._encoding_errors.of(activation, encoding, place)
        return tensor_body(activation, targets, encoding=encoding, lossy=lossy)

    def decode(self, message: Message, encoding: str) -> torch.Tensor | list[torch.Tensor]:
        """Return g(a_n); a sparse encoding has values only where a_n is not zero, as a ReLU passes no others on."""
        output = self._outputs.get(message.micro_batch)
        if isinstance(output, tuple):
            return crossing.read_gradients(message, encoding, output)
        if not is_sparse(encoding):
            return read_tensor(message, encoding)
        if output is None:
            raise ProtocolError(f"The server sent {message}, but no such micro-batch awaits a gradient.")
        if output.requires_grad and not is_rectified(output):
            raise ProtocolError(f"{message} is encoded as {encoding}, which is exact only after a ReLU.")
        return read_tensor(message, encoding, not_zero(output))

    @torch.no_grad()
    def protect(self, noise: mechanisms.NoiseSource, *, clip: float, multiplier: float) -> None:
        """Clip the update of this part by one norm over all of it, and add noise; in place.

        Running variances are clamped at 0 after the noise, which reveals nothing further. Entries without noise are
        reset to their received values, even if a module has stored something in them.
        """
        assert self._base is not None
        learned = self._learned()
        self._take_back(self._base)
        base = arrays({name: self._base[name] for name in learned})
        mechanisms.clip_and_noise(arrays(learned), base, clip=clip, multiplier=multiplier, noise=noise)
        for name, tensor in learned.items():
            if name.endswith("running_var"):
                tensor.clamp_(min=0.0)

    def _take_back(self, base: Mapping[str, torch.Tensor]) -> None:
        """Reset what gets no noise and is sent: integers other than the batch counters.

        They differ from their received values only if a module stores data in them, such as label counts.
        """
        # Shared tensors under all of their names.
        weights, buffers = (
            named(remove_duplicate=False) for named in (self.module.named_parameters, self.module.named_buffers)
        )
        noised = {name for name, weight in weights if weight.requires_grad}
        noised |= {name for name, buffer in buffers if buffer.is_floating_point()}
        for name, tensor in changing_state(self.module).items():
            if name not in noised and not name.endswith(_ITERATIONS):
                tensor.copy_(base[name])

    def _learned(self) -> dict[str, torch.Tensor]:
        """Return everything that depends on the data, by name: trained weights and floating-point buffers.

        A weight shared by two layers occurs once: the noise must be added to it only once.
        """
        state = self.state()
        learned = [name for name, weight in self.module.named_parameters() if weight.requires_grad]
        buffers = [name for name, buffer in self.module.named_buffers() if buffer.is_floating_point()]
        return {name: state[name] for name in (*learned, *buffers) if name in state}

    def pack(self, *, changes: bool = False) -> Body:
        """Return the trained weights without copying them, or their changes since they were received.

        Frozen parameters are left out: the server has them.

        They stay unmodified until the next model is installed. The server sends that model only after it has these
        weights or has given up on them, and then it ignores the rest of this message.
        """
        base = self._base if changes else None
        state = changing_state(self.module)
        body = state_body(state) if base is None else changes_body(state, base)
        # Gradients are freed: the next model needs their memory.
        release_model_memory(body.size_bytes)
        return body

    def unpack_and_install(self, body: Body, *, keep_state: bool) -> None:
        state = read_state(body, self._base)
        self.install(state, keep_state=keep_state)
        self._is_installed = True
        changing = changing_state(self.module) if self._keeps_base else {}
        self._base = {name: state[name] for name in changing} if self._keeps_base else None

    def _may_be_missing(self) -> frozenset[str]:
        return super()._may_be_missing() if self._is_installed else frozenset()

    @property
    def frozen_bytes(self) -> int:
        """The bytes of the parameters that only the first model has."""
        return frozen_bytes(self.module)


@dataclass
class _BatchCount:
    """What the pieces of one batch have counted so far: a device must not give its batch more weight than it has."""

    so_far: float = 0.0
    announced: float | None = None

    def add(self, own: float, announced: float) -> None:
        """Add a piece; raise ProtocolError if the pieces of its batch do not agree, or count more than the batch."""
        self.so_far += own
        if self.announced not in (None, announced) or self.so_far > announced * (1 + COUNT_ROUNDING):
            raise ProtocolError(
                f"The micro-batches of a batch count {self.so_far:g} so far, but one says that all count {announced:g}."
            )
        self.announced = announced


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
    ) -> None:
        super().__init__(module, optimizer, proximal=proximal, rounding=rounding)
        self._task = task
        self._counted = _BatchCount()
        self._returns_gradients = returns_gradients  # False: the device has nothing to train
        # A leaf that requires a gradient cannot be overwritten. A network cut before nn.ReLU(inplace=True) would try
        # to, also through a view of its input, such as nn.Flatten returns.
        self._overwrites_input = any(getattr(layer, "inplace", False) for layer in module.modules())
        self._takes: list[tuple[torch.Size, torch.dtype]] | None = None  # of one sample's tensors, as first received
        self.loss_sum = 0.0
        self._prepare()

    def _prepare(self) -> None:
        """Prepare what a subclass adds, when everything else is constructed."""

    def decode(self, message: Message, encoding: str) -> Decoded:
        several = message.body.encoding == SEVERAL
        activation = read_activations(message, encoding) if several else read_tensor(message, encoding)
        if self._takes not in (None, _outline(activation)):
            raise ProtocolError(f"{message} has a different shape or dtype than the activations before it.")
        given = (one if one.requires_grad or not several else unmasked(one) for one in tensors_at(activation))
        check_range(given, str(message))
        targets, count = self._task.read(message)
        return Decoded(activation, targets, message.batch_samples, count)

    def forward(self, decoded: Decoded) -> tuple[Activation, torch.Tensor]:
        """Return the activations and the loss of one micro-batch: its share of the batch's mean loss."""
        activation, targets, batch_samples, count = decoded
        if self._task.sends_count:
            self._counted.add(self._task.loss.count(targets), count)
        if isinstance(activation, torch.Tensor):
            activation.requires_grad_(self._returns_gradients)
        loss = self._loss(activation, targets, count)
        if isinstance(activation, Received) or not self._task.has_labels:
            check_range([loss], "The loss of a micro-batch")  # its masks, or its targets, may have any effect
        self.loss_sum += loss.item() * batch_samples
        return activation, loss

    def step(self, at: StepCount = FIRST_STEP, others: float = 0.0) -> None:
        super().step(at, others)
        self._counted = _BatchCount()

    def _loss(self, activation: Activation, targets: Targets, count: float) -> torch.Tensor:
        """Return the loss; raise ProtocolError if these layers cannot take what a device sent."""
        given = tensors_at(activation)
        try:
            output = self.module(*(one.clone() for one in given) if self._overwrites_input else given)
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
        self.loss_sum = 0.0
        self._counted = _BatchCount()

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
        loss, self.loss_sum = self.loss_sum, 0.0
        return loss
