"""Real processes train the weights of the definitions, bit for bit as in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.over_grpc import train_over_grpc
from support.training import EXACT, Case, hand_made_profile, largest_error, reference_state

import pipar
from pipar.events import Event, Replanned
from pipar.launch.run import World
from pipar.methods import Plan
from pipar.planner import replanner
from pipar.settings.links import Link
from pipar.storage.result import Result

pytestmark = pytest.mark.slow

METHODS = ("fl", "sl", "sfl", "sfl2", "pipar")


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# --- gRPC over loopback and threads, all in this process


@pytest.mark.parametrize(
    "case",
    [
        *(Case(method, (2,), norm="group", momentum="keep", even=True) for method in METHODS),
        *(Case(method, (4,), even=True) for method in ("sl", "sfl", "sfl2")),
        Case("sfl", (3, 1, 5), even=True),
        Case("pipar", (1,), (12,), even=True),
        Case("pipar", (1, 5, 2), (7, 1, 3), norm="group", schedule="1f1b", even=True),
        Case("pipar", (2, 1, 3), (3, 7, 12), momentum="keep", even=True),
        Case("pipar", (1,), (7,), shape=(3, 32, 32), sizes=(130, 30), epochs=1, even=True),
    ],
    ids=str,
)
def test_weights_over_grpc_are_those_of_the_definition(case: Case) -> None:
    trained = asyncio.run(train_over_grpc(case))
    assert largest_error(trained.state, reference_state(case)) < EXACT
    assert trained.samples == [sum(case.sizes)] * case.epochs


@pytest.mark.parametrize("momentum", ["reset", "keep"])
def test_weights_over_grpc_do_not_depend_on_changes_of_plans(momentum: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replanner, "NOTICED", -1.0)  # every round's links count as changed
    case = Case("pipar", (2,), (7,), epochs=4, momentum=momentum, weight_decay=0.1, norm="group", even=True)
    # On unlimited links only a script can tell when: each device has one that is measured.
    case = MeasuredCase(**case.__dict__)
    script = iter([(4, 3, 2), (1, 5, 5), (5, 1, 2)])
    seen: list[int] = []

    async def replan(links: Mapping[str, Link]) -> Mapping[str, Plan]:
        await asyncio.sleep(0)
        return {name: Plan(p, 1 if p == 5 else 4) for name, p in zip(sorted(links), next(script), strict=True)}

    def observe(event: Event) -> None:
        if isinstance(event, Replanned):
            seen.append(event.epoch)

    trained = asyncio.run(train_over_grpc(case, replan, observe))
    assert seen == [2, 3, 4]
    assert largest_error(trained.state, reference_state(case)) < EXACT


class MeasuredCase(Case):
    """A case on fast links with a finite rate."""

    def tree(self) -> dict[str, Any]:
        tree = super().tree()
        for device in tree["devices"]:
            device["link"] = {"up": "400Mbit/s", "down": "400Mbit/s"}
        return tree


# --- processes


def run(case: Case, world: World, tmp_path: Path) -> Result:
    """Return the result of a case from `pipar.run`, with a profile file so that nothing is measured."""
    workload = case.workload()
    tree: dict[str, Any] = case.tree()
    file = tmp_path / "profile.json"
    hand_made_profile(workload.build_model(), workload.samples.input_shape, case.dtype).save(file)
    settings = [f'server.profile="{file}"', f'devices.profile="{file}"', "devices.link=unlimited", "devices.speed=1.0"]
    return pipar.run(tree, world=world, settings=settings)


IN_PROCESSES = [
    Case("fl", momentum="keep", even=True),
    Case("sl", (2,), norm="group", even=True),
    Case("sfl2", (2,), momentum="keep", even=True),
    Case("pipar", (1, 4, 2), (7, 3, 12), norm="group", even=True),
]


@pytest.mark.parametrize("case", IN_PROCESSES, ids=str)
def test_processes_train_the_weights_of_the_definition_and_the_bits_of_virtual_time(case: Case, tmp_path: Path) -> None:
    real = run(case, "real", tmp_path)
    state = real.state_dict()
    expected = reference_state(case)
    assert largest_error({name: state[name] for name in expected}, expected) < EXACT
    assert [epoch["samples"] for epoch in real.epochs] == [sum(case.sizes)] * case.epochs
    assert (real.content["world"], real.content["equivalence"]) == ("real", "exact")
    assert real.content["replans"] == []  # plans are made with the devices' own profiles
    virtual = run(case, "virtual", tmp_path)
    assert real.content["weights_sha256"] == virtual.content["weights_sha256"]
    assert real.test_accuracy == virtual.test_accuracy
    assert [epoch["train_loss"] for epoch in real.epochs] == [epoch["train_loss"] for epoch in virtual.epochs]
    assert [epoch["val_loss"] for epoch in real.epochs] == [epoch["val_loss"] for epoch in virtual.epochs]
