"""Scenarios: what one simulated world trains, and which faults happen when, all drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pipar.methods import METHODS, Plan
from pipar.settings.config import drawn_devices
from pipar.wire import encodings

#: Kinds of faults and their relative frequencies. `docs/faults.md` describes each.
FAILURES = {
    "cut": 9,
    "one-way": 3,
    "slow": 3,
    "delay": 2,
    "duplicate": 2,
    "corrupt": 3,
    "crash-device": 4,
    "poison": 1,
    "crash-server": 3,
    "stop-server": 1,
    "power-loss": 2,
    "full-disk": 2,
    "clock-jump": 2,
}
#: Attacks, operators' slips and disks that return errors; drawn separately, so that a seed keeps its failures.
ATTACKS = {
    "hostile-device": 6,
    "intruder": 4,
    "imposter": 3,
    "unreadable": 2,
    "misdirected": 2,
    "full-results": 2,
    "slow-disk": 2,
    "second-server": 2,
}
KINDS = FAILURES | ATTACKS
#: Those that hit one device or its link; the others hit the server or the clock of all.
DEVICE_FAULTS = frozenset(
    {"cut", "one-way", "slow", "delay", "duplicate", "corrupt", "crash-device", "poison", "hostile-device", "intruder"}
)
LAYERS = 3
#: Split points whose last device layer is a ReLU.
RECTIFIED = frozenset({2})
BATCH = 4
EVALUATION_SAMPLES = 3  # of each device, in worlds whose devices evaluate models


@dataclass(frozen=True, order=True)
class Fault:
    """One fault at a moment of virtual time."""

    at_s: float  # since the round `after_round` was first over
    kind: str
    device: str = ""
    seconds: float = 0.0  # how long it lasts, or until the program restarts
    choice: int = 0  # decides the details: direction, bytes, step
    after_round: int = 0  # 0: the time counts from the start of the world

    def __str__(self) -> str:
        device = f" {self.device}" if self.device else ""
        after = f" after round {self.after_round}" if self.after_round else ""
        return f"{self.at_s:7.3f} s{after}  {self.kind}{device} for {self.seconds:.2f} s (choice {self.choice})"


@dataclass(frozen=True)
class Privacy:
    """Noise on updates: the budget of each device allows this number of releases."""

    noise_multiplier: float
    releases: int


@dataclass(frozen=True)
class Scenario:
    """One training and its faults."""

    seed: int
    method: str
    samples: dict[str, int]
    plans: dict[str, Plan]
    speeds: dict[str, float]
    rounds: int
    min_devices: int
    resume_window_s: float
    round_deadline_s: float | None
    latency_s: float = 0.0
    rate_bps: float | None = None
    keep_state: bool = False
    replans: bool = False
    has_credentials: bool = True  # devices prove their names by certificates
    chunk_bytes: int = 1_000_000
    coded_chunk_bytes: int = 256 * 1024  # of a tensor before it is encoded
    encoding: str = "auto"  # of tensors; unless it is "raw", models travel as changes where that is shorter
    network: str = "plain"  # "plain", "batch-norm" or "dropout"
    privacy: Privacy | None = None
    is_traced: bool = False
    evaluates: bool = False  # devices evaluate every model on samples of their own
    local_epochs: int = 1  # passes over its samples that a device trains in each round
    devices_per_round: int | float | Literal["all"] = "all"
    clip_norm: float | None = None  # of the gradients of both sides of a cut
    skews_s: dict[str, float] = field(default_factory=dict)  # by machine: how far its clock is ahead
    faults: tuple[Fault, ...] = field(default=())

    @property
    def names(self) -> list[str]:
        return list(self.samples)

    @property
    def draws(self) -> bool:
        """Whether some devices are drawn for each round."""
        return self.devices_per_round != "all"

    @property
    def is_exact(self) -> bool:
        """Whether the model of a round follows from the previous one, whichever devices take part.

        Momentum that devices keep depends on earlier rounds; split learning keeps only that of the server. Noise and
        dropout are random. Batch statistics depend on the number of micro-batches, which new plans change.
        """
        if self.privacy is not None or self.network == "dropout":
            return False
        if self.has_batch_statistics and not self._is_one_piece:
            return False
        return not self.keep_state or METHODS[self.method].one_device_at_a_time

    @property
    def has_batch_statistics(self) -> bool:
        return self.network == "batch-norm"

    @property
    def _is_one_piece(self) -> bool:
        """Whether no device cuts its batches into micro-batches."""
        may_change = self.replans and METHODS[self.method].pipelines
        return not may_change and all(plan.micro_batches == 1 for plan in self.plans.values())

    @property
    def server_layers(self) -> range:
        """Places of the layers that devices share on the server, if they do."""
        return range(next(iter(self.plans.values())).split_point, LAYERS)

    def __str__(self) -> str:
        deadline = "no deadline" if self.round_deadline_s is None else f"deadline {self.round_deadline_s:g} s"
        devices = ", ".join(f"{name} {self.samples[name]} samples {self.plans[name]}" for name in self.names)
        private = "" if self.privacy is None else f", budget of {self.privacy.releases} releases"
        traced = ", traced" if self.is_traced else ""
        drawn = f", {self.devices_per_round} devices a round" if self.draws else ""
        passes = f", {self.local_epochs} passes a round" if self.local_epochs > 1 else ""
        clipped = "" if self.clip_norm is None else f", clipped at {self.clip_norm:g}"
        return (
            f"{self.method}, {self.network}, {self.rounds} rounds, at least {self.min_devices} devices, window "
            f"{self.resume_window_s:g} s, {deadline}{private}{traced}{drawn}{passes}{clipped}: {devices}"
        )


#: Approximate duration of a round without faults.
_ROUND_S = 2.4
#: Faults are drawn for this number of rounds at a time, so that a long training has as many per round as a short one.
_ROUNDS_AT_ONCE = 5
_MOST_FAILURES, _MOST_ATTACKS = 16, 6


def draw_scenario(seed: int, devices: int = 5, rounds: int = 5) -> Scenario:
    """Return the scenario of a seed: always the same one."""
    # The words are part of the seed: with others, every seed would be another world.
    rng, coding = random.Random(f"pipar faults {seed}"), random.Random(f"coding {seed}")
    names = [f"device-{number}" for number in range(1, devices + 1)]
    method = rng.choices(("pipar", "sfl", "fl", "sfl2", "sl"), (8, 3, 3, 2, 2))[0]
    window_s = rng.choice((0.0, 2.0, 5.0, 5.0, 10.0))
    scenario = Scenario(
        seed=seed,
        method=method,
        samples={name: rng.randint(6, 20) for name in names},
        plans=_draw_plans(rng, method, names),
        speeds={name: rng.uniform(0.4, 1.0) for name in names},
        rounds=rounds,
        min_devices=rng.randint(1, devices),
        resume_window_s=window_s,
        round_deadline_s=rng.choice((None, 4.0, 8.0, 20.0)),
        latency_s=rng.choice((0.0, 0.0, 0.02)),
        rate_bps=rng.choice((None, None, 200e3)),
        keep_state=rng.random() < 0.15,
        replans=rng.random() < 0.3,
        has_credentials=rng.random() < 0.7,
        chunk_bytes=rng.choice((2_500, 1_000_000)),
        # Several chunks per sample, one or a few samples per chunk, or all samples in one chunk.
        coded_chunk_bytes=coding.choice((300, 700, 1_400, 256 * 1024)),
        encoding=coding.choice(("raw", "auto", "planes", "sparse-planes", "sparse-planes")),
        faults=draw_faults(rng, names, rounds, max(window_s, 1.0)),
    )
    scenario = _with_surroundings(scenario, random.Random(f"surroundings {seed}"))
    scenario = _with_rounds(scenario, random.Random(f"rounds {seed}"))
    evaluates = random.Random(f"evaluation {seed}").random() < 0.25 and scenario.privacy is None
    return replace(scenario, evaluates=evaluates)


def _with_surroundings(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario with a network, privacy, traces, clocks and attacks."""
    network = rng.choices(("plain", "batch-norm", "dropout"), (6, 3, 1))[0]
    plans = scenario.plans
    if network == "batch-norm" and rng.random() < 0.5:  # in one piece, so that the model of a round is known
        plans = {name: replace(plan, micro_batches=1, window=0) for name, plan in plans.items()}
    privacy = None
    if rng.random() < 0.2 and not METHODS[scenario.method].shares_server_model:
        privacy = Privacy(rng.choice((2.0, 5.0)), scenario.rounds + rng.choice((0, 2, 10)))
    attacks = draw_attacks(rng, scenario.names, scenario.rounds)
    return replace(
        scenario,
        network=network,
        plans=plans,
        privacy=privacy,
        min_devices=1 if privacy is not None else scenario.min_devices,
        keep_state=scenario.keep_state and privacy is None,
        is_traced=rng.random() < 0.25,
        skews_s={name: rng.choice((0.0, 1.0)) * 10 ** rng.uniform(2, 7) for name in ("server", *scenario.names)},
        faults=tuple(sorted((*scenario.faults, *attacks), key=lambda fault: (fault.after_round, fault))),
    )


def _with_rounds(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario with passes over the samples, drawn devices, and clipped gradients."""
    devices = len(scenario.names)
    passes = rng.choices((1, 2, 3), (7, 2, 1))[0]
    share: int | float = rng.choice((rng.randint(1, devices), 0.4, 0.7))
    draws = rng.random() < 0.3 and not scenario.keep_state
    clips = rng.random() < 0.25 and not METHODS[scenario.method].shares_server_model and scenario.privacy is None
    drawn = drawn_devices(share, devices) if draws else devices
    return replace(
        scenario,
        local_epochs=passes,
        devices_per_round=share if draws else "all",
        min_devices=min(scenario.min_devices, drawn),
        clip_norm=rng.choice((0.2, 1.0)) if clips else None,
    )


def draw_plans(rng: random.Random, names: Sequence[str], *, cut_inside: bool = False) -> dict[str, Plan]:
    """Return random plans that PiPar could use for these devices."""
    most = LAYERS - 1 if cut_inside else LAYERS
    return {
        name: draw_encodings(rng, Plan(rng.randint(1, most), rng.randint(1, BATCH), rng.choice((0, 0, 1, 2))))
        for name in names
    }


def draw_encodings(rng: random.Random, plan: Plan) -> Plan:
    """Return the plan with random encodings that are exact at its split point; none if the device has all layers."""
    if plan.split_point == LAYERS:
        return plan
    exact = encodings.EXACT if plan.split_point in RECTIFIED else ("raw", "planes")
    return replace(plan, up=rng.choice(exact), down=rng.choice(exact))


def _draw_plans(rng: random.Random, method: str, names: Sequence[str]) -> dict[str, Plan]:
    if method == "pipar":
        return draw_plans(rng, names)
    if method == "fl":
        return dict.fromkeys(names, Plan(LAYERS, 1))
    if method == "sfl":
        return {name: draw_encodings(rng, Plan(rng.randint(1, LAYERS - 1), 1)) for name in names}
    plan = Plan(rng.randint(1, LAYERS - 1), 1)  # a shared server-side model has one split point
    return {name: draw_encodings(rng, plan) for name in names}


def draw_faults(rng: random.Random, names: Sequence[str], rounds: int, window_s: float) -> tuple[Fault, ...]:
    """Return zero to sixteen faults for every five rounds in order of time, sometimes all within a second."""
    faults = []
    for after_round, until_s in _segments(rounds):
        kinds = rng.choices(list(FAILURES), list(FAILURES.values()), k=rng.randint(0, _MOST_FAILURES))
        storm_s = rng.choice((until_s, until_s, until_s, 0.3 * until_s, 1.0))
        begins_s = rng.uniform(0.0, until_s - storm_s)
        drawn = []
        for kind in kinds:
            at_s = round(rng.uniform(begins_s, begins_s + storm_s), 3)
            device = rng.choice(names) if kind in DEVICE_FAULTS else ""
            seconds = round(_draw_seconds(rng, kind, window_s), 3)
            drawn.append(Fault(at_s, kind, device, seconds, rng.getrandbits(16), after_round))
        faults += sorted(drawn)
    return tuple(faults)


def draw_attacks(rng: random.Random, names: Sequence[str], rounds: int) -> tuple[Fault, ...]:
    """Return zero to six attacks and errors of the disk for every five rounds."""
    faults = []
    for after_round, until_s in _segments(rounds):
        for kind in rng.choices(list(ATTACKS), list(ATTACKS.values()), k=rng.randint(0, _MOST_ATTACKS)):
            at_s, seconds = round(rng.uniform(0.0, until_s), 3), round(rng.uniform(0.5, 6.0), 3)
            device = rng.choice(names) if kind in DEVICE_FAULTS else ""
            faults.append(Fault(at_s, kind, device, seconds, rng.getrandbits(16), after_round))
    return tuple(faults)


def _segments(rounds: int) -> list[tuple[int, float]]:
    """Return the first rounds, less one, of the periods for which faults are drawn, with their approximate lengths."""
    starts = range(0, rounds, _ROUNDS_AT_ONCE)
    return [(start, min(_ROUNDS_AT_ONCE, rounds - start) * _ROUND_S) for start in starts]


def _draw_seconds(rng: random.Random, kind: str, window_s: float) -> float:
    """Return how long a fault lasts: links are lost for shorter and for longer than the resume window."""
    if kind == "cut":
        return window_s * rng.choice((0.02, 0.05, 0.1, 0.3, 0.6, 0.9, 1.5, 3.0))
    if kind == "one-way":
        return window_s * rng.choice((0.3, 0.9, 2.0))
    if kind == "delay":
        return rng.choice((0.5, 3.0, 15.0))
    if kind == "clock-jump":
        return rng.choice((0.5, 3.0, 30.0))
    return rng.uniform(0.1, 6.0)
