"""The user's own functions, passed in Python, and their names in a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipar.errors import ConfigError
from pipar.job.passed_object import PassedObject

#: The module of functions that were passed in Python, in a configuration.
OWN = "own"


class PassedFunction(PassedObject[Callable[..., Any]]):
    """A loss, a metric or a factory of optimisers of the user's."""


#: What a function that the user passes has to be.
OF_OUTPUTS = "a function of (outputs, targets)"
OF_PARAMETERS = (
    "a function that makes an optimiser of a list of (name, parameter), as in lambda named: torch.optim.AdamW(named)"
)


def checked_function(function: Any, what: str, wanted: str = OF_OUTPUTS) -> PassedFunction:
    """Return a function that the user passed as this."""
    if not callable(function):
        raise ConfigError(f"{what} is a {type(function).__name__}: give {wanted}.")
    if wanted is OF_OUTPUTS and isinstance(function, type):
        name = function.__name__
        raise ConfigError(f"{what} is the class {name}: give an object of it, as in {name}(), or {wanted}.")
    return PassedFunction(function)


def passed_name(function: Any) -> str:
    """Return the name of a passed function in a configuration."""
    name = getattr(function, "__name__", type(function).__name__)
    return f"{OWN}:{name if name.isidentifier() else 'function'}"
