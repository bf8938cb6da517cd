"""The aggregators: from the global model and what the devices trained of it to the next global model.

FedAvg and FedProx (whose term is in `nn/parts.py`) take the mean by samples. Server optimisers take the way from the
global model to that mean for a gradient. Robust ones bear some devices that bring back anything at all: there every
device counts the same, because a device could say any number of samples.

Weights are what devices train. Other floating entries, as the running statistics of batch normalisation, are averaged
or, by a robust aggregator, treated as weights; of integer counters the mean takes the largest, a median the middle one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from pipar.aggregation import all_parameters, check_devices, is_own, trimmed_at_each_end
from pipar.errors import ConfigError, PiparError, TooFewDevicesError, TrainingError
from pipar.nn.aggregate import State, exact_average, federated_average
from pipar.user_function import call_factory

#: So many numbers of all devices together are sorted or compared at once: 8 MiB in float64.
_BLOCK = 1 << 20


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


def make_aggregator(name: str, given: Mapping[str, Any]) -> Aggregator:
    """Return the aggregator of this name with these parameters; of "package.module:function", what that returns."""
    if is_own(name):
        return OwnAggregator(name, call_factory(name, keywords=given))
    try:
        parameters = all_parameters(name, given)
    except ValueError as error:
        raise ConfigError(f"{error}.") from None
    return _MAKERS[name](**parameters)


def _mean(models: DeviceModels) -> dict[str, torch.Tensor]:
    # n * x / n may differ from x in the last bit: one model is its own average.
    if len(models) == 1:
        return next(iter(models)).state
    return federated_average((model.state, model.samples) for model in models)


class _Stateless(ABC):
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
            raise _foreign(key, type(self).__name__)


def _foreign(key: str, kind: str) -> ConfigError:
    return ConfigError(
        f"The kept state of the aggregator has {key!r}, which {kind} does not keep: go on with the server.aggregator "
        "that it was written by."
    )


# --- means


class FedAvg(_Stateless):
    """The mean of the devices' models, weighted by samples."""

    def _combined(self, models: DeviceModels) -> dict[str, torch.Tensor]:
        return _mean(models)


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
                raise _foreign(key, type(self).__name__)
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


# --- robust aggregators


class Median(_Stateless):
    """The median of every coordinate, of an even number the mean of the two in the middle; Yin et al. 2018."""

    def _combined(self, models: DeviceModels) -> dict[str, torch.Tensor]:
        return _by_coordinate(models, _median)


@dataclass
class TrimmedMean(_Stateless):
    """The mean of every coordinate without its largest and its smallest values; Yin et al. 2018.

    Left out at each end is the share `trim` of the devices, rounded up.
    """

    trim: float

    def _combined(self, models: DeviceModels) -> dict[str, torch.Tensor]:
        _check_count("trimmed_mean", {"trim": self.trim}, len(models))
        left_out = trimmed_at_each_end(self.trim, len(models))
        return _by_coordinate(models, lambda ordered: ordered[left_out : len(models) - left_out].mean(0))


@dataclass
class Krum(_Stateless):
    """The model that is nearest to its neighbours, or the mean of the `selected` nearest (Multi-Krum).

    A model's score is the sum of squared distances to its K - f - 2 nearest others, f = `byzantine`; the lowest win,
    of equal ones the first by device name. Blanchard et al. 2017, who let Multi-Krum select up to K; here it is K - f.
    """

    byzantine: int
    selected: int

    def _combined(self, models: DeviceModels) -> dict[str, torch.Tensor]:
        _check_count("krum", {"byzantine": self.byzantine, "selected": self.selected}, len(models))
        held = list(models)
        best = krum_scores([model.state for model in held], self.byzantine).sort(stable=True).indices[: self.selected]
        return _mean([held[place]._replace(samples=1) for place in sorted(best.tolist())])


def krum_scores(states: Sequence[State], byzantine: int) -> torch.Tensor:
    """Return each model's sum of squared distances, over everything floating, to its K - f - 2 nearest others."""
    squares = torch.zeros((len(states), len(states)), dtype=torch.float64)
    for name in [name for name, tensor in states[0].items() if tensor.is_floating_point()]:
        for _, block in _blocks([state[name] for state in states]):
            for place in range(len(states) - 1):
                square = (block[place + 1 :] - block[place]).square_().sum(1)
                squares[place, place + 1 :] += square
                squares[place + 1 :, place] += square
    # A model with a NaN in it is as far as can be from everyone.
    squares = squares.nan_to_num(nan=torch.inf, posinf=torch.inf).fill_diagonal_(torch.inf)
    return squares.sort(1).values[:, : len(states) - byzantine - 2].sum(1)


def _check_count(aggregator: str, parameters: Mapping[str, Any], devices: int) -> None:
    try:
        check_devices(aggregator, parameters, devices)
    except ValueError as error:
        raise TooFewDevicesError(f"{error}.") from None


def _by_coordinate(models: DeviceModels, reduced: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `reduced` of the devices' sorted values for each coordinate; NaN counts as larger than all others."""
    states = [model.state for model in models]
    return {name: _reduce([state[name] for state in states], reduced) for name in states[0]}


def _reduce(tensors: Sequence[torch.Tensor], reduced: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    result = torch.empty(tensors[0].shape, dtype=tensors[0].dtype)
    flat = result.view(-1)
    for place, block in _blocks(tensors):
        ordered = block.sort(0).values
        # A counter stays one that a device has counted up to.
        flat[place] = reduced(ordered) if block.is_floating_point() else ordered[(len(ordered) - 1) // 2]
    return result


def _median(ordered: torch.Tensor) -> torch.Tensor:
    low, high = (len(ordered) - 1) // 2, len(ordered) // 2
    return ordered[low] if low == high else (ordered[low] + ordered[high]) / 2


def _blocks(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield stretches of a tensor's coordinates with the devices' values there, one a row, floating ones in float64.

    So little more than the models themselves is in memory at once.
    """
    flat = [tensor.reshape(-1) for tensor in tensors]
    width = max(1, _BLOCK // len(flat))
    for start in range(0, flat[0].numel(), width):
        place = slice(start, start + width)
        block = torch.stack([tensor[place] for tensor in flat])
        yield place, block.to(torch.float64) if block.is_floating_point() else block


# --- a user's own


@dataclass
class OwnAggregator:
    """A user's aggregator: what it raises becomes one sentence, and what it returns has to be a state of the model."""

    spec: str
    inner: Any
    _keeps: bool = field(init=False)

    def __post_init__(self) -> None:
        if not callable(getattr(self.inner, "aggregate", None)):
            raise ConfigError(
                f"server.aggregator {self.spec!r} returned a {type(self.inner).__name__}, which has no method "
                "aggregate(before, models, parameters)."
            )
        has = [callable(getattr(self.inner, name, None)) for name in ("state", "load_state")]
        if any(has) != all(has):
            raise ConfigError(
                f"server.aggregator {self.spec!r} has one of state() and load_state(state): give it both, or neither "
                "if it keeps nothing between rounds."
            )
        self._keeps = all(has)

    def aggregate(self, before: State, models: DeviceModels, parameters: AbstractSet[str]) -> dict[str, torch.Tensor]:
        # A copy, so that a mistake in it leaves the global model as it was.
        copied = {name: tensor.clone() for name, tensor in before.items()}
        new = self._called("aggregate", copied, models, parameters)
        return self._checked(new, before)

    def state(self) -> dict[str, torch.Tensor]:
        return dict(self._called("state")) if self._keeps else {}

    def load_state(self, state: State) -> None:
        if self._keeps:
            self._called("load_state", dict(state))
        elif state:
            raise _foreign(next(iter(state)), self.spec)

    def _called(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.inner, method)(*arguments)
        except PiparError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise TrainingError(f"server.aggregator {self.spec!r} raised {what} in {method}.") from error

    def _checked(self, new: Any, before: State) -> dict[str, torch.Tensor]:
        if not isinstance(new, Mapping) or new.keys() != before.keys():
            raise TrainingError(
                f"server.aggregator {self.spec!r} has to return a dictionary with the names of the state before, all "
                "of them and no other."
            )
        for name, tensor in before.items():
            made = new[name]
            if (
                not isinstance(made, torch.Tensor)
                or made.shape != tensor.shape
                or made.is_floating_point() != tensor.is_floating_point()
            ):
                raise TrainingError(
                    f"server.aggregator {self.spec!r} returned for {name!r} something else than a tensor of shape "
                    f"{tuple(tensor.shape)} and a dtype like {tensor.dtype}."
                )
        return {name: new[name].detach().to(tensor.dtype) for name, tensor in before.items()}


_MAKERS: dict[str, Callable[..., Aggregator]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "krum": Krum,
}
