"""Aggregators: they compute the next global model from the current one and the models that the devices trained.

FedAvg and FedProx (its proximal term is in `nn/parts.py`) average the models, weighted by samples. Server optimisers
treat the difference between that average and the global model as a gradient. The robust aggregators are in
`aggregation/robust_aggregators.py`.

Here weights are the trained parameters. Other floating-point entries, such as the running statistics of batch
normalisation, are averaged; integer counters take the largest value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch

from pipar.aggregation.averaging import State, exact_average, federated_average
from pipar.errors import ConfigError


class DeviceModel(NamedTuple):
    """The model that one device trained, and the number of samples that it trained on."""

    device: str
    state: dict[str, torch.Tensor]
    samples: int


class DeviceModels(Protocol):
    """The devices' models in device-name order; each is read only when it is reached."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[DeviceModel]: ...


class Aggregator(Protocol):
    """Computes the next global model, and may keep state between rounds."""

    def aggregate(self, before: State, models: DeviceModels, parameters: AbstractSet[str]) -> dict[str, torch.Tensor]:
        """Return the new state, with every name in `before`, the current state; `parameters` names the weights.

        The arguments must not be modified.
        """
        ...

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state kept between rounds, for a checkpoint; later rounds must not modify these tensors."""
        ...

    def load_state(self, state: State) -> None:
        """Resume from the result of `state`."""
        ...


def mean_of(models: DeviceModels) -> dict[str, torch.Tensor]:
    """Return the mean of the models, weighted by samples; a single model is returned unchanged."""
    # n * x / n may differ from x in the last bit.
    if len(models) == 1:
        return next(iter(models)).state
    return federated_average((model.state, model.samples) for model in models)


class Stateless(ABC):
    """Keeps nothing between rounds and uses only the devices' models."""

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
    """Return the error for a checkpoint of another aggregator."""
    return ConfigError(
        f"The aggregator's saved state has {key!r}, which {kind} does not keep: resume with the server.aggregator "
        "that wrote it."
    )


# --- means


class FedAvg(Stateless):
    """The mean of the devices' models, weighted by samples; McMahan et al. 2017, Algorithm 1."""

    def _combined(self, models: DeviceModels) -> dict[str, torch.Tensor]:
        return mean_of(models)


@dataclass
class FedProx(FedAvg):
    """The same mean; each training step has the proximal term mu/2 |w - w_global|^2; Li et al. 2020, Algorithm 2.

    Unlike there, the server's replicas have the term too: a device trains only the layers before its cut.
    """

    proximal: float


# --- server optimisers


class ServerOptimizer(ABC):
    """A step from the global weights x along the pseudo-gradient delta = mean_k(x_k) - x; Reddi et al. 2021, Alg. 2.

    Only weights take the step; everything else is averaged. Sums, steps and kept state are in float64, and the new
    weights are rounded once. The mean is weighted by samples; Algorithm 2 weights all clients equally.
    """

    _KEEPS: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, torch.Tensor]] = {what: {} for what in self._KEEPS}

    def aggregate(self, before: State, models: DeviceModels, parameters: AbstractSet[str]) -> dict[str, torch.Tensor]:
        held = list(models)  # read all first: an unreadable model must not change the kept state
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
        """Return the update to the weights of this name; kept tensors are replaced, never modified in place."""

    def _last(self, what: str, name: str, delta: torch.Tensor, *, first: float = 0.0) -> torch.Tensor:
        kept = self._kept[what].get(name)
        if kept is not None and kept.shape != delta.shape:
            raise ConfigError(
                f"The aggregator's saved state has {name!r} with shape {tuple(kept.shape)}, but the network has "
                f"{tuple(delta.shape)}: it was saved for another network."
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
    return tensors[0].to(torch.float64, copy=True)  # always a new tensor: the caller modifies it in place


class FedAvgM(ServerOptimizer):
    """v = beta v + delta, x = x + eta v; Hsu et al. 2019.

    eta is `server_learning_rate`; there it is 1.
    """

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

    m starts at 0 and v at tau^2, without bias correction; Reddi et al. 2021, Algorithm 2.
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
    """Like FedAdam, with v = v - (1 - beta2) delta^2 sign(v - delta^2), so that v decays slowly; Reddi et al. 2021."""

    def _next_variance(self, variance: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        return variance - (1 - self._beta2) * square * torch.sign(variance - square)
