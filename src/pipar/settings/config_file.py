"""A configuration from a TOML file and settings, and back; a mistake is one sentence."""

from __future__ import annotations

import copy
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from pipar.errors import ConfigError, did_you_mean
from pipar.settings.config import Config, DeviceSection
from pipar.settings.links import link_tree


def load_config(
    path: Path | None = None, settings: Sequence[str] = (), defaults: Mapping[str, Any] | None = None
) -> Config:
    """Return the configuration of a TOML file, or the defaults, overridden by `section.key=value` settings.

    >>> pipar.load_config(settings=["run.epochs=3"]).run.epochs
    3
    """
    tree: dict[str, Any] = copy.deepcopy(dict(defaults or {}))
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"Cannot read the configuration {path}: {error.strerror}.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}.") from None
    for setting in settings:
        _apply(tree, setting)
    return config_from(tree)


def with_settings(config: Config, settings: Sequence[str]) -> Config:
    """Return the configuration overridden by `section.key=value` settings, as if its file had been overridden."""
    # Only keys that were set: a default may depend on another key, as a device's speed depends on its profile.
    tree = config.model_dump(exclude_unset=True)
    if "devices" in tree:
        tree["devices"] = [_group_tree(group) for group in config.devices]
    return load_config(None, settings, tree) if settings else config


def _group_tree(group: DeviceSection) -> dict[str, Any]:
    """Return the keys of a group that were set; its link stays a record, whose fields are not those of a file."""
    return {key: getattr(group, key) for key in group.model_fields_set}


def config_from(tree: Mapping[str, Any]) -> Config:
    """Return the configuration of nested dictionaries; raise one sentence about the first mistake."""
    try:
        return Config.model_validate(dict(tree))
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from None


def dump_config(config: Config) -> str:
    """Return TOML that `load_config` reads back as the same configuration."""
    return tomli_w.dumps(config_tree(config))


def config_tree(config: Config) -> dict[str, Any]:
    """Return the configuration as nested dictionaries that `config_from` takes, with every default."""
    tree = config.model_dump(exclude_none=True)
    for group, dumped in zip(config.devices, tree["devices"], strict=True):
        dumped["link"] = link_tree(group.link)
    if config.optimizer.factory is not None:  # which takes the place of a name
        del tree["optimizer"]["name"]
    return tree


def _apply(tree: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and name):
        raise ConfigError(f"'{setting}' is not a setting; write --set section.key=value, as in run.epochs=3.")
    value = _toml_value(text.strip())
    if section == "devices":
        # A device key is set for every group: "all devices on wifi". The default group has four devices.
        # Anything other than a list of groups is left unchanged: validation reports it.
        groups = tree.setdefault("devices", [{"count": 4}])
        for group in groups if isinstance(groups, list) else []:
            if isinstance(group, dict):
                group[name] = value
    else:
        _put(tree, [section, *name.split(".")], value)


def _put(table: Any, path: Sequence[str], value: Any) -> None:
    """Set a key in nested tables; anything other than a table is left unchanged: validation reports it."""
    for name in path[:-1]:
        table = table.setdefault(name, {}) if isinstance(table, dict) else None
    if isinstance(table, dict):
        table[path[-1]] = value


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a word without quotes is a string: --set run.method=fl


def _sentence(error: ValidationError) -> str:
    """Turn the first of pydantic's errors into one sentence: what was given, what is allowed."""
    first = error.errors()[0]
    # pydantic adds the names of its own validators to the location; a user needs section and key.
    parts = [part for part in first["loc"] if isinstance(part, str) and part.isidentifier() and part != "auto"]
    where = ".".join(parts[:3]).removesuffix("_bps").replace("latency_s", "latency")
    given, kind = first.get("input"), first["type"]
    if kind == "extra_forbidden":
        return _unknown_key(first["loc"])
    if kind == "literal_error":
        allowed = first["ctx"]["expected"].replace(" or ", ", ").replace("'", "")
        is_name = where.endswith(".name") and isinstance(given, str)  # 'float16' is not a misspelt 'float64'
        hint = did_you_mean(given, allowed.split(", ")) if is_name else ""
        return f"{where} = {given!r} is not known{hint}; allowed are {allowed}."
    if kind == "value_error":
        cause = str(first["ctx"]["error"])
        # An error about two keys of a section already names them.
        return f"{cause}." if not where or cause.startswith(f"{where}.") else f"{where} = {given!r} {cause}."
    if kind == "model_type":
        return f"{where} = {given!r} is not allowed: write a section [{where}] with its keys below it."
    return f"{where} = {given!r} is not allowed: it {_should(first['msg'])}."


def _should(message: str) -> str:
    """Return pydantic's "Input should be ..." as the end of a sentence about a key."""
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    return message.partition(",")[0]


_WORDS = {
    "Input should": "should",
    "a valid integer": "a whole number",
    "a valid string": "text",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}


def _unknown_key(location: tuple[int | str, ...]) -> str:
    section: Any = Config
    for part in location[:-1]:
        if isinstance(part, str):
            section = DeviceSection if part == "devices" else section.model_fields[part].annotation
    known = list(section.model_fields)
    key = str(location[-1])
    # Part of a name is a better hint than similar spelling: "epsilon" is part of three keys.
    close = [name for name in known if key.lower() in name.split("_")] or difflib.get_close_matches(key, known, n=1)
    meant = " or ".join(f"'{name}'" for name in close)
    hint = f"did you mean {meant}? Allowed" if close else "allowed"
    place = f"[{location[0]}]" if len(location) > 1 else "the configuration"
    return f"'{key}' is not a key of {place}: {hint} are {', '.join(known)}."
