"""A timing-only run on the simulator has the results of the programs; where it would not, the programs run."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import pytest
from support.random_jobs import PIXEL, clipping, coded_job, frozen_job, private_job, random_job, several_at_once

import pipar
from pipar.errors import PlanError
from pipar.events import EpochResult, Event, Preparing, Replanned, Started, TimedByPrograms, ignore
from pipar.execution.spans import Span
from pipar.job.job import Job
from pipar.job.prepare import prepare_timing_only
from pipar.launch.rehearsal import rehearse
from pipar.launch.simulated import simulate_training, why_programs
from pipar.launch.virtual import train_timing_only
from pipar.planner import background_search
from pipar.planner.simulated_training import SimulatedTraining
from pipar.settings.config_file import config_from

SMALL = [
    "devices.count=2", "run.epochs=2", "run.batch_size=10", "data.samples_per_device=20", "data.validation=10",
    "data.test=10", "devices.profile=raspberry-pi-3b", "server.profile=i7-11850h", "plan.split_point=2",
    "plan.micro_batches=4",
]  # fmt: skip
SAME = 1e-4
#: Traces are sent as text: rounding changes the last digits of its numbers, and with them their length.
DIGITS_BYTES = 32

Epochs = list[tuple[EpochResult, list[Span]]]


def with_run(job: Job, **changes: Any) -> Job:
    """Return a job with other keys in [run], and with plans that stay."""
    plan = job.config.plan.model_copy(update={"replan": False})
    run = job.config.run.model_copy(update={"epochs": 3, "trace": "off", **changes})
    return replace(job, config=job.config.model_copy(update={"run": run, "plan": plan}))


def timed(job: Job) -> tuple[Epochs, Epochs]:
    """Return the epochs of a job, by the programs and by the simulator."""
    both: tuple[Epochs, Epochs] = ([], [])
    for run, epochs in zip((train_timing_only, simulate_training), both, strict=True):
        run(job, lambda result, spans, epochs=epochs: epochs.append((result, spans)), ignore)  # type: ignore[misc]
    return both


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a row with its path."""
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(one, f"{path}/{key}")
    else:
        yield path, value


def differences(one: EpochResult, other: EpochResult) -> list[tuple[str, Any, Any]]:
    """Return what differs between two epochs by more than is agreed; idle times count as shares of the epoch."""
    found = []
    mine, theirs = (dict(numbers(result.to_dict())) for result in (one, other))
    for path in sorted(mine.keys() | theirs.keys()):
        first, second = mine.get(path), theirs.get(path)
        if isinstance(first, float | int) and isinstance(second, float | int):
            least = one.seconds if "idle" in path else 1.0 if "utilisation" in path else 0.0
            allowed = max(SAME * max(abs(first), least), DIGITS_BYTES * one.devices if "bytes" in path else 0.0)
            if abs(first - second) <= allowed:
                continue
        elif first == second:
            continue
        found.append((path, first, second))
    return found


def check_same(job: Job) -> None:
    """Hold the simulator against the programs: every number of every epoch."""
    assert not why_programs(job)
    programs, simulated = timed(job)
    assert len(programs) == len(simulated) == job.config.run.epochs
    for (one, _), (other, _) in zip(programs, simulated, strict=True):
        assert differences(one, other) == []


RUNS = {
    "all": {},
    "drawn": {"devices_per_round": 2, "epochs": 4},
    "passes": {"local_epochs": 2},
    "traced": {"trace": "full"},
    "drawn, traced, passes": {"devices_per_round": 0.5, "trace": "full", "local_epochs": 2},
}
JOBS: dict[str, Callable[[int], Job]] = {
    "any": random_job,
    "coded": coded_job,
    "at once": lambda seed: several_at_once(random_job(seed), 2),
    "coded, at once": lambda seed: several_at_once(coded_job(seed), "auto"),
    "clipped": lambda seed: clipping(coded_job(seed)),
    "frozen": lambda seed: frozen_job(seed, 1),
    "nothing to train": lambda seed: frozen_job(seed, 3),
    "fl": lambda seed: private_job(coded_job(seed), "fl", {}),
    "sfl": lambda seed: private_job(coded_job(seed), "sfl", {}),
    "noise on inputs": lambda seed: private_job(coded_job(seed), "pipar", PIXEL),
}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("make", JOBS.values(), ids=JOBS)
def test_a_simulated_training_has_the_results_of_the_programs(make: Callable[[int], Job], run: dict[str, Any]) -> None:
    for seed in range(4):
        check_same(with_run(make(seed), **run))


@pytest.mark.slow
@pytest.mark.parametrize("make", [random_job, coded_job])
def test_a_simulated_training_has_the_spans_of_the_programs(make: Callable[[int], Job]) -> None:
    def places(spans: list[Span]) -> Counter[tuple[Any, ...]]:
        return Counter((s.owner, s.lane, s.kind, s.epoch, s.iteration, s.micro_batch, s.waiting) for s in spans)

    def busy_s(spans: list[Span]) -> dict[tuple[str, str], float]:
        lanes = {(span.owner, span.lane) for span in spans if not span.waiting}
        return {
            lane: sum(span.end - span.start for span in spans if (span.owner, span.lane) == lane and not span.waiting)
            for lane in lanes
        }

    for seed in range(3):
        for (_, programs), (_, simulated) in zip(*timed(with_run(make(seed), trace="full")), strict=True):
            if make is random_job:  # the server's encoding of several chunks is one span here
                assert places(programs) == places(simulated)
            assert busy_s(simulated) == {
                lane: pytest.approx(seconds, rel=SAME, abs=1e-6) for lane, seconds in busy_s(programs).items()
            }


def test_a_sample_of_devices_is_traced_as_by_the_programs() -> None:
    settings = [*SMALL, "run.epochs=2", "devices.count=30", "run.trace=sampled", "data.name=synthetic"]
    simulated, programs = (
        pipar.run(world="timing-only", settings=settings, programs=programs, progress=False).content
        for programs in (False, True)
    )
    for one, other in zip(programs["epochs"], simulated["epochs"], strict=True):  # devices that are alike may swap
        assert other["seconds"] == pytest.approx(one["seconds"], rel=SAME)
        assert other["bytes_up"] == pytest.approx(one["bytes_up"], rel=SAME)
        assert other["bytes_down"] == pytest.approx(one["bytes_down"], rel=SAME)
    assert simulated["rounds"] == programs["rounds"]


REASONS = {
    "run.method=sl": "devices share one server-side model in sl",
    "run.method=sfl2": "devices share one server-side model in sfl2",
    "server.round_deadline=100": "rounds have a deadline",
    "server.min_devices=1": "it begins before all devices have joined",
    "privacy.target_epsilon=8": "updates get noise",
    "devices.link={cycle=['4g', 'wifi'], every='1s'}": "links change",
    "data.evaluate_on_devices=0.2": "devices evaluate models",
    "optimizer.state_at_aggregation=keep": "the state of optimisers moves with layers",
}


@pytest.mark.parametrize("setting", REASONS)
def test_what_the_simulator_does_not_cover_runs_the_programs_and_says_why(setting: str) -> None:
    events: list[Event] = []
    train = partial(pipar.run, world="timing-only", progress=False)
    result = train(settings=[*SMALL, setting], observe=events.append)
    assert [event.reason for event in events if isinstance(event, TimedByPrograms)] == [REASONS[setting]]
    assert result.content["epochs"] == train(settings=[*SMALL, setting], programs=True).content["epochs"]


def test_activations_that_the_server_may_keep_are_timed_by_the_programs() -> None:
    job = with_run(random_job(0))
    assert why_programs(job) == ""
    assert why_programs(replace(job, steady_layers=1)) == "the server may keep activations"


def test_a_recording_is_made_by_the_programs() -> None:
    events: list[Event] = []
    pipar.run(world="timing-only", settings=SMALL, progress=False, observe=events.append, record=True)
    assert [event.reason for event in events if isinstance(event, TimedByPrograms)] == ["it is recorded"]


#: Only one of two unequal devices takes part in a round. From the third one on, its machine is known better.
UNEQUAL: dict[str, Any] = {
    "run": {"epochs": 3, "batch_size": 20, "devices_per_round": 1},
    "data": {"name": "synthetic", "samples_per_device": 50},
    "server": {"profile": "i7-11850h"},
    "devices": [
        {"link": "wifi", "speed": 3, "profile": "raspberry-pi-5"},
        {"link": {"up": "1Mbit/s", "down": "unlimited"}, "speed": 3, "profile": "raspberry-pi-5"},
    ],
}
#: With the same link, a search finds no other plans.
EQUAL = UNEQUAL | {"devices": [UNEQUAL["devices"][0]] * 2}


@pytest.mark.slow
def test_a_training_in_which_devices_get_new_plans_is_timed_by_the_programs() -> None:
    events: list[Event] = []
    train = partial(pipar.run, UNEQUAL, world="timing-only", progress=False)
    result = train(observe=events.append)
    assert [event.epoch for event in events if isinstance(event, Replanned)] == [3]
    assert [event.reason for event in events if isinstance(event, TimedByPrograms)] == ["devices get new plans"]
    assert result.content["epochs"] == train(programs=True).content["epochs"]


def test_a_training_in_which_no_plan_changes_is_simulated_after_it_was_tried() -> None:
    events: list[Event] = []
    train = partial(pipar.run, EQUAL, world="timing-only", progress=False)
    simulated = train(observe=events.append)
    names = [type(event) for event in events]
    tried = [event.share for event in events if isinstance(event, Preparing) and event.what.startswith("Simulating")]
    assert tried == [0.0, 0.5]
    assert max(place for place, kind in enumerate(names) if kind is Preparing) < names.index(Started)
    assert TimedByPrograms not in names
    programs = train(programs=True).content["epochs"]
    assert [row["seconds"] for row in simulated.content["epochs"]] == [
        pytest.approx(row["seconds"], rel=SAME) for row in programs
    ]


def test_a_training_whose_search_for_new_plans_fails_is_timed_by_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise PlanError("no plans.")

    job = prepare_timing_only(config_from(UNEQUAL), rehearse)
    assert job is not None
    monkeypatch.setattr(background_search, "search_again", fail)
    assert why_programs(job) == "a search for new plans fails"


def test_nothing_is_simulated_for_a_training_that_has_been_stopped() -> None:
    job = prepare_timing_only(config_from(UNEQUAL), rehearse)
    assert job is not None
    events: list[Event] = []
    assert why_programs(job, events.append, should_stop=lambda: True) == ""
    assert events == []


def test_ctrl_c_ends_the_simulation_before_a_run_in_the_middle_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        rounds.append("trained to its end")

    job = prepare_timing_only(config_from(UNEQUAL), rehearse)
    assert job is not None
    rounds: list[str] = []
    monkeypatch.setattr(SimulatedTraining, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        why_programs(job)
    assert rounds == []
