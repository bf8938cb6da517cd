"""Accounting: how much of its privacy a device has given up by what it has sent.

Neighbours differ in all data of one device, so two updates that are clipped to C differ by at most 2 C, and noise of
sigma C is a Gaussian mechanism with the multiplier sigma / 2. Nothing is amplified by sampling: every device takes part
in every round, and the server sees the message of each. So one release is mu-GDP with mu = 2 / sigma, and releases add
up as mu^2 = sum of (2 / sigma_r)^2 (Dong, Roth and Su, 2022, corollary 3.3), also if their noise differs. Epsilon of
that at a delta is what `dp-accounting` computes for one Gaussian mechanism with multiplier 1 / mu, exactly (Balle and
Wang, 2018).
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from pipar.errors import InputError

_PACKAGE = "dp_accounting"
#: |u - v| <= 2 C for any two clipped updates u and v.
SENSITIVITY = 2.0
#: A multiplier is chosen so much above the least one that no rounding of many sums takes it below.
_MARGIN = 1e-9
#: More releases than anybody will ever send.
_MOST = 10**12


class NoAccountantError(InputError):
    """The package that computes epsilon is not installed."""


def cost(multiplier: float) -> float:
    """Return mu^2 = (2 / sigma)^2, what one release adds to the sum."""
    return float((SENSITIVITY / multiplier) ** 2)


@lru_cache(maxsize=4096)
def epsilon(mu_squared: float, delta: float) -> float:
    """Return the least epsilon for which all releases together are (epsilon, delta)-private."""
    if mu_squared == 0.0:
        return 0.0
    return _computed("get_epsilon_gaussian", 1.0 / math.sqrt(mu_squared), delta)


def epsilon_after(multiplier: float, releases: int, delta: float) -> float:
    """Return epsilon of so many releases with the same noise."""
    return epsilon(releases * cost(multiplier), delta)


@lru_cache(maxsize=256)
def budget(target_epsilon: float, delta: float) -> float:
    """Return the largest mu^2 whose epsilon does not exceed the target."""
    most, step = _computed("get_sigma_gaussian", target_epsilon, delta) ** -2, 1e-15
    while epsilon(most, delta) > target_epsilon:  # it is exact up to a rounding, which must not be to our favour
        most, step = most * (1.0 - step), 2 * step
    return most


def most_releases(multiplier: float, target_epsilon: float, delta: float) -> int:
    """Return the largest number of releases with this noise whose epsilon does not exceed the target."""
    limit, each = budget(target_epsilon, delta), cost(multiplier)
    count = int(min(_MOST, limit / each)) if each else _MOST
    while count * each > limit:
        count -= 1
    return count


def smallest_multiplier(releases: int, target_epsilon: float, delta: float) -> float:
    """Return the least noise with which so many releases do not exceed the target."""
    return SENSITIVITY * math.sqrt(releases / budget(target_epsilon, delta)) * (1.0 + _MARGIN)


def event(multiplier: float, releases: int = 1) -> Any:
    """Return the releases as dp-accounting's other accountants take them."""
    library = _accountant()
    one = library.GaussianDpEvent(multiplier / SENSITIVITY)
    return library.SelfComposedDpEvent(one, releases)


def is_installed() -> bool:
    """Return whether the package is there that computes epsilon."""
    return find_spec(_PACKAGE) is not None


def get_ready() -> None:
    """Import the package if it is there, which takes a second."""
    if is_installed():
        _accountant()


def require() -> None:
    """Raise one sentence if the package that computes epsilon is not installed."""
    if not is_installed():
        raise NoAccountantError(
            "Noise on updates needs the package dp-accounting, which tells epsilon, and it is not installed: "
            "`pip install 'pipar[privacy]'`, or leave noise_multiplier and target_epsilon out of [privacy]."
        )


def _computed(function: str, *of: float) -> float:
    """Return what a function of the package gives; on its way to the solution it may look where logarithms end."""
    import numpy as np  # late, as the package itself: `pipar --help` has no time for either

    with np.errstate(all="ignore"):
        return float(getattr(_accountant(), function)(*of))


@cache
def _accountant() -> Any:
    """Return the package; it is imported when it is needed, because that takes a second."""
    require()
    return import_module(_PACKAGE)
