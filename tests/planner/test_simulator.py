"""The simulation is the two programs' own timing: that of a timing-only run of the same plans, to the last digits."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import pytest
from support.random_jobs import (
    CLASSIC,
    OVERHEADS,
    PIXEL,
    clipping,
    coded_job,
    frozen_job,
    private_job,
    random_job,
    random_profile,
    several_at_once,
)

from pipar.events import EpochResult, ignore
from pipar.execution.schedule import cut_batch
from pipar.execution.spans import COMPUTE, DOWNLINK, IO, NOISE, SERVER, UPLINK, Span, by_lane
from pipar.execution.work import Work
from pipar.job.job import Job
from pipar.job.prepare import unplanned_timing_only_job
from pipar.launch.rehearsal import rehearse
from pipar.launch.virtual import train_timing_only
from pipar.methods import Plan
from pipar.planner.compute_load import compute_seconds
from pipar.planner.costs import Costs
from pipar.planner.fleet import Fleet
from pipar.planner.search import search_kinds
from pipar.planner.simulator import simulate, timeline
from pipar.planner.stage_times import transfer_s
from pipar.planner.timing import STEADY_ITERATIONS, Timing, epoch_timing
from pipar.profiling.profile import CodingTimes
from pipar.settings.config import device_specs
from pipar.settings.config_file import config_from
from pipar.settings.links import Link

SAME = 1e-9  # relative: sums of the same numbers in another order


@dataclass(frozen=True)
class Run:
    """A timing-only run of one epoch; its spans count from the epoch's start."""

    job: Job
    result: EpochResult
    spans: list[Span]

    def busy_s(self, owner: str, lane: str, kinds: set[str]) -> float:
        return sum(
            span.end - span.start
            for span in self.spans
            if span.owner == owner and span.lane.startswith(lane) and span.kind in kinds
        )

    @property
    def ends(self) -> dict[str, tuple[float, ...]]:
        """The ends of each device's iterations."""
        steps = [span for span in self.spans if span.kind == "step" and span.lane == COMPUTE]
        trains = [name for name in self.job.sizes if self.job.fleet().trains(self.job.plans[name].split_point)]
        return {name: tuple(sorted(s.end for s in steps if s.owner == name)) for name in trains}


def run(job: Job) -> Run:
    found: list[tuple[EpochResult, list[Span]]] = []
    train_timing_only(job, lambda result, spans: found.append((result, spans)), ignore)
    ((result, spans),) = found
    busy = [span for span in spans if not span.waiting and span.epoch == 1]
    start = min(span.start for span in busy if span.lane == IO)
    moved = [replace(span, start=span.start - start, end=span.end - start) for span in busy]
    return Run(job, result, moved)


def same(seconds: Any) -> Any:
    return pytest.approx(seconds, rel=SAME, abs=1e-12)


def check_timing(job: Job) -> None:
    """Hold the simulation against the run: the epoch, every device's every iteration, and how long lanes were busy."""
    ran, timing = run(job), simulate(job.fleet(), job.plans)
    assert timing.epoch_s == pytest.approx(ran.result.seconds, rel=SAME)
    assert {name: timing.ends[name] for name in ran.ends} == {name: same(ends) for name, ends in ran.ends.items()}
    served = {"decode", "fs", "bs", "encode", "step"}
    assert timing.busy_s == same(
        {
            "device": max(ran.busy_s(name, COMPUTE, {"fc", "bc", "step"}) for name in job.sizes),
            "uplink": max(ran.busy_s(name, UPLINK, {"u", "model"}) for name in job.sizes),
            "server": ran.busy_s(SERVER, "", served) / job.cores,
            "downlink": max(ran.busy_s(name, DOWNLINK, {"d", "model"}) for name in job.sizes),
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 200), marks=pytest.mark.slow)], ids=str)
def test_a_simulation_is_the_timing_of_a_timing_only_run(seeds: range) -> None:
    for seed in seeds:
        check_timing(random_job(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(8), range(8, 60)], ids=str)
def test_a_simulation_knows_the_exchange_of_norms(seeds: range) -> None:
    for seed in seeds:
        check_timing(clipping(random_job(seed)))


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 4, "auto"])
@pytest.mark.parametrize("seeds", [range(12), range(12, 60)], ids=str)
def test_a_simulation_knows_how_many_micro_batches_are_computed_at_once(seeds: range, threads: int | str) -> None:
    for seed in seeds:
        check_timing(several_at_once(random_job(seed), threads))


def test_a_server_with_more_cores_than_devices_is_faster_with_several_micro_batches_at_once() -> None:
    job = one_slow_server(3)
    one, two, auto = (
        simulate(several.fleet(), several.plans).epoch_s
        for several in (several_at_once(job, 1), several_at_once(job, 2), several_at_once(job, "auto"))
    )
    assert two == auto
    assert 0.5 * one < two < 0.65 * one


def test_cores_that_only_slow_each_other_down_compute_one_micro_batch_at_a_time() -> None:
    job = one_slow_server(3)
    crowded = replace(job.server_profile, crowded=(2.0,) * len(job.server_profile.batch_sizes), crowd=1)
    assert replace(several_at_once(job, "auto"), server_profile=crowded).fleet().at_once(Plan(1, 6)) == 1
    assert several_at_once(job, "auto").fleet().at_once(Plan(1, 6)) == 2


@pytest.mark.parametrize(("devices", "at_once"), [(1, 4), (2, 2), (3, 2), (4, 1), (9, 1)])
def test_cores_without_a_device_of_their_own_compute_more_micro_batches(devices: int, at_once: int) -> None:
    job = one_slow_server(3)
    server = job.config.server.model_copy(update={"cores": 4, "threads": "auto"})
    fleet = replace(job, config=job.config.model_copy(update={"server": server})).fleet()
    assert fleet.at_once(Plan(1, 6), devices) == at_once
    assert fleet.at_once(Plan(1, 1), devices) == 1
    assert fleet.at_once(Plan(1, 6, 0, "raw", "int8"), devices) == 1  # its error goes into the next one
    for ordered in ({"in_order": True}, {"batch_statistics": True}, {"exchanges_norms": True}, {"steady_layers": 1}):
        assert replace(fleet, **ordered).at_once(Plan(1, 6), devices) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("effect", ["dropout", "counts_forwards", "writes_weights", "batch_statistics"])
def test_forwards_with_effects_on_later_ones_are_computed_one_after_another(effect: str) -> None:
    job = several_at_once(one_slow_server(3), "auto")
    assert job.fleet().at_once(Plan(1, 6)) == 2
    assert replace(job, **{effect: True}).fleet().at_once(Plan(1, 6)) == 1  # type: ignore[arg-type]


def one_slow_server(seed: int) -> Job:
    """Return one device with a fast link and a server of two cores that do not disturb each other, and are slow."""
    rng = random.Random(seed)
    profile = replace(random_profile(rng), crowded=(), crowd=0)
    tree = {
        "run": {"batch_size": 30},
        "data": {"name": "synthetic", "samples_per_device": 300},
        "server": {"cores": 2, "speed": 0.1},
        "devices": [{"name": "d", "link": "unlimited", "speed": 10.0}],
    }
    config = config_from(tree)
    return Job(
        config=config,
        specs=device_specs(config),
        sizes={"d": 300},
        server_profile=profile,
        device_profiles={"d": profile},
        batch_statistics=False,
        dropout=False,
        plans={"d": Plan(1, 6)},
        dataset="none",
        model="any",
    )


def test_norms_cost_no_round_trip_on_a_device() -> None:
    """The server's norm arrives right after its last gradient, while the device computes its last backward."""
    for seed in range(3):
        plain, clipped = random_job(seed), clipping(random_job(seed))
        times = [simulate(job.fleet(), job.plans).epoch_s for job in (plain, clipped)]
        assert times[0] <= times[1] * (1 + 1e-12)
        assert times[1] < times[0] * 1.05


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_simulation_of_frozen_layers_is_the_timing_of_a_run(layers: int) -> None:
    for seed in range(8):
        job, plain = frozen_job(seed, layers), random_job(seed)
        check_timing(job)
        assert simulate(job.fleet(), job.plans).epoch_s < simulate(plain.fleet(), plain.plans).epoch_s


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [CLASSIC, PIXEL, CLASSIC | PIXEL], ids=["classic", "pixel", "both"])
@pytest.mark.parametrize("method", ["fl", "sfl", "pipar"])
def test_a_simulation_of_a_private_training_is_the_timing_of_a_run(method: str, privacy: Mapping[str, float]) -> None:
    for seed in range(4):
        job = private_job(random_job(seed), method, privacy)
        check_timing(job)
        plain = private_job(random_job(seed), method, {})
        assert simulate(job.fleet(), job.plans).epoch_s > simulate(plain.fleet(), plain.plans).epoch_s


@pytest.mark.slow
def test_clipping_and_noise_are_counted_where_a_device_is_expected_to_compute() -> None:
    job = private_job(random_job(1), "pipar", CLASSIC)
    ran, (devices, _) = run(job), compute_seconds(job.fleet(), job.plans)
    kinds = {"fc", "bc", "step", "protect", "pack", "install"}
    for name in job.sizes:
        protect = [span for span in ran.spans if (span.owner, span.kind) == (name, "protect")]
        assert [span.lane for span in protect] == [COMPUTE]
        assert devices[name] == same(ran.busy_s(name, COMPUTE, kinds))


@pytest.mark.parametrize("method", ["fl", "sfl", "pipar"])
def test_noise_on_inputs_only_delays_the_first_batch_with_every_method(method: str) -> None:
    """Nothing that a batch sends or gets waits for the noise of the next one."""
    job = steady_job(count=1, cores=1, samples=60)
    plain, noisy = (private_job(job, method, privacy) for privacy in ({}, PIXEL))
    member = noisy.fleet().members[0]
    first_s = member.costs.seconds(Work("noise", size_bytes=12 * noisy.fleet().noised_bytes))
    added_s = simulate(noisy.fleet(), noisy.plans).epoch_s - simulate(plain.fleet(), plain.plans).epoch_s
    assert first_s > 0.01
    assert added_s == pytest.approx(first_s, rel=1e-6)
    ran = run(noisy)
    assert {span.lane for span in ran.spans if span.kind == "noise"} == {NOISE}
    assert ran.result.seconds == pytest.approx(simulate(noisy.fleet(), noisy.plans).epoch_s, rel=SAME)


@pytest.mark.slow
def test_models_with_noise_are_sent_whole_even_where_changes_would_be_faster() -> None:
    job = steady_job(count=1, cores=1, samples=24)
    (name,) = job.sizes
    times = {"changes": CodingTimes(encode_s_per_byte=4e-9, decode_s_per_byte=2e-9)}
    profile = replace(job.server_profile, coding=times, changes_share=0.25)
    job = replace(job, server_profile=profile, device_profiles={name: profile})
    size = profile.parameter_bytes(1, job.plans[name].split_point)
    sent = {}
    for words, privacy in (("plain", {}), ("private", CLASSIC)):
        here = private_job(job, "pipar", privacy)
        sent[words] = run(here).result
        assert simulate(here.fleet(), here.plans).epoch_s == pytest.approx(sent[words].seconds, rel=SAME)
    saved = pytest.approx(0.75 * size, abs=100)
    assert sent["private"].bytes_up - sent["plain"].bytes_up == saved
    assert sent["private"].bytes_down - sent["plain"].bytes_down == saved


def test_the_exchange_of_a_private_training_is_drawn_with_its_noise() -> None:
    job = private_job(random_job(2), "fl", CLASSIC)
    name = next(iter(job.sizes))
    (protect,) = (s for s in timeline(job.fleet(), job.plans, name, exchange=True) if s.kind == "protect")
    (model,) = (
        s for s in timeline(job.fleet(), job.plans, name, exchange=True) if (s.lane, s.kind) == (UPLINK, "model")
    )
    assert protect.end - protect.start > 0
    assert protect.end <= model.start
    assert not [s for s in timeline(job.fleet(), job.plans, name) if s.kind == "protect"]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 100), marks=pytest.mark.slow)], ids=str)
def test_a_simulation_of_coded_tensors_that_leave_chunk_by_chunk_is_the_timing_of_a_run(seeds: range) -> None:
    # Not to the last digit: each chunk counts as its share of all, whatever a call or the labels after the last cost.
    for seed in seeds:
        job = several_at_once(coded_job(seed), random.Random(seed).choice([1, 2, "auto"]))
        ran, timing = run(job), simulate(job.fleet(), job.plans)
        assert timing.epoch_s == pytest.approx(ran.result.seconds, rel=5e-4), seed
        assert dict(timing.ends) == {name: pytest.approx(ends, rel=5e-4) for name, ends in ran.ends.items()}, seed


def test_micro_batches_of_one_chunk_after_those_of_two_are_all_sent() -> None:
    # 17 samples take two chunks, 16 fit into one: when the last of two has left, both others wait to be encoded.
    tree = {
        "model": {"name": "mobilenetv3_small"},
        "data": {"name": "cifar10", "samples_per_device": 300, "validation": 0, "test": 0},
        "server": {"profile": "i7-11850h"},
        "devices": [{"count": 2, "link": "4g", "profile": "raspberry-pi-3b", "split_point": 1, "micro_batches": 6}],
    }
    job = unplanned_timing_only_job(config_from(tree))
    assert job is not None
    plans = {name: Plan(1, 6, 0, "planes", "planes") for name in job.sizes}
    predicted = simulate(job.fleet(), plans)
    assert all(len(ends) == 3 for ends in predicted.ends.values())
    assert predicted.epoch_s == pytest.approx(rehearse(replace(job, plans=plans), None).epoch_s, rel=1e-3)


def test_a_timing_only_run_sends_the_shares_of_its_profile() -> None:
    job = steady_job(count=1, cores=1, samples=24)
    (name,) = job.sizes
    layers = tuple(replace(layer, shares={"planes": (0.75, 0.5)}) for layer in job.server_profile.layers)
    profile = replace(job.server_profile, layers=layers)

    def sent(plan: Plan) -> tuple[int, int]:
        result = run(replace(job, plans={name: plan}, server_profile=profile, device_profiles={name: profile})).result
        return result.bytes_up, result.bytes_down

    raw, coded = sent(Plan(2, 4)), sent(Plan(2, 4, 0, "planes", "planes"))
    size = 24 * profile.output_bytes(2)
    saved = [before - after for before, after in zip(raw, coded, strict=True)]
    assert saved == [pytest.approx(0.25 * size, rel=2e-3), pytest.approx(0.5 * size, rel=2e-3)]  # but for headers


def test_a_timing_only_run_sends_changes_where_a_direction_is_slow() -> None:
    """The first model is sent whole; after it each direction decides for itself, as in the simulator."""
    job = steady_job(count=1, cores=1, samples=24)
    (name,) = job.sizes
    times = {"changes": CodingTimes(encode_s_per_byte=4e-9, decode_s_per_byte=2e-9)}
    profile = replace(job.server_profile, coding=times, changes_share=0.25)
    (spec,) = job.specs
    size = profile.parameter_bytes(1, job.plans[name].split_point)

    def sent(up_bps: float, down_bps: float) -> tuple[int, int]:
        link = Link(up_bps=up_bps, down_bps=down_bps)
        of = replace(job, specs=(replace(spec, link=link),), server_profile=profile, device_profiles={name: profile})
        ran = run(of)
        assert simulate(of.fleet(), of.plans).epoch_s == pytest.approx(ran.result.seconds, rel=SAME)
        return ran.result.bytes_up, ran.result.bytes_down

    whole, up, down = sent(1e9, 1e9), sent(1e7, 1e9), sent(1e9, 1e7)
    saved, few = pytest.approx(0.75 * size, abs=100), pytest.approx(0, abs=100)  # numbers in JSON differ in length
    assert (whole[0] - up[0], whole[1] - up[1]) == (saved, few)
    assert (whole[0] - down[0], whole[1] - down[1]) == (few, saved)


def test_returned_changes_are_decoded_as_they_arrive_on_all_cores() -> None:
    job = steady_job(count=5, cores=2, samples=24)
    size = job.server_profile.parameter_bytes(1, 2)
    times = {"changes": CodingTimes(encode_s_per_byte=4e-9, decode_s_per_byte=0.1 / size)}  # a tenth of a second each
    profile = replace(job.server_profile, coding=times, changes_share=0.25)
    link = Link(up_bps=4.0 * size, down_bps=1e6)  # a whole part takes two seconds
    late = replace(job.specs[0], link=link.model_copy(update={"latency_s": 2.0}))
    specs = (late, *(replace(spec, link=link) for spec in job.specs[1:]))
    job = replace(job, specs=specs, server_profile=profile, device_profiles=dict.fromkeys(job.device_profiles, profile))
    ran, (_, server_s) = run(job), compute_seconds(job.fleet(), job.plans)
    assert simulate(job.fleet(), job.plans).epoch_s == pytest.approx(ran.result.seconds, rel=SAME)
    decoded = [span for span in ran.spans if span.kind == "decode" and span.iteration == 0]
    assert sorted(span.device for span in decoded) == sorted(job.sizes)
    assert {span.lane for span in decoded} == {"core 0", "core 1"}
    (aggregate,) = (span for span in ran.spans if span.kind == "aggregate")
    early = [span.end for span in decoded if span.device != late.name]
    assert max(early) < aggregate.start - 1.0  # before the last device's model has arrived
    # The expected work of the server is its real work, so that changes do not make it look slower.
    kinds = {"decode", "fs", "bs", "encode", "step", "aggregate", "pack"}
    assert server_s == pytest.approx(ran.busy_s(SERVER, "", kinds), rel=SAME)


def test_these_fleets_cover_everything_that_a_simulation_models() -> None:
    jobs = [random_job(seed) for seed in range(12)]
    plans = [plan for job in jobs for plan in job.plans.values()]
    assert {plan.split_point for plan in plans} == {1, 2, 3, 4}
    assert {plan.window for plan in plans} == {0, 1, 3}
    assert {job.batch_statistics for job in jobs} == {True, False}
    assert min(len(job.sizes) for job in jobs) == 1
    assert max(len(job.sizes) for job in jobs) == 8
    assert {spec.link.up_bps is None for job in jobs for spec in job.specs} == {True, False}
    assert all(value > 0 for value in OVERHEADS.values())


def test_without_overheads_only_the_bytes_of_stop_epoch_are_not_known_exactly() -> None:
    job = random_job(3)
    bare = dict.fromkeys(OVERHEADS, 0.0)
    job = replace(
        job,
        server_profile=replace(job.server_profile, **bare),  # type: ignore[arg-type]
        device_profiles={name: replace(profile, **bare) for name, profile in job.device_profiles.items()},  # type: ignore[arg-type]
    )
    slowest = min(spec.link.up_bps or 1e12 for spec in job.specs)
    off = run(job).result.seconds - simulate(job.fleet(), job.plans).epoch_s
    assert abs(off) <= 60 * 8 / slowest  # the JSON counts samples and seconds, in more or fewer digits


# --- the spans of one device


def blocks(spans: list[Span], device: str) -> list[tuple[object, ...]]:
    """Return the spans of a device and of the cores that work for it; decode, f_s, b_s and encode are one block."""
    found: list[tuple[object, ...]] = []
    for span in spans:
        mine = span.owner == device and span.kind not in ("control", "model", "pack", "install", "trace")
        if mine and span.lane in (COMPUTE, IO, UPLINK, DOWNLINK):
            found.append((span.lane, span.kind, span.iteration, span.micro_batch, span.start, span.end))
    cores: dict[tuple[str, int, int], list[Span]] = {}
    for span in spans:
        if span.owner == SERVER and span.device == device and span.kind != "install":
            kind = "step" if span.kind == "step" else "fs"
            cores.setdefault((kind, span.iteration, span.micro_batch), []).append(span)
    for (kind, iteration, n), of in cores.items():
        found.append((SERVER, kind, iteration, n, min(s.start for s in of), max(s.end for s in of)))
    return sorted(found, key=lambda block: block[:4])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_timeline_has_the_spans_of_a_run(seed: int) -> None:
    job = random_job(seed)
    ran, fleet = run(job), job.fleet()
    for name in job.sizes:
        spans = timeline(fleet, job.plans, name)
        assert spans == sorted(spans, key=lambda span: span.start)
        start = simulated_start(fleet, job.plans)
        moved = [replace(span, start=span.start - start, end=span.end - start) for span in spans]
        mine, theirs = blocks(moved, name), blocks(ran.spans, name)
        assert [block[:4] for block in mine] == [block[:4] for block in theirs]
        assert [block[4:] for block in mine] == [same(block[4:]) for block in theirs]


def simulated_start(fleet: Fleet, plans: Mapping[str, Plan]) -> float:
    """Return when the first device of all begins to load: an epoch's seconds count from there."""
    return min(timeline(fleet, plans, member.name)[0].start for member in fleet.members)


# --- the part that repeats


def steady_job(count: int, cores: int, samples: int) -> Job:
    job = random_job(0)
    config = config_from(
        {
            "run": {"method": "pipar", "epochs": 1, "batch_size": 12, "trace": "full"},
            "server": {"cores": cores},
            "devices": [{"name": "pi", "count": count, "link": "4g", "speed": 0.1}],
        }
    )
    specs = device_specs(config)
    names = [spec.name for spec in specs]
    profile = replace(job.server_profile, crowded=(), crowd=0)  # otherwise busy cores slow each other down
    return replace(
        job,
        config=config,
        specs=specs,
        sizes=dict.fromkeys(names, samples),
        server_profile=profile,
        device_profiles=dict.fromkeys(names, profile),
        plans=dict.fromkeys(names, Plan(2, 4)),
        batch_statistics=False,
    )


def test_two_iterations_of_equal_devices_that_do_not_wait_for_each_other_predict_all_others() -> None:
    job = steady_job(count=4, cores=4, samples=120)
    fleet = job.fleet()
    first = simulate(fleet, job.plans, iterations=2)
    assert [len(ends) for ends in first.ends.values()] == [2] * 4
    assert first.extrapolated_epoch_s(fleet) == pytest.approx(simulate(fleet, job.plans).epoch_s, rel=SAME)


def test_a_slow_device_with_little_data_does_not_lengthen_the_prediction_for_the_others() -> None:
    job = steady_job(count=2, cores=2, samples=120)
    specs = (replace(job.specs[0], speed=0.01), job.specs[1])
    job = replace(job, specs=specs, sizes={specs[0].name: 12, specs[1].name: 120})
    fleet = job.fleet()
    predicted = simulate(fleet, job.plans, iterations=2).extrapolated_epoch_s(fleet)
    assert predicted == pytest.approx(simulate(fleet, job.plans).epoch_s, rel=0.05)


@pytest.mark.slow
def test_a_long_epoch_is_extrapolated_with_every_devices_end_and_busy_lanes() -> None:
    job = steady_job(count=3, cores=2, samples=120)
    first, second, third = job.specs
    specs = (replace(first, speed=0.3), replace(second, link=Link(up_bps=2e5, down_bps=1e6)), third)
    sizes = dict(zip(job.sizes, (60_000, 240, 50_000), strict=True))
    job = replace(job, specs=specs, sizes=sizes)
    fleet, asked = job.fleet(), []

    def counting(fleet: Fleet, plans: Mapping[str, Plan], iterations: int | None) -> Timing:
        asked.append(iterations)
        return simulate(fleet, plans, iterations)

    predicted, whole = epoch_timing(counting, fleet, job.plans), simulate(fleet, job.plans)
    assert sorted(asked) == [STEADY_ITERATIONS - 1, STEADY_ITERATIONS]
    assert predicted.epoch_s == pytest.approx(whole.epoch_s, rel=0.02)
    assert predicted.busy_s == pytest.approx(dict(whole.busy_s), rel=0.02)
    assert predicted.device_s == pytest.approx(
        whole.device_s, rel=0.05
    )  # the device that shares a core with the third ends later
    assert predicted.bottleneck == whole.bottleneck


def test_bounds_compute_each_size_of_a_micro_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    job = steady_job(count=2, cores=1, samples=12 * 3 + 5)
    sizes = [12, 12, 12, 5]
    asked: list[int] = []
    least_s = Costs.least_s

    def counting(costs: Costs, first: int, last: int, samples: int) -> float:
        asked.append(samples)
        return least_s(costs, first, last, samples)

    monkeypatch.setattr(Costs, "least_s", counting)
    bounds = job.bounds()
    assert len(asked) == 2 * 2 * 3  # devices, sides; 12 = 4 x 3 and 5 = 2 + 3 x 1
    costs, name = Costs(job.server_profile, 0.1), job.specs[0].name
    pieces = [piece for size in sizes for piece in cut_batch(size, 4)]
    assert bounds.device_s[name] == pytest.approx(sum(least_s(costs, 1, 2, piece) for piece in pieces))
    asked.clear()
    replace(job, sizes=dict.fromkeys(job.sizes, 10**12)).bounds()
    assert len(asked) <= 2 * 2 * 3


def test_a_disturbance_changes_its_iteration_and_no_earlier_one() -> None:
    job = steady_job(count=2, cores=2, samples=48)
    fleet = job.fleet()
    calm = simulate(fleet, job.plans)

    def disturbed(name: str, iteration: int, times: Any) -> Any:
        return replace(times, step=times.step + 1.0) if (name, iteration) == ("pi-2", 3) else times

    shaken = simulate(fleet, job.plans, disturb=disturbed)
    assert shaken.ends["pi-1"] == calm.ends["pi-1"]
    assert shaken.ends["pi-2"][:2] == calm.ends["pi-2"][:2]
    assert shaken.ends["pi-2"][2:] == same(tuple(end + 1.0 for end in calm.ends["pi-2"][2:]))


# --- the virtual world instead of the simulator


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("iterations", [1, 2, None])
def test_a_rehearsal_in_the_virtual_world_and_the_simulator_agree(seed: int, iterations: int | None) -> None:
    job = random_job(seed)
    timing, rehearsed = simulate(job.fleet(), job.plans, iterations=iterations), rehearse(job, iterations)
    assert timing.epoch_s == same(rehearsed.epoch_s)
    assert timing.busy_s == same(dict(rehearsed.busy_s))
    assert dict(timing.ends) == {name: same(ends) for name, ends in rehearsed.ends.items()}
    assert timing.bottleneck == rehearsed.bottleneck


@pytest.mark.slow
def test_the_planner_finds_the_same_plans_with_either() -> None:
    job = steady_job(count=2, cores=1, samples=24)
    fleet = replace(job.fleet(), batch_size=12)

    def in_the_virtual_world(at: Fleet, plans: Mapping[str, Plan], iterations: int | None) -> Timing:
        speeds = {member.name: member.costs.speed for member in at.members}
        specs = tuple(replace(spec, speed=speeds[spec.name]) for spec in job.specs)
        server = job.config.server.model_copy(update={"speed": at.server.speed})
        config = job.config.model_copy(update={"server": server})
        return rehearse(replace(job, config=config, specs=specs, plans=plans), iterations)

    by_simulator, by_world = search_kinds(fleet, simulate), search_kinds(fleet, in_the_virtual_world)
    assert by_simulator.plans == by_world.plans
    assert by_simulator.simulations == by_world.simulations
    assert by_simulator.epoch_s == same(by_world.epoch_s)


def test_lanes_of_one_device_never_overlap_in_a_simulation() -> None:
    job = random_job(5)
    for name in job.sizes:
        lanes = by_lane(timeline(job.fleet(), job.plans, name))
        own = [pairwise(spans) for (owner, _), spans in lanes.items() if owner != SERVER and len(spans) > 1]
        assert own
        for before, after in chain.from_iterable(own):
            assert before.end <= after.start + 1e-12


def test_a_message_on_a_link_counts_its_bytes_and_a_header_for_each_megabyte() -> None:
    empty = transfer_s(0, 8.0)
    assert empty > 0
    assert transfer_s(100, 8.0) == empty + 100
    assert transfer_s(100, None) == 0.0
    assert transfer_s(3 * 2**20, 8.0) >= 3 * 2**20 + 3 * empty
