"""The choice of {P, N} for one device by the paper's estimate; III-C, phase 3.

The paper shortlists one N for each P. The estimate has a closed form in N, so every N is searched here for the
price of a few.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pipar.config import Link
from pipar.methods import Method, Plan, check_plan
from pipar.planner.costs import Costs
from pipar.planner.estimate import StageTimes, closed_form_s, full_batch_times, iteration_s
from pipar.planner.profile import Profile

#: Predictions this close, relative to the best, are a tie. The estimate is no better than that, and where the link or
#: the server is the bottleneck it never grows with N: without a tie, micro-batches of one sample would always win.
TIE = 0.01

Auto = Literal["auto"]


@dataclass(frozen=True)
class Choice:
    """The plan of one device and the seconds that the estimate gives one iteration of it."""

    plan: Plan
    predicted_iteration_s: float


def choose_plan(
    method: Method,
    device_profile: Profile,
    server_profile: Profile,
    batch_size: int,
    link: Link,
    device_speed: float = 1.0,
    server_speed: float = 1.0,
    *,
    split_point: int | Auto = "auto",
    micro_batches: int | Auto = "auto",
) -> Choice:
    """Return the P and N with the shortest estimated iteration; ties go to the smaller N, then the smaller P.

    A given P or N is kept, as far as the method lets it count: fl has P = Q and N = 1; sl, sfl and sfl2 have
    N = 1 and choose P below Q. P = Q has N = 1 for every method: there is nothing to overlap.
    """
    layers = len(device_profile.layers)
    check_given(method, split_point, micro_batches, layers=layers, batch_size=batch_size, model=device_profile.model)
    given = micro_batches if method.pipelines else 1
    device, server = Costs(device_profile, device_speed), Costs(server_profile, server_speed)
    searches = [
        _Search(
            p,
            full_batch_times(device, server, p, batch_size, link),
            _range_of_n(given, whole=p == layers, batch_size=batch_size),
        )
        for p in _split_points(method, split_point, given, layers)
    ]
    within = min(search.shortest_s() for search in searches) * (1 + TIE)
    tied = [plan for search in searches for plan in search.first_within(within)]
    plan = min(tied, key=lambda plan: (plan.micro_batches, plan.split_point))
    chosen = next(search for search in searches if search.split_point == plan.split_point)
    return Choice(plan, iteration_s(chosen.times.divided_by(plan.micro_batches), plan.micro_batches))


def check_given(
    method: Method,
    split_point: int | Auto,
    micro_batches: int | Auto,
    *,
    layers: int,
    batch_size: int,
    model: str,
) -> None:
    """Raise PlanError if a given P or N that counts for the method does not fit the network or the batch."""
    p = split_point if method.splits and split_point != "auto" else layers
    n = micro_batches if method.pipelines and micro_batches != "auto" else 1
    check_plan(Plan(p, n), layers=layers, batch_size=batch_size, model=model)


@dataclass(frozen=True)
class _Search:
    """All N of one split point. With T(N) from `closed_form_s` at times t / N,

        T(N) = max( f_c + b_c,  slowest + (sum - slowest) / N ),

    which never grows with N: the largest N is as fast as any, and the smallest that ties with it is by bisection.
    """

    split_point: int
    times: StageTimes  # of the full batch
    n: range

    def predict(self, micro_batches: int) -> float:
        return closed_form_s(self.times.divided_by(micro_batches), micro_batches)

    def shortest_s(self) -> float:
        return self.predict(self.n[-1])

    def first_within(self, limit_s: float) -> Iterable[Plan]:
        """Yield the plan with the smallest N that takes no longer than the limit, if there is one."""
        low, high = 0, len(self.n)
        while low < high:
            middle = (low + high) // 2
            if self.predict(self.n[middle]) <= limit_s:
                high = middle
            else:
                low = middle + 1
        if low < len(self.n):
            yield Plan(self.split_point, self.n[low])


def _split_points(method: Method, split_point: int | Auto, micro_batches: int | Auto, layers: int) -> range:
    if not method.splits:
        return range(layers, layers + 1)
    if split_point != "auto":
        return range(split_point, split_point + 1)
    # A method that always splits, or a number of micro-batches that was asked for, leaves out P = Q.
    cuts_only = not method.pipelines or micro_batches not in ("auto", 1)
    return range(1, layers) if cuts_only and layers > 1 else range(1, layers + 1)


def _range_of_n(micro_batches: int | Auto, *, whole: bool, batch_size: int) -> range:
    if whole:
        return range(1, 2)
    return range(1, batch_size + 1) if micro_batches == "auto" else range(micro_batches, micro_batches + 1)
