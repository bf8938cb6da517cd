"""How thoroughly plans are searched: the budget of a search, and the thresholds that it decides by."""

from __future__ import annotations

from dataclasses import dataclass

from pipar.planner.timing import FEWEST_ITERATIONS, STEADY_ITERATIONS

#: Simulated epochs this close, relative to the best, are a tie, which goes to the smaller N: no profile is more exact.
TIE = 0.002


@dataclass(frozen=True)
class SearchSettings:
    """The budget of a search, which every caller chooses, and thresholds that all searches share."""

    # --- the budget

    #: A larger fleet is searched by a sample of this size.
    devices: int
    #: Micro-batches that may be simulated, at some microseconds each; after that nothing is improved any more.
    micro_batch_budget: int
    #: Variations of the profiles in which plans close to the best are compared.
    worlds: int
    #: Iterations of an epoch that are simulated; the others are assumed to be like them.
    iterations: int = STEADY_ITERATIONS
    #: Whether to confirm, over a whole epoch, that plans of whole batches are not faster.
    confirms: bool = False
    #: The least share of an epoch that new plans must gain to replace the current ones: smaller gains may be errors.
    least_gain: float = 0.0
    #: The share of an epoch that plans with untried split points may seem to lose: a trial shows how long they really
    #: take.
    trial_cost: float = 0.0

    # --- which N are tried

    #: The N that are tried first; then every N around the best of them. The steps grow with N, because one micro-batch
    #: more changes less the more there are.
    coarse_micro_batches: tuple[int, ...] = (
        1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25, 32, 40, 50, 64, 80, 100, 128, 160, 200, 256, 320, 400, 512,
    )  # fmt: skip
    #: The N of each split point when plans of several kinds of devices are combined: few, because every one multiplies
    #: the combinations. The best N is searched for afterwards.
    combined_micro_batches: tuple[int, ...] = (1, 2, 4, 8)

    # --- where a search starts, and how far it goes

    #: With more combinations of the kinds' plans than this, none are tried to find starting points: the bound of every
    #: one has to be computed to order them.
    most_combinations: int = 50_000
    #: Combinations of split points that are improved. One may lead to a local optimum; each costs another search.
    starts: int = 3
    #: Limit on the rounds over all kinds of devices; a round that gains no more than a tie is the last one anyway.
    sweeps: int = 4

    # --- which of the good plans is taken

    #: Plans this close to the best are compared again on varied profiles, because no profile is exact: a plan that only
    #: just balances two lanes does worse than it seems (docs/decisions/005).
    close: float = 0.05
    #: By how much every layer's time varies there, up and down.
    variation: float = 0.15
    #: Plans that are compared in half of the worlds, and those of them that are compared in all: a world costs a whole
    #: simulation.
    shortlist: int = 8
    finalists: int = 3
    #: Plans are compared until this multiple of the budget is spent: half as much again as the search.
    comparison_budget: float = 1.5
    #: Plans of whole batches that the best one is compared with over a whole epoch: fl's and sfl's.
    confirmed: int = 2
    #: Next best plans that are returned: as many as a table shows at a glance.
    runners_up: int = 8

    # --- what a simulation costs

    #: A simulation that is stopped early has mostly taken this many times less than a whole one.
    stopped_early_divisor: int = 3
    #: What surrounds a batch takes as long to simulate as this many of its micro-batches.
    micro_batches_around_batch: int = 2

    # --- fleets of many kinds of devices

    #: With more kinds than this, the kinds are merged into this many groups first,
    groups: int = 2
    #: then into this many smaller ones, around the plans that the groups got.
    smaller_groups: int = 8
    #: "Around" includes this many layers to each side of the groups' split points.
    nearby_layers: int = 2

    @property
    def far(self) -> float:
        """Plans that are further than this from the best are neither improved nor simulated to their end."""
        return 2 * self.close


#: Before a training, for seconds: its plans may stay for hours.
THOROUGH = SearchSettings(devices=128, micro_batch_budget=500_000, worlds=8, confirms=True)
#: During a training, for a third of a second: links that change every minute need new plans every minute.
QUICK = SearchSettings(devices=24, micro_batch_budget=10_000, worlds=2, iterations=FEWEST_ITERATIONS, least_gain=0.01)
#: During a training, for some seconds: what a training has shown of its machines stays true for longer.
UNHURRIED = SearchSettings(devices=128, micro_batch_budget=300_000, worlds=4, least_gain=0.003, trial_cost=0.005)
