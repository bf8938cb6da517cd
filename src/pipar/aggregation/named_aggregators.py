"""The aggregator that a configuration names: one of pipar's, or a user's own, whose results are checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch

from pipar.aggregation.aggregators import (
    Aggregator,
    DeviceModels,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedProx,
    FedYogi,
    foreign_state,
)
from pipar.aggregation.averaging import State
from pipar.aggregation.robust_aggregators import Krum, Median, TrimmedMean
from pipar.errors import ConfigError, PiparError, TrainingError
from pipar.settings.aggregators import all_parameters, is_own
from pipar.user_function import call_factory

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


def make_aggregator(name: str, given: Mapping[str, Any]) -> Aggregator:
    """Return the aggregator of this name with these parameters; for "package.module:function", its result."""
    if is_own(name):
        return UserAggregator(name, call_factory(name, keywords=given))
    try:
        parameters = all_parameters(name, given)
    except ValueError as error:
        raise ConfigError(f"{error}.") from None
    return _MAKERS[name](**parameters)


@dataclass
class UserAggregator:
    """A user's aggregator: its exceptions become one-line errors, and its results are checked against the model."""

    spec: str
    inner: Any
    _keeps: bool = field(init=False)

    def __post_init__(self) -> None:
        if not callable(getattr(self.inner, "aggregate", None)):
            raise ConfigError(
                f"server.aggregator {self.spec!r} returned a {type(self.inner).__name__} without the method "
                "aggregate(before, models, parameters): add it."
            )
        has = [callable(getattr(self.inner, name, None)) for name in ("state", "load_state")]
        if any(has) != all(has):
            raise ConfigError(
                f"server.aggregator {self.spec!r} has only one of state() and load_state(state): define both, or "
                "neither if it keeps nothing between rounds."
            )
        self._keeps = all(has)

    def aggregate(self, before: State, models: DeviceModels, parameters: AbstractSet[str]) -> dict[str, torch.Tensor]:
        # A copy, so that a bug in user code cannot change the global model.
        copied = {name: tensor.clone() for name, tensor in before.items()}
        new = self._called("aggregate", copied, models, parameters)
        return self._checked(new, before)

    def state(self) -> dict[str, torch.Tensor]:
        return dict(self._called("state")) if self._keeps else {}

    def load_state(self, state: State) -> None:
        if self._keeps:
            self._called("load_state", dict(state))
        elif state:
            raise foreign_state(next(iter(state)), self.spec)

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
                f"server.aggregator {self.spec!r} must return a dictionary with exactly the names of the state that it "
                "was given."
            )
        for name, tensor in before.items():
            made = new[name]
            if (
                not isinstance(made, torch.Tensor)
                or made.shape != tensor.shape
                or made.is_floating_point() != tensor.is_floating_point()
            ):
                raise TrainingError(
                    f"server.aggregator {self.spec!r} must return for {name!r} a tensor of shape "
                    f"{tuple(tensor.shape)} and a dtype like {tensor.dtype}."
                )
        return {name: new[name].detach().to(tensor.dtype) for name, tensor in before.items()}
