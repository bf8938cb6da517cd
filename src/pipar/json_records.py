"""Reads JSON that may come from elsewhere: records need exactly their fields, and numbers have a range."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeGuard

from pipar.errors import ConfigError

#: No number in a message needs more; Python computes with any, and refuses to print those of 4,300 digits.
_MOST_DIGITS = 40


class LongNumberError(ValueError):
    """A whole number has more digits than any that a peer needs."""


def parse_json(text: str | bytes) -> Any:
    """Return the content of JSON, or raise ValueError; also for a whole number with too many digits."""
    try:
        return json.loads(text, parse_int=_whole_number)
    except RecursionError:  # brackets nested too deeply
        raise ValueError("it is nested too deeply") from None


def _whole_number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise LongNumberError(
            f"has a number of {len(digits)} digits, which does not fit: it has to be one of at most {_MOST_DIGITS}"
        )
    return int(digits)


def is_whole(value: Any, least: int, most: int) -> TypeGuard[int]:
    """Return whether a value is a whole number in this range."""
    return type(value) is int and least <= value <= most


def is_number(value: Any, least: float, most: float) -> TypeGuard[float]:
    """Return whether a value is a number in this range; NaN is in none."""
    return type(value) in (int, float) and least <= value <= most


def only_fields(record: type, tree: Any) -> dict[str, Any]:
    """Return the tree if its keys are exactly the record's fields."""
    wanted = {field.name for field in fields(record)}
    given = set(tree) if isinstance(tree, dict) else set()
    if given != wanted:
        wrong = ", ".join(sorted(given ^ wanted))
        raise ConfigError(f"these keys are missing or unknown: {wrong}.")
    return dict(tree)


def read_fields(record: type, text: str, version: int, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the values of a record from JSON whose `format` is this version; those with `defaults` may be missing."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"it is not valid JSON ({error}).") from None
    if not isinstance(tree, dict) or tree.get("format") != version:
        given = repr(tree.get("format")) if isinstance(tree, dict) else "missing"
        raise ConfigError(f"its format is {given}, not {version}, the only one that this version reads.")
    return only_fields(record, {**(defaults or {}), **{key: value for key, value in tree.items() if key != "format"}})


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
