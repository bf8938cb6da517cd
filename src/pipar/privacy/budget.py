"""Who has sent its update how often, what that has cost it, and whether it may once more.

The server counts for everybody, to tell epsilon and to stop in time. Each device counts for itself, too, and need not
take a server's word for it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pipar.config import Config
from pipar.errors import BudgetSpentError, ConfigError, PrivacyError
from pipar.privacy import accounting

if TYPE_CHECKING:
    from pipar.privacy.mechanisms import NoiseSource


@dataclass(frozen=True)
class BudgetUse:
    """What a device has sent: how many updates, and the mu^2 that they add up to."""

    releases: int = 0
    mu_squared: float = 0.0

    def plus(self, multiplier: float) -> BudgetUse:
        """Return it with one more release."""
        return BudgetUse(self.releases + 1, self.mu_squared + accounting.cost(multiplier))

    def or_more(self, other: BudgetUse) -> BudgetUse:
        """Return what at least has been sent if each of two knows of so much."""
        return BudgetUse(max(self.releases, other.releases), max(self.mu_squared, other.mu_squared))


@dataclass(frozen=True)
class UpdateNoise:
    """How updates are protected in a training, and how much each device has to spend."""

    clip: float
    multiplier: float
    delta: float
    target_epsilon: float | None = None
    budget: float = math.inf  # the largest mu^2 that the target allows

    def allow(self, used: BudgetUse) -> bool:
        """Return whether one more release stays within the budget."""
        return used.plus(self.multiplier).mu_squared <= self.budget


def choose_noise(config: Config) -> UpdateNoise | None:
    """Return what a configuration says of updates, with the noise that its target needs; None without any noise."""
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
    """What each device of a training has used, as far as its server knows."""

    def __init__(self, noise: UpdateNoise | None) -> None:
        self.noise = noise
        self._used: dict[str, BudgetUse] = {}
        if noise is not None:
            accounting.epsilon_after(noise.multiplier, 1, noise.delta)  # imports, which may not hold up a round

    def note(self, device: str) -> None:
        """A device has sent its update, or begun to; also of a round that does not count it afterwards."""
        if self.noise is not None:
            self._used[device] = self.of(device).plus(self.noise.multiplier)

    def learn(self, device: str, used: BudgetUse) -> None:
        """Take what a device says that it has sent; the larger one of two counts is the one to go by."""
        if self.noise is not None and used.releases:
            self._used[device] = self.of(device).or_more(used)

    def of(self, device: str) -> BudgetUse:
        return self._used.get(device, BudgetUse())

    def epsilons(self) -> dict[str, float]:
        """Return epsilon of every device that has sent something, in name order."""
        if self.noise is None:
            return {}
        delta = self.noise.delta
        return {name: accounting.epsilon(used.mu_squared, delta) for name, used in sorted(self._used.items())}

    def largest_epsilon(self) -> float | None:
        """Return the largest of them; None where updates have no noise."""
        return None if self.noise is None else max(self.epsilons().values(), default=0.0)

    def would_exceed(self, devices: Iterable[str]) -> tuple[str, float] | None:
        """Return the first device that has no release left, and the epsilon that it would come to by one more."""
        noise = self.noise
        if noise is None:
            return None
        name = next((name for name in sorted(devices) if not noise.allow(self.of(name))), None)
        if name is None:
            return None
        return name, accounting.epsilon(self.of(name).plus(noise.multiplier).mu_squared, noise.delta)

    def as_notes(self) -> dict[str, Any]:
        """Return all counts as a checkpoint has them."""
        return {name: asdict(used) for name, used in sorted(self._used.items())}

    def go_on(self, notes: Mapping[str, Any]) -> None:
        """Take the counts of a checkpoint."""
        self._used = {name: BudgetUse(**used) for name, used in notes.items()}

    def as_result(self) -> dict[str, Any] | None:
        """Return how updates were protected and what each device has used, as result.json has it."""
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
    """Where a device lets its network be cut, and why nowhere else."""

    layers: int
    allowed: frozenset[int]
    why: str


@dataclass(frozen=True)
class PrivacyLimits:
    """What a device's own configuration allows, whatever a server orders."""

    least_multiplier: float = 0.0
    budget: float = math.inf  # the largest mu^2
    delta: float | None = None  # at which epsilon is computed
    cuts: AllowedCuts | None = None


class PrivacyGuard:
    """What a device itself allows to be sent of it, and the noise that only it knows.

    It outlives connections and sessions: what was sent in any of them was sent. With something that remembers, it
    outlives the device's program, too; `used` is what was sent before. With a `delta` it tells what that comes to.
    """

    def __init__(
        self,
        noise_seed: int | None = None,
        limits: PrivacyLimits | None = None,
        *,
        used: BudgetUse | None = None,
        save: Callable[[BudgetUse], None] | None = None,
    ) -> None:
        # Never the seed of a run before: who starts anew counts anew, and noise must not come twice.
        self.noise_seed = secrets.randbits(128) if noise_seed is None else noise_seed
        self.used = used or BudgetUse()
        self._limits = limits or PrivacyLimits()
        self._budget = self._limits.budget
        self._save = save

    def accept(self, multiplier: float, seen: BudgetUse, budget: float = 0.0) -> None:
        """Take the noise that a server orders and the count that it has, or raise if that is not enough noise.

        Its budget holds besides the device's own, unless it is 0: what is still on its way, as the update of a round
        that went on without the device, only the device knows of.
        """
        least = self._limits.least_multiplier
        if multiplier < least or (multiplier == 0.0 and self._limits.budget < math.inf):
            raise PrivacyError(
                f"The server orders noise of {multiplier:g} times the clip on updates, and this device's configuration "
                f"wants {'some' if least == 0.0 else f'at least {least:g}'}: start both with the same [privacy]."
            )
        self._budget = min(self._limits.budget, budget or math.inf)
        self._take(self.used.or_more(seen))
        if multiplier > 0 and self._limits.delta is not None:
            accounting.get_ready()  # that may not hold up a round

    @property
    def epsilon(self) -> float | None:
        """What all that was sent comes to; None if this device has no delta, or nothing that computes it."""
        return self._epsilon(self.used.mu_squared)

    @property
    def target_epsilon(self) -> float | None:
        """What it may come to at most; None without a budget, or if that cannot be told."""
        return None if math.isinf(self._budget) else self._epsilon(self._budget)

    def _epsilon(self, mu_squared: float) -> float | None:
        if self._limits.delta is None or not accounting.is_installed():
            return None
        return accounting.epsilon(mu_squared, self._limits.delta)

    def accept_cut(self, split_point: int, layers: int) -> None:
        """Raise if a server wants activations of this device that its own configuration does not let it have."""
        cuts = self._limits.cuts
        if cuts is not None and (layers != cuts.layers or split_point not in cuts.allowed):
            raise PrivacyError(
                f"The server orders the split point {split_point} of {layers}, and {cuts.why}: start both with the "
                "same configuration."
            )

    def check(self, multiplier: float) -> None:
        """Raise if one more release would exceed the budget."""
        if multiplier > 0 and self.used.plus(multiplier).mu_squared > self._budget:
            used, most = self.epsilon, self.target_epsilon
            updates = "1 update" if self.used.releases == 1 else f"{self.used.releases} updates"
            so_far = "" if used is None else f" (epsilon {used:.4g} in all)"
            of = "" if most is None else f" of {most:.4g} (delta {self._limits.delta:g})"
            raise BudgetSpentError(
                f"This device has sent {updates}{so_far}, and one more would exceed its privacy budget{of}: it takes "
                "part no more. A larger privacy.target_epsilon, here and at the server, would let it."
            )

    def note(self, multiplier: float) -> None:
        """An update is about to be sent."""
        self.check(multiplier)
        self._take(self.used.plus(multiplier))

    def _take(self, used: BudgetUse) -> None:
        """Take another count; it is remembered before anything that it counts is sent."""
        if used != self.used and self._save is not None:
            self._save(used)
        self.used = used

    def noise_source(self, device: str, epoch: int) -> NoiseSource:
        """Return the noise of the next release, by a tensor's name.

        A round that is trained again has other noise when the first try was sent: the difference of two releases with
        the same noise would have none.
        """
        from pipar import random_streams  # brings numpy, which `pipar --help` has no time for

        return partial(random_streams.generator, self.noise_seed, "update", device, epoch, self.used.releases)
