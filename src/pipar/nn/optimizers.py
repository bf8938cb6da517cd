"""The optimiser of one part of the network: any of torch.optim that keeps its state by parameter, or a user's own.

A parameter is updated from its own gradient and its own state, so a network that is cut in two trains as the whole one
does. State has the name of its parameter and its key in torch, as in "layer1.weight/exp_avg"; it moves with layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from pipar.errors import ConfigError, InputError, PiparError, ProtocolError
from pipar.execution.schedule import StepCount
from pipar.nn.eager_optimizers import eager
from pipar.settings.optimizers import OPTIMIZERS, OWN, REFUSED, state_copies
from pipar.settings.schedules import Schedule
from pipar.tensors.bodies import check_range
from pipar.tensors.torch_device import TorchDevice, numbers, wait_for
from pipar.user_function import load_factory

Parameters = Mapping[str, nn.Parameter]
State = Mapping[str, torch.Tensor]
#: Makes an optimiser of parameters with their names.
Factory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]

FIRST_STEP = StepCount()
#: Of torch.nn.utils.clip_grad_norm_, against a norm of 0.
_CLIP_EPSILON = 1e-6
#: Ends the key of a state that is a number in Python, not a tensor.
_NUMBER = "="
#: A user's own optimiser is tried out on this many small parameters of the network.
_TRIED, _SMALL_VALUES = 6, 1 << 16
_SAME = 1e-9
#: Of its gradients: some optimisers couple parameters only above a threshold, as by clipping.
_SCALES = (1.0, 1.0, 1e6, 1e-6)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters whose names match a pattern, as in "head.*", and their settings, with torch's names."""

    match: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class OptimizerSettings:
    """How parameters are trained: a class of torch.optim with its arguments, or a user's own function."""

    name: str = "sgd"
    learning_rate: float | None = None  # None: that of the class
    arguments: Mapping[str, Any] = field(default_factory=dict)  # those that are not given are the class's own
    factory: str | Factory | None = None
    groups: tuple[ParameterGroup, ...] = ()  # with settings of their own; the first that matches a parameter counts
    decay_norms_and_biases: bool = True
    schedule: Schedule = field(default_factory=Schedule)
    clip_norm: float | None = None  # the largest norm of a gradient

    def over(self, module: nn.Module) -> PartOptimizer | None:
        """Return an optimiser for a part of the network; None if no parameter of the part is trained."""
        named = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        return PartOptimizer(self, named) if named else None

    def build(self, named: Parameters) -> torch.optim.Optimizer:
        """Return torch's optimiser of these parameters; raise ConfigError if it does not take them."""
        try:
            made = self._named(named) if self.factory is None else self._own(named)
        except PiparError:
            raise
        except Exception as error:  # a factory may raise anything; torch raises several kinds for wrong arguments
            raise ConfigError(f"{self._what} cannot be made: {type(error).__name__}: {error}.") from error
        return made

    def _named(self, named: Parameters) -> torch.optim.Optimizer:
        known = OPTIMIZERS[self.name]
        make = getattr(torch.optim, known.class_name, None)
        if make is None:
            raise ConfigError(f"optimizer.name = '{self.name}' needs a newer torch than {torch.__version__}.")
        rate = known.learning_rate if self.learning_rate is None else self.learning_rate
        made: torch.optim.Optimizer = eager(make)(
            self._grouped(named),
            lr=rate,
            **{**known.arguments, **self.arguments},
        )
        return made

    def _grouped(self, named: Parameters) -> list[dict[str, Any]]:
        """Return the groups of parameters that have the same settings, in the order of their first parameter."""
        found: dict[int, dict[str, Any]] = {}
        for name, weight in named.items():
            place, settings = self._group_of(name)
            if not self.decay_norms_and_biases and weight.ndim < 2:
                place, settings = -1 - place, {"weight_decay": 0.0, **settings}
            found.setdefault(place, {"params": [], **settings})["params"].append(weight)
        return list(found.values())

    def _group_of(self, name: str) -> tuple[int, Mapping[str, Any]]:
        """Return the number of a parameter's group, and the settings of that."""
        for number, group in enumerate(self.groups, start=1):
            if any(fnmatchcase(name, pattern) for pattern in group.match):
                return number, group.settings
        return len(self.groups) + 1, {}

    def _own(self, named: Parameters) -> torch.optim.Optimizer:
        assert self.factory is not None
        make = load_factory(self.factory) if isinstance(self.factory, str) else self.factory
        made = make(list(named.items()))
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(f"{self._what} returned {type(made).__name__}, not a torch.optim.Optimizer.")
        if (kind := type(made).__name__.lower()) in REFUSED:
            raise ConfigError(f"{self._what} returned {type(made).__name__}, which {REFUSED[kind]}.")
        given = [id(weight) for group in made.param_groups for weight in group["params"]]
        if sorted(given) != sorted(map(id, named.values())):
            raise ConfigError(f"{self._what} must give every parameter to its optimiser exactly once.")
        return made

    @property
    def kind(self) -> str:
        """The name of the optimiser; "own" for a user's."""
        return self.name if self.factory is None else OWN

    @property
    def _what(self) -> str:
        if self.factory is None:
            return f"optimizer.name = '{self.name}'"
        return f"optimizer.factory {self.factory!r}" if isinstance(self.factory, str) else "the optimizer function"

    def check(self, model: nn.Module) -> None:
        """Raise ConfigError if this optimiser cannot train the network, or couples its parameters."""
        self._check_groups([name for name, _ in model.named_parameters()])
        tried = _tried(model)
        if self.over(model) is None:
            return
        together = self._after_steps(tried)
        # Of torch's own, those that couple parameters have no name in a configuration.
        for name, weight in tried.items() if self.factory is not None else ():
            alone = self._after_steps({name: weight})[name]
            if not torch.allclose(alone, together[name], rtol=_SAME, atol=_SAME):
                raise ConfigError(
                    f"{self._what} updates '{name}' differently when it also trains other parameters: an optimiser "
                    "that couples parameters cannot train a network with layers on two machines."
                )

    def _check_groups(self, names: Sequence[str]) -> None:
        for group in self.groups:
            for pattern in group.match:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise ConfigError(
                        f"optimizer.groups has '{pattern}', which matches no parameter of the network: its parameters "
                        f"are '{names[0]}', ..., '{names[-1]}'."
                    )

    def _after_steps(self, named: Parameters) -> dict[str, torch.Tensor]:
        """Return what some steps make of copies of these parameters, in float64, where rounding does not show."""
        copies = {name: nn.Parameter(weight.detach().double().clone()) for name, weight in named.items()}
        made = self.build(copies)
        for seed, scale in enumerate(_SCALES):
            for weight in copies.values():
                weight.grad = scale * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)).double()
            made.step()
        for name, weight in copies.items():
            dict(_tensors(made.state[weight], self._what, name))  # raises if it cannot be moved
        return {name: weight.detach() for name, weight in copies.items()}

    def layout(self, name: str, weight: nn.Parameter) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return the shape and dtype of each state that a parameter has after a step, by its key."""
        found = self._after_step(name, weight)
        return {place.rpartition("/")[2]: (one.shape, one.dtype) for place, one in found.items()}

    def _after_step(self, name: str, weight: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the state after one step of a parameter like this one."""
        copy = nn.Parameter(torch.zeros_like(weight))
        copy.grad = torch.zeros_like(weight)
        made = PartOptimizer(self, {name: copy})
        made.step()
        return made.state()

    def device_of(self, name: str, weight: nn.Parameter, key: str) -> torch.device:
        """Return where torch keeps a state of a parameter."""
        return weight.device if weight.is_cpu else self._after_step(name, weight)[f"{name}/{key}"].device

    def state_copies(self, model: nn.Module) -> float:
        """Return how many values it keeps for each weight; a user's own optimiser is tried out on small ones."""
        if self.factory is None:
            return state_copies(self.name, self.arguments, cycles_momentum=self.schedule.cycles_momentum)
        tried = _tried(model)
        states = (one for name, weight in tried.items() for one in self.layout(name, weight).values())
        kept = sum(shape.numel() * dtype.itemsize for shape, dtype in states)
        return kept / sum(weight.nbytes for weight in tried.values()) if tried else 0.0


def _tried(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return some of the smaller trained parameters, on which an optimiser is tried out."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    small = [name for name, weight in trained.items() if weight.numel() <= _SMALL_VALUES] or list(trained)
    largest = sorted(small, key=lambda name: trained[name].numel())[-_TRIED:]
    return {name: trained[name] for name in trained if name in largest}


def sgd(learning_rate: float = 0.01, momentum: float = 0.9, weight_decay: float = 0.0) -> OptimizerSettings:
    """Return stochastic gradient descent with momentum, the default of a configuration."""
    return OptimizerSettings("sgd", learning_rate, {"momentum": momentum, "weight_decay": weight_decay})


class PartOptimizer:
    """The optimiser of the trained parameters of one part, and its state by name."""

    def __init__(self, settings: OptimizerSettings, named: Parameters) -> None:
        self._settings = settings
        self._named = named
        self._torch = settings.build(named)
        self._first = [dict(group) for group in self._torch.param_groups]

    def step(self, at: StepCount = FIRST_STEP) -> None:
        """Apply the accumulated gradients and free them."""
        self.follow_schedule(at)
        self._torch.step()
        # Another lane's stream allocated the gradients, and may get their memory as soon as they are freed.
        wait_for(self._named.values())
        self.zero_grad()

    def follow_schedule(self, at: StepCount) -> None:
        """Set learning rates, and what else a schedule changes, to those of a step."""
        schedule = self._settings.schedule
        for group, first in zip(self._torch.param_groups, () if schedule.is_constant else self._first, strict=False):
            group.update(schedule.group(first, at.number, at.total))

    def squared_norm(self) -> float:
        """Return the squared norm of all gradients."""
        gradients = [weight.grad for weight in self._named.values() if weight.grad is not None]
        return math.fsum(norm**2 for norm in numbers(map(torch.linalg.vector_norm, gradients)))

    @torch.no_grad()
    def clip(self, norm: float, most: float) -> None:
        """Scale the gradients as torch.nn.utils.clip_grad_norm_ does, by the norm of all of the network's."""
        factor = most / (norm + _CLIP_EPSILON)
        for weight in self._named.values() if not factor >= 1.0 else ():
            if weight.grad is not None:
                weight.grad.mul_(factor)

    def zero_grad(self) -> None:
        self._torch.zero_grad(set_to_none=True)

    def largest(self, key: str) -> float:
        """Return the largest value of a setting, such as "lr", over all groups; 0 if none has it."""
        return max(float(group.get(key) or 0.0) for group in self._torch.param_groups)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state of all parameters that have one; the tensors are the optimiser's own."""
        what = self._settings.name
        return {
            f"{name}/{key}": one
            for name, weight in self._named.items()
            for key, one in _tensors(self._torch.state.get(weight, {}), what, name)
        }

    def load(self, state: State) -> None:
        """Load copies of what `state` returned for some of the parameters."""
        for (name, key), one in _by_name(state):
            if name in self._named:
                own = self._torch.state[self._named[name]]
                own[key.removesuffix(_NUMBER)] = one.item() if key.endswith(_NUMBER) else self._own_copy(name, key, one)
        wait_for(self._named.values())

    def _own_copy(self, name: str, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a state where torch keeps it: beside its weight, but many numbers on the CPU."""
        weight = self._named[name]
        kept = weight.device if tensor.ndim else self._settings.device_of(name, weight, key)
        return tensor.clone() if kept.type == "cpu" else TorchDevice(str(kept)).put(tensor)


def divided_state(state: State, own: Parameters) -> tuple[State, State]:
    """Return the state of a part's own parameters, and that of all others."""
    is_own = {place: place.rpartition("/")[0] in own for place in state}
    return tuple({place: one for place, one in state.items() if is_own[place] is side} for side in (True, False))  # type: ignore[return-value]


def moved_state(state: State, to: Parameters, settings: OptimizerSettings) -> State:
    """Return the state that a peer sent for layers that moved; raise ProtocolError unless it fits them."""
    if misfit := _misfit(state, to, settings):
        raise ProtocolError(f"The peer sent optimiser state {misfit!r}, which does not fit the layers that moved.")
    check_range(state.values(), "The optimiser state of the layers that moved")
    return state


def saved_state(state: State, to: Parameters, settings: OptimizerSettings) -> State:
    """Return the state of a checkpoint for these parameters; raise InputError unless it fits them."""
    fitting = {place: one for place, one in state.items() if place.rpartition("/")[0] in to}
    if misfit := _misfit(fitting, to, settings):
        raise InputError(
            f"The checkpoint has optimiser state {misfit!r} that does not fit this network with [optimizer] of the "
            "configuration: resume with the [optimizer] that the training had, or give another run.name and start "
            "without --resume."
        )
    return fitting


def _misfit(state: State, to: Parameters, settings: OptimizerSettings) -> str | None:
    """Return the first name of a state that the optimiser would not have for these parameters, or that is missing."""
    given: dict[str, dict[str, torch.Tensor]] = {}
    for (name, key), one in _by_name(state):
        given.setdefault(name, {})[key] = one
    for name, found in given.items():
        if name not in to:
            return f"{name}/{next(iter(found))}"
        wanted = settings.layout(name, to[name])
        for key in (*wanted, *found):
            if key not in found or wanted.get(key) != (found[key].shape, found[key].dtype):
                return f"{name}/{key}"
    return None


def _by_name(state: State) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    for place, one in state.items():
        name, _, key = place.rpartition("/")
        yield (name, key), one


def _tensors(state: Mapping[str, Any], what: str, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the state of one parameter as tensors; numbers become tensors without dimensions."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            yield key, value
        elif isinstance(value, bool | int | float):
            yield key + _NUMBER, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        elif value is not None:
            raise ConfigError(
                f"{what} keeps {key!r} of '{name}' as {type(value).__name__}, but only tensors and numbers can be "
                "moved and saved."
            )
