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
    from pipar.privacy.mechanisms import Chance


@dataclass(frozen=True)
class Spent:
    """What a device has sent: how many updates, and the mu^2 that they add up to."""

    releases: int = 0
    mu_squared: float = 0.0

    def plus(self, multiplier: float) -> Spent:
        """Return it with one more release."""
        return Spent(self.releases + 1, self.mu_squared + accounting.cost(multiplier))

    def or_more(self, other: Spent) -> Spent:
        """Return what at least has been sent if each of two knows of so much."""
        return Spent(max(self.releases, other.releases), max(self.mu_squared, other.mu_squared))


@dataclass(frozen=True)
class Terms:
    """How updates are protected in a training, and how much each device has to spend."""

    clip: float
    multiplier: float
    delta: float
    target_epsilon: float | None = None
    budget: float = math.inf  # the largest mu^2 that the target allows

    def allow(self, spent: Spent) -> bool:
        """Return whether one more release stays within the budget."""
        return spent.plus(self.multiplier).mu_squared <= self.budget


def terms_of(config: Config) -> Terms | None:
    """Return what a configuration says of updates, with the noise that its target needs; None without any noise."""
    privacy, epochs = config.privacy, config.run.epochs
    if not privacy.clips:
        return None
    accounting.require()
    target, delta, given = privacy.target_epsilon, privacy.delta, privacy.noise_multiplier
    if target is None:
        assert given is not None
        return Terms(privacy.clip, given, delta)
    multiplier = accounting.smallest_multiplier(epochs, target, delta) if given is None else given
    terms = Terms(privacy.clip, multiplier, delta, target, accounting.budget(target, delta))
    if not terms.allow(Spent()):
        once = accounting.epsilon_after(multiplier, 1, delta)
        needed = accounting.smallest_multiplier(1, target, delta)
        raise ConfigError(
            f"privacy.target_epsilon = {target:g} does not allow a single round: with noise_multiplier = "
            f"{multiplier:g} its epsilon is {once:.6g}. Give a noise_multiplier of at least {needed + 0.005:.2f}, "
            "leave it out, or give a larger target."
        )
    return terms


class PrivacyAccountant:
    """What each device of a training has spent, as far as its server knows."""

    def __init__(self, terms: Terms | None) -> None:
        self.terms = terms
        self._spent: dict[str, Spent] = {}
        if terms is not None:
            accounting.epsilon_after(terms.multiplier, 1, terms.delta)  # imports, which may not hold up a round

    def note(self, device: str) -> None:
        """A device has sent its update, or begun to; also of a round that does not count it afterwards."""
        if self.terms is not None:
            self._spent[device] = self.of(device).plus(self.terms.multiplier)

    def learn(self, device: str, spent: Spent) -> None:
        """Take what a device says that it has sent; the larger one of two counts is the one to go by."""
        if self.terms is not None and spent.releases:
            self._spent[device] = self.of(device).or_more(spent)

    def of(self, device: str) -> Spent:
        return self._spent.get(device, Spent())

    def epsilons(self) -> dict[str, float]:
        """Return epsilon of every device that has sent something, in name order."""
        if self.terms is None:
            return {}
        delta = self.terms.delta
        return {name: accounting.epsilon(spent.mu_squared, delta) for name, spent in sorted(self._spent.items())}

    def largest_epsilon(self) -> float | None:
        """Return the largest of them; None where updates have no noise."""
        return None if self.terms is None else max(self.epsilons().values(), default=0.0)

    def would_exceed(self, devices: Iterable[str]) -> tuple[str, float] | None:
        """Return the first device that has no release left, and the epsilon that it would come to by one more."""
        terms = self.terms
        if terms is None:
            return None
        name = next((name for name in sorted(devices) if not terms.allow(self.of(name))), None)
        if name is None:
            return None
        return name, accounting.epsilon(self.of(name).plus(terms.multiplier).mu_squared, terms.delta)

    def as_notes(self) -> dict[str, Any]:
        """Return all counts as a checkpoint has them."""
        return {name: asdict(spent) for name, spent in sorted(self._spent.items())}

    def go_on(self, notes: Mapping[str, Any]) -> None:
        """Take the counts of a checkpoint."""
        self._spent = {name: Spent(**spent) for name, spent in notes.items()}

    def as_result(self) -> dict[str, Any] | None:
        """Return how updates were protected and what each device has spent, as result.json has it."""
        terms = self.terms
        if terms is None:
            return None
        return {
            "clip": terms.clip,
            "noise_multiplier": terms.multiplier,
            "delta": terms.delta,
            "target_epsilon": terms.target_epsilon,
            "devices": [
                {"device": name, "releases": self.of(name).releases, "epsilon": one}
                for name, one in self.epsilons().items()
            ],
        }


@dataclass(frozen=True)
class Cuts:
    """Where a device lets its network be cut, and why nowhere else."""

    layers: int
    allowed: frozenset[int]
    why: str


class Guard:
    """What a device itself allows to be sent of it, and the noise that only it knows.

    It outlives connections and sessions: what was sent in any of them was sent. With something that remembers, it
    outlives the device's program, too; `spent` is what was sent before. With a `delta` it tells what that comes to.
    """

    def __init__(
        self,
        noise_seed: int | None = None,
        *,
        least_multiplier: float = 0.0,
        budget: float = math.inf,
        delta: float | None = None,
        cuts: Cuts | None = None,
        spent: Spent | None = None,
        remember: Callable[[Spent], None] | None = None,
    ) -> None:
        # Never the seed of a run before: who starts anew counts anew, and noise must not come twice.
        self.noise_seed = secrets.randbits(128) if noise_seed is None else noise_seed
        self.spent = spent or Spent()
        self._least_multiplier = least_multiplier
        self._own_budget = self._budget = budget
        self._delta = delta
        self._cuts = cuts
        self._remember = remember

    def accept(self, multiplier: float, seen: Spent, budget: float = 0.0) -> None:
        """Take the noise that a server orders and the count that it has, or raise if that is not enough noise.

        Its budget holds besides the device's own, unless it is 0: what is still on its way, as the update of a round
        that went on without the device, only the device knows of.
        """
        if multiplier < self._least_multiplier or (multiplier == 0.0 and self._own_budget < math.inf):
            raise PrivacyError(
                f"The server orders noise of {multiplier:g} times the clip on updates, and this device's configuration "
                f"wants {'some' if self._least_multiplier == 0.0 else f'at least {self._least_multiplier:g}'}: start "
                "both with the same [privacy]."
            )
        self._budget = min(self._own_budget, budget or math.inf)
        self._take(self.spent.or_more(seen))
        if multiplier > 0 and self._delta is not None:
            accounting.get_ready()  # that may not hold up a round

    @property
    def epsilon(self) -> float | None:
        """What all that was sent comes to; None if this device has no delta, or nothing that computes it."""
        return self._epsilon(self.spent.mu_squared)

    @property
    def target_epsilon(self) -> float | None:
        """What it may come to at most; None without a budget, or if that cannot be told."""
        return None if math.isinf(self._budget) else self._epsilon(self._budget)

    def _epsilon(self, mu_squared: float) -> float | None:
        if self._delta is None or not accounting.is_installed():
            return None
        return accounting.epsilon(mu_squared, self._delta)

    def accept_cut(self, split_point: int, layers: int) -> None:
        """Raise if a server wants activations of this device that its own configuration does not let it have."""
        cuts = self._cuts
        if cuts is not None and (layers != cuts.layers or split_point not in cuts.allowed):
            raise PrivacyError(
                f"The server orders the split point {split_point} of {layers}, and {cuts.why}: start both with the "
                "same configuration."
            )

    def check(self, multiplier: float) -> None:
        """Raise if one more release would exceed the budget."""
        if multiplier > 0 and self.spent.plus(multiplier).mu_squared > self._budget:
            spent, most = self.epsilon, self.target_epsilon
            updates = "1 update" if self.spent.releases == 1 else f"{self.spent.releases} updates"
            so_far = "" if spent is None else f" (epsilon {spent:.4g} in all)"
            of = "" if most is None else f" of {most:.4g} (delta {self._delta:g})"
            raise BudgetSpentError(
                f"This device has sent {updates}{so_far}, and one more would exceed its privacy budget{of}: it takes "
                "part no more. A larger privacy.target_epsilon, here and at the server, would let it."
            )

    def note(self, multiplier: float) -> None:
        """An update is about to be sent."""
        self.check(multiplier)
        self._take(self.spent.plus(multiplier))

    def _take(self, spent: Spent) -> None:
        """Take another count; it is remembered before anything that it counts is sent."""
        if spent != self.spent and self._remember is not None:
            self._remember(spent)
        self.spent = spent

    def chance(self, device: str, epoch: int) -> Chance:
        """Return the noise of the next release, by a tensor's name.

        A round that is trained again has other noise when the first try was sent: the difference of two releases with
        the same noise would have none.
        """
        from pipar import random_streams  # brings numpy, which `pipar --help` has no time for

        return partial(random_streams.generator, self.noise_seed, "update", device, epoch, self.spent.releases)
