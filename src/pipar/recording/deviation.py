"""How far a replay differs from its recording, and the likely cause: what-if answers are no better than that."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pipar.recording.flight import Flight, RecordedRound

#: Replays of trainings on quiet machines differ by less.
MOST_SHARE = 0.03
#: A single round may differ more, by what the machines did in it.
_MOST_SHARE_OF_ROUND = 0.1


def distrust(flight: Flight, replayed_s: Mapping[int, float]) -> str:
    """Return why answers to what-if questions are not reliable, in one sentence; "" if they are.

    `replayed_s` are the seconds of the replayed rounds by number.
    """
    shares = {one.number: replayed_s[one.number] / one.seconds - 1 for one in flight.rounds if one.seconds > 0}
    recorded_s = math.fsum(one.seconds for one in flight.rounds)
    if not shares or not recorded_s:
        return ""
    whole = math.fsum(replayed_s[number] for number in shares) / recorded_s - 1
    worst = max(shares, key=lambda number: abs(shares[number]))
    if abs(whole) <= MOST_SHARE and abs(shares[worst]) <= _MOST_SHARE_OF_ROUND:
        return ""
    return (
        f"Do not trust what-if answers from this recording: its replay differs by {100 * whole:+.1f} % in total and "
        f"{100 * shares[worst]:+.1f} % in round {worst}. Likely cause: {_cause(flight, replayed_s, worst)}."
    )


def _cause(flight: Flight, replayed_s: Mapping[int, float], number: int) -> str:
    one = next(one for one in flight.rounds if one.number == number)
    if replayed_s[number] < one.seconds:
        return "devices or the server waited for something that is not recorded, such as programs on their machines"
    if any(max(_on_link_s(one, name)) > 0.5 * (replayed_s[number] - one.seconds) for name in one.rates):
        return "the measured rates of links are too low, because the machines were busy with other programs"
    return "the machines were busy with other programs, so that work took longer than without them"


def _on_link_s(one: RecordedRound, device: str) -> list[float]:
    """Return how long the bytes of a round were on a device's link, up and down, at the measured rates."""
    sent = [one.times.up.get(device), one.times.down.get(device)]
    return [
        8 * (of.tensor_bytes + of.model_bytes) / rate if of is not None and rate else 0.0
        for of, rate in zip(sent, one.rates[device], strict=True)
    ]
