"""The optimisers that a configuration may name: their arguments with torch's defaults, and what each costs.

What they compute is in `nn/optimizers.py`; this needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipar.errors import did_you_mean

#: Arguments that a configuration has under the same name for all optimisers.
COMMON = ("momentum", "weight_decay")
_LARGEST = 1e300


@dataclass(frozen=True)
class NamedOptimizer:
    """One of torch.optim: its class, its arguments with their defaults, and its cost.

    `state` is the number of values that it keeps for each weight; `step` is how long a step takes, as a multiple of
    SGD's with momentum. Both are those of the default arguments.
    """

    class_name: str
    learning_rate: float
    arguments: Mapping[str, Any]
    state: float
    step: float
    adds: Mapping[str, float] = field(default_factory=dict)  # to `state`, if this argument is not 0 or false


_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "maximize": False}
#: Measured with float32 matrices of 512 x 512 on one core; Muon multiplies matrices, so that its step grows with them.
OPTIMIZERS: dict[str, NamedOptimizer] = {
    # As pipar has always trained: torch's own defaults are a learning rate of 0.001 and no momentum.
    "sgd": NamedOptimizer(
        "SGD",
        0.01,
        {"momentum": 0.9, "weight_decay": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False},
        0.0,
        1.0,
        {"momentum": 1.0},
    ),
    "adam": NamedOptimizer(
        "Adam", 0.001, {**_ADAM, "amsgrad": False, "decoupled_weight_decay": False}, 2.0, 3.0, {"amsgrad": 1.0}
    ),
    "adamw": NamedOptimizer(
        "AdamW", 0.001, {**_ADAM, "weight_decay": 0.01, "amsgrad": False}, 2.0, 3.0, {"amsgrad": 1.0}
    ),
    "rmsprop": NamedOptimizer(
        "RMSprop",
        0.01,
        {"alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False, "maximize": False},
        1.0,
        1.5,
        {"momentum": 1.0, "centered": 1.0},
    ),
    "adagrad": NamedOptimizer(
        "Adagrad",
        0.01,
        {"lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10, "maximize": False},
        1.0,
        1.5,
    ),
    "nadam": NamedOptimizer(
        "NAdam", 0.002, {**_ADAM, "momentum_decay": 0.004, "decoupled_weight_decay": False}, 2.0, 3.5
    ),
    "radam": NamedOptimizer("RAdam", 0.001, {**_ADAM, "decoupled_weight_decay": False}, 2.0, 3.5),
    "adadelta": NamedOptimizer(
        "Adadelta", 1.0, {"rho": 0.9, "eps": 1e-6, "weight_decay": 0.0, "maximize": False}, 2.0, 4.0
    ),
    "adamax": NamedOptimizer("Adamax", 0.002, dict(_ADAM), 2.0, 2.5),
    # Of a matrix it keeps a row and a column only; of a vector, one value for each weight.
    "adafactor": NamedOptimizer(
        "Adafactor",
        0.01,
        {"beta2_decay": -0.8, "eps": (None, 0.001), "d": 1.0, "weight_decay": 0.0, "maximize": False},
        0.1,
        5.0,
    ),
    "asgd": NamedOptimizer(
        "ASGD",
        0.01,
        {"lambd": 0.0001, "alpha": 0.75, "t0": 1000000.0, "weight_decay": 0.0, "maximize": False},
        1.0,
        1.5,
    ),
    "rprop": NamedOptimizer(
        "Rprop", 0.01, {"etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0), "maximize": False}, 2.0, 8.0
    ),
    "muon": NamedOptimizer(
        "Muon",
        0.001,
        {
            "weight_decay": 0.1,
            "momentum": 0.95,
            "nesterov": True,
            "ns_coefficients": (3.4445, -4.775, 2.0315),
            "eps": 1e-7,
            "ns_steps": 5,
            "adjust_lr_fn": None,
        },
        1.0,
        500.0,
    ),
}
#: Optimisers of torch that pipar cannot use, and why.
REFUSED = {
    "lbfgs": "evaluates the loss several times a step and couples all parameters, which lie on both sides of a cut",
    "sparseadam": "takes sparse gradients only, which the layers of a split network do not give",
}


def known_optimizer(name: Any) -> Any:
    """Return the name; raise a ValueError whose text continues a sentence about it."""
    if not isinstance(name, str):
        raise ValueError(f"is not text: write the name of an optimiser, as in '{next(iter(OPTIMIZERS))}'")
    if name.lower() in REFUSED:
        raise ValueError(f"cannot be used: it {REFUSED[name.lower()]}; allowed are {', '.join(OPTIMIZERS)}")
    if name not in OPTIMIZERS:
        hint = did_you_mean(name, list(OPTIMIZERS))
        raise ValueError(
            f"is not known{hint}; allowed are {', '.join(OPTIMIZERS)}, and your own as optimizer.factory = "
            "'package.module:function'"
        )
    return name


def check_arguments(name: str, given: Mapping[str, Any]) -> None:
    """Raise ValueError if an optimiser has no such argument, or if its value is of another kind."""
    known = OPTIMIZERS[name].arguments
    for key, value in given.items():
        if key not in known:
            hint = " (did you mean 'learning_rate'?)" if key in ("lr", "rate") else did_you_mean(key, list(known))
            raise ValueError(
                f"optimizer.{key} = {value!r} is not an argument of {name}{hint}: it has "
                f"learning_rate, {', '.join(known)}"
            )
        if not _fits(value, known[key]):
            raise ValueError(f"optimizer.{key} = {value!r} is not allowed: {name} takes {_kind(known[key])}")


def _fits(value: Any, default: Any) -> bool:
    """Return whether a value is of the kind of torch's default."""
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, tuple):
        return isinstance(value, list | tuple) and len(value) == len(default) and all(map(_is_number, value))
    if type(default) is int:
        return type(value) is int
    return isinstance(value, str) if default is None else _is_number(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST  # also of integers that no float can have


def _kind(default: Any) -> str:
    if isinstance(default, bool):
        return "true or false"
    if isinstance(default, tuple):
        return f"a list of {len(default)} numbers"
    if default is None:
        return "text"
    return "a whole number" if type(default) is int else "a number"


#: A user's own optimiser is expected to cost as much as this one, where it cannot be measured.
OWN = "own"
_LIKE_OWN = "adam"


def step_cost(name: str) -> float:
    """Return how long a step takes, as a multiple of SGD's with momentum."""
    return OPTIMIZERS.get(name, OPTIMIZERS[_LIKE_OWN]).step


def state_copies(name: str, arguments: Mapping[str, Any], *, cycles_momentum: bool = False) -> float:
    """Return how many values an optimiser keeps for each weight; one whose schedule cycles momentum has some."""
    if name == OWN:
        return OPTIMIZERS[_LIKE_OWN].state
    known = OPTIMIZERS[name]
    used = {**known.arguments, **arguments, **({"momentum": True} if cycles_momentum else {})}
    return known.state + sum(more for key, more in known.adds.items() if used[key])
