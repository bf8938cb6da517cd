"""A server that computes several micro-batches of a device at the same time trains the same bits, in less time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.training import EXACT, Case, largest_error, reference_state, train_in_virtual_time

import pipar
from pipar.execution.spans import SERVER
from pipar.launch.run import World
from pipar.storage.result import Result


class ThreadsCase(Case):
    """A case with a number of threads for the micro-batches of one device."""

    threads: int | str = 1

    def tree(self) -> dict[str, Any]:
        tree = super().tree()
        tree["server"] |= {"threads": self.threads, "cores": 4}
        return tree


def with_threads(case: Case, threads: int | str) -> ThreadsCase:
    several = ThreadsCase(**case.__dict__)
    object.__setattr__(several, "threads", threads)
    return several


CASES = [
    Case("pipar", (2,), (7,), sizes=(50,), dtype="float32"),
    Case("pipar", (1, 3), (4, 12), sizes=(37, 60), norm="group", dtype="float32", momentum="keep"),
    Case("pipar", (2, 5, 1), (7, 1, 3), norm="group", dtype="float32", schedule="1f1b"),
    Case("pipar", (2,), (7,), sizes=(50,), dtype="float32", encoding="int8"),
    Case("pipar", (2,), (7,), sizes=(50,), dtype="float32", optimizer=(("clip_norm", 0.5),)),
    Case("sfl2", (2,), sizes=(50, 30), dtype="float32"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case}-{case.encoding}-{len(case.optimizer)}")
def test_any_number_of_threads_trains_the_same_bits(case: Case) -> None:
    trained = [train_in_virtual_time(with_threads(case, threads)) for threads in (1, 2, 3, "auto")]
    for other in trained[1:]:
        assert all((other.state[name] == tensor).all() for name, tensor in trained[0].state.items())
        assert [epoch.train_loss for epoch in other.epochs] == [epoch.train_loss for epoch in trained[0].epochs]


def test_micro_batches_of_one_device_are_computed_at_the_same_time_and_faster() -> None:
    case = Case("pipar", (1,), (6,), sizes=(60,), even=True)
    one, two = (train_in_virtual_time(with_threads(case, threads)) for threads in (1, 2))
    assert two.epochs[0].seconds < one.epochs[0].seconds
    lanes = {span.lane for span in two.spans if span.owner == SERVER and span.kind == "fs"}
    assert len(lanes) > 1
    assert largest_error(two.state, reference_state(case)) < EXACT


@pytest.mark.slow
def test_real_processes_train_the_bits_of_virtual_time_with_any_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    case = Case("pipar", (2,), (7,), sizes=(60,), norm="group", dtype="float32", even=True)

    def run(threads: int, world: World) -> Result:
        return pipar.run(with_threads(case, threads).tree_with_profile(tmp_path), world=world)

    one, two, virtual = run(1, "real"), run(2, "real"), run(2, "virtual")
    assert one.content["weights_sha256"] == two.content["weights_sha256"] == virtual.content["weights_sha256"]
    assert [epoch["train_loss"] for epoch in one.epochs] == [epoch["train_loss"] for epoch in two.epochs]
    assert (one.content["server_threads"], two.content["server_threads"]) == (1, 2)
