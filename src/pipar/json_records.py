"""Reads records from JSON that may come from elsewhere: they need exactly their fields, of the right types."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from pipar.errors import ConfigError


def only_fields(record: type, tree: Any) -> dict[str, Any]:
    """Return the tree if its keys are exactly the record's fields."""
    wanted = {field.name for field in fields(record)}
    given = set(tree) if isinstance(tree, dict) else set()
    if given != wanted:
        wrong = ", ".join(sorted(given ^ wanted))
        raise ConfigError(f"these keys are missing or unknown: {wrong}.")
    return dict(tree)


def read_fields(record: type, text: str, version: int) -> dict[str, Any]:
    """Return the values of a record from JSON whose `format` is this version."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"it is not valid JSON ({error}).") from None
    if not isinstance(tree, dict) or tree.get("format") != version:
        given = repr(tree.get("format")) if isinstance(tree, dict) else "missing"
        raise ConfigError(f"its format is {given}, not {version}, the only one that this version reads.")
    return only_fields(record, {key: value for key, value in tree.items() if key != "format"})


def list_of(value: Any, key: str) -> list[Any]:
    """Return the value of a key if it is a list."""
    if not isinstance(value, list):
        raise ConfigError(f"{key} is not a list.")
    return value


def object_of(value: Any, key: str) -> dict[str, Any]:
    """Return the value of a key if it is an object."""
    if not isinstance(value, dict):
        raise ConfigError(f"{key} is not an object.")
    return value
