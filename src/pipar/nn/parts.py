"""One forward and one backward on each side of the cut, and the optimiser step behind them.

For a batch of m samples cut into pieces of m_n, each piece's loss is its summed loss divided by m. Gradients
accumulate over the pieces, so before the step they are those of the mean loss over the whole batch: the
gradient that plain training has, whatever the cut. (The paper scales both the loss and the step by 1/N.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from pipar.errors import InputError, ProtocolError
from pipar.execution.stages import Place
from pipar.nn.encoding_errors import EncodingErrors, Generators
from pipar.nn.micro_batches import MicroBatch
from pipar.nn.rectified import is_rectified
from pipar.nn.runtime import release_model_memory
from pipar.nn.tensors import (
    arrays,
    changes_body,
    check_finite,
    not_zero,
    read_labels,
    read_state,
    read_tensor,
    state_body,
    tensor_body,
)
from pipar.privacy import mechanisms
from pipar.wire.chunks import chunk_bytes
from pipar.wire.encodings import is_sparse
from pipar.wire.messages import ITEM_BYTES, Body, Message, tensor_bytes


@dataclass(frozen=True)
class Optimizer:
    """Stochastic gradient descent with momentum."""

    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0

    def over(self, module: nn.Module) -> torch.optim.Optimizer | None:
        """Return an optimiser for a part of the network; None if the part has nothing to learn."""
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            return None
        return torch.optim.SGD(
            parameters, lr=self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay
        )


#: What torch's optimiser calls the momentum of a parameter.
_MOMENTUM = "momentum_buffer"
#: What torch's normalising layers call the number of their batches, which everybody knows.
_ITERATIONS = "num_batches_tracked"


class Part:
    """The layers on one side of the cut with their optimiser: what a step and an exchange of models need."""

    def __init__(
        self, module: nn.Sequential, optimizer: Optimizer, *, proximal: float = 0.0, rounding: Generators | None = None
    ) -> None:
        self.module = module.train()
        self._encoding_errors = EncodingErrors(rounding)
        self._proximal = proximal
        self._global: dict[str, torch.Tensor] = {}  # w_global by name, where there is a proximal term
        self._optimizer = optimizer
        self._torch_optimizer = optimizer.over(module)
        self._new: dict[str, nn.Parameter] = {}  # of layers that came from the other side of the cut

    def step(self) -> None:
        """Apply the accumulated gradients."""
        if self._torch_optimizer is not None:
            self._add_proximal_gradient()
            self._torch_optimizer.step()
            self._torch_optimizer.zero_grad(set_to_none=True)

    def discard(self) -> None:
        """Forget gradients that no step has applied yet."""
        if self._torch_optimizer is not None:
            self._torch_optimizer.zero_grad(set_to_none=True)

    def take_encoding_error(self) -> tuple[float, float] | None:
        """Return what a lossy encoding has lost since the last call: squared errors, and the squared values."""
        return self._encoding_errors.take()

    def keep_errors_of(self, devices: Collection[str]) -> None:
        """Forget what a lossy encoding has to make up for to all other devices."""
        self._encoding_errors.keep_only(devices)

    @torch.no_grad()
    def _add_proximal_gradient(self) -> None:
        """Add mu (w - w_global) to each gradient: that of FedProx's term mu/2 |w - w_global|^2."""
        for name, parameter in self.module.named_parameters() if self._global else ():
            if parameter.grad is not None:
                parameter.grad.add_(parameter - self._global[name], alpha=self._proximal)

    def set_proximal_target(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take these for the global weights that the proximal term pulls to.

        They are not copied, so whoever gives them must not change them within a round.
        """
        if self._proximal > 0:
            self._global = {name: state[name].detach() for name, _ in self.module.named_parameters()}

    def state(self) -> dict[str, torch.Tensor]:
        return self.module.state_dict()

    def install(self, state: Mapping[str, torch.Tensor], *, keep_momentum: bool) -> None:
        """Take over weights and buffers; momentum starts anew unless it is kept."""
        try:
            self.module.load_state_dict(state)
        except RuntimeError as error:
            raise ProtocolError(f"The peer's model does not fit this part of the network: {error}.") from None
        if not keep_momentum:
            self._torch_optimizer = self._optimizer.over(self.module)
        self.set_proximal_target(state)

    def carry_momentum_from(self, before: Part) -> Body:
        """Take over the momentum of the layers that stay on this side of the cut; return that of those that leave it.

        What comes from the other side is taken by `receive_momentum`, as this body is there.
        """
        own = dict(self.module.named_parameters())
        was = before.momentum()
        self._set_momentum({name: momentum for name, momentum in was.items() if name in own})
        known = dict(before.module.named_parameters())
        self._new = {name: parameter for name, parameter in own.items() if name not in known}
        return state_body({name: momentum for name, momentum in was.items() if name not in own})

    def receive_momentum(self, body: Body) -> None:
        """Take the momentum of layers that came from the other side of the cut; one that never moved has none."""
        state = read_state(body)
        for name, momentum in state.items():
            parameter = self._new.get(name)
            if parameter is None or (momentum.shape, momentum.dtype) != (parameter.shape, parameter.dtype):
                raise ProtocolError(f"The peer sent momentum of {name!r}, which does not fit the layers that moved.")
        check_finite(state.values(), "The momentum of the layers that moved")
        self._set_momentum(state)
        self._new = {}

    def restore_momentum(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `momentum` gave of such a part; that of layers which are not in this one is left out."""
        own = dict(self.module.named_parameters())
        fitting = {name: momentum for name, momentum in state.items() if name in own}
        for name, momentum in fitting.items():
            if (momentum.shape, momentum.dtype) != (own[name].shape, own[name].dtype):
                raise InputError(f"The checkpoint has momentum of {name!r} that does not fit this network.")
        self._set_momentum(fitting)

    def momentum(self) -> dict[str, torch.Tensor]:
        """Return the momentum of every parameter that has some, by name; the tensors are the optimiser's own."""
        known = self._torch_optimizer.state if self._torch_optimizer is not None else {}
        named = ((name, known.get(parameter, {})) for name, parameter in self.module.named_parameters())
        return {name: kept[_MOMENTUM] for name, kept in named if kept.get(_MOMENTUM) is not None}

    def _set_momentum(self, state: Mapping[str, torch.Tensor]) -> None:
        parameters = dict(self.module.named_parameters())
        for name, momentum in state.items():
            if self._torch_optimizer is not None and parameters[name].requires_grad:
                self._torch_optimizer.state[parameters[name]][_MOMENTUM] = momentum.clone()


class TorchDevicePart(Part):
    """M^c_k: layers 1..P on the device; with P = Q the loss, too."""

    def __init__(
        self,
        module: nn.Sequential,
        optimizer: Optimizer,
        *,
        has_loss: bool,
        proximal: float = 0.0,
        rounding: Generators | None = None,
        keeps_base: bool = False,
    ) -> None:
        super().__init__(module, optimizer, proximal=proximal, rounding=rounding)
        self._keeps_base = keeps_base
        self._base: dict[str, torch.Tensor] | None = None  # what came last, so that its changes can be told
        self._has_loss = has_loss
        self.last_loss: float | None = None  # the mean over the last batch, where the device computes it
        self._outputs: dict[int, torch.Tensor] = {}  # by micro-batch, until its backward
        self.loss_sum = 0.0

    def forward(self, micro_batch: int, piece: MicroBatch) -> torch.Tensor:
        """Return the activations a_n at the cut; with P = Q nothing leaves the device and the loss is kept."""
        output: torch.Tensor = self.module(piece.inputs)
        if self._has_loss:
            output = F.cross_entropy(output, piece.labels, reduction="sum") / piece.batch_samples
            self.last_loss = output.item()
            self.loss_sum += self.last_loss * piece.batch_samples
        self._outputs[micro_batch] = output
        return output

    def backward(self, micro_batch: int, gradient: torch.Tensor | None) -> None:
        """Accumulate g(M^c_k | g(a_n)); the activations of this micro-batch are then free."""
        output = self._outputs.pop(micro_batch)
        if gradient is not None and gradient.shape != output.shape:
            raise ProtocolError(f"A gradient of shape {tuple(gradient.shape)} came for {tuple(output.shape)}.")
        if output.requires_grad:  # not where the part has no weights
            torch.autograd.backward(output, gradient)

    def take_loss(self) -> float:
        """Return the loss summed over the samples since the last call."""
        loss, self.loss_sum = self.loss_sum, 0.0
        return loss

    def discard(self) -> None:
        """Forget an epoch that does not count; the weights come anew, and so does the momentum."""
        super().discard()
        self._encoding_errors.take()
        self._outputs.clear()
        self.loss_sum = 0.0
        self._torch_optimizer = self._optimizer.over(self.module)

    def chunk_bytes(self, activation: torch.Tensor, encoding: str) -> list[int]:
        return chunk_bytes(tuple(activation.shape), activation.element_size(), encoding)

    def encode(self, activation: torch.Tensor, piece: MicroBatch, encoding: str, place: Place = ()) -> Body:
        lossy = self._encoding_errors.of(activation, encoding, place)
        labels = piece.labels if piece.sent_labels is None else piece.sent_labels
        return tensor_body(activation, labels, encoding=encoding, lossy=lossy)

    def decode(self, message: Message, encoding: str) -> torch.Tensor:
        """Return g(a_n). Behind a ReLU only what is not zero in a_n has come: of the rest nothing gets through it."""
        if not is_sparse(encoding):
            return read_tensor(message, encoding)
        output = self._outputs.get(message.micro_batch)
        if output is None:
            raise ProtocolError(f"The server sent {message}, but nothing waits for it.")
        if output.requires_grad and not is_rectified(output):
            raise ProtocolError(f"{message} is encoded as {encoding}, which is exact behind a ReLU only.")
        return read_tensor(message, encoding, not_zero(output))

    @torch.no_grad()
    def protect(self, chance: mechanisms.NoiseSource, *, clip: float, multiplier: float) -> None:
        """Clip what has changed in this part since it came, in one norm over all of it, and add noise to it.

        In place: it is nobody's any more but the server's. Running variances stay at least 0, which says nothing more
        of the data than they do. What has no noise goes as it came, whatever a module has made of it.
        """
        assert self._base is not None
        learned = self._learned()
        self._take_back(self._base)
        base = arrays({name: self._base[name] for name in learned})
        mechanisms.clip_and_noise(arrays(learned), base, clip=clip, multiplier=multiplier, noise=chance)
        for name, tensor in learned.items():
            if name.endswith("running_var"):
                tensor.clamp_(min=0.0)

    def _take_back(self, base: Mapping[str, torch.Tensor]) -> None:
        """Put back what gets no noise: weights that are not learned, and integers but those that count iterations.

        They are as they came, unless a module keeps something in them, as averages of weights or counts of labels.
        """
        # Also by the other names of what layers share.
        weights, buffers = (
            named(remove_duplicate=False) for named in (self.module.named_parameters, self.module.named_buffers)
        )
        noised = {name for name, weight in weights if weight.requires_grad}
        noised |= {name for name, buffer in buffers if buffer.is_floating_point()}
        for name, tensor in self.state().items():
            if name not in noised and not name.endswith(_ITERATIONS):
                tensor.copy_(base[name])

    def _learned(self) -> dict[str, torch.Tensor]:
        """Return all that the data have changed, by name: what is learned, and statistics of it.

        A weight that two layers share is in it once, or it would have noise twice, and less of it on average.
        """
        state = self.state()
        learned = [name for name, weight in self.module.named_parameters() if weight.requires_grad]
        buffers = [name for name, buffer in self.module.named_buffers() if buffer.is_floating_point()]
        return {name: state[name] for name in (*learned, *buffers) if name in state}

    def pack(self, *, changes: bool = False) -> Body:
        """Return the trained weights where they lie, or what has changed in them since they came.

        Weights stay as they are until another model is installed.

        The server sends that when it has these. If it goes on without them, it ignores what still comes of them.
        """
        base = self._base if changes else None
        body = state_body(self.state()) if base is None else changes_body(self.state(), base)
        # The gradients are gone: what they took is needed for the model that comes.
        release_model_memory(body.size_bytes)
        return body

    def unpack_and_install(self, body: Body, *, keep_momentum: bool) -> None:
        state = read_state(body, self._base)
        self.install(state, keep_momentum=keep_momentum)
        self._base = state if self._keeps_base else None


class TorchServerPart(Part):
    """M^s_k: layers P+1..Q on the server, with the loss."""

    def __init__(
        self,
        module: nn.Sequential,
        optimizer: Optimizer,
        *,
        classes: int,
        proximal: float = 0.0,
        rounding: Generators | None = None,
    ) -> None:
        super().__init__(module, optimizer, proximal=proximal, rounding=rounding)
        self._classes = classes
        # A leaf that needs a gradient cannot be overwritten; a network cut before nn.ReLU(inplace=True) would try,
        # and so would one with a view of its input, as nn.Flatten makes it, in between.
        self._overwrites_input = any(getattr(layer, "inplace", False) for layer in module.modules())
        self._takes: tuple[torch.Size, torch.dtype] | None = None  # one sample's activation, known from the first
        self.loss_sum = 0.0

    def decode(self, message: Message, encoding: str) -> tuple[torch.Tensor, torch.Tensor, int]:
        activation = read_tensor(message, encoding)
        if self._takes not in (None, (activation.shape[1:], activation.dtype)):
            raise ProtocolError(f"{message} has another shape or dtype than the activations before it.")
        check_finite([activation], str(message))
        return activation, read_labels(message, self._classes), message.batch_samples

    def forward(self, decoded: tuple[torch.Tensor, torch.Tensor, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return activations and loss of one micro-batch: its share of the batch's mean loss."""
        activation, labels, batch_samples = decoded
        activation.requires_grad_()
        loss = self._loss(activation, labels) / batch_samples
        self.loss_sum += loss.item() * batch_samples
        return activation, loss

    def _loss(self, activation: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the summed loss; the first activation of a device may be one that these layers do not take."""
        try:
            output = self.module(activation.clone() if self._overwrites_input else activation)
            loss = F.cross_entropy(output, labels, reduction="sum")
        except (RuntimeError, ValueError, IndexError) as error:
            if self._takes is not None:
                raise  # not the shape's fault
            given = f"{tuple(activation.shape)} in {activation.dtype}"
            raise ProtocolError(f"The layers behind the cut do not take activations of {given}: {error}") from error
        self._takes = (activation.shape[1:], activation.dtype)
        return loss

    def backward(self, forwarded: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Accumulate g(M^s_k | a_n) and return a_n with its gradient g(a_n)."""
        activation, loss = forwarded
        torch.autograd.backward(loss)
        assert activation.grad is not None
        return activation

    def discard(self) -> None:
        super().discard()
        self.loss_sum = 0.0

    def chunk_bytes(self, message: Message, encoding: str) -> list[int]:
        """Return the sizes of the gradient's chunks: it has the shape of what came, if that is a tensor."""
        tensor_bytes(message)
        return chunk_bytes(message.body.shape, ITEM_BYTES[message.body.dtype], encoding)

    def encode(self, activation: torch.Tensor, encoding: str, place: Place = ()) -> Body:
        kept = not_zero(activation) if is_sparse(encoding) else None
        assert activation.grad is not None
        return tensor_body(
            activation.grad, encoding=encoding, kept=kept, lossy=self._encoding_errors.of(activation, encoding, place)
        )

    def take_loss(self) -> float:
        """Return the loss summed over the samples since the last call."""
        loss, self.loss_sum = self.loss_sum, 0.0
        return loss
