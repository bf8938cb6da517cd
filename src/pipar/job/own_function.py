"""The user's own function: called in this process, pickled only for another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle

from pipar.errors import ConfigError

#: The module of functions that were passed in Python, in a configuration.
OWN = "own"


class OwnFunction:
    """A function that another process gets as cloudpickle bytes, so that functions defined in a notebook work."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function: Callable[..., Any] | None = function
        self._pickled: bytes | None = None

    def get(self) -> Callable[..., Any]:
        """Return the function."""
        if self._function is None:
            assert self._pickled is not None
            self._function = cloudpickle.loads(self._pickled)  # made by the process that started this one
        assert self._function is not None
        return self._function

    def __getstate__(self) -> dict[str, object]:
        if self._pickled is None:  # once for all processes
            self._pickled = cloudpickle.dumps(self._function)
        return {"_function": None, "_pickled": self._pickled}


def checked_function(function: Any, what: str) -> OwnFunction:
    """Return a function that the user passed as this."""
    if not callable(function):
        raise ConfigError(f"{what} is a {type(function).__name__}: give a function of (outputs, targets).")
    return OwnFunction(function)


def own_name(function: Any) -> str:
    """Return the name of a passed function in a configuration."""
    name = getattr(function, "__name__", type(function).__name__)
    return f"{OWN}:{name if name.isidentifier() else 'function'}"
