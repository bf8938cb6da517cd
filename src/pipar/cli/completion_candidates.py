"""Candidates for shell completion: known names, configuration keys and their values, folders of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from pipar.profiling.machines import MACHINES
from pipar.settings.aggregators import AGGREGATORS
from pipar.settings.config import Config, DeviceSection
from pipar.settings.links import NAMED_LINKS
from pipar.storage.run_names import runs_folder

#: Returns candidates from the command so far, the parameter, and the typed part of its value.
Complete = Callable[[click.Context, click.Parameter, str], list[str]]

#: Named values of keys whose types do not list them.
_NAMED: dict[str, Iterable[str]] = {
    "server.aggregator": AGGREGATORS,
    "server.profile": MACHINES,
    "devices.profile": MACHINES,
    "devices.link": NAMED_LINKS,
}


def one_of(names: Iterable[str]) -> Complete:
    """Complete one of these names."""
    return lambda _, __, typed: starting_with(names, typed)


def some_of(names: Iterable[str]) -> Complete:
    """Complete the last name of a comma-separated list; each name is offered once."""

    def complete(_: click.Context, __: click.Parameter, typed: str) -> list[str]:
        before, comma, last = typed.rpartition(",")
        left = [name for name in names if name not in before.split(",")]
        return [f"{before}{comma}{name}" for name in starting_with(left, last)]

    return complete


def a_setting(_: click.Context, __: click.Parameter, typed: str) -> list[str]:
    """Complete "section.key=", and then the named values of that key."""
    key, equals, value = typed.partition("=")
    known = values_by_key()
    if not equals:
        return [f"{name}=" for name in starting_with(known, key)]
    return [f"{key}={name}" for name in starting_with(known.get(key, ()), value)]


def a_run(_: click.Context, __: click.Parameter, typed: str) -> list[CompletionItem[str]]:
    """Complete the runs in the folder of runs; elsewhere, any folder."""
    folders = sorted(str(path.parent) for path in runs_folder().glob("*/config.toml"))
    found = [CompletionItem(name) for name in starting_with(folders, typed)]
    return found or [CompletionItem(typed, type="dir")]


def starting_with(names: Iterable[str], typed: str) -> list[str]:
    return [name for name in names if name.startswith(typed)]


def values_by_key() -> dict[str, list[str]]:
    """Return every configuration key as "section.key", with its named values."""
    default = Config()
    sections = {name: type(getattr(default, name)) for name in Config.model_fields} | {"devices": DeviceSection}
    return {
        (name := f"{section}.{key}"): list(_NAMED.get(name) or _choices(field.annotation))
        for section, model in sections.items()
        for key, field in model.model_fields.items()
    }


def _choices(annotation: Any) -> list[str]:
    """Return the named values of a type: "auto" for `Literal["auto"] | int`."""
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in _choices(part)]
