"""The aggregators: from the global model and what the devices trained of it to the next global model.

FedAvg and FedProx (whose term is in `nn/parts.py`) take the mean by samples. Server optimisers take the way from the
global model to that mean for a gradient. Robust ones bear some devices that bring back anything at all: there every
device counts the same, because a device could say any number of samples.

Weights are what devices train. Other floating entries, as the running statistics of batch normalisation, are averaged
or, by a robust aggregator, treated as weights; of integer counters the mean takes the largest, a median the middle one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch

from pipar.errors import ConfigError
from pipar.nn.averaging import State, exact_average, federated_average


class DeviceModel(NamedTuple):
    """What one device trained, and on how many samples."""

    device: str
    state: dict[str, torch.Tensor]
    samples: int


class DeviceModels(Protocol):
    """The devices' models in device-name order; one is read when its turn comes."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[DeviceModel]: ...


class Aggregator(Protocol):
    """Makes the next global model, and keeps what it needs from round to round."""

    def aggregate(self, before: State, models: DeviceModels, parameters: AbstractSet[str]) -> dict[str, torch.Tensor]:
        """Return the new state: every name of `before`, the state until now. `parameters` are those that are weights.

        Nothing that is given may be changed in place.
        """
        ...

    def state(self) -> dict[str, torch.Tensor]:
        """Return what is kept between rounds, for a checkpoint; later rounds do not change these tensors."""
        ...

    def load_state(self, state: State) -> None:
        """Go on from what `state` returned."""
        ...


def mean_of(models: DeviceModels) -> dict[str, torch.Tensor]:
    # n * x / n may differ from x in the last bit: one model is its own average.
    if len(models) == 1:
        return next(iter(models)).state
    return federated_average((model.state, model.samples) for model in models)


class Stateless(ABC):
    """Begins every round anew, and makes the new model of the devices' alone."""

    def aggregate(
        self,
        before: State,  # noqa: ARG002
        models: DeviceModels,
        parameters: AbstractSet[str],  # noqa: ARG002
    ) -> dict[str, torch.Tensor]:
        return self._combined(models)

    @abstractmethod
    def _combined(self, models: DeviceModels) -> dict[str, torch.Tensor]:
        """Return the new state."""

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state(self, state: State) -> None:
        for key in state:
            raise foreign_state(key, type(self).__name__)


def foreign_state(key: str, kind: str) -> ConfigError:
    return ConfigError(
        f"The kept state of the aggregator has {key!r}, which {kind} does not keep: go on with the server.aggregator "
        "that it was written by."
    )


# --- means


class FedAvg(Stateless):
    """The mean of the devices' models, weighted by samples."""

    def _combined(self, models: DeviceModels) -> dict[str, torch.Tensor]:
        return mean_of(models)


@dataclass
class FedProx(FedAvg):
    """The same mean: the proximal term mu/2 |w - w_global|^2 is in every step of device and server; Li et al. 2020."""

    proximal: float


# --- server optimisers


class ServerOptimizer(ABC):
    """A step from the global weights x along the pseudo-gradient delta = mean_k(x_k) - x; Reddi et al. 2021, Alg. 2.

    Only weights are stepped; everything else is averaged. Sums, steps and what is kept are in float64, and the new
    weights are rounded once.
    """

    _KEEPS: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, torch.Tensor]] = {what: {} for what in self._KEEPS}

    def aggregate(self, before: State, models: DeviceModels, parameters: AbstractSet[str]) -> dict[str, torch.Tensor]:
        held = list(models)  # all of them first: a model that cannot be read changes nothing that is kept
        return {name: self._stepped(name, before[name], held, parameters) for name in held[0].state}

    def _stepped(
        self, name: str, before: torch.Tensor, models: Sequence[DeviceModel], parameters: AbstractSet[str]
    ) -> torch.Tensor:
        mean = _exact_mean(name, models)
        if name in parameters and mean.is_floating_point():
            x = before.to(torch.float64)
            mean = x + self._step(name, mean.sub_(x))
        return mean.to(before.dtype)

    @abstractmethod
    def _step(self, name: str, delta: torch.Tensor) -> torch.Tensor:
        """Return what to add to the weights of this name; what is kept of them is replaced, not changed in place."""

    def _last(self, what: str, name: str, delta: torch.Tensor, *, first: float = 0.0) -> torch.Tensor:
        kept = self._kept[what].get(name)
        if kept is not None and kept.shape != delta.shape:
            raise ConfigError(
                f"The kept state of the aggregator has {name!r} in the shape {tuple(kept.shape)}, but the network has "
                f"{tuple(delta.shape)}: it was written for another network."
            )
        return torch.full_like(delta, first) if kept is None else kept

    def state(self) -> dict[str, torch.Tensor]:
        return {f"{what}/{name}": tensor for what, kept in self._kept.items() for name, tensor in kept.items()}

    def load_state(self, state: State) -> None:
        kept: dict[str, dict[str, torch.Tensor]] = {what: {} for what in self._KEEPS}
        for key, tensor in state.items():
            what, _, name = key.partition("/")
            if what not in kept or tensor.dtype != torch.float64:
                raise foreign_state(key, type(self).__name__)
            kept[what][name] = tensor.clone()
        self._kept = kept


def _exact_mean(name: str, models: Sequence[DeviceModel]) -> torch.Tensor:
    tensors = [model.state[name] for model in models]
    if len(tensors) > 1 or not tensors[0].is_floating_point():
        return exact_average(tensors, [model.samples for model in models])
    return tensors[0].to(torch.float64, copy=True)  # a copy, because the sum of several is one, too


class FedAvgM(ServerOptimizer):
    """v = beta v + delta, x = x + eta v; Hsu et al. 2019."""

    _KEEPS = ("momentum",)

    def __init__(self, server_learning_rate: float, server_momentum: float) -> None:
        super().__init__()
        self._learning_rate = server_learning_rate
        self._momentum = server_momentum

    def _step(self, name: str, delta: torch.Tensor) -> torch.Tensor:
        momentum = self._momentum * self._last("momentum", name, delta) + delta
        self._kept["momentum"][name] = momentum
        return self._learning_rate * momentum


class FedAdam(ServerOptimizer):
    """m = beta1 m + (1 - beta1) delta, v = beta2 v + (1 - beta2) delta^2, x = x + eta m / (sqrt(v) + tau).

    m begins at 0 and v at tau^2, without a correction of the bias; Reddi et al. 2021, Algorithm 2.
    """

    _KEEPS = ("momentum", "variance")

    def __init__(self, server_learning_rate: float, beta1: float, beta2: float, tau: float) -> None:
        super().__init__()
        self._learning_rate = server_learning_rate
        self._beta1, self._beta2, self._tau = beta1, beta2, tau

    def _step(self, name: str, delta: torch.Tensor) -> torch.Tensor:
        momentum = self._beta1 * self._last("momentum", name, delta) + (1 - self._beta1) * delta
        variance = self._next_variance(self._last("variance", name, delta, first=self._tau**2), delta.square())
        self._kept["momentum"][name], self._kept["variance"][name] = momentum, variance
        return self._learning_rate * momentum / (variance.sqrt() + self._tau)

    def _next_variance(self, variance: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        return self._beta2 * variance + (1 - self._beta2) * square


class FedYogi(FedAdam):
    """As FedAdam with v = v - (1 - beta2) delta^2 sign(v - delta^2): v follows slowly when gradients become small."""

    def _next_variance(self, variance: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        return variance - (1 - self._beta2) * square * torch.sign(variance - square)
