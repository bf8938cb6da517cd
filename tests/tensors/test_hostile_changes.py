"""A device that returns invalid changes is dismissed by name, and the server continues."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipar.errors import ProtocolError, UnusableModelError
from pipar.nn.learner import LearnerSettings, TorchLearner
from pipar.nn.optimizers import sgd
from pipar.tasks.task import classification
from pipar.tensors.bodies import read_state
from pipar.wire.messages import Body
from pipar.wire.orders import TrainedPart


def changes(payload: bytes) -> Body:
    return Body.of(payload, encoding="changes")


@pytest.mark.parametrize("payload", [b"", bytes(1), b"\0\0more", b"\x02\0", b"\x01\x01", b"\x09\0"])
def test_a_device_that_returns_no_valid_model_is_named(payload: bytes) -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    learner = TorchLearner(model, {"pi": 1}, LearnerSettings(sgd(), task=classification(2)))
    before = learner.sha256()
    with pytest.raises(UnusableModelError, match="pi returned"):
        learner.aggregate([TrainedPart("pi", changes(payload), 5)])
    assert learner.sha256() == before


def test_changes_of_a_model_that_numpy_cannot_hold_are_refused() -> None:
    """Changes of such a model are never sent, but a device may claim to send them."""
    with pytest.raises(ProtocolError):
        read_state(changes(b"\0"), {"scale": torch.ones(2, dtype=torch.bfloat16)})
