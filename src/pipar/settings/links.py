"""A device's link: its rates and latency, as a configuration writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipar.errors import ConfigError, did_you_mean
from pipar.units import format_rate, parse_duration, parse_rate

NAMED_LINKS = {"4g": (10e6, 25e6), "4g+": (20e6, 40e6), "wifi": (50e6, 50e6), "unlimited": (None, None)}
#: A link that changes more often would cost more to emulate than to send its bytes.
_LEAST_EVERY_S = 1e-3
_CYCLE = '{cycle = ["4g", "wifi"], every = "60s"}'
_RATES = '{up = "10Mbit/s", down = "25Mbit/s", latency = "20ms"}'
_CHANGING = f"write {_CYCLE}"
_STEADY = f"write a name or {_RATES}"

Quantity = TypeVar("Quantity")


class Link(BaseModel):
    """The two directions of one device's connection, each with its own rate; None means no limit.

    A link that changes has each link of `cycle` for `every_s` seconds in turn; its own rates are those of the first.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    up_bps: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    down_bps: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    latency_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    cycle: tuple[Link, ...] = ()
    every_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @classmethod
    def changing(cls, cycle: Sequence[Link], every_s: float) -> Link:
        """Return the link that is each of these for `every_s` seconds, repeatedly."""
        if len({link.latency_s for link in cycle}) > 1:
            raise ValueError("has links of different latencies; only the rates of a link can change")
        if every_s < _LEAST_EVERY_S:
            raise ValueError(f"changes every {every_s:g} s; give at least '{_LEAST_EVERY_S * 1e3:g}ms'")
        return cls(**{**dict(cycle[0]), "cycle": tuple(cycle), "every_s": every_s})

    def times(self, factor: float) -> Link:
        """Return the link with all its rates multiplied; what has no limit still has none."""
        update = {
            "up_bps": self.up_bps and self.up_bps * factor,
            "down_bps": self.down_bps and self.down_bps * factor,
            "cycle": tuple(link.times(factor) for link in self.cycle),
        }
        return self.model_copy(update=update)


def parse_link(value: Any) -> Any:
    if isinstance(value, Mapping) and ("cycle" in value or "every" in value):
        return _parse_changing_link(value)
    return value if isinstance(value, Link) else _parse_steady_link(value, f"{_RATES}, or {_CYCLE}")


def _parse_changing_link(value: Mapping[str, Any]) -> Link:
    _check_link_keys(value, ("cycle", "every"), _CHANGING)
    if "every" not in value:
        raise ValueError(f"has no 'every', which says how long each link of the cycle stays; {_CHANGING}")
    cycle = value.get("cycle")
    if not isinstance(cycle, list | tuple) or not cycle:
        raise ValueError(f"has no list of links in 'cycle'; {_CHANGING}")
    return Link.changing([_parse_link_of_cycle(link) for link in cycle], _quantity(value, "every", parse_duration))


def _parse_link_of_cycle(value: Any) -> Link:
    try:
        return _parse_steady_link(value)
    except ValidationError:
        raise  # it names its key itself
    except ValueError as error:
        raise ValueError(f"has {value!r} in its cycle, which {error}") from None


def _parse_steady_link(value: Any, forms: str = _RATES) -> Link:
    if isinstance(value, str):
        if value not in NAMED_LINKS:
            hint = did_you_mean(value, NAMED_LINKS)
            names = ", ".join(NAMED_LINKS)
            raise ValueError(f"is not a link{hint}; there are {names}; or write {forms}")
        up, down = NAMED_LINKS[value]
        return Link(up_bps=up, down_bps=down)
    if not isinstance(value, Mapping) or "cycle" in value:
        raise ValueError(f"is not a link; {_STEADY}")
    _check_link_keys(value, ("up", "down", "latency"), _STEADY)
    return Link(
        up_bps=_quantity(value, "up", _parse_limit),
        down_bps=_quantity(value, "down", _parse_limit),
        latency_s=_quantity(value, "latency", parse_duration) if "latency" in value else 0.0,
    )


def _check_link_keys(value: Mapping[str, Any], allowed: Sequence[str], example: str) -> None:
    unknown = [key for key in value if key not in allowed]
    if unknown:
        hint = did_you_mean(unknown[0], allowed)
        raise ValueError(f"has an unknown key '{unknown[0]}'{hint}; the keys are {', '.join(allowed)}; {example}")


def _quantity(value: Mapping[str, Any], key: str, parse: Callable[[Any], Quantity]) -> Quantity:
    """Return the value of a key of a link; raise an error that names the key if it is wrong."""
    try:
        return parse(value.get(key, "unlimited"))
    except ConfigError as error:
        raise ValueError(f"has a wrong '{key}': {str(error).removesuffix('.')}") from None


def link_tree(link: Link) -> dict[str, Any]:
    """Return the link as a configuration file writes it."""
    if link.cycle:
        return {"cycle": [link_tree(one) for one in link.cycle], "every": link.every_s}
    return {"up": format_rate(link.up_bps), "down": format_rate(link.down_bps), "latency": link.latency_s}


def _parse_limit(text: str | float) -> float | None:
    return None if text == "unlimited" else parse_rate(text)
