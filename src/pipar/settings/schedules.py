"""How the learning rate changes over a training: a pure function of the step, which both sides of a cut compute.

Values are those of torch.optim.lr_scheduler. After its last step a schedule keeps its last value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipar.errors import ConfigError, did_you_mean
from pipar.user_function import call_factory

#: The settings of a group of parameters, such as "lr", "momentum" and "betas".
Group = Mapping[str, Any]

#: The parameters of each schedule with their defaults; None: it has to be given, or for "steps", the whole training.
_CYCLE = {
    "pct_start": 0.3,
    "div_factor": 25.0,
    "final_div_factor": 1e4,
    "cycle_momentum": True,
    "base_momentum": 0.85,
    "max_momentum": 0.95,
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {},
    "step": {"step_size": None, "gamma": 0.1},
    "exponential": {"gamma": None},
    "linear": {"end_factor": 0.0, "steps": None},
    "cosine": {"eta_min": 0.0, "steps": None},
    "onecycle": {**_CYCLE, "steps": None},
}
_MAY_BE_MISSING = ("steps",)
_WHOLE = ("steps", "step_size")
_MOMENTA = ("base_momentum", "max_momentum")
_LARGEST = 1e30


def known_schedule(name: Any) -> Any:
    """Return the name; raise a ValueError whose text continues a sentence about it."""
    if not isinstance(name, str) or (name not in SCHEDULES and ":" not in name):
        hint = did_you_mean(str(name), list(SCHEDULES))
        raise ValueError(
            f"is not known{hint}; allowed are {', '.join(SCHEDULES)}, and your own as 'package.module:function'"
        )
    return name


def check_schedule(name: str, given: Mapping[str, Any]) -> None:
    """Raise ValueError if a schedule does not have these parameters, or needs others."""
    known = SCHEDULES.get(name, {})
    for key, value in given.items():
        where = f"optimizer.scheduling.{key} = {value!r}"
        if key not in known:
            has = f"whose parameters are {', '.join(known)}" if known else "which has no parameters"
            raise ValueError(f"{where} does not belong to the schedule '{name}', {has}")
        if not _fits(key, value):
            raise ValueError(f"{where} is not allowed: it should be {_kind(key)}")
    missing = [key for key, default in known.items() if default is None and key not in (*given, *_MAY_BE_MISSING)]
    if missing:
        raise ValueError(f"optimizer.schedule = '{name}' needs optimizer.scheduling.{missing[0]}: {_kind(missing[0])}")


def _fits(key: str, value: Any) -> bool:
    if key == "cycle_momentum":
        return isinstance(value, bool)
    if key in _WHOLE:
        return type(value) is int and value >= 1
    if type(value) not in (int, float) or not abs(value) <= _LARGEST:  # also of integers that no float can have
        return False
    if key == "pct_start":
        return bool(0 <= value < 1)
    if key in _MOMENTA:
        return bool(0 < value < 1)
    return bool(value > 0) if key in ("gamma", "div_factor", "final_div_factor") else bool(value >= 0)


def _kind(key: str) -> str:
    if key in _WHOLE:
        return "a whole number of steps, from 1"
    if key == "pct_start":
        return "a number from 0, below 1"
    if key in _MOMENTA:
        return "a number above 0, below 1"
    if key == "cycle_momentum":
        return "true or false"
    return "a number above 0" if key in ("gamma", "div_factor", "final_div_factor") else "a number from 0"


@dataclass(frozen=True)
class Schedule:
    """A schedule by name, or a user's own function of the step and the number of all steps, with a linear warm-up."""

    name: str = "constant"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    warmup: int = 0  # steps

    @property
    def is_constant(self) -> bool:
        return self.name == "constant" and not self.warmup

    @property
    def cycles_momentum(self) -> bool:
        """Whether it also changes momentum, which then starts at its highest value, also during the warm-up."""
        return self.name == "onecycle" and bool(self._used["cycle_momentum"])

    @property
    def _used(self) -> dict[str, Any]:
        return {**SCHEDULES.get(self.name, {}), **self.parameters}

    def group(self, first: Group, number: int, total: int) -> dict[str, Any]:
        """Return the changed settings of a parameter group at one of `total` steps, counted from 0."""
        if number < self.warmup:
            start = 1.0 / self.warmup
            rate = first["lr"] * (start + (1.0 - start) * number / self.warmup)
            return {"lr": rate, **(_with_momentum(first, self._used["max_momentum"]) if self.cycles_momentum else {})}
        number, total = number - self.warmup, max(1, total - self.warmup)
        used = self._used
        steps = used.get("steps") or total
        if self.name == "onecycle":
            return _one_cycle(first, min(number, steps - 1), steps, used)
        return {"lr": self._rate(first["lr"], min(number, steps) if "steps" in used else number, total, used)}

    def _rate(self, rate: float, number: int, total: int, used: Mapping[str, Any]) -> float:
        steps = used.get("steps") or total
        match self.name:
            case "constant":
                return rate
            case "step":
                return rate * _power(used["gamma"], number // used["step_size"])
            case "exponential":
                return rate * _power(used["gamma"], number)
            case "linear":
                return rate * (1.0 + (float(used["end_factor"]) - 1.0) * number / steps)
            case "cosine":
                least = float(used["eta_min"])
                return least + (rate - least) * (1.0 + math.cos(math.pi * number / steps)) / 2.0
        return rate * _own_factor(self.name, number, total)

    def check_length(self, total: int, whose: str) -> None:
        """Raise ConfigError if a training of this many steps is longer than the schedule, or over before it begins."""
        steps = self.parameters.get("steps")
        if self.warmup >= total:
            raise ConfigError(
                f"optimizer.warmup = {self.warmup}, but {whose} takes only {total} steps: give fewer, or more epochs."
            )
        if self.name == "onecycle" and steps is not None and steps < total - self.warmup:
            raise ConfigError(
                f"optimizer.scheduling.steps = {steps}, but {whose} takes {total - self.warmup} steps, and the "
                "cycle must not end before the training: leave it out, for a cycle over the whole training."
            )
        self.check_function(total - self.warmup)

    def check_function(self, steps: int) -> None:
        """Call a user's function for its first and last steps, so that an error in it comes before the training."""
        if self.name not in SCHEDULES:
            for number in (0, steps - 1):
                self.group({"lr": 1.0}, self.warmup + number, self.warmup + steps)


def _power(gamma: float, times: int) -> float:
    """Return gamma ** times, up to a limit far above every rate that trains."""
    try:
        return min(float(gamma) ** times, _LARGEST)
    except OverflowError:
        return _LARGEST


def _own_factor(name: str, number: int, total: int) -> float:
    factor = call_factory(name, number, total)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor < math.inf:
        raise ConfigError(
            f"optimizer.schedule {name!r} returned {factor!r} for step {number} of {total}: return a number from 0, by "
            "which the learning rate is multiplied."
        )
    return float(factor)


def _one_cycle(first: Group, number: int, steps: int, used: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rate, which rises to the learning rate and then falls, and momentum, which does the opposite."""
    highest = first["lr"]
    lowest = highest / used["div_factor"]
    peak, last = float(used["pct_start"] * steps) - 1, steps - 1
    ways = (lowest, highest, lowest / used["final_div_factor"])
    changed: dict[str, Any] = {"lr": _there_and_back(ways, number, peak, last)}
    if used["cycle_momentum"]:
        most, least = used["max_momentum"], used["base_momentum"]
        momentum = _there_and_back((most, least, most), number, peak, last)
        changed |= _with_momentum(first, momentum)
    return changed


def _with_momentum(first: Group, momentum: float) -> dict[str, Any]:
    return {"betas": (momentum, *first["betas"][1:])} if "betas" in first else {"momentum": momentum}


def _there_and_back(ways: tuple[float, float, float], number: int, peak: float, last: int) -> float:
    """Return a value that moves from the first to the second until `peak`, and then to the third until `last`."""
    if number <= peak:
        return _on_cosine(ways[0], ways[1], number / peak if peak > 0 else 1.0)
    return _on_cosine(ways[1], ways[2], (number - peak) / (last - peak) if last > peak else 1.0)


def _on_cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2.0 * (math.cos(math.pi * share) + 1.0)
