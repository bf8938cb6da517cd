"""A recorded training is replayed as it was, and under other conditions as it would have been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.recorded import (
    CHANGING,
    NO_LATENCY,
    STEADY,
    TWICE_CHANGING,
    TWICE_NO_LATENCY,
    TWICE_STEADY,
    Recorded,
    record,
    recorded_job,
    without,
)
from support.training import Case, make_job

from pipar.errors import InputError, TrainingError
from pipar.events import ignore
from pipar.launch.replay import Change, replay
from pipar.launch.virtual import train_virtually
from pipar.methods import Plan
from pipar.recording.flight import Flight
from pipar.recording.frames import pack_record, read_records
from pipar.recording.recorder import FILE
from pipar.recording.recorder import recorded as recording
from pipar.storage.run_folder import RunFolder

EXACT = 1e-9
#: Numbers in control messages are text, whose length depends on their last digit: up to 20 bytes a message, or 0.1 ms
#: on a link of 2 Mbit/s.
ALMOST = 2e-4


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(tmp_path_factory.mktemp("flight"), recorded_job(epochs=1))


def replayed(path: Path, change: Change | None = None) -> list[float]:
    return [result.seconds for _, result in sorted(replay(Flight.read(path), change).results.items())]


def same(one: Sequence[float], other: Sequence[float], tolerance: float) -> bool:
    return list(one) == pytest.approx(list(other), rel=tolerance, abs=0.0)


@pytest.mark.slow
def test_a_replay_without_limited_links_takes_the_same_seconds(tmp_path: Path) -> None:
    run = record(tmp_path, recorded_job("unlimited"))
    assert same(replayed(run.path), run.seconds, EXACT)


@pytest.mark.slow
def test_a_replay_of_several_passes_in_a_round_takes_the_same_seconds(tmp_path: Path) -> None:
    run = record(tmp_path, recorded_job(epochs=2, run={"local_epochs": 3}))
    assert same(replayed(run.path), run.seconds, ALMOST)


@pytest.mark.slow
@pytest.mark.parametrize("share", [2, 0.6])
def test_the_devices_that_were_drawn_take_part_in_the_same_rounds_again(tmp_path: Path, share: float) -> None:
    run = record(tmp_path, recorded_job(epochs=4, run={"devices_per_round": share, "seed": 3}))
    assert len({tuple(counted) for counted in run.counted}) > 1
    # With other devices, a round takes up to a quarter longer.
    assert same(replayed(run.path), run.seconds, 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("link", [STEADY, CHANGING], ids=["steady", "changing"])
def test_a_replay_takes_the_same_seconds(tmp_path: Path, link: object) -> None:
    run = record(tmp_path, recorded_job(link))
    assert same(replayed(run.path), run.seconds, ALMOST)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("speed", "device_speed", "seed"), [(0.4, 0.2, 1), (0.6, 0.1, 1), (0.6, 0.1, 2), (1.0, 0.2, 2)]
)
def test_devices_of_a_busy_machine_are_replayed_on_links_that_change(
    tmp_path: Path, speed: float, device_speed: float, seed: int
) -> None:
    # Micro-batches of two devices arrive at almost the same time, and what is left when a link changes takes ten times
    # as long.
    rates = [{"up": "10Mbit/s", "down": "10Mbit/s"}, {"up": "1Mbit/s", "down": "2Mbit/s"}]
    job = recorded_job({"cycle": rates, "every": "900ms"}, devices=2, epochs=6, cores=1, speed=speed)
    job = replace(job, specs=tuple(replace(spec, speed=device_speed) for spec in job.specs))
    run = record(tmp_path, job, busy=seed)
    assert same(replayed(run.path), run.seconds, 0.03)


@pytest.mark.slow
def test_a_micro_batch_that_never_comes_delays_a_replay_little(tmp_path: Path) -> None:
    run = record(tmp_path, recorded_job())
    records, _ = read_records(run.path)
    for one in records:
        if one["is"] == "round":
            one["order"] = [2, *one["order"]]  # the slow device, which is the last to begin
    run.path.write_bytes(b"".join(map(pack_record, records)))
    assert same(replayed(run.path), run.seconds, 0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case("pipar", (1, 2), (3, 2), encoding="planes"), Case("sfl2", (2,)), Case("sl", (2,))], ids=str
)
def test_a_training_with_coded_tensors_and_models_is_replayed_by_sizes_alone(tmp_path: Path, case: Case) -> None:
    workload = case.workload()
    job, seconds = make_job(workload), []
    folder = RunFolder(tmp_path, job, world="virtual", command="a test")
    with recording(folder, world="virtual", is_on=True) as (emitting, watching):
        emit = emitting(lambda result, _: seconds.append(result.seconds))
        train_virtually(job, workload, emit, watching(ignore))
    assert same(replayed(tmp_path / FILE), seconds, 0.001)


@pytest.mark.slow
def test_times_come_from_the_recording_and_not_from_profiles(tmp_path: Path) -> None:
    usual, slow = (record(tmp_path / name, recorded_job("unlimited"), slower=k) for name, k in (("a", 1), ("b", 3)))
    assert min(slow.seconds) > 2 * max(usual.seconds)
    assert same(replayed(slow.path), slow.seconds, EXACT)


@pytest.mark.slow
def test_a_killed_device_delays_the_same_round_by_the_same_time(tmp_path: Path) -> None:
    whole = record(tmp_path / "whole", recorded_job(epochs=4))
    begins = whole.flight.rounds[1].start
    job = recorded_job(epochs=4, resume_window="5s")
    run = record(tmp_path / "killed", job, kills={"pi-1": begins + 0.3})
    assert [sorted(counted) for counted in run.counted] == [["pi-1", "pi-2", "slow"], *[["pi-2", "slow"]] * 3]
    assert run.seconds[1] > 5  # the resume window
    assert same(replayed(run.path), run.seconds, ALMOST)


@pytest.mark.slow
@pytest.mark.parametrize("said", ["1.5", '"auto"'], ids=["configured", "chosen by the server"])
def test_a_device_that_is_too_late_is_excluded_from_the_same_rounds(tmp_path: Path, said: str) -> None:
    run = record(tmp_path, recorded_job(round_deadline="1.5s"))
    assert [sorted(counted) for counted in run.counted] == [["pi-1", "pi-2"]] * 3
    records, _ = read_records(run.path)
    records[0]["configuration"] = records[0]["configuration"].replace("_deadline = 1.5", f"_deadline = {said}")
    run.path.write_bytes(b"".join(map(pack_record, records)))
    assert f"round_deadline = {said}" in str(Flight.read(run.path).header)
    again = replay(Flight.read(run.path)).results
    assert [again[number].devices for number in (1, 2, 3)] == [2, 2, 2]
    assert same([again[number].seconds for number in (1, 2, 3)], run.seconds, 0.01)


# --- what if


@pytest.mark.slow
def test_without_changes_what_if_is_what_was(tmp_path: Path) -> None:
    run = record(tmp_path, recorded_job(epochs=2))
    same_plan = Change(plan=(1, 3))
    assert same(replayed(run.path, same_plan), replayed(run.path), EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [(1, 5), (2, 2), (3, 1)])
def test_another_plan_takes_what_a_training_with_it_takes(tmp_path: Path, plan: tuple[int, int]) -> None:
    job = recorded_job(epochs=2)
    run = record(tmp_path / "one", job, slower=1.7)
    plans = dict.fromkeys(job.sizes, Plan(*plan))
    other = record(tmp_path / "other", replace(job, plans=plans), slower=1.7)
    assert same(replayed(run.path, Change(plan=plan)), other.seconds, 0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("link", "twice"), [(STEADY, TWICE_STEADY), (CHANGING, TWICE_CHANGING)])
def test_twice_the_link_takes_what_a_training_on_it_takes(tmp_path: Path, link: object, twice: object) -> None:
    run, other = (record(tmp_path / name, recorded_job(on)) for name, on in (("a", link), ("b", twice)))
    # A link that changes does so after the same seconds of a round, but a shorter round ends before that: the first
    # round is about the same, later ones are not.
    rounds, tolerance = (1, 0.005) if link is CHANGING else (3, ALMOST)
    assert same(replayed(run.path, Change(link_factor=2.0))[:rounds], other.seconds[:rounds], tolerance)


@pytest.mark.slow
def test_links_that_are_not_emulated_are_replayed_and_made_faster(tmp_path: Path) -> None:
    run = record(tmp_path / "real", recorded_job(NO_LATENCY), knows_links=False)
    other = record(tmp_path / "twice", recorded_job(TWICE_NO_LATENCY))
    # By the rates that the traffic has shown, and about the bytes that were sent.
    assert same(replayed(run.path), run.seconds, 0.001)
    assert same(replayed(run.path, Change(link_factor=2.0)), other.seconds, 0.001)


@pytest.mark.slow
def test_one_device_less_takes_what_a_training_without_it_takes(tmp_path: Path) -> None:
    job = recorded_job(epochs=2)
    run = record(tmp_path / "all", job)
    other = record(tmp_path / "less", without(job, "slow"))
    assert same(replayed(run.path, Change(without=frozenset({"slow"}))), other.seconds, ALMOST)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Change(plan=(9, 1)), "Split point 9 is outside 1..3"),
        (Change(plan=(1, 99)), "99 micro-batches are outside 1..20"),
        (Change(link_factor=0.0), "0 is not a factor"),
        (Change(link_factor=float("nan")), "is not a factor"),
        (Change(without=frozenset({"nobody"})), "'nobody' is not a device of this recording; there are pi-1, pi-2"),
        (Change(without=frozenset({"pi-1", "pi-2", "slow"})), "leave at least one"),
    ],
)
def test_impossible_changes_are_refused(recorded: Recorded, change: Change, words: str) -> None:
    with pytest.raises(InputError, match=words):
        replay(recorded.flight, change)


@pytest.mark.slow
def test_a_replay_without_the_devices_that_were_not_lost_says_in_which_round_none_is_left(tmp_path: Path) -> None:
    run = record(tmp_path, recorded_job(epochs=3, resume_window="1s"), kills={"pi-1": 3.0})
    lost_in = next(number for number, counted in enumerate(run.counted, start=1) if "pi-1" not in counted)
    with pytest.raises(TrainingError, match=f"no device is left in round {lost_in}; the others were lost"):
        replay(run.flight, Change(without=frozenset({"pi-2", "slow"})))
