"""A device computes with the threads of its profile, each of its lanes with its own number, and shares its cores."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pipar
from pipar.device.interfaces import DeviceLanes
from pipar.execution.lanes import ThreadLanes
from pipar.execution.spans import COMPUTE, EVALUATION, IO, NOISE, Recorder
from pipar.execution.work import Work
from pipar.launch import device_lanes
from pipar.launch.device_lanes import DeviceThreadLanes, claim_cores
from pipar.profiling.cache import usable_cores


def test_lanes_that_train_or_evaluate_have_the_threads_and_the_others_one() -> None:
    async def threads_of() -> dict[str, int]:
        make, work = DeviceThreadLanes(threads=2), (Work("fc"), torch.get_num_threads)
        lanes = {name: make([name], Recorder("pi")) for name in (COMPUTE, IO, NOISE, EVALUATION)}
        # Twice: a thread that has used torch must not take over the number of another one.
        found = [{name: await lane.run(work) for name, lane in lanes.items()} for _ in range(2)]
        for lane in lanes.values():
            lane.close()
        assert found[0] == found[1]
        return found[0]

    before = torch.get_num_threads()
    try:
        assert asyncio.run(threads_of()) == {COMPUTE: 2, IO: 1, NOISE: 1, EVALUATION: 2}
    finally:
        torch.set_num_threads(before)


def test_lanes_of_one_thread_change_nothing() -> None:
    async def made() -> DeviceLanes | ThreadLanes:
        lane = DeviceThreadLanes()([COMPUTE], Recorder("pi"))
        assert await lane.run((Work("fc"), torch.get_num_threads)) == torch.get_num_threads()
        lane.close()
        return lane  # type: ignore[return-value]

    asyncio.run(made())


def test_only_the_first_program_of_a_machine_has_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    claim = "from pipar.launch.device_lanes import claim_cores; print(claim_cores(), flush=True); input()"
    command = [sys.executable, "-c", claim]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdin is not None
        assert first.stdout.readline() == "True\n"
        assert not claim_cores()
        first.stdin.write("\n")
        first.stdin.close()
        assert first.wait() == 0
    assert claim_cores()
    assert not claim_cores()  # this process has them already, for another device


def test_machines_that_share_a_home_folder_do_not_share_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert claim_cores()
    monkeypatch.setattr(device_lanes, "clock_machine", lambda: "another")
    assert claim_cores()
    assert not claim_cores()


TREE = {
    "run": {"epochs": 1, "batch_size": 20, "seed": 3, "method": "pipar"},
    "model": {"dtype": "float64"},
    "data": {"name": "synthetic", "shape": [1, 8, 8], "classes": 4, "samples_per_device": 40, "validation": 0},
    "plan": {"split_point": 2, "micro_batches": 4, "replan": False},
    "wire": {"encoding": "raw"},
    "devices": [{"name": "pi", "link": "unlimited", "speed": 1.0}],
}


@pytest.mark.slow
@pytest.mark.usefixtures("measured_at_once")
@pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
def test_a_device_with_two_threads_trains_the_weights_of_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one, two = (
        pipar.run({**TREE, "devices": [{**TREE["devices"][0], "threads": threads}]}, world="real")  # type: ignore[index]
        for threads in (1, 2)
    )
    assert (one.content["threads"], two.content["threads"]) == ({"pi": 1}, {"pi": 2})
    states = one.state_dict(), two.state_dict()
    largest = max(tensor.abs().max().item() for tensor in states[0].values())
    error = max((states[0][name] - states[1][name]).abs().max().item() for name in states[0])
    assert error <= 1e-12 * largest
