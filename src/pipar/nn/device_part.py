"""The layers before the cut: a device's side of each micro-batch, and the model that it receives and sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipar.cutting.frozen import changing_state, frozen_bytes
from pipar.errors import ProtocolError
from pipar.execution.schedule import StepCount
from pipar.execution.work import Place
from pipar.nn.loss_sum import LossSum
from pipar.nn.micro_batches import Crossing, MicroBatch
from pipar.nn.optimizers import FIRST_STEP, OptimizerSettings
from pipar.nn.parts import Part
from pipar.nn.runtime import release_model_memory
from pipar.privacy import mechanisms
from pipar.tasks.task import Task, classification
from pipar.tensors import crossing
from pipar.tensors.bodies import (
    Generators,
    arrays,
    changes_body,
    not_zero,
    read_state,
    read_tensor,
    state_body,
    tensor_body,
)
from pipar.tensors.inputs import Inputs, call, mapped, rebuilt, split_rows, tensors_of
from pipar.tensors.relu_outputs import is_rectified
from pipar.tensors.torch_device import CPU, TorchDevice, all_to_host
from pipar.wire.encodings import chunk_bytes, is_sparse
from pipar.wire.messages import (
    Body,
    Message,
)

#: The batch counter of torch's normalisation layers; the server knows its value anyway, so it needs no noise.
_ITERATIONS = "num_batches_tracked"

#: The task of a part for which no other is given.
_LABELS = classification(0)


@dataclass(frozen=True)
class DeviceSettings:
    """How a device trains its part, as its orders say."""

    proximal: float = 0.0
    keeps_base: bool = False  # the last received model, because changes relative to it are needed
    each_alone: bool = False  # compute each sample by itself


_PLAIN = DeviceSettings()


class TorchDevicePart(Part):
    """M^c_k: layers 1..P on the device; for P = Q also the loss."""

    def __init__(
        self,
        module: nn.Sequential,
        optimizer: OptimizerSettings,
        *,
        has_loss: bool,
        task: Task = _LABELS,
        settings: DeviceSettings = _PLAIN,
        rounding: Generators | None = None,
        device: TorchDevice = CPU,
    ) -> None:
        super().__init__(module, optimizer, proximal=settings.proximal, rounding=rounding, device=device)
        self._task = task
        self._settings = settings
        self._base: dict[str, torch.Tensor] | None = None  # the last received model, if it is kept
        self._is_installed = False  # a model has come, with the frozen parameters
        self._has_loss = has_loss
        self._outputs: dict[int, Crossing] = {}  # by micro-batch, until its backward
        self._losses = LossSum()

    def forward(self, micro_batch: int, piece: MicroBatch) -> Crossing:
        """Return the activations a_n at the cut; for P = Q the loss, which stays on the device."""
        inputs = mapped(piece.inputs, self._torch_device.put)
        with self._torch_device.computing():
            output = self._one_by_one(inputs, piece.samples) if self._settings.each_alone else call(self.module, inputs)
            if self._has_loss:
                output = self._task.share(output, mapped(piece.targets, self._torch_device.put), piece.batch_count)
                self._losses.add(output, piece.batch_samples)
        activation: Crossing = self._torch_device.widened(output)
        self._outputs[micro_batch] = activation
        return activation

    def _one_by_one(self, inputs: Inputs, samples: int) -> Any:
        """Return the activations of each sample, computed alone: in a batch, their last bits depend on the others."""
        alone = (mapped(one, torch.clone) for one in split_rows(inputs, [1] * samples))
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

    def step(self, at: StepCount = FIRST_STEP, others: float = 0.0) -> None:
        super().step(at, others)
        self._losses.read()

    def take_loss(self) -> float:
        """Return the loss summed over the samples since the last call."""
        return self._losses.take()

    @property
    def last_loss(self) -> float | None:
        """The mean over the last batch, if the device computes it."""
        return self._losses.last

    def discard(self) -> None:
        """Discard an epoch: its gradients, losses and optimiser state; the server sends new weights."""
        super().discard()
        self._encoding_errors.take()
        self._outputs.clear()
        self._losses.take()
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
            return [self._torch_device.put(one) for one in crossing.read_gradients(message, encoding, output)]
        return self._torch_device.put(self._read_gradient(message, encoding, output))

    def _read_gradient(self, message: Message, encoding: str, output: torch.Tensor | None) -> torch.Tensor:
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
        weights = self._learned()
        learned = all_to_host(weights)  # noise is drawn and added on the CPU
        self._take_back(self._base)
        base = arrays({name: self._base[name] for name in learned})
        mechanisms.clip_and_noise(arrays(learned), base, clip=clip, multiplier=multiplier, noise=noise)
        for name, tensor in learned.items():
            if name.endswith("running_var"):
                tensor.clamp_(min=0.0)
        for name, weight in weights.items():
            if not weight.is_cpu:
                weight.copy_(learned[name])

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
        state = self.module.state_dict()
        learned = [name for name, weight in self.module.named_parameters() if weight.requires_grad]
        buffers = [name for name, buffer in self.module.named_buffers() if buffer.is_floating_point()]
        return {name: state[name] for name in (*learned, *buffers) if name in state}

    def pack(self, *, changes: bool = False) -> Body:
        """Return the trained weights, without copying them on the CPU, or their changes since they were received.

        Frozen parameters are left out: the server has them.

        They stay unmodified until the next model is installed. The server sends that model only after it has these
        weights or has given up on them, and then it ignores the rest of this message.
        """
        base = self._base if changes else None
        state = self.changing_state()
        body = state_body(state) if base is None else changes_body(state, base)
        # Gradients are freed: the next model needs their memory.
        release_model_memory(body.size_bytes)
        return body

    def unpack_and_install(self, body: Body, *, keep_state: bool) -> None:
        state = read_state(body, self._base)
        self.install(state, keep_state=keep_state)
        self._is_installed = True
        changing = changing_state(self.module) if self._settings.keeps_base else {}
        self._base = {name: state[name] for name in changing} if self._settings.keeps_base else None

    def _may_be_missing(self) -> frozenset[str]:
        return super()._may_be_missing() if self._is_installed else frozenset()

    @property
    def frozen_bytes(self) -> int:
        """The bytes of the parameters that only the first model has."""
        return frozen_bytes(self.module)
