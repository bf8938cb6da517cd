"""Accounting: the privacy loss of a device from the updates that it has sent.

Neighbouring datasets differ in all data of one device, so two updates that are clipped to C differ by at most 2 C, and
noise of sigma C is a Gaussian mechanism with the multiplier sigma / 2. There is no amplification by sampling: every
device takes part in every round, and the server sees each message. So one release is mu-GDP with mu = 2 / sigma, and
releases compose to mu^2 = sum of (2 / sigma_r)^2 (Dong, Roth and Su, 2022, corollary 3.3), even if their noise differs.
`dp-accounting` computes its epsilon at a delta exactly, as that of one Gaussian mechanism with multiplier 1 / mu (Balle
and Wang, 2018).
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
#: A chosen multiplier is larger than the least one by this share, so that rounding cannot take it below.
_MARGIN = 1e-9


class NoAccountantError(InputError):
    """The package that computes epsilon is not installed."""


def cost(multiplier: float) -> float:
    """Return mu^2 = (2 / sigma)^2, which one release adds to the sum."""
    return float((SENSITIVITY / multiplier) ** 2)


@lru_cache(maxsize=4096)
def epsilon(mu_squared: float, delta: float) -> float:
    """Return the least epsilon for which all releases together are (epsilon, delta)-private."""
    if mu_squared == 0.0:
        return 0.0
    return _computed("get_epsilon_gaussian", 1.0 / math.sqrt(mu_squared), delta)


def epsilon_after(multiplier: float, releases: int, delta: float) -> float:
    """Return the epsilon of a number of releases with the same noise."""
    return epsilon(releases * cost(multiplier), delta)


@lru_cache(maxsize=256)
def budget(target_epsilon: float, delta: float) -> float:
    """Return the largest mu^2 whose epsilon does not exceed the target."""
    most, step = _computed("get_sigma_gaussian", target_epsilon, delta) ** -2, 1e-15
    while epsilon(most, delta) > target_epsilon:  # exact up to rounding, which must not be in our favour
        most, step = most * (1.0 - step), 2 * step
    return most


def smallest_multiplier(releases: int, target_epsilon: float, delta: float) -> float:
    """Return the least noise with which this number of releases does not exceed the target."""
    return SENSITIVITY * math.sqrt(releases / budget(target_epsilon, delta)) * (1.0 + _MARGIN)


def is_installed() -> bool:
    """Return whether the package that computes epsilon is installed."""
    return find_spec(_PACKAGE) is not None


def get_ready() -> None:
    """Import the package, if it is installed; that takes a second."""
    if is_installed():
        _accountant()


def require() -> None:
    """Raise an error if the package that computes epsilon is not installed."""
    if not is_installed():
        raise NoAccountantError(
            "Noise on updates needs the package dp-accounting, which computes epsilon and is not installed: "
            "`pip install 'pipar[privacy]'`, or leave noise_multiplier and target_epsilon out of [privacy]."
        )


def _computed(function: str, *of: float) -> float:
    """Return the result of a function of the package; its solver may evaluate logarithms outside their domain."""
    import numpy as np  # late, as the package itself: `pipar --help` should not wait for either

    with np.errstate(all="ignore"):
        return float(getattr(_accountant(), function)(*of))


@cache
def _accountant() -> Any:
    """Return the package; it is imported on first use, because that takes a second."""
    require()
    return import_module(_PACKAGE)
