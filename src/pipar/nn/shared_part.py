"""A server-side model that all devices share: a batch of one device must not make it useless to the others."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from statistics import median

import torch

from pipar.errors import ProtocolError, UnusableStepError
from pipar.execution.schedule import StepCount
from pipar.execution.work import Place
from pipar.nn.micro_batches import Activation
from pipar.nn.optimizers import FIRST_STEP
from pipar.nn.server_part import TorchServerPart
from pipar.tensors.bodies import LARGEST_NORM, check_range
from pipar.tensors.torch_device import numbers
from pipar.wire.messages import Body

#: Weights below this mean size, such as those that start at 0, count as this large when a step is compared with them.
_SMALL_WEIGHT = 0.2
#: The largest steps, relative to the weights.
_LARGEST_STEP = 100.0  # of any device: all of them may diverge together
_LARGEST_FIRST_STEP = 1.0  # while no other device has made one to compare with
_USUAL_STEP = 1.0  # larger ones are compared with other devices' gradients
#: The same for gradients of optimisers that scale them, where a gradient says little about the step.
_LARGEST_SCALED = 1e6
#: How far the means of batch normalisation may grow in one round.
_LARGEST_MEAN = 1000.0
#: A gradient of this many times the median of other devices' largest ones, in the last two rounds of each, is unusual.
#: A device that comes first in its turn may have learned its own classes well, so its latest gradients say nothing.
_UNUSUAL_GRADIENT = 100.0
_ROUNDS = 2
#: The same for a batch's mean, and the largest of their latest ones.
_UNUSUAL_FACTOR = 30.0
#: The same for a batch's statistics; a variance is the square of a deviation.
_UNUSUAL = {"running_mean": _UNUSUAL_FACTOR, "running_var": _UNUSUAL_FACTOR**2}
_LARGEST = {"running_mean": _LARGEST_MEAN, "running_var": _LARGEST_MEAN**2}
#: A device's batches that are remembered, by their largest numbers: single ones may be small by chance, as after
#: dropout or in a batch of few samples.
_BATCHES = 4


class SharedServerPart(TorchServerPart):
    """Layers P+1..Q for all devices. Each batch counts whole or not at all: weights, optimiser and batch statistics.

    Unless `trusts_devices` is set, a batch that changes the model far more than batches of other devices is refused. A
    training whose devices are all its own may diverge as it would in plain torch, up to numbers that overflow.
    """

    trusts_devices = False

    def _prepare(self) -> None:
        self._epoch, self._device = 0, ""  # whose batch is being trained
        self._gradients: dict[str, dict[int, float]] = {}  # by device and epoch: the largest norm that counted
        self._statistics: dict[str, deque[dict[str, float]]] = {}  # by device: those of the last batches that counted
        self._kept_buffers: dict[str, torch.Tensor] = {}  # as they were after the last whole batch
        self._keep_buffers()
        self._largest_buffers = self._measured_buffers()  # the largest values at the start of the round

    def encode(self, activation: Activation, encoding: str, place: Place = ()) -> Body:
        self._epoch, self._device = (int(place[0]), str(place[3])) if len(place) > 3 else (0, "")
        return super().encode(activation, encoding, place)

    def step(self, at: StepCount = FIRST_STEP, others: float = 0.0) -> None:
        """Apply the gradients of a batch, or raise UnusableStepError and change nothing."""
        if self._steps is not None:
            self._steps.follow_schedule(at)
        gradient = self._check_weights()
        self._check_buffers()
        statistics = self._check_statistics()
        super().step(at, others)
        self._note_gradient(gradient)
        self._statistics.setdefault(self._device, deque(maxlen=_BATCHES)).append(statistics)
        self._takes = None  # the next batch is another device's, which must not be held to this one's shape
        self._keep_buffers()

    def _note_gradient(self, gradient: float) -> None:
        known = self._gradients.get(self._device, {})
        known[self._epoch] = max(gradient, known.get(self._epoch, 0.0))
        self._gradients[self._device] = {epoch: known[epoch] for epoch in sorted(known)[-_ROUNDS:]}

    def _check_weights(self) -> float:
        """Return the norm of the gradient, or raise if its step would leave weights that others cannot train with."""
        weights = [weight for weight in self.module.parameters() if weight.grad is not None]
        gradient, size = _norm(weight.grad for weight in weights if weight.grad is not None), _norm(weights)
        step = self._longest_step(gradient, size)
        count = sum(weight.numel() for weight in weights)
        usual = max(size, _SMALL_WEIGHT * math.sqrt(count))
        most = math.inf if self.trusts_devices else self._largest_step(gradient) * usual
        if not (step <= most and size + step <= LARGEST_NORM):
            raise UnusableStepError(
                f"Its batch would change the weights of the shared server-side model by {step:.3g}, and at most "
                f"{most:.3g} is allowed. Unless the device is faulty, the training has diverged: a smaller "
                "optimizer.learning_rate may help."
            )
        return gradient

    def _longest_step(self, gradient: float, size: float) -> float:
        """Return a bound on the norm of the step: of SGD, eta (|g| + beta |v| + lambda |w|).

        Other optimisers scale gradients, so that no large one makes a long step; but it stays in their state for
        hundreds of batches. There the gradient counts itself.
        """
        steps = self._steps
        if steps is None:
            return 0.0
        if self._scales_gradients:
            return gradient
        velocity = _norm(steps.state().values())
        moved = gradient + steps.largest("momentum") * velocity + steps.largest("weight_decay") * size
        return steps.largest("lr") * moved

    @property
    def _scales_gradients(self) -> bool:
        return self._optimizer.name != "sgd" or self._optimizer.factory is not None

    def _largest_step(self, gradient: float) -> float:
        """Return the largest step, relative to the weights, that a batch with this gradient may make.

        A device whose gradient is far above the others' ruins the model for them. If all gradients are large, the
        training diverges, and no device is to blame.
        """
        others = [max(norms.values()) for device, norms in self._gradients.items() if device != self._device]
        if others and gradient > _UNUSUAL_GRADIENT * median(others):
            return _USUAL_STEP
        if self._scales_gradients:
            return _LARGEST_SCALED
        return _LARGEST_STEP if others else _LARGEST_FIRST_STEP

    def _check_buffers(self) -> None:
        """Raise if the batch's statistics overflow, or are far above those at the start of the round."""
        try:
            check_range(self._buffers().values(), "The shared server-side model, after its batch,")
        except ProtocolError as error:
            raise UnusableStepError(str(error)) from None
        for name, largest in self._measured_buffers().items() if not self.trusts_devices else ():
            factor = _LARGEST.get(name.rpartition(".")[2], _LARGEST_MEAN)
            most = factor * max(self._largest_buffers.get(name, 0.0), 1.0)
            if largest > most:
                raise UnusableStepError(
                    f"Its batch would bring {name} of the shared server-side model to {largest:.3g}, and at most "
                    f"{most:.3g} is allowed in this round: the device's activations are far larger than the others'."
                )

    def _check_statistics(self) -> dict[str, float]:
        """Return the largest statistic of the batch in each buffer, or raise if it is far above other devices'.

        Batches are compared, not running averages: those can be raised by a little in every batch.
        """
        own = self._batch_statistics()
        others = [known for device, known in self._statistics.items() if device != self._device]
        for name, largest in own.items() if others and not self.trusts_devices else ():
            unusual = _UNUSUAL[name.rpartition(".")[2]]
            usual = median(max(batch.get(name, 0.0) for batch in known) for known in others)
            most = unusual * max(usual, 1.0)
            if largest > most:
                raise UnusableStepError(
                    f"Its batch has {name} of {largest:.3g} in the shared server-side model, and at most {most:.3g} is "
                    "allowed: the device's activations are far larger than the others'."
                )
        return own

    def _batch_statistics(self) -> dict[str, float]:
        """Return the largest means and variances of the batch, b = r + (r' - r) / m, from running averages r and r'."""
        found = {}
        for place, layer in self.module.named_modules():
            prefix = f"{place}." if place else ""
            share = self._share_of_batch(layer, f"{prefix}num_batches_tracked")
            for name in _UNUSUAL if share else ():
                buffer, full = getattr(layer, name, None), f"{prefix}{name}"
                if isinstance(buffer, torch.Tensor) and buffer.numel() and full in self._kept_buffers:
                    before = self._kept_buffers[full]
                    found[full] = _largest(before + (buffer - before) / share)
        return found

    def _share_of_batch(self, layer: torch.nn.Module, counter: str) -> float:
        """Return the share m of the batch in running averages: the momentum or, without one, that in all batches."""
        momentum, count = getattr(layer, "momentum", None), getattr(layer, "num_batches_tracked", None)
        if momentum is not None or not isinstance(count, torch.Tensor) or counter not in self._kept_buffers:
            return float(momentum) if isinstance(momentum, int | float) else 0.0
        return float(count - self._kept_buffers[counter]) / max(1.0, float(count))

    def discard(self) -> None:
        """Discard an unfinished batch: its gradients, and what its forward has changed in the buffers."""
        super().discard()
        self._takes = None
        with torch.no_grad():
            for name, buffer in self._buffers().items():
                buffer.copy_(self._kept_buffers.get(name, buffer))

    def install(self, state: Mapping[str, torch.Tensor], *, keep_state: bool) -> None:
        super().install(state, keep_state=keep_state)
        self._keep_buffers()
        self._largest_buffers = self._measured_buffers()

    def keep_errors_of(self, devices: Collection[str]) -> None:
        """Drop what is known of all other devices: encoding residuals, gradients' norms, and batch statistics."""
        super().keep_errors_of(devices)
        self._gradients = {device: norms for device, norms in self._gradients.items() if device in devices}
        self._statistics = {device: known for device, known in self._statistics.items() if device in devices}

    def _keep_buffers(self) -> None:
        self._kept_buffers = {name: buffer.clone() for name, buffer in self._buffers().items()}

    def _measured_buffers(self) -> dict[str, float]:
        """Return the largest magnitude in each buffer, by name."""
        return {
            name: _largest(buffer)
            for name, buffer in self._buffers().items()
            if buffer.is_floating_point() and buffer.numel()
        }

    def _buffers(self) -> dict[str, torch.Tensor]:
        return dict(self.module.named_buffers())


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest magnitude."""
    return float(tensor.abs().max())


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    """Return the norm over all tensors; infinite or NaN if a value is, or if a square overflows."""
    return math.hypot(*numbers(torch.linalg.vector_norm(tensor.detach()) for tensor in tensors))
