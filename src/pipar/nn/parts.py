"""The layers on one side of the cut: their weights, and the optimiser step after a batch.

For a batch of m samples, the loss of a micro-batch is the sum of its samples' losses divided by m; a task may count
something other than samples. Gradients accumulate over the N micro-batches, so at the step they equal g(M) of the mean
loss over the whole batch, as in plain training, wherever the network and the batch are cut. We differ from the paper
here: it scales both the loss and the step by 1/N.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import nn

from pipar.cutting.frozen import changing_state, frozen_names
from pipar.errors import ProtocolError
from pipar.execution.schedule import StepCount
from pipar.nn.optimizers import FIRST_STEP, OptimizerSettings, divided_state, moved_state, saved_state
from pipar.tensors.bodies import (
    EncodingErrors,
    Generators,
    read_state,
    state_body,
)
from pipar.tensors.torch_device import CPU, TorchDevice, all_to_host
from pipar.wire.messages import (
    Body,
)


class Part:
    """The layers on one side of the cut, with their optimiser; they are on one device of torch."""

    def __init__(
        self,
        module: nn.Sequential,
        optimizer: OptimizerSettings,
        *,
        proximal: float = 0.0,
        rounding: Generators | None = None,
        device: TorchDevice = CPU,
    ) -> None:
        self.module = module.train()
        self._torch_device = device  # where the module is
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
            self._global = self._torch_device.put_all({name: state[name].detach() for name in trained})

    def state(self) -> dict[str, torch.Tensor]:
        """Return weights and buffers on the CPU; those of a part on the CPU are its own."""
        return all_to_host(self.module.state_dict())

    def changing_state(self) -> dict[str, torch.Tensor]:
        """Return the same without frozen parameters."""
        return all_to_host(changing_state(self.module))

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
        """Return the state of each parameter that has one, by names; on the CPU, it is the optimiser's own."""
        return {} if self._steps is None else all_to_host(self._steps.state())

    def _set_state(self, state: Mapping[str, torch.Tensor]) -> None:
        if self._steps is not None:
            self._steps.load(state)
