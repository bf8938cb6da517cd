"""New plans between two rounds change the time alone: layers change sides, weights and momentum with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from training import EXACT, Case, Trained, largest_error, make_job, reference_state

from pipar import replanning
from pipar.config import Link
from pipar.events import EpochResult, Event, Replanned
from pipar.methods import Plan
from pipar.replanning import Choose
from pipar.trace import Span
from pipar.virtual import train_virtually

Q = 5  # layers of VGG-5
VISIBLE = 1e-6


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round's links count as changed."""
    monkeypatch.setattr(replanning, "NOTICED", -1.0)


def scripted(names: Sequence[str], script: Sequence[Sequence[Plan]]) -> Choose:
    """Return plans that are written down beforehand: for each choice one for each device."""
    left = iter(script)

    async def choose(links: Mapping[str, Link]) -> Mapping[str, Plan]:
        assert sorted(links) == sorted(names)
        return dict(zip(sorted(names), next(left), strict=True))

    return choose


def train(case: Case, script: Sequence[Sequence[Plan]]) -> tuple[Trained, list[Replanned]]:
    """Return what a case comes to in virtual time, its plans changed by a script between its epochs."""
    workload = case.workload()
    job = make_job(workload)
    epochs: list[EpochResult] = []
    spans: list[Span] = []
    seen: list[Replanned] = []

    def emit(result: EpochResult, of_epoch: list[Span]) -> None:
        epochs.append(result)
        spans.extend(of_epoch)

    def observe(event: Event) -> None:
        if isinstance(event, Replanned):
            seen.append(event)

    learner = train_virtually(job, workload, emit, observe, choose=scripted(workload.names, script))
    return Trained(job, learner.state(), epochs, spans), seen


SCRIPTS: dict[str, list[list[Plan]]] = {
    "back and forth": [[Plan(4, 3)] * 3, [Plan(1, 3)] * 3],
    "to the whole network and back": [[Plan(Q, 1), Plan(Q, 1), Plan(2, 3)], [Plan(1, 7), Plan(3, 2), Plan(Q, 1)]],
    "each its own way": [[Plan(1, 7), Plan(4, 1, 2), Plan(3, 100)], [Plan(3, 2, 1), Plan(2, 12), Plan(1, 57, 3)]],
    "micro-batches alone": [[Plan(2, 1), Plan(2, 12), Plan(2, 7)], [Plan(2, 3, 2), Plan(2, 12), Plan(2, 100, 5)]],
    "one of three": [[Plan(2, 7), Plan(4, 7), Plan(2, 7)], [Plan(2, 7), Plan(1, 7), Plan(2, 7)]],
}
RULES: list[dict[str, Any]] = [
    {"momentum": "reset"},
    {"momentum": "keep"},
    {"momentum": "keep", "weight_decay": 0.1, "norm": "group"},
]


@pytest.mark.usefixtures("every_round")
@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("script", SCRIPTS)
def test_weights_are_those_of_the_definition_whatever_plans_come(script: str, rules: dict[str, Any]) -> None:
    case = Case("pipar", (2,), (7,), epochs=3, **rules)
    trained, seen = train(case, SCRIPTS[script])
    assert [event.epoch for event in seen] == [2, 3]
    assert largest_error(trained.state, reference_state(case)) < EXACT
    assert trained.samples == [sum(case.sizes)] * case.epochs
