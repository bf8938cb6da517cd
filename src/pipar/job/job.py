"""A training with every choice made: plans, profiles, sizes. Real and virtual runs start from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pipar.cutting.cut_points import Cut, CutList
from pipar.execution.schedule import count_batches, count_pieces, cut_batch
from pipar.execution.spans import SERVER
from pipar.job.equivalence import EquivalenceFacts, equivalence_reasons
from pipar.methods import METHODS, Method, Plan
from pipar.planner.calibration import Calibration, calibrated
from pipar.planner.costs import Costs
from pipar.planner.fleet import Auto, Fleet, Member, SharedHost
from pipar.privacy.budget import PrivacyGuard, PrivacyLimits, UpdateNoise, choose_noise
from pipar.profiling.cache import usable_cores
from pipar.profiling.comparison import are_alike
from pipar.profiling.profile import Profile
from pipar.settings.config import Config, DeviceSpec, device_names, drawn_devices, draws_devices
from pipar.settings.links import Link
from pipar.settings.wording import equivalence
from pipar.wire.messages import LABELS, TargetSize
from pipar.wire.orders import Orders

#: With more devices than this, `trace = "auto"` keeps the spans of a sample of them only.
_FULL_TRACE_DEVICES = 200
_SAMPLED_DEVICES = 20


class FirstNames(Container[str]):
    """The first different names that it is asked about, at most this many; and with any, the server's own."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: set[str] = set()

    def __contains__(self, name: object) -> bool:
        if name == SERVER or name in self._names:
            return self._most > 0
        if len(self._names) >= self._most:
            return False
        self._names.add(str(name))
        return True


@dataclass(frozen=True)
class Bounds:
    """Profiled seconds of compute of one epoch: on each device, and on one core of the server."""

    device_s: Mapping[str, float]
    server_s: float
    served_s: Mapping[str, float] = field(default_factory=dict)  # of the server's, by device


@dataclass(frozen=True)
class Job:
    """One training, resolved."""

    config: Config
    specs: tuple[DeviceSpec, ...]
    sizes: Mapping[str, int]
    server_profile: Profile
    device_profiles: Mapping[str, Profile]
    batch_statistics: bool
    dropout: bool
    plans: Mapping[str, Plan]
    dataset: str
    model: str
    real_links: bool = False  # between machines, with or without emulation
    leaky_cuts: Mapping[int, float] = field(default_factory=dict)  # split points that leak too much, with their leakage
    leakage_guess: float | None = None  # similarity of a reconstruction without any activation, if measured
    sample_bytes: int = 0  # of one sample's input
    inputs: str = ""  # what the samples of a deployment's devices have to be; empty: not known
    target_size: TargetSize = LABELS  # of the targets that travel with activations
    most_samples: int | None = None  # that a device may report; None: any number
    steady_layers: int = 0  # first layers whose activations are the same in every epoch
    cuts: CutList | None = None  # of a network that is not an nn.Sequential, or has cut points
    adapters: bool = False  # of low rank are trained
    counts_forwards: bool = False  # each forward changes a buffer, or decides by values
    writes_weights: bool = False  # each forward does, as of an embedding with a largest norm
    evaluation_sizes: Mapping[str, int] = field(default_factory=dict)  # of devices that evaluate models, if known
    hosted: frozenset[str] = frozenset()  # devices on the server's machine, which share its cores
    measured_links: Mapping[str, Link] = field(default_factory=dict)  # between machines, when devices joined
    server_memory_bytes: int | None = None  # of its accelerator; None: the CPU, or unknown

    @property
    def method(self) -> Method:
        return METHODS[self.config.run.method]

    @property
    def layers(self) -> int:
        return len(self.server_profile.layers)

    def cut_list(self) -> CutList:
        """Return where the network can be cut; of an nn.Sequential, with the bytes that cross there."""
        if self.cuts is not None:
            return self.cuts
        layers = enumerate(self.server_profile.layers[:-1], start=1)
        return CutList("children", self.layers, tuple(Cut(p, one.name, one.output_bytes) for p, one in layers))

    @property
    def cores(self) -> int:
        return self.config.server.cores or usable_cores()

    def threads(self, device: str) -> int:
        """Return how many threads compute a stage of a device: as in its profile, but one where it is emulated."""
        if self.hosted and not self.real_links:
            given = next(spec.threads for spec in self.specs if spec.name == device)
            return 1 if given == "auto" else given
        return self.device_profiles[device].threads

    @property
    def server_threads(self) -> int:
        """The most micro-batches of one device that the server computes at the same time."""
        fleet = self.fleet()
        return max((fleet.at_once(plan) for plan in self.plans.values()), default=1)

    @cached_property
    def links(self) -> dict[str, Link]:
        return {spec.name: spec.link for spec in self.specs}

    @cached_property
    def split_points(self) -> dict[str, int]:
        return {name: plan.split_point for name, plan in self.plans.items()}

    @cached_property
    def update_noise(self) -> UpdateNoise | None:
        """How updates are protected, with the chosen noise; None if updates have no noise."""
        return choose_noise(self.config)

    def guard(self) -> PrivacyGuard:
        """Return the privacy limits of one device on this machine; its noise depends on the seed of the run."""
        noise = self.update_noise
        return PrivacyGuard(self.config.run.seed, PrivacyLimits(budget=math.inf if noise is None else noise.budget))

    @property
    def draws(self) -> bool:
        """Whether only some of the devices take part in a round."""
        return draws_devices(self.config.run.devices_per_round)

    @property
    def keep_state(self) -> bool:
        return self.config.optimizer.state_at_aggregation == "keep"

    @property
    def equivalence(self) -> str:
        """How the weights compare to plain training: "exact" (equal for every P and N) or "statistical"."""
        return equivalence(equivalence_reasons(self.equivalence_facts))

    @property
    def equivalence_facts(self) -> EquivalenceFacts:
        """What decides whether the weights are exact, if all devices train with the plans of this job."""
        privacy = self.config.privacy
        return EquivalenceFacts(
            layers=self.layers,
            plans=frozenset(self.plans.values()),
            averaged=len(self.specs),
            batch_statistics=self.batch_statistics,
            counts_forwards=self.counts_forwards,
            dropout=self.dropout,
            adapters=self.adapters and not self.method.one_device_at_a_time,  # which averages nothing
            noisy_updates=privacy.clips,
            noisy_inputs=privacy.pixel_epsilon is not None,
            randomised_labels=privacy.label_epsilon is not None,
            clips_by_side=self.config.optimizer.clips_by_side,
            device_autocast=self._devices_autocast,
            server_autocast=self.config.server.autocast != "off",
        )

    @property
    def _devices_autocast(self) -> bool:
        """Whether a device computes in bfloat16, by the configuration or by the profile that it has measured."""
        profiles = {id(one): one for one in self.device_profiles.values()}
        return any({one.autocast for one in self.specs} - {"off"}) or any(
            one.autocast != "off" for one in profiles.values()
        )

    @property
    def can_replan(self) -> bool:
        """Whether devices can get new plans between two rounds.

        If devices share one server-side model, only encodings can change. In federated learning there is nothing to
        choose.
        """
        may_change = not self.method.shares_server_model or self.config.wire.encoding == "auto"
        return self.config.plan.replan and self.method.splits and may_change

    def resolved_config(self) -> Config:
        """Return the configuration with the chosen plans, so that running it again uses the same ones."""
        names, groups, at = device_names(self.config), [], 0
        if not set(names) <= set(self.plans):  # in a deployment, before its devices have joined
            return self.config
        for group in self.config.devices:
            here = names[at : at + group.count]
            # Devices of a group differ only in their data. If their plans differ, each becomes a separate group.
            alike = len({self.plans[name] for name in here}) == 1
            for name in here[:1] if alike else here:
                plan = self.plans[name]
                own = {} if alike else {"name": name, "count": 1}
                chosen = {"split_point": plan.split_point, "micro_batches": plan.micro_batches, **own}
                groups.append(group.model_copy(update=chosen))
            at += group.count
        return self.config.model_copy(update={"devices": tuple(groups)})

    def orders(self) -> dict[str, Orders]:
        """Return the orders that each device gets when it joins."""
        config, fleet, terms = self.config, self.fleet(), self.update_noise
        return {
            member.name: Orders(
                session=number,
                plan=self.plans[member.name],
                layers=self.layers,
                batch_size=config.run.batch_size,
                batch_statistics=self.batch_statistics,
                # Split learning passes the weights on to another device, without the state of their optimiser.
                keep_state=self.keep_state and not self.method.one_device_at_a_time,
                proximal=config.server.proximal,
                changes_below_bps=fleet.changes_below_bps(member) if fleet.keeps_base(member) else 0.0,
                clip=config.privacy.clip,
                noise_multiplier=0.0 if terms is None else terms.multiplier,
                budget=0.0 if terms is None or math.isinf(terms.budget) else terms.budget,
                frozen_layers=self.server_profile.frozen_layers,
                steady_layers=self.steady_layers,
                epochs=0 if config.optimizer.learning_schedule.is_constant else config.run.epochs,
                norms=int(config.optimizer.clips_across),
                optimizer=config.optimizer.fingerprint,
                learning_rate=config.optimizer.learning_rate or 0.0,
                local_epochs=config.run.local_epochs,
                task=config.task.fingerprint,
            )
            for number, member in enumerate(fleet.members, start=1)
        }

    def fleet(self) -> Fleet:
        """Return the fleet to plan for."""
        costs, window = shared_costs(merge=True), self._given_window
        members = tuple(
            Member(
                spec.name,
                costs(self.device_profiles[spec.name], spec.speed),
                spec.link,
                self.sizes[spec.name],
                spec.memory_bytes,
                spec.split_point,
                spec.micro_batches,
                window,
                self.config.wire.encoding,
                min(1.0, spec.speed) if spec.name in self.hosted else 0.0,
            )
            for spec in self.specs
        )
        config = self.config
        fleet = Fleet(
            self.method,
            members,
            self.server_costs(),
            self.cores,
            config.run.batch_size,
            self.batch_statistics,
            self.real_links,
            leaky_cuts=frozenset(self.leaky_cuts),
            protects=config.privacy.clips,
            noised_bytes=self.noised_bytes,
            steady_layers=self.steady_layers,
            cache_bytes=config.server.activation_cache,
            exchanges_norms=config.optimizer.clips_across,
            local_epochs=config.run.local_epochs,
            per_round=drawn_devices(config.run.devices_per_round, len(members)) if self.draws else None,
            whole_models=self.draws,
            recalled=1.0 - 1.0 / config.run.epochs if self.steady_layers else 0.0,  # the mean over all epochs
            targets=self.target_size,
            threads=config.server.threads,
            in_order=self._computes_in_order,
            host=SharedHost(usable_cores(), min(1.0, config.server.speed)) if self.hosted else None,
            replica_memory_bytes=self._replica_memory_bytes(len(members)),
        )
        return calibrated(fleet, Calibration(links=self.measured_links)) if self.measured_links else fleet

    def _replica_memory_bytes(self, devices: int) -> int | None:
        """Return the bytes of the server's accelerator for the layers of each device that takes part in a round."""
        if self.server_memory_bytes is None:
            return None
        replicas = drawn_devices(self.config.run.devices_per_round, devices)
        return self.server_memory_bytes // (1 if self.method.shares_server_model else max(1, replicas))

    @property
    def noised_bytes(self) -> int:
        """The bytes of one sample's input, if devices add noise to inputs, else 0."""
        return self.sample_bytes if self.config.privacy.pixel_scale else 0

    @property
    def _given_window(self) -> int | Auto:
        plan = self.config.plan
        return {"auto": "auto", "all-forward": 0, "1f1b": plan.window}[plan.schedule]  # type: ignore[return-value]

    @property
    def _computes_in_order(self) -> bool:
        """Whether the micro-batches of a device have to be computed one after another, or an accelerator does."""
        on_cpu = (self.config.server.torch_device, self.config.server.autocast) == ("cpu", "off")
        return self.dropout or self.counts_forwards or self.writes_weights or not on_cpu

    def server_costs(self) -> Costs:
        return Costs(self.server_profile, self.config.server.speed)

    def bounds(self) -> Bounds:
        """Return the profiled compute times of one epoch."""
        server = self.server_costs()
        costs = shared_costs()
        device_s, served_s, server_s = {}, {}, 0.0
        for spec in self.specs:
            plan, size = self.plans[spec.name], self.sizes[spec.name]
            device_s[spec.name] = self._compute_s(costs(self.device_profiles[spec.name], spec.speed), plan, size, False)
            served_s[spec.name] = self._compute_s(server, plan, size, True)
            server_s += served_s[spec.name]
        return Bounds(device_s, server_s, served_s)

    def piece_sizes(self, plan: Plan) -> set[int]:
        """Return the sizes of the micro-batches of a full batch."""
        batch = self.config.run.batch_size
        return set(cut_batch(batch, plan.micro_batches, batch_statistics=self.batch_statistics))

    def batch_counts(self, samples: int) -> dict[int, int]:
        """Return the number of iterations of a device's epoch by their number of samples."""
        run, statistics = self.config.run, self.batch_statistics
        return count_batches(samples, run.batch_size, batch_statistics=statistics, passes=run.local_epochs)

    def _compute_s(self, costs: Costs, plan: Plan, samples: int, server: bool) -> float:
        """Return the seconds of forward and backward passes of one device's epoch, on one side of the cut."""
        first, last = (plan.split_point + 1, self.layers) if server else (1, plan.split_point)
        if first > last:
            return 0.0
        statistics = self.batch_statistics
        return math.fsum(
            count * pieces * costs.least_s(first, last, piece)
            for batch, count in self.batch_counts(samples).items()
            for piece, pieces in count_pieces(batch, plan.micro_batches, batch_statistics=statistics).items()
        )

    def sample_of_traced_devices(self) -> Container[str] | None:
        """Return the devices whose spans are kept, if any device may join; None for all of them."""
        most = {"auto": _FULL_TRACE_DEVICES, "sampled": _SAMPLED_DEVICES, "off": 0}.get(self.config.run.trace)
        return None if most is None else FirstNames(most)

    @cached_property
    def traced_devices(self) -> frozenset[str] | None:
        """The devices whose spans are kept; None for all of them."""
        names = [spec.name for spec in self.specs]
        trace = self.config.run.trace
        if trace == "off":
            return frozenset()
        if trace == "full" or (trace == "auto" and len(names) <= _FULL_TRACE_DEVICES):
            return None
        return frozenset(names[:: max(1, len(names) // _SAMPLED_DEVICES)][:_SAMPLED_DEVICES])


def shared_costs(*, merge: bool = False) -> Callable[[Profile, float], Costs]:
    """Return a factory of cost models that gives equal devices the same one, so that they share its cache.

    Two measurements of equal boards always differ a little. With `merge`, profiles that hardly differ count as equal,
    so that these boards are planned as one kind.
    """
    known: dict[tuple[int, float], Costs] = {}
    different: list[Costs] = []

    def make(profile: Profile, speed: float) -> Costs:
        # By identity first: comparing all layers for ten thousand devices would be slow.
        key = (id(profile), speed)
        if key not in known:
            same = (c for c in different if c.speed == speed and _are_same(c.profile, profile, merge))
            known[key] = next(same, None) or Costs(profile, speed)
            if known[key].profile is profile:
                different.append(known[key])
        return known[key]

    return make


def _are_same(one: Profile, other: Profile, merge: bool) -> bool:
    return are_alike(one, other) if merge else one == other
