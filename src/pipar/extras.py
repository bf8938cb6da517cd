"""Libraries that pipar does not need for training, imported when they are first used."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from pipar.errors import InputError


def optional_library(name: str, *, extra: str, purpose: str) -> Any:
    """Return a module of an extra, or raise an InputError that says how to install it."""
    package = name.partition(".")[0]
    if find_spec(package) is None:
        raise InputError(f"{purpose} needs {package}, which is not installed: pip install 'pipar[{extra}]'.")
    return import_module(name)
