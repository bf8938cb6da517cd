"""The privacy budget of each device: the updates that it has sent, their cost, and whether it may send another one.

The server counts for all devices, to report epsilon and to stop in time. Each device also counts for itself, so that it
does not depend on the server's count.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pipar.errors import BudgetSpentError, ConfigError, NoBudgetLeftError, PrivacyError
from pipar.privacy import accounting
from pipar.settings.config import Config

if TYPE_CHECKING:
    from pipar.privacy.mechanisms import NoiseSource


@dataclass(frozen=True)
class BudgetUse:
    """The updates that a device has sent: their number, and the mu^2 that they add up to."""

    releases: int = 0
    mu_squared: float = 0.0

    def plus(self, multiplier: float) -> BudgetUse:
        """Return it with one more release."""
        return BudgetUse(self.releases + 1, self.mu_squared + accounting.cost(multiplier))

    def or_more(self, other: BudgetUse) -> BudgetUse:
        """Return the larger of two counts of the same device."""
        return BudgetUse(max(self.releases, other.releases), max(self.mu_squared, other.mu_squared))


@dataclass(frozen=True)
class UpdateNoise:
    """How a training protects updates, and the budget of each device."""

    clip: float
    multiplier: float
    delta: float
    target_epsilon: float | None = None
    budget: float = math.inf  # the largest mu^2 that the target allows

    def allow(self, used: BudgetUse) -> bool:
        """Return whether one more release stays within the budget."""
        return used.plus(self.multiplier).mu_squared <= self.budget


def choose_noise(config: Config) -> UpdateNoise | None:
    """Return the noise on updates that a configuration gives, or that its target needs; None for no noise."""
    privacy, epochs = config.privacy, config.run.epochs
    if not privacy.clips:
        return None
    accounting.require()
    target, delta, given = privacy.target_epsilon, privacy.delta, privacy.noise_multiplier
    if target is None:
        assert given is not None
        return UpdateNoise(privacy.clip, given, delta)
    multiplier = accounting.smallest_multiplier(epochs, target, delta) if given is None else given
    noise = UpdateNoise(privacy.clip, multiplier, delta, target, accounting.budget(target, delta))
    if not noise.allow(BudgetUse()):
        once = accounting.epsilon_after(multiplier, 1, delta)
        needed = accounting.smallest_multiplier(1, target, delta)
        raise ConfigError(
            f"privacy.target_epsilon = {target:g} does not allow a single round: with noise_multiplier = "
            f"{multiplier:g} its epsilon is {once:.6g}. Give a noise_multiplier of at least {needed + 0.005:.2f}, "
            "leave it out, or give a larger target."
        )
    return noise


class PrivacyAccountant:
    """The budget that each device of a training has used, as far as its server knows."""

    def __init__(self, noise: UpdateNoise | None) -> None:
        self.noise = noise
        self._used: dict[str, BudgetUse] = {}
        self._took_part: set[str] = set()  # devices that were ever welcomed to this training
        if noise is not None:
            accounting.epsilon_after(noise.multiplier, 1, noise.delta)  # imports now, so that no round waits for it

    def welcome(self, device: str) -> None:
        """A device takes part in this training from now on."""
        self._took_part.add(device)

    def note(self, device: str) -> None:
        """Count an update that a device has sent or begun to send, even if the round then excludes the device."""
        if self.noise is not None:
            self._used[device] = self.of(device).plus(self.noise.multiplier)

    def learn(self, device: str, used: BudgetUse) -> None:
        """Take a device's own count; the larger of the two counts holds."""
        if self.noise is not None and used.releases:
            self._used[device] = self.of(device).or_more(used)

    def of(self, device: str) -> BudgetUse:
        return self._used.get(device, BudgetUse())

    def epsilons(self) -> dict[str, float]:
        """Return the epsilon of every device that has sent an update, in name order."""
        if self.noise is None:
            return {}
        delta = self.noise.delta
        return {name: accounting.epsilon(used.mu_squared, delta) for name, used in sorted(self._used.items())}

    def largest_epsilon(self) -> float | None:
        """Return the largest epsilon of all devices; None if updates have no noise."""
        return None if self.noise is None else max(self.epsilons().values(), default=0.0)

    def check_claim(self, device: str, used: BudgetUse) -> None:
        """Raise NoBudgetLeftError if a device that has not taken part before claims to have no release left.

        Its claim costs only itself: the training does not end for it.
        """
        if self.noise is not None and device not in self._took_part and not self.noise.allow(used):
            raise self.no_budget_left(device, used)

    def no_budget_left(self, device: str, used: BudgetUse | None = None) -> NoBudgetLeftError:
        """Return the error that ends the session of a device without a release left."""
        assert self.noise is not None
        assert self.noise.target_epsilon is not None
        epsilon = self._epsilon_of_one_more(used or self.of(device))
        return NoBudgetLeftError(
            f"'{device}' has used its privacy budget: one more update would bring it to epsilon {epsilon:.4g}, and "
            f"privacy.target_epsilon is {self.noise.target_epsilon:g}. To continue, raise it on the device and on the "
            "server.",
            self.noise.multiplier,
        )

    def _epsilon_of_one_more(self, used: BudgetUse) -> float:
        assert self.noise is not None
        return accounting.epsilon(used.plus(self.noise.multiplier).mu_squared, self.noise.delta)

    def spent(self, devices: Iterable[str]) -> list[str]:
        """Return the devices without a release left, in name order."""
        noise = self.noise
        return [] if noise is None else [name for name in sorted(devices) if not noise.allow(self.of(name))]

    def would_exceed(self, devices: Iterable[str]) -> tuple[str, float] | None:
        """Return the first device without a release left and the epsilon that one more would give; None if none."""
        name = next(iter(self.spent(devices)), None)
        return None if name is None else (name, self._epsilon_of_one_more(self.of(name)))

    def as_notes(self) -> dict[str, Any]:
        """Return all counts in the form of a checkpoint."""
        return {name: asdict(used) for name, used in sorted(self._used.items())}

    def resume(self, notes: Mapping[str, Any]) -> None:
        """Take the counts of a checkpoint."""
        self._used = {name: BudgetUse(**used) for name, used in notes.items()}
        self._took_part = set(notes)

    def as_result(self) -> dict[str, Any] | None:
        """Return the noise on updates and each device's epsilon in the form of result.json."""
        noise = self.noise
        if noise is None:
            return None
        return {
            "clip": noise.clip,
            "noise_multiplier": noise.multiplier,
            "delta": noise.delta,
            "target_epsilon": noise.target_epsilon,
            "devices": [
                {"device": name, "releases": self.of(name).releases, "epsilon": one}
                for name, one in self.epsilons().items()
            ],
        }


@dataclass(frozen=True)
class AllowedCuts:
    """The split points that a device allows, and why it allows no other."""

    layers: int
    allowed: frozenset[int]
    why: str


@dataclass(frozen=True)
class PrivacyLimits:
    """The limits of a device's own configuration, which hold for all orders of a server."""

    least_multiplier: float = 0.0
    budget: float = math.inf  # the largest mu^2
    delta: float | None = None  # at which epsilon is computed
    cuts: AllowedCuts | None = None


class PrivacyGuard:
    """Decides what a device may send, and draws the noise that only the device knows.

    It outlives connections and sessions, because a release counts no matter which of them carried it. With `save`,
    which stores each new count, it outlives the device's program; `used` is the count of earlier programs.
    """

    def __init__(
        self,
        noise_seed: int | None = None,
        limits: PrivacyLimits | None = None,
        *,
        used: BudgetUse | None = None,
        save: Callable[[BudgetUse], None] | None = None,
    ) -> None:
        # Never the seed of an earlier program: a device without a file counts from 0 again and would repeat its noise.
        self.noise_seed = secrets.randbits(128) if noise_seed is None else noise_seed
        self.used = used or BudgetUse()
        self._limits = limits or PrivacyLimits()
        self._budget = self._limits.budget
        self._save = save

    def accept(self, multiplier: float, seen: BudgetUse, budget: float = 0.0) -> None:
        """Accept a server's noise and its count for this device, or raise if the noise is too little.

        The server's budget holds in addition to the device's own, unless it is 0. The device has to check it too: the
        server does not know of updates that have not arrived yet, such as that of a round that ended without the
        device.
        """
        least = self._limits.least_multiplier
        if multiplier < least or (multiplier == 0.0 and self._limits.budget < math.inf):
            raise PrivacyError(
                f"The server orders noise of {multiplier:g} times the clip on updates, but this device's configuration "
                f"needs {'some' if least == 0.0 else f'at least {least:g}'}: start both with the same [privacy]."
            )
        self._budget = min(self._limits.budget, budget or math.inf)
        self._set(self.used.or_more(seen))
        if multiplier > 0 and self._limits.delta is not None:
            accounting.get_ready()  # now, so that no round waits for it

    @property
    def epsilon(self) -> float | None:
        """The epsilon of all updates sent; None if this device has no delta, or no package that computes it."""
        return self._epsilon(self.used.mu_squared)

    @property
    def target_epsilon(self) -> float | None:
        """The largest epsilon allowed; None without a budget, or if it cannot be computed."""
        return None if math.isinf(self._budget) else self._epsilon(self._budget)

    def _epsilon(self, mu_squared: float) -> float | None:
        if self._limits.delta is None or not accounting.is_installed():
            return None
        return accounting.epsilon(mu_squared, self._limits.delta)

    def accept_cut(self, split_point: int, layers: int) -> None:
        """Raise if this device's own configuration does not allow a cut that a server orders."""
        cuts = self._limits.cuts
        if cuts is not None and (layers != cuts.layers or split_point not in cuts.allowed):
            raise PrivacyError(
                f"The server orders the split point {split_point} of {layers}, but {cuts.why}: start both with the "
                "same configuration."
            )

    def check(self, multiplier: float) -> None:
        """Raise if one more release would exceed the budget."""
        if multiplier > 0 and self.used.plus(multiplier).mu_squared > self._budget:
            used, most = self.epsilon, self.target_epsilon
            updates = "1 update" if self.used.releases == 1 else f"{self.used.releases} updates"
            so_far = "" if used is None else f" (epsilon {used:.4g} in total)"
            of = "" if most is None else f" of {most:.4g} (delta {self._limits.delta:g})"
            raise BudgetSpentError(
                f"This device has sent {updates}{so_far}, and one more would exceed its privacy budget{of}, so it "
                "stops. To continue, raise privacy.target_epsilon on the device and on the server."
            )

    def note(self, multiplier: float) -> None:
        """Count an update that is about to be sent; raise if it may not be."""
        self.check(multiplier)
        self._set(self.used.plus(multiplier))

    def _set(self, used: BudgetUse) -> None:
        """Set another count; it is saved before any update that it counts is sent."""
        if used != self.used and self._save is not None:
            self._save(used)
        self.used = used

    def noise_source(self, device: str, epoch: int) -> NoiseSource:
        """Return the noise of the next release, by a tensor's name.

        A round that is trained again after its update was sent gets other noise: with the same noise, the difference of
        the two releases would have none.
        """
        from pipar import random_streams  # imports numpy, which `pipar --help` should not wait for

        return partial(random_streams.generator, self.noise_seed, "update", device, epoch, self.used.releases)
