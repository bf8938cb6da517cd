"""Work for one device that fails, for whatever reason, ends the session of this device and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.hostile import at_iteration, only_one_sample
from support.roaming import A, B, C, Roamed, roam, same
from support.server_world import ScriptedLearner, by_hand, honest, train
from support.training import Case

from pipar.errors import SessionOverError
from pipar.events import Dropped, Lost
from pipar.launch.sizes_only import SizesOnlyServerPart
from pipar.nn.learner import TorchLearner
from pipar.nn.server_part import TorchServerPart
from pipar.server import membership
from pipar.server.device_messages import Introduction
from pipar.wire.messages import Kind, Message, json_body
from pipar.wire.orders import TrainedPart

METHODS = {"pipar": (2,), "sfl": (1,), "sfl2": (1,), "sl": (1,)}


def case(method: str, *, norm: str = "batch") -> Case:
    return Case(method, micro_batches=METHODS[method], norm=norm, encoding="raw", sizes=(230, 130, 157))


def without_c(method: str, *, norm: str = "batch") -> Roamed:
    return roam(case(method, norm=norm), {}, absent={C})


def excluded(trained: Roamed) -> list[tuple[str, int]]:
    return [(event.device, event.epoch) for event in trained.of(Dropped)]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_micro_batch_that_batch_normalisation_refuses_costs_only_its_device(method: str) -> None:
    trained = roam(case(method), {}, tampers={C: at_iteration(2, only_one_sample)})
    assert excluded(trained) == [(C, 1)]
    assert [sorted(counted) for counted in trained.counted] == [[A, B], [A, B]]
    assert "Expected more than 1 value per channel" in str(trained.endings[C])
    assert [event.device for event in trained.of(Lost)] == [C]
    if method != "sfl2":  # where the device's first batch stays in the shared model
        assert same(trained.state, without_c(method).state)


ERRORS: dict[str, tuple[type[Exception], str]] = {
    "a value error": (ValueError, "Expected more than 1 value per channel when training"),
    "torch's error": (RuntimeError, "shape '[4, 4]' is invalid for input of size 5"),
    "no memory": (MemoryError, ""),
    "an index": (IndexError, "Target 10 is out of bounds."),
}
STAGES = ("decode", "forward", "backward", "encode", "step")


def failing(stage: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one stage of the server fail for the third device, on its first batch."""
    real: Callable[..., Any] = getattr(TorchServerPart, stage)
    real_decode = TorchServerPart.decode
    serving: dict[TorchServerPart, bool] = {}

    def decode(self: TorchServerPart, message: Any, encoding: str) -> Any:
        serving[self] = message.batch_samples == 57
        return fails(self, message, encoding) if stage == "decode" else real_decode(self, message, encoding)

    def fails(self: TorchServerPart, *arguments: Any, **named: Any) -> Any:
        if not serving[self]:
            return real(self, *arguments, **named)
        if stage == "step":  # as far as to leave a step half done
            with torch.no_grad():
                next(self.module.parameters()).add_(1.0)
        kind, text = ERRORS[error]
        raise kind(text)

    monkeypatch.setattr(TorchServerPart, stage, fails)
    monkeypatch.setattr(TorchServerPart, "decode", decode)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stage", STAGES)
def test_an_error_in_any_stage_leaves_the_weights_of_a_training_without_the_device(
    method: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Case(method, micro_batches=(1,), norm="batch", encoding="raw", sizes=(100, 100, 57))
    expected = roam(small, {}, absent={C})
    failing(stage, "torch's error", monkeypatch)
    trained = roam(small, {}, tampers={C: lambda message: message})
    assert excluded(trained) == [(C, 1)]
    assert trained.counted == expected.counted
    if (stage, method) == ("step", "sfl2"):  # the others' batches of the round are taken back with the half step
        assert all(tensor.isfinite().all() for tensor in trained.state.values())
    else:
        assert same(trained.state, expected.state)


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS)
def test_whatever_the_error_is_the_others_train_on(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failing("forward", error, monkeypatch)
    small = Case("pipar", micro_batches=(1,), encoding="raw", sizes=(100, 100, 57))
    trained = roam(small, {}, tampers={C: lambda message: message})
    assert [sorted(counted) for counted in trained.counted] == [[A, B], [A, B]]
    assert (C, 1) in excluded(trained)


class Unreadable(ScriptedLearner):
    """A learner on which work for the device "b" fails before its first batch."""

    def replica(self, device: str) -> SizesOnlyServerPart:
        if device == "b":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return super().replica(device)


def test_a_device_whose_replica_cannot_be_made_is_dismissed_alone() -> None:
    outcome = train([honest("a"), honest("b")], epochs=2, learner=Unreadable)
    assert outcome.failure is None
    assert outcome.counted == [{"a": 20}, {"a": 20}]
    assert isinstance(outcome.lives[1], SessionOverError)  # it may join again when there is memory
    assert "allocate memory" in str(outcome.lives[1])
    assert outcome.left_running == 0


def test_a_message_whose_reading_fails_ends_only_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a mistake in a reader")

    monkeypatch.setattr("pipar.server.membership.read_json", fails)
    last = Message(Kind.FAULT, body=json_body({"reason": "tired"}))
    outcome = train([honest("a"), by_hand(Kind.ROUND, last)], epochs=2)
    assert outcome.failure is None
    assert [event.device for event in outcome.of(Lost)] == ["b"]
    assert "RuntimeError: a mistake in a reader" in str(outcome.lives[1])
    assert outcome.counted == [{"a": 20}, {"a": 20}]


def test_a_hello_whose_reading_fails_is_refused_and_the_others_train(monkeypatch: pytest.MonkeyPatch) -> None:
    real = membership.read_hello

    def fails(message: Message, *rest: Any) -> Introduction:
        introduction = real(message, *rest)
        if introduction.name == "b":
            raise OverflowError("int too large to convert to float")
        return introduction

    monkeypatch.setattr(membership, "read_hello", fails)
    outcome = train([honest("a"), by_hand(Kind.ROUND)], begin_with=1, epochs=2)
    assert outcome.failure is None
    assert outcome.counted == [{"a": 20}, {"a": 20}]
    assert "OverflowError: int too large" in str(outcome.lives[1])


@pytest.mark.slow
def test_a_returned_model_whose_reading_fails_excludes_only_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    real = TorchLearner._device_state

    def fails(self: TorchLearner, back: TrainedPart) -> Any:
        if back.device == C:
            raise KeyError("conv9.weight")
        return real(self, back)

    monkeypatch.setattr(TorchLearner, "_device_state", fails)
    small = Case("pipar", micro_batches=(1,), encoding="raw", sizes=(100, 100, 57))
    trained = roam(small, {}, tampers={C: lambda message: message})
    assert excluded(trained) == [(C, 1)]
    assert "conv9.weight" in str(trained.endings[C])
