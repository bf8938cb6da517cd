"""Jobs drawn at random, whose times tell apart nearly everything that a simulation could mistake."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipar.job.job import Job
from pipar.methods import Plan
from pipar.profiling.profile import CodingTimes, LayerProfile, Profile
from pipar.settings.config import PrivacySection, device_specs
from pipar.settings.config_file import config_from
from pipar.wire import encodings

LINKS: tuple[Any, ...] = (
    "4g",
    "wifi",
    "unlimited",
    {"up": "3Mbit/s", "down": "7Mbit/s", "latency": "15ms"},
    {"up": "1Mbit/s", "down": "unlimited"},
)
#: A device packs its part for longer than 'stop epoch' is on the slowest of these links: its bytes do not matter.
PACK_S = 3e-3
OVERHEADS = {
    "load_s": 1e-4, "encode_s": 1e-4, "encode_s_per_byte": 1e-9, "decode_s": 2e-4, "decode_s_per_byte": 2e-9,
    "step_s": 1e-3, "step_s_per_byte": 1e-9, "pack_s": PACK_S, "pack_s_per_byte": 1e-9, "install_s": 1e-3,
    "install_s_per_byte": 3e-9, "backward_at_cut_s": 2e-4, "aggregate_s": 1e-3, "aggregate_s_per_byte": 1e-9,
    "noise_s_per_byte": 5e-8,
}  # fmt: skip


def random_profile(rng: random.Random) -> Profile:
    def times(each: float) -> tuple[float, ...]:
        return tuple(rng.uniform(0.5, 1.5) * each * (5 + size) for size in (2, 10, 50))

    layers = tuple(
        LayerProfile(name, times(1e-3), times(2e-3), 4 * rng.randrange(1000, 40_000), 4 * rng.randrange(100_000))
        for name in "abcd"
    )
    crowded = tuple(rng.uniform(1.0, 2.0) for _ in range(3))
    crowd = rng.randint(1, 4)
    return Profile("any", "float32", (2, 10, 50), layers, crowded=crowded, crowd=crowd, **OVERHEADS)  # type: ignore[arg-type]


def random_plan(rng: random.Random, batch: int) -> Plan:
    p = rng.randint(1, 4)
    return Plan(p, 1 if p == 4 else rng.choice([1, 2, rng.randint(1, batch), batch]), rng.choice([0, 0, 1, 3]))


def random_job(seed: int) -> Job:
    """Return up to 8 devices on up to 4 cores; some with P = Q, windows, N up to B, uneven sizes and speeds."""
    rng = random.Random(seed)
    count, cores, batch = rng.randint(1, 8), rng.randint(1, 4), rng.choice([7, 12, 30])
    sizes = [rng.randrange(1, 3 * batch) for _ in range(count)]
    devices = [{"name": f"d{k}", "link": rng.choice(LINKS), "speed": rng.uniform(0.05, 2)} for k in range(count)]
    config = config_from(
        {
            "run": {"method": "pipar", "epochs": 1, "batch_size": batch, "trace": "full"},
            "data": {"name": "synthetic", "samples_per_device": sizes},
            "server": {"cores": cores, "speed": rng.uniform(0.5, 4)},
            "devices": devices,
        }
    )
    specs = device_specs(config)
    names = [spec.name for spec in specs]
    here, there = random_profile(rng), random_profile(rng)
    same_sizes = [
        replace(layer, output_bytes=other.output_bytes, parameter_bytes=other.parameter_bytes)
        for layer, other in zip(there.layers, here.layers, strict=True)
    ]
    return Job(
        config=config,
        specs=specs,
        sizes=dict(zip(names, sizes, strict=True)),
        server_profile=replace(there, layers=tuple(same_sizes)),
        device_profiles=dict.fromkeys(names, here),
        batch_statistics=rng.random() < 0.3,
        dropout=False,
        plans={name: random_plan(rng, batch) for name in names},
        dataset="none",
        model="any",
    )


def clipping(job: Job) -> Job:
    """Return a job whose gradients are clipped by one norm over both sides of the cut."""
    section = job.config.optimizer.model_copy(update={"clip_norm": 1.0})
    return replace(job, config=job.config.model_copy(update={"optimizer": section}))


def several_at_once(job: Job, threads: int | str) -> Job:
    """Return a job whose server computes several micro-batches of one device at the same time."""
    section = job.config.server.model_copy(update={"threads": threads})
    return replace(job, config=job.config.model_copy(update={"server": section}))


def frozen_job(seed: int, layers: int) -> Job:
    """Return devices whose first layers are frozen; the first of them has a buffer."""
    job = random_job(seed)

    def frozen(profile: Profile) -> Profile:
        first = [replace(one, trained=False, frozen_bytes=one.parameter_bytes) for one in profile.layers[:layers]]
        first[0] = replace(first[0], frozen_bytes=first[0].parameter_bytes // 2)
        return replace(profile, layers=(*first, *profile.layers[layers:]))

    devices = {name: frozen(profile) for name, profile in job.device_profiles.items()}
    return replace(job, server_profile=frozen(job.server_profile), device_profiles=devices)


CLASSIC, PIXEL = {"noise_multiplier": 1.0}, {"pixel_epsilon": 0.5}


def private_job(job: Job, method: str, privacy: Mapping[str, float]) -> Job:
    """Return the same devices with a method, with noise on their updates, on their samples, or on both."""
    plans = dict(job.plans)
    if method == "fl":
        plans = dict.fromkeys(plans, Plan(4, 1))
    elif method == "sfl":
        plans = {name: Plan(min(3, plan.split_point), 1) for name, plan in plans.items()}
    update = {
        "run": job.config.run.model_copy(update={"method": method}),
        "privacy": PrivacySection.model_validate(privacy),
    }
    return replace(job, config=job.config.model_copy(update=update), plans=plans, sample_bytes=4 * 3 * 32 * 32)


CODED = encodings.CODED


def coded_job(seed: int) -> Job:
    """Return the same devices with any encodings, of any times and shares."""
    job, rng = random_job(seed), random.Random(seed)

    def with_coding(profile: Profile) -> Profile:
        names = (*CODED, "changes")
        coding = {n: CodingTimes(1e-5, rng.uniform(1e-9, 2e-8), 2e-5, rng.uniform(1e-9, 2e-8)) for n in names}
        shares = [{name: (rng.uniform(0.3, 1), rng.uniform(0.3, 1)) for name in CODED} for _ in profile.layers]
        layers = [replace(layer, shares=of) for layer, of in zip(profile.layers, shares, strict=True)]
        return replace(profile, coding=coding, layers=tuple(layers), changes_share=rng.uniform(0.2, 0.9))

    def with_encodings(plan: Plan) -> Plan:
        return plan if plan.split_point == 4 else replace(plan, up=rng.choice(CODED), down=rng.choice(CODED))

    device = with_coding(next(iter(job.device_profiles.values())))
    return replace(
        job,
        server_profile=with_coding(job.server_profile),
        device_profiles=dict.fromkeys(job.device_profiles, device),
        plans={name: with_encodings(plan) for name, plan in job.plans.items()},
    )
