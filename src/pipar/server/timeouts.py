"""How long a server waits for a device: chosen from the cost model, and from what rounds and links have shown.

    silent        a device that shows no sign of life for this long is lost
    resume        a device whose connection broke keeps its place for this long
    limit         a device that is alive, but has not finished its round by then, is excluded from it

The first two bound the cost of a dead device: less than two normal rounds. The third bounds the cost of a device that
is alive but does not finish. It is several times what the device has needed so far, and grows while the device makes
progress. Neither the device's claims nor its earlier rounds can raise it beyond a multiple of what the others take.

Everything here is a pure function of what is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from pipar.units import format_seconds

#: The slowest link that is not taken for a dead one, while nothing is known about it.
SLOWEST_BPS = 100_000.0
#: A dead device is waited for this many normal rounds, and never for less than the first wait of its reconnection
#: (see `backoff.py`) and the time that a busy machine may take.
_DEAD_ROUNDS, _LEAST_S = 1.5, 0.8
#: Longer than this only if rounds are long: then for this share of one.
_USUAL_S, _LONG_SHARE = 30.0, 0.25
#: Before the first round only its forecast is known, which does not know the links: this many times the forecast,
#: within these bounds.
_FORECAST_FACTOR, _LEAST_FIRST_S = 10.0, 5.0
#: How many times the longest silence so far, and the time of the largest frame on the link, are explained by jitter.
_SILENCE_FACTOR, _FRAME_FACTOR = 2.0, 3.0
#: Neither lets a dead device cost more than this many normal rounds.
_MOST_ROUNDS = 1.85
#: A device may take this many times as long as it took before; while it makes progress, this many times.
_SLOWER, _MUCH_SLOWER = 4.0, 12.0
#: But no longer than this many times the median of all devices, unless its own shortest round was long.
_USUAL_ROUNDS = 25.0
#: And this long in any case, before its first complete round and after it.
_LEAST_FIRST_LIMIT_S, _LEAST_LIMIT_S = 60.0, 5.0
#: A device that makes progress at a steady rate may take this many times as long as that rate shows.
_PROJECTED = 1.5
#: In its first round, it may take this many times as long as over the slowest link.
_SLOWEST_FACTOR = 4.0
#: Signs of life are due this many times in the time after which a device counts as lost, and at least this many times
#: while a device has not heard of a shorter time yet.
_SIGNS, _LEAST_SIGNS = 6, 4
_SHORTEST_SIGN_S, _LONGEST_SIGN_S = 0.1, 10.0
#: The device notices a dead connection before the server gives its place away, but reconnects no more often than this.
_DEVICE_SHARE, _LEAST_DEVICE_S = 0.7, 5.0


@dataclass(frozen=True)
class Forecast:
    """How long a device's round takes by the cost model: with the links that are known, and over the slowest ones."""

    round_s: float
    slowest_s: float


@dataclass(frozen=True)
class Knowledge:
    """What is known of one device, its link and the rounds so far; the last few of each, the newest last."""

    forecast: Forecast | None = None
    rounds_s: tuple[float, ...] = ()  # of all devices together
    own_s: tuple[float, ...] = ()  # of this device: from the order to train to its trained model
    shortest_s: float = 0.0  # of all its complete rounds; 0 before the first one
    usual_s: float | None = None  # what devices take, this one among them, at the median; None if there is no other
    silences_s: tuple[float, ...] = ()  # the longest of each of its rounds
    frame_bytes: int = 0  # the largest that travels either way
    model_bytes: int = 0
    up_bps: float | None = SLOWEST_BPS  # as measured; None means no limit
    down_bps: float | None = SLOWEST_BPS
    sign_every_s: float = 0.0  # how often it was told to show signs of life, at the rarest that may still apply
    wait_factor: float = 1.0  # above 1 after it was taken for dead and was not
    misses: int = 0  # rounds in a row that ended without it

    @property
    def normal_s(self) -> float | None:
        """The length of a normal round; None before the first one is complete."""
        return median_low(self.rounds_s) if self.rounds_s else None


class Choice(NamedTuple):
    """A number of seconds, and what it follows from."""

    seconds: float
    reason: str


def resume_window(known: Knowledge) -> Choice:
    """Return how long a device whose connection broke keeps its place."""
    chosen = _dead_after(known)
    return Choice(chosen.seconds * known.wait_factor, chosen.reason)


def silent_after(known: Knowledge) -> Choice:
    """Return after how long without a sign of life a device is lost.

    A sign of life waits for the frame ahead of it, so a slow link makes the silence longer. A device that has not
    completed a round yet may have any link.
    """
    chosen = _dead_after(known)
    frame_s, longest_s = _frame_s(known, known.up_bps), max(known.silences_s, default=0.0)
    explained_s = max(_SILENCE_FACTOR * longest_s, _FRAME_FACTOR * frame_s)
    if known.normal_s is not None and known.own_s:  # rounds with a slow device are not normal at first
        explained_s = min(explained_s, _MOST_ROUNDS * max(known.normal_s, min(known.own_s)))
    explained_s = max(explained_s, _LEAST_SIGNS * known.sign_every_s)
    if explained_s > chosen.seconds:
        chosen = Choice(
            explained_s, f"{chosen.reason}, frames that take up to {format_seconds(max(frame_s, longest_s), 2)}"
        )
    return Choice(chosen.seconds * known.wait_factor, chosen.reason)


def _dead_after(known: Knowledge) -> Choice:
    if (normal_s := known.normal_s) is not None:
        most_s = max(_USUAL_S, _LONG_SHARE * normal_s)
        return Choice(max(_LEAST_S, min(_DEAD_ROUNDS * normal_s, most_s)), f"rounds of {format_seconds(normal_s, 2)}")
    if known.forecast is None:
        return Choice(_USUAL_S, "no round and no forecast yet")
    forecast_s = known.forecast.round_s
    within_s = max(_LEAST_FIRST_S, min(_FORECAST_FACTOR * forecast_s, _USUAL_S))
    return Choice(within_s, f"rounds of {format_seconds(forecast_s, 2)} forecast, links not measured yet")


def _frame_s(known: Knowledge, rate_bps: float | None) -> float:
    return 0.0 if rate_bps is None else known.frame_bytes * 8 / rate_bps


def round_limit(known: Knowledge, elapsed_s: float = 0.0, progress: float = 0.0) -> Choice:
    """Return how long a device may take for its round, if `progress` (from 0 to 1) is done after `elapsed_s`."""
    projected_s = _PROJECTED * elapsed_s / progress if progress > 0 else 0.0
    # Until the first activations arrive, or the model in federated learning, nothing shows its progress.
    models_s = _PROJECTED * (2 * known.model_bytes + known.frame_bytes) * 8 / SLOWEST_BPS
    others_s = math.inf if known.usual_s is None else _USUAL_ROUNDS * known.usual_s
    slowest_s = 0.0 if known.forecast is None else known.forecast.slowest_s
    if known.own_s:
        own_s, shortest_s = max(known.own_s), known.shortest_s
        least_s = max(_LEAST_LIMIT_S, min(_SLOWER * own_s, max(_SLOWER * shortest_s, others_s + models_s)))
        most_s = min(_MUCH_SLOWER * own_s, max(_MUCH_SLOWER * shortest_s, others_s + models_s, slowest_s))
        limit_s, reason = max(least_s, min(projected_s, most_s)), f"its rounds took up to {format_seconds(own_s, 2)}"
    elif known.forecast is None:
        return Choice(math.inf, "no round and no forecast yet")
    else:
        least_s = max(_LEAST_FIRST_LIMIT_S, min(_FORECAST_FACTOR * known.forecast.round_s, others_s) + models_s)
        limit_s = max(least_s, min(projected_s, _SLOWEST_FACTOR * slowest_s))
        reason = f"a round of {format_seconds(known.forecast.round_s, 2)} forecast"
    return Choice(max(limit_s / (1 + known.misses), known.normal_s or 0.0), reason)


def signs_of_life(known: Knowledge) -> dict[str, float]:
    """Return what a device is told: how often to show that it is alive, and when to give a silent connection up."""
    silent_s = dead_s = silent_after(known).seconds
    if not known.own_s:  # as often as the next round may need
        expected_s = known.normal_s or (math.inf if known.forecast is None else known.forecast.round_s)
        dead_s = min(silent_s, _DEAD_ROUNDS * expected_s)
    every_s = min(_LONGEST_SIGN_S, max(_SHORTEST_SIGN_S, dead_s / _SIGNS))
    frame_s = _frame_s(known, known.down_bps)
    given_up_s = max(_LEAST_DEVICE_S, _DEVICE_SHARE * silent_s, 3 * every_s, _FRAME_FACTOR * frame_s)
    return {"alive_every_s": round(every_s, 3), "silent_after_s": round(given_up_s, 3)}
