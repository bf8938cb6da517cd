"""The aggregators that a configuration may name: their parameters with defaults and ranges, and what each needs.

What they compute is in `aggregation/aggregators.py`; this needs no torch.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pipar.methods import Method


@dataclass(frozen=True)
class Parameter:
    """A number with its default and its range: at least `least`, or above it, and below `below`."""

    default: float
    least: float = 0
    below: float = math.inf
    above_least: bool = False
    whole: bool = False

    def takes(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        return (value > self.least if self.above_least else value >= self.least) and value < self.below

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        end = f", below {self.below:g}" if self.below < math.inf else ""
        return f"{kind} {'above' if self.above_least else 'from'} {self.least:g}{end}"


#: Adaptive server optimisers; Reddi et al. fix beta1, beta2 and tau at these and tune the learning rate for each task.
_ADAPTIVE = {
    "server_learning_rate": Parameter(0.01, above_least=True),
    "beta1": Parameter(0.9, below=1),
    "beta2": Parameter(0.99, below=1),
    "tau": Parameter(1e-3, above_least=True),
}
AGGREGATORS: dict[str, dict[str, Parameter]] = {
    "fedavg": {},
    "fedprox": {"proximal": Parameter(0.01)},
    "fedavgm": {
        "server_learning_rate": Parameter(1.0, above_least=True),
        "server_momentum": Parameter(0.9, below=1),
    },
    "fedadam": _ADAPTIVE,
    "fedyogi": _ADAPTIVE,
    "median": {},
    "trimmed_mean": {"trim": Parameter(0.1, below=0.5)},
    "krum": {"byzantine": Parameter(1, whole=True), "selected": Parameter(1, least=1, whole=True)},
}


def is_own(aggregator: str) -> bool:
    """Return whether this names a user's own aggregator, "package.module:function"."""
    return ":" in aggregator


def known_aggregator(name: str) -> str:
    """Return the name; raise a ValueError whose text continues a sentence about it."""
    if name not in AGGREGATORS and not is_own(name):
        close = difflib.get_close_matches(name, AGGREGATORS, n=1)
        hint = f"did you mean '{close[0]}'? Allowed" if close else "allowed"
        raise ValueError(
            f"is not known: {hint} are {', '.join(AGGREGATORS)}, and your own as 'package.module:function'"
        )
    return name


def all_parameters(aggregator: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of an aggregator, defaults for those not given; a mistake is a ValueError.

    Parameters of a user's own aggregator are not checked.
    """
    if is_own(aggregator):
        return dict(given)
    known = AGGREGATORS[aggregator]
    for key, value in given.items():
        if key not in known:
            has = f"whose parameters are {', '.join(known)}" if known else "which has no parameters"
            raise ValueError(f"server.aggregation.{key} = {value!r} does not belong to {aggregator}, {has}")
        if not known[key].takes(value):
            raise ValueError(f"server.aggregation.{key} = {value!r} is not allowed: it should be {known[key]}")
    return {key: given.get(key, parameter.default) for key, parameter in known.items()}


def check_method(aggregator: str, method: Method) -> None:
    """Raise ValueError if the method has nothing that this aggregator could aggregate."""
    if method.one_device_at_a_time and aggregator != "fedavg":
        raise ValueError(
            f"{method.name} trains one device at a time and hands its model on, so there is nothing that "
            f"server.aggregator = {aggregator!r} could aggregate: leave the aggregator out, or use another method"
        )


def trimmed_at_each_end(trim: float, devices: int) -> int:
    """Return how many devices this share is, rounded up, so that at least the given share is left out."""
    # Exact arithmetic on the decimal number: in floating point, 0.07 * 100 is more than 7.
    return math.ceil(Fraction(str(trim)) * devices)


def check_devices(aggregator: str, parameters: Mapping[str, Any], devices: int) -> None:
    """Raise ValueError if these are too few devices for the aggregator and its parameters."""
    if aggregator == "trimmed_mean":
        trim = parameters["trim"]
        left_out = trimmed_at_each_end(trim, devices)
        if 2 * left_out >= devices:
            raise ValueError(
                f"trimmed_mean with trim = {trim:g} leaves out {left_out} of {devices} devices at each end, "
                "so that none is left: give more devices or a smaller server.aggregation.trim"
            )
    elif aggregator == "krum":
        byzantine, selected = parameters["byzantine"], parameters["selected"]
        if devices < 2 * byzantine + 3:
            raise ValueError(
                f"krum with byzantine = {byzantine} needs at least {2 * byzantine + 3} devices, but there are "
                f"{devices}: give more devices or a smaller server.aggregation.byzantine"
            )
        if selected > devices - byzantine:
            raise ValueError(
                f"krum can select at most {devices - byzantine} of {devices} devices with byzantine = {byzantine}, "
                f"but selected = {selected}: give a smaller server.aggregation.selected"
            )
