"""Devices refer only to activations that the server has kept and announced; others are excluded."""

from __future__ import annotations

from support.server_world import Kind, Message, activation, by_hand, honest, train

from pipar.events import Dropped
from pipar.wire.messages import Body


def reference(n: int = 1) -> Message:
    return Message(Kind.ACTIVATION, 1, 1, n, 5, 10, Body(20, encoding="kept"))


def test_a_device_that_refers_to_what_was_not_announced_is_excluded_and_the_others_train() -> None:
    for said in ((reference(),), (activation(n=1), reference(n=2))):
        outcome = train([honest("a"), by_hand(Kind.ROUND, *said, leaves=True)], devices=("a", "b"), epochs=2)
        assert outcome.failure is None
        (event,) = outcome.of(Dropped)
        assert (event.device, event.epoch) == ("b", 1)
        assert "refers to activations, but the server has not said that it has them" in event.reason
        assert outcome.counted == [{"a": 20}, {"a": 20}]
