"""A user's own function, named in the configuration as "package.module:function"."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from pipar.errors import ConfigError, PiparError


def load_factory(spec: str) -> Callable[..., Any]:
    """Return the function that "package.module:function" names.

    The current directory is searched first and stays on the import path, because the user's module may
    import its neighbours later.
    """
    module_name, colon, function_name = spec.partition(":")
    if not (colon and _is_dotted_name(module_name) and _is_dotted_name(function_name)):
        raise ConfigError(f"factory {spec!r} is not of the form 'package.module:function'.")
    function = _look_up(_import(module_name, spec), function_name, spec)
    if not callable(function):
        raise ConfigError(f"factory {spec!r} is of type {type(function).__name__}, not a function: name a function.")
    return function


def call_factory(spec: str, *arguments: Any, keywords: Mapping[str, Any] | None = None) -> Any:
    """Return the function's result; an error that it raises becomes one sentence with its name."""
    function = load_factory(spec)
    try:
        return function(*arguments, **(keywords or {}))
    except PiparError:
        raise
    except Exception as error:
        raise ConfigError(f"factory {spec!r} raised {type(error).__name__}: {error}.") from error


def _is_dotted_name(text: str) -> bool:
    """Return True for identifiers joined by dots."""
    return all(part.isidentifier() for part in text.split("."))


def _import(module_name: str, spec: str) -> ModuleType:
    """Return the module; raise an error with the reason if it cannot be imported."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    # The directory may hold files that were written after Python last listed it.
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"factory {spec!r}: no module {error.name!r} is installed or in the current directory {here}."
            ) from error
        raise ConfigError(f"factory {spec!r}: {module_name} could not be imported: {error}.") from error
    # The user's module may raise any exception while it is imported.
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"factory {spec!r}: {module_name} could not be imported: {what}.") from error


def _look_up(module: ModuleType, name: str, spec: str) -> object:
    """Return the attribute, which may be dotted, of the module."""
    try:
        found: object = reduce(getattr, name.split("."), module)
    except AttributeError:
        raise ConfigError(
            f"factory {spec!r}: {module.__name__} has no {name!r}: check the name after the colon."
        ) from None
    return found
