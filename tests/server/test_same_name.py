"""Two devices with one credential: one of them trains, and the other one is told why it does not."""

from __future__ import annotations

import pytest
from support.server_world import honest, roaming, train

from pipar.errors import TryAgainError
from pipar.events import Event, Lost, Reconnecting
from pipar.server.name_conflicts import NameConflicts


@pytest.mark.slow
def test_two_devices_with_one_credential_do_not_replace_each_other_for_ever() -> None:
    told: list[Event] = []
    clones = [
        roaming("b", proved=True, observe=told.append),
        roaming("b", proved=True, starts_s=2.0, observe=told.append),
    ]
    outcome = train([honest("a", samples=40), *clones], epochs=8)
    assert outcome.failure is None
    assert [sorted(counted) for counted in outcome.counted[2:]] == [["a", "b"]] * 6
    assert len(outcome.of(Lost)) == 2
    reasons = " ".join(event.reason for event in told if isinstance(event, Reconnecting))
    assert "two devices seem to share it. Give each its own, with 'pipar certs issue NAME'" in reasons
    assert outcome.lives == [None, None, None]  # the other one joins when the first has left


def test_a_device_that_loses_its_state_now_and_then_replaces_itself() -> None:
    conflicts = NameConflicts()
    for hours in range(10):
        conflicts.replace("b", hours * 3600.0)
    conflicts.replace("b", 9 * 3600.0 + 1)
    with pytest.raises(TryAgainError, match="'b' is connected, and has been replaced 2 times"):
        conflicts.replace("b", 9 * 3600.0 + 2)
    conflicts.replace("c", 9 * 3600.0 + 2)
