"""An explanation of plans, as data: what `pipar plan` prints and `--json` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from pipar.execution.spans import Span
from pipar.job.job import Job
from pipar.methods import Plan, plans_as_json
from pipar.planner.candidates import needed_bytes
from pipar.planner.fleet import Fleet, Member
from pipar.planner.simulator import timeline
from pipar.planner.stage_times import lane_s
from pipar.planner.timing import LANES, Timing
from pipar.settings.config import device_names
from pipar.settings.links import Link

Plans = Mapping[str, Plan]


@dataclass(frozen=True)
class Option:
    """Plans of all devices, and the duration of an epoch with them."""

    plans: Plans
    epoch_s: float


@dataclass(frozen=True)
class DeviceGroup:
    """Equal devices with the same plan; `machine` is the name of their profile, None for this machine's."""

    devices: tuple[Member, ...]
    machine: str | None
    plan: Plan
    predicted_s: float  # when the last of them ends its last iteration
    needed_bytes: int
    utilisation: Mapping[str, float]  # busy share of the epoch, of a device's own lanes and of all cores
    shares: tuple[float, float] = (1.0, 1.0)  # of the bytes up and down, with the plan's encodings

    @property
    def bottleneck(self) -> str:
        """The busiest lane that these devices use."""
        return max(LANES, key=lambda lane: self.utilisation[lane])

    @property
    def memory_bytes(self) -> int | None:
        return self.devices[0].memory_bytes

    def to_dict(self) -> dict[str, Any]:
        first, plan = self.devices[0], self.plan
        return {
            "devices": [member.name for member in self.devices],
            "machine": self.machine,
            "speed": first.costs.speed,
            "link": first.link.model_dump(mode="json"),
            "memory_bytes": self.memory_bytes,
            "needed_bytes": self.needed_bytes,
            **asdict(plan),
            "encoding": plan.encoding,
            "share_up": self.shares[0],
            "share_down": self.shares[1],
            "schedule": "1f1b" if plan.window else "all-forward",
            "predicted_s": self.predicted_s,
            "bottleneck": self.bottleneck,
            "utilisation": dict(self.utilisation),
        }


@dataclass(frozen=True)
class Timeline:
    """What a device's lanes, and the cores that serve it, do in one iteration or in a whole epoch."""

    device: str
    spans: Sequence[Span]
    whole_epoch: bool


@dataclass(frozen=True)
class LinkState:
    """The changing links at one position of their cycles, and the plans of a training at that position."""

    links: tuple[Link, ...]  # in the order of the configuration, without duplicates
    chosen: Option

    def to_dict(self) -> dict[str, Any]:
        links = [link.model_dump(mode="json") for link in self.links]
        return {"links": links, "plans": _tree(self.chosen), "epoch_s": self.chosen.epoch_s}


@dataclass(frozen=True)
class ExhaustiveSearch:
    """The result of an exhaustive search. `grid` are the N that it tried, None for all."""

    best: Option
    chosen_epoch_s: float
    grid: tuple[int, ...] | None
    simulated: int
    ruled_out: int
    seconds: float

    @property
    def score(self) -> float:
        """T_opt / T; paper V-D."""
        return self.best.epoch_s / self.chosen_epoch_s

    def to_dict(self) -> dict[str, Any]:
        return {
            "best": {"plans": _tree(self.best), "epoch_s": self.best.epoch_s},
            "chosen_epoch_s": self.chosen_epoch_s,
            "score": self.score,
            "exhaustive": {
                "micro_batches": "all" if self.grid is None else list(self.grid),
                "simulated": self.simulated,
                "ruled_out": self.ruled_out,
                "seconds": self.seconds,
            },
        }


@dataclass(frozen=True)
class LeakageLimitCost:
    """The effect of `privacy.max_leakage`: the split points that it rules out, with their leakage."""

    most: float
    ruled_out: Mapping[int, float]
    without: Option  # the choice without the limit
    guess: float | None = None  # similarity of a reconstruction without any activation

    def to_dict(self, chosen: Option) -> dict[str, Any]:
        """Return the limit with what it costs: the chosen plans against those without it."""
        return {
            "max_leakage": self.most,
            "guess": self.guess,
            "ruled_out": [{"split_point": p, "leakage": leaks} for p, leaks in self.ruled_out.items()],
            "without": {"plans": _tree(self.without), "epoch_s": self.without.epoch_s},
            "relative": chosen.epoch_s / self.without.epoch_s,
        }


@dataclass(frozen=True)
class Explanation:
    """The plans of a job and why they were chosen. Times are of whole simulated epochs."""

    job: Job
    fleet: Fleet
    chosen: Option
    timing: Timing
    runners_up: tuple[Option, ...]
    other: Option  # the choice of the other estimate
    simulations: int
    seconds: float
    exhaustive: ExhaustiveSearch | None = None
    states: tuple[LinkState, ...] = ()  # of changing links; all other fields describe the first one
    leakage_limit: LeakageLimitCost | None = None

    @property
    def estimate(self) -> str:
        return self.job.config.plan.estimate

    @property
    def utilisation(self) -> dict[str, float]:
        """The busy share of the epoch: of the busiest device's lanes, and of the server's cores on average."""
        return {lane: self.timing.busy_s[lane] / self.timing.epoch_s for lane in LANES}

    @cached_property
    def predicted_s(self) -> dict[str, float]:
        """When each device ends its last iteration; devices that were not simulated have the last end of their kind."""
        known = self.timing.device_s
        slowest = [
            max(known[member.name] for member in kind if member.name in known) for kind in self.fleet.device_kinds()
        ]
        return {
            m.name: known.get(m.name, last)
            for kind, last in zip(self.fleet.device_kinds(), slowest, strict=True)
            for m in kind
        }

    def rows(self, plans: Plans | None = None) -> list[DeviceGroup]:
        """Return the devices in groups of equal ones with the same plan, in the configuration's order."""
        plans = self.chosen.plans if plans is None else plans
        together: dict[tuple[object, ...], list[Member]] = {}
        place = {name: number for number, name in enumerate(device_names(self.job.config))}
        for member in sorted(self.fleet.members, key=lambda member: place[member.name]):
            key = (id(member.costs), member.link, member.memory_bytes, plans[member.name])
            together.setdefault(key, []).append(member)
        return [self._row(tuple(members), plans[members[0].name]) for members in together.values()]

    def _row(self, members: tuple[Member, ...], plan: Plan) -> DeviceGroup:
        first, fleet = members[0], self.fleet
        profile, needed = first.costs.profile, needed_bytes(fleet, first, plan)
        machine = next(spec.profile for spec in self.job.specs if spec.name == first.name)
        ended_s = max(self.predicted_s[member.name] for member in members)
        p, server = plan.split_point, fleet.server.profile
        shares = (profile.share(p, "up", plan.up), server.share(p, "down", plan.down))
        return DeviceGroup(members, machine, plan, ended_s, needed, self._utilisation(members, plan), shares)

    def _utilisation(self, members: tuple[Member, ...], plan: Plan) -> dict[str, float]:
        """Return the busy shares of the lanes of the device with the most data; the server's cores serve all."""
        busiest = max(members, key=lambda member: member.samples)
        own = {lane: s / self.timing.epoch_s for lane, s in lane_s(self.fleet, busiest, plan).items()}
        return {lane: own.get(lane, self.utilisation[lane]) for lane in LANES}

    def timeline(self) -> Timeline | None:
        """Return one iteration of the device that ends last; None for methods that the simulator does not cover.

        With P = Q, where only models use the links, it is the whole epoch including the exchange of models.
        """
        if self.job.method.shares_server_model:
            return None
        slowest = max(self.timing.device_s.items(), key=lambda item: item[1])[0]
        fleet, plans = self.fleet.sampled(), self.chosen.plans
        if plans[slowest].split_point == fleet.layers:
            return Timeline(slowest, timeline(fleet, plans, slowest, exchange=True), whole_epoch=True)
        return Timeline(slowest, timeline(fleet, plans, slowest, iterations=1), whole_epoch=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `pipar plan --json` prints."""
        other = "paper" if self.estimate == "simulation" else "simulation"
        document = {
            "method": self.job.method.name,
            "model": self.job.model,
            "dataset": self.job.dataset,
            "plans": [{**entry, "predicted_s": self.predicted_s[entry["device"]]} for entry in _tree(self.chosen)],
            "groups": [row.to_dict() for row in self.rows()],
            "cuts": self.job.cut_list().to_dict(),
            "server": {
                "machine": self.job.config.server.profile,
                "speed": self.job.config.server.speed,
                "cores": self.fleet.cores,
            },
            "predicted_epoch_s": self.chosen.epoch_s,
            "bottleneck": self.timing.bottleneck,
            "utilisation": self.utilisation,
            "runners_up": [
                {"plans": _tree(option), "epoch_s": option.epoch_s, "relative": option.epoch_s / self.chosen.epoch_s}
                for option in self.runners_up
            ],
            "estimate": self.estimate,
            other: {"plans": _tree(self.other), "epoch_s": self.other.epoch_s},
            "simulations": self.simulations,
            "seconds": self.seconds,
        }
        if self.states:
            document["states"] = [state.to_dict() for state in self.states]
        if self.leakage_limit is not None:
            document["privacy"] = self.leakage_limit.to_dict(self.chosen)
        return document if self.exhaustive is None else document | self.exhaustive.to_dict()


def _tree(option: Option) -> list[dict[str, Any]]:
    return [{**plan, "encoding": option.plans[plan["device"]].encoding} for plan in plans_as_json(option.plans)]
