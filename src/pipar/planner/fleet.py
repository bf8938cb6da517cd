"""The fleet that is planned for: the devices with their links and limits, and the server that they share."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from pipar.execution.schedule import count_batches, cut_batch, cut_epoch
from pipar.methods import Method, Plan
from pipar.planner.costs import Costs
from pipar.planner.measured_epochs import MeasuredEpochs
from pipar.settings.links import Link
from pipar.units import LIMITLESS_BPS
from pipar.wire.encodings import LOSSY
from pipar.wire.messages import LABELS, TargetSize

Auto = Literal["auto"]

#: One plan for each kind of device, in the order of `Fleet.device_kinds`.
PlansByKind = tuple[Plan, ...]

#: A fleet of more devices is planned for, and predicted, by a sample of it.
_SAMPLE = 128
#: Micro-batches at the same time have to take at most this share of the time that they take one after another.
_WORTH_IT = 0.9
#: Devices whose numbers of samples differ by no more than this share count as equal.
_ALIKE = 0.05


@dataclass(frozen=True)
class SharedHost:
    """The machine of a server that devices run on as well: its cores, and how much of one each server lane uses."""

    cores: float
    server_share: float = 1.0  # of a core, while a lane of the server computes: less if a slow server is emulated


@dataclass(frozen=True)
class Member:
    """One device of a fleet; "auto" where its plan is to be chosen.

    `window` is the given 1F1B window, 0 for all forwards first; "auto" takes a window only if memory asks for one.
    `encoding` is that of activations and gradients. `host_share` is the share of a core of the server's machine that
    it uses while it computes: 0 on a machine of its own, less than 1 if a slow device is emulated.
    """

    name: str
    costs: Costs
    link: Link
    samples: int
    memory_bytes: int | None = None
    split_point: int | Auto = "auto"
    micro_batches: int | Auto = "auto"
    window: int | Auto = "auto"
    encoding: str = "auto"
    host_share: float = 0.0
    stands_for: float = 1.0  # devices of its kind: more than one in a sample of a larger fleet

    @property
    def kind(self) -> tuple[object, ...]:
        """What its plan depends on, apart from its amount of data: devices of one kind are planned once."""
        # Costs by identity: equal devices share them, and comparing profiles layer by layer would take longer.
        given = (self.split_point, self.micro_batches, self.window, self.encoding, self.host_share)
        return (id(self.costs), self.link, self.memory_bytes, *given)


@dataclass(frozen=True)
class Fleet:
    """All devices of a training, in name order, and the server's cores."""

    method: Method
    members: tuple[Member, ...]
    server: Costs
    cores: int
    batch_size: int
    batch_statistics: bool = False
    real_links: bool = False  # between machines: their rates are unknown before the first traffic
    stable_rounds: float = math.inf  # rounds for which the links are expected to stay unchanged
    tried_split_points: Mapping[str, frozenset[int]] = field(
        default_factory=dict
    )  # that each device has had in this training
    cores_each: float = 1.0  # cores that each one stands for: more than one in a sample of a larger fleet
    leaky_cuts: frozenset[int] = frozenset()  # split points that are not allowed because they reveal too much
    protects: bool = False  # devices clip their updates and add noise before they send them
    noised_bytes: int = 0  # of one sample, to which a device adds noise when it is loaded
    steady_layers: int = 0  # first layers whose activations are the same in every epoch
    cache_bytes: int = 0  # of a device's activations that the server keeps at most
    exchanges_norms: bool = False  # both sides tell each other the norm of their gradient after each batch
    local_epochs: int = 1  # passes of a device over its samples in one epoch
    per_round: int | None = None  # devices that take part in a round, if they are drawn
    whole_models: bool = False  # no changes are sent, because devices rarely have the previous model
    recalled: float = 0.0  # the share of epochs in which devices refer to activations that the server has kept
    targets: TargetSize = LABELS  # the bytes of targets in a message with activations
    replica_memory_bytes: int | None = None  # of the server's accelerator, for the layers of each device
    host: SharedHost | None = None  # the server's machine, if devices run on it, too
    measured: MeasuredEpochs = field(default_factory=MeasuredEpochs)  # what epochs have taken so far
    threads: int | Auto = 1  # of the server, that compute micro-batches of one device at the same time
    in_order: bool = False  # each forward of a replica depends on the one before, as with batch statistics

    @property
    def averaged_bytes(self) -> int:
        """The bytes that one core reads to average the models of all devices."""
        whole = self.server.profile.changing_bytes(1, self.layers)
        return round(whole * self.devices)

    @cached_property
    def devices(self) -> float:
        """How many devices take part, of which a sample has some."""
        return sum(member.stands_for for member in self.members)

    @property
    def all_cores(self) -> float:
        """How many cores the server has, of which a sample has some."""
        return self.cores * self.cores_each

    def core_share(self, member: Member) -> float:
        """Return for how much of a job a core is taken that serves a device: in a sample both stand for several."""
        return member.stands_for / self.cores_each

    @property
    def is_real(self) -> bool:
        """Whether it is a fleet of real processes: on one machine, or with links between machines."""
        return self.host is not None or self.real_links

    @property
    def layers(self) -> int:
        return len(self.server.profile.layers)

    def at_once(self, plan: Plan, devices: int | None = None) -> int:
        """Return how many micro-batches of one device the server computes at the same time, each on one core.

        With "auto" they use the cores that have no device of their own, if that is worth it although cores slow each
        other down. One at a time where the order matters: to a shared model, batch statistics, random numbers, a lossy
        encoding, norms, or activations that are kept.
        """
        wanted = self.threads
        is_ordered = self.in_order or self.batch_statistics or self.exchanges_norms or self.method.shares_server_model
        if wanted == 1 or is_ordered or plan.down in LOSSY or self.is_steady(plan.split_point):
            return 1
        if wanted == "auto":
            among = devices or min(len(self.members), self.per_round or len(self.members))
            wanted = -(-self.cores // max(1, among))
            share = self.server.contention(-(-self.batch_size // plan.micro_batches))
            if (1.0 + share * (wanted - 1)) / wanted > _WORTH_IT:
                return 1
        return max(1, min(wanted, self.cores, plan.micro_batches))

    def trains(self, split_point: int) -> bool:
        """Return whether a device with these layers has anything to train: otherwise it gets no gradients."""
        return split_point > self.server.profile.frozen_layers

    def is_steady(self, split_point: int) -> bool:
        """Return whether a device with these layers computes each sample by itself, the same in every epoch."""
        return split_point <= self.steady_layers and split_point < self.layers

    def recalled_share(self, member: Member, plan: Plan) -> float:
        """Return the share of epochs in which a device computes and sends nothing but references."""
        size = member.samples * (self.server.profile.output_bytes(plan.split_point) + self.targets.sample_bytes)
        keeps = self.is_steady(plan.split_point) and plan.up not in LOSSY and size <= self.cache_bytes
        return self.recalled if keeps else 0.0

    def changes_below_bps(self, member: Member) -> float:
        """Return the rate of a link below which sending the changes of a model is faster than sending the model.

        All devices may return their models at the same time, and the server decodes one for each core at a time. The
        rate is 0 where models are always sent whole: if the encoding is raw, if the cost of changes was not measured,
        in split learning, where no two parties have the same model, with noise, which changes every byte, and if
        devices are drawn.
        """
        device, server = member.costs, self.server
        is_measured = all("changes" in costs.profile.coding for costs in (device, server))
        is_whole = member.encoding == "raw" or self.method.one_device_at_a_time or self.protects or self.whole_models
        if is_whole or not is_measured:
            return 0.0
        saved_bits = 8 * (1 - server.profile.changes_share)
        turns = max(1.0, self.devices / self.all_cores)
        up = device.changes_s_per_byte("pack") + turns * server.changes_s_per_byte("install")
        down = server.changes_s_per_byte("pack") + device.changes_s_per_byte("install")
        return min(LIMITLESS_BPS, saved_bits / max(up, down, 1e-12))

    def sends_changes(self, member: Member, rate_bps: float | None) -> bool:
        """Return whether models are sent over a link of this rate as their changes."""
        return rate_bps is not None and rate_bps < self.changes_below_bps(member)

    def keeps_base(self, member: Member) -> bool:
        """Return whether a device keeps the last model that it received, to send or to clip its changes."""
        if self.protects:
            return True
        rates = [rate for link in (member.link, *member.link.cycle) for rate in (link.up_bps, link.down_bps)]
        return any(self.sends_changes(member, rate) for rate in ([0.0] if self.real_links else rates))

    def served(self, members: Iterable[Member]) -> float:
        """Return how many samples of these devices an epoch has; a sample counts in each pass."""
        return self.local_epochs * sum(member.samples * member.stands_for for member in members)

    def repeats(self, members: Iterable[Member], simulated: int) -> float:
        """Return how many iterations follow the simulated ones, on the device with the most data.

        A left-over batch counts by its samples, unless those of whole passes are among what is simulated.
        """
        most = max(member.samples for member in members)
        count = float(self.iterations(most))
        if self.local_epochs == 1 or simulated * self.local_epochs < count:
            count = self.local_epochs * most / self.batch_size
        return max(0.0, count - simulated)

    def batches(self, samples: int, most: int | None = None) -> list[int]:
        """Return the number of samples of each iteration of a device's epoch, or of its first ones."""
        statistics, passes = self.batch_statistics, self.local_epochs
        return cut_epoch(samples, self.batch_size, batch_statistics=statistics, passes=passes, most=most)

    def batch_counts(self, samples: int) -> dict[int, int]:
        """Return the number of iterations of a device's epoch by their number of samples."""
        statistics, passes = self.batch_statistics, self.local_epochs
        return count_batches(samples, self.batch_size, batch_statistics=statistics, passes=passes)

    def iterations(self, samples: int) -> int:
        """Return how many iterations a device's epoch has."""
        return sum(self.batch_counts(samples).values())

    def full_batches(self, kind: tuple[Member, ...]) -> list[int]:
        """Return how many full batches each device of a kind has in an epoch."""
        return [self.batch_counts(member.samples).get(self.batch_size, 0) for member in kind]

    def pieces(self, batch: int, micro_batches: int) -> list[int]:
        """Return the sizes of a batch's micro-batches."""
        return cut_batch(batch, micro_batches, batch_statistics=self.batch_statistics)

    def slower(self, *, devices: float = 1.0, server: float = 1.0) -> Fleet:
        """Return the fleet with computation that takes these factors as long; devices of one kind stay of one kind."""
        return self._with_costs(lambda costs, _: costs.slower(devices), self.server.slower(server))

    def slowed(self, hosted: Callable[[float], float], server: float) -> Fleet:
        """Return the fleet whose server takes this factor as long, and each device on its machine that of its share."""
        devices: dict[tuple[int, float], Costs] = {}
        for member in self.members:
            key = (id(member.costs), member.host_share)
            if key not in devices:
                times = hosted(member.host_share) if member.host_share else 1.0
                devices[key] = member.costs.slower(times) if times > 1.0 else member.costs
        members = tuple(replace(m, costs=devices[id(m.costs), m.host_share]) for m in self.members)
        return replace(self, members=members, server=self.server.slower(server) if server > 1.0 else self.server)

    def varied(self, factors: Callable[[str], Callable[[], float]]) -> Fleet:
        """Return the fleet with every layer's time multiplied by its own factor on each machine; kinds stay kinds."""
        return self._with_costs(
            lambda costs, number: costs.varied(factors(f"device {number}")), self.server.varied(factors("server"))
        )

    def _with_costs(self, change: Callable[[Costs, int], Costs], server: Costs) -> Fleet:
        known: dict[int, Costs] = {}
        for number, member in enumerate(self.members):
            if id(member.costs) not in known:
                known[id(member.costs)] = change(member.costs, number)
        members = tuple(replace(member, costs=known[id(member.costs)]) for member in self.members)
        return replace(self, members=members, server=server)

    def of(self, names: Collection[str]) -> Fleet:
        """Return the fleet of these devices only, all of which take part."""
        if len(names) == len(self.members) and self.per_round is None:
            return self
        members = tuple(member for member in self.members if member.name in names)
        return replace(self, members=members, per_round=None)

    def sampled(self, most: int = _SAMPLE) -> Fleet:
        """Return a sample of about `most` devices, which stand for all devices of their kinds, and its share of cores.

        Every kind is in it, in proportion as far as possible: its devices count on the server for as many as there are.
        """
        # Of a fleet whose devices are drawn, a round has only some: they share the cores with these, not with all.
        everyone = len(self.members)
        count = everyone if self.per_round is None else min(everyone, self.per_round)
        if everyone <= min(most, count):
            return self
        members: list[Member] = []
        for kind in self.device_kinds():
            some = kind[: max(1, round(len(kind) * min(most, count) / everyone))]
            each = len(kind) / len(some) * count / everyone
            members += [replace(member, stands_for=member.stands_for * each) for member in some]
        cores = max(1, round(self.cores * len(members) / count))
        in_order = tuple(sorted(members, key=lambda member: member.name))
        return replace(self, members=in_order, cores=cores, cores_each=self.all_cores / cores, per_round=None)

    def device_kinds(self) -> list[tuple[Member, ...]]:
        """Return the members by kind, each kind in name order, in the order of their first members.

        Devices with slightly different amounts of data are of one kind; those with much more are of another.
        """
        return self._kinds

    @cached_property
    def slowed_fleets(self) -> dict[object, Fleet]:
        """Fleets that are slowed down by other work on a shared machine, by how much: they are simulated repeatedly."""
        return {}

    @cached_property
    def _kinds(self) -> list[tuple[Member, ...]]:
        # Needed by every simulation of the fleet.
        groups: dict[tuple[object, ...], list[Member]] = {}
        for member in self.members:
            groups.setdefault(member.kind, []).append(member)
        kinds = [kind for group in groups.values() for kind in _by_samples(group)]
        return sorted(kinds, key=lambda kind: kind[0].name)


def _by_samples(members: list[Member]) -> list[tuple[Member, ...]]:
    """Return the members in groups of about equally many samples."""
    groups: list[list[Member]] = []
    for member in sorted(members, key=lambda member: (member.samples, member.name)):
        if not groups or member.samples > groups[-1][0].samples * (1 + _ALIKE):
            groups.append([])
        groups[-1].append(member)
    return [tuple(sorted(group, key=lambda member: member.name)) for group in groups]


def plans_by_device(fleet: Fleet, by_kind: PlansByKind) -> dict[str, Plan]:
    """Return each device's plan from those of the kinds."""
    return {m.name: plan for kind, plan in zip(fleet.device_kinds(), by_kind, strict=True) for m in kind}


def extend_plans(fleet: Fleet, plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """Return each device's plan from those of a sample of the fleet, which has the first device of every kind."""
    return {member.name: plans[kind[0].name] for kind in fleet.device_kinds() for member in kind}


def plans_from_sample(fleet: Fleet, sample: Fleet, by_kind: PlansByKind) -> dict[str, Plan]:
    """Return each device's plan from those of the kinds of a sample of the fleet."""
    return extend_plans(fleet, plans_by_device(sample, by_kind))
