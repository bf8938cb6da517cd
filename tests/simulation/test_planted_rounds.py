"""Each invariant about drawn devices, passes and clipping finds the error that it is there for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipar.job.device_evaluation import HeldOutSamples
from pipar.server import serving
from pipar.server.participants import Participants
from pipar.server.sampling import Draw
from pipar.server.session import Session
from pipar.storage.checkpoint_writer import CheckpointWriter
from pipar.storage.run_folder import RunFolder
from pipar.wire.messages import Body
from pipar.wire.orders import Orders
from simulation.reference_training import copied
from simulation.scenario import Fault, Scenario
from tests.support.quiet_worlds import found, holds, quiet


def with_draws(seed: int) -> Scenario:
    """Return a world in which one device of three is drawn for each round, and the server crashes."""
    crashes = [Fault(4.0 + 4.0 * n, "crash-server", "", 0.5, n) for n in range(2)]
    return quiet(seed, *crashes, devices_per_round=1, rounds=8)


def in_passes(seed: int) -> Scenario:
    return quiet(seed, Fault(1.0, "cut", "device-1", 0.5, 1), local_epochs=3)


def clipped(seed: int) -> Scenario:
    return quiet(seed, Fault(1.0, "cut", "device-1", 0.5, 1), clip_norm=0.2)


@pytest.mark.slow
def test_draws_that_prefer_a_device_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    holds(with_draws)
    monkeypatch.setattr(Draw, "_in_order", lambda _, __, names: names)
    assert found(with_draws) == "draws are fair"


@pytest.mark.slow
def test_draws_that_a_resumed_server_does_not_remember_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    resume = RunFolder.resume

    def forgetful(self: RunFolder, *arguments: Any) -> None:
        resume(self, *arguments)
        self.drawn = {}

    monkeypatch.setattr(RunFolder, "resume", forgetful)
    assert found(with_draws) == "draws are fair"


@pytest.mark.slow
def test_draws_that_are_not_saved_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    save = CheckpointWriter.save_if_due

    async def without_draws(self: CheckpointWriter, *arguments: Any, **options: Any) -> None:
        self._folder.drawn = {}
        await save(self, *arguments, **options)

    monkeypatch.setattr(CheckpointWriter, "save_if_due", without_draws)
    assert found(with_draws) == "draws are fair"


@pytest.mark.slow
def test_a_device_that_counts_without_being_drawn_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Participants.draw

    async def everyone(self: Participants, *arguments: Any) -> list[Session]:
        await draw(self, *arguments)
        for session in self._membership.welcomed():
            await self._make_replica(session.device)
        return self._membership.welcomed()

    monkeypatch.setattr(Participants, "draw", everyone)
    assert found(with_draws) == "draws are fair"


@pytest.mark.slow
def test_replicas_of_devices_that_are_not_drawn_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Participants.release_absent

    def of_the_absent(self: Participants) -> None:
        self._drawn = None
        release(self)

    monkeypatch.setattr(Participants, "release_absent", of_the_absent)
    # They are in memory, and still have the weights of the round that they were drawn for.
    assert found(with_draws) in ("memory is bounded", "aggregate is the mean")


@pytest.mark.slow
def test_passes_in_the_order_of_the_first_one_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    holds(in_passes)
    monkeypatch.setattr(Orders, "passes", lambda self, epoch: [epoch] * self.local_epochs)
    assert found(in_passes) == "aggregate is the mean"


@pytest.mark.slow
@pytest.mark.parametrize("ignoring", ["server", "device"])
def test_gradients_that_are_clipped_by_the_norm_of_one_side_are_found(
    ignoring: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    holds(clipped)
    if ignoring == "server":
        monkeypatch.setattr(serving, "read_norm", lambda _: 0.0)
    else:
        monkeypatch.setattr("pipar.device.pipeline.read_norm", lambda _: 0.0)
    assert found(clipped) == "aggregate is the mean"


def evaluated(seed: int) -> Scenario:
    """Return a world whose devices evaluate every model, and in which one is cut off and the server crashes."""
    faults = Fault(1.0, "cut", "device-1", 0.5, 1), Fault(4.0, "crash-server", "", 0.5, 1)
    return quiet(seed, *faults, evaluates=True, rounds=6)


@pytest.mark.slow
def test_values_of_another_model_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    holds(evaluated)
    evaluator = HeldOutSamples.evaluator

    def with_the_first_layers_it_had(self: HeldOutSamples, part: Any, body: Body) -> Any:
        first = self.__dict__.setdefault("first", copied(part.state()))
        return evaluator(self, SimpleNamespace(state=lambda: first), body)

    monkeypatch.setattr(HeldOutSamples, "evaluator", with_the_first_layers_it_had)
    assert found(evaluated) == "evaluation is of the model"
