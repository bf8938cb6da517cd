"""What the server has learned of its devices' times, and how long it waits for each of them now."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from statistics import median_low

from pipar.events import Observer, TimeoutsChosen
from pipar.planner.replanner import MeasuredLink
from pipar.server.session import Session
from pipar.server.timeouts import (
    SLOWEST_BPS,
    Forecast,
    Knowledge,
    resume_window,
    round_limit,
    signs_of_life,
    silent_after,
)
from pipar.transport.shaping import Traffic
from pipar.units import format_mbits
from pipar.wire.frames import CHUNK_BYTES

#: Rounds that are remembered.
_REMEMBERED = 5
#: A device that was wrongly taken for dead gets twice the time, up to this factor; each good round takes some away.
_MOST_WAIT_FACTOR, _CALMER = 8.0, 0.9
#: A round in which a device has done less than this share says nothing about how long it needs.
_TELLING = 0.05
_MOST_SLACK = 64.0
#: A device that has not finished takes at least as long as it has so far: up to this many of its shortest rounds.
_UNFINISHED = 4.0
#: A server whose timers fire late runs on a busy machine, and so may its devices: this many times the delay is added.
#: What is known of the delay is halved after this time.
_BUSY, _BUSY_FOR_S = 20.0, 30.0
#: Smaller delays are usual, and no delay explains a longer silence than this.
_LEAST_LATE_S, _MOST_BUSY_S = 0.02, 30.0
#: What devices take for a round is looked at again after this time.
_FRESH_S = 0.05
#: Timeouts are reported again if one of them has changed by more than this factor.
_NOTABLE = 2.0

#: Returns the forecasts of a round of these devices; none where nothing can be predicted.
MakeForecasts = Callable[[Collection[str]], Mapping[str, Forecast]]


@dataclass(frozen=True)
class ChosenTimeouts:
    """Which timeouts the server chooses by itself, and the forecast that it begins with."""

    deadline: bool = True
    resume_window: bool = True
    keepalive: bool = True
    forecasts: MakeForecasts = lambda _: {}


@dataclass
class _Device:
    """What is known of one device, over all its sessions."""

    own_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    shortest_s: float = 0.0  # of all its complete rounds
    silences_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    rates_bps: tuple[float | None, float | None] = (SLOWEST_BPS, SLOWEST_BPS)  # up, down
    forecast: Forecast | None = None
    wait_factor: float = 1.0
    misses: int = 0
    was_silent: bool = False  # its last session ended because nothing was heard from it


class LearnedTimeouts:
    """Decides how long the server waits for each device, where the configuration leaves that to it."""

    def __init__(self, chosen: ChosenTimeouts | None, observe: Observer) -> None:
        self.chooses_deadline = chosen is not None and chosen.deadline
        self.chooses_window = chosen is not None and chosen.resume_window
        self.watches_silence = chosen is not None and chosen.keepalive
        self._forecasts = chosen.forecasts if chosen is not None else lambda _: {}
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._rounds_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._devices: dict[str, _Device] = {}
        self._began: dict[Session, float] = {}  # when its round did
        self._took: dict[Session, float] = {}  # how long its round took, until its next one begins
        self._finished_at = self._missed_at = self._loop.time()
        self._wasted_s = 0.0  # of this round: waited for devices that did not finish it
        self._usual: tuple[float, float | None] | None = None  # when it was looked at, and `_usual_s`
        self._late_s, self._late_at = 0.0, 0.0  # how late the server's timers fired, and when
        self._whole: set[Session] = set()  # sessions with a complete round
        self._told: dict[Session, tuple[float, ...]] = {}  # how often to show signs of life: before, and now
        self._slack = 1.0  # above 1 after a round that all devices were too slow for
        self._reported: tuple[float | None, ...] = ()

    @property
    def _is_needed(self) -> bool:
        return self.chooses_deadline or self.chooses_window or self.watches_silence

    # --- what happens

    def gathered(self, group: Collection[Session]) -> None:
        """These are the devices of the next round, at the same time or in turn."""
        if not self._is_needed:
            return
        self._wasted_s = 0.0
        if any(session not in self._whole for session in group):
            for name, forecast in self._forecasts([session.device for session in group]).items():
                self._of(name).forecast = forecast
        self._report(group)

    def begin_round(self, group: Collection[Session]) -> None:
        """These devices are told to train now."""
        if not self._is_needed:
            return
        now = self._finished_at = self._missed_at = self._loop.time()
        self._began = {**{s: at for s, at in self._began.items() if not s.is_over}, **dict.fromkeys(group, now)}
        self._usual = None
        self._took = {s: took for s, took in self._took.items() if not (s.is_over or s in group)}
        self._whole = {session for session in self._whole if not session.is_over}
        self._told = {session: told for session, told in self._told.items() if not session.is_over}

    def signs_of_life(self, session: Session) -> dict[str, float]:
        """Return what a device is told about signs of life; nothing if they are not watched."""
        if not self.watches_silence:
            return {}
        told = signs_of_life(replace(self._known(session), sign_every_s=0.0))
        self._told[session] = (*self._told.get(session, ())[-1:], told["alive_every_s"])
        return told

    def finished(self, session: Session, link: MeasuredLink | None) -> None:
        """A device has returned its part of the model."""
        if not self._is_needed or session not in self._began:
            return
        device, now = self._of(session.device), self._loop.time()
        took_s = self._took[session] = now - self._began[session]
        device.own_s.append(took_s)
        device.shortest_s = min(device.shortest_s or took_s, took_s)
        if self._began[session] < self._missed_at:  # it trained meanwhile, so no time was wasted
            self._wasted_s = 0.0
        self._finished_at, self._usual = now, None
        device.misses, device.wait_factor = 0, max(1.0, device.wait_factor * _CALMER)
        silence = session.channel.silence
        if silence.peer_shows_life:
            device.silences_s.append(silence.take_longest_s())
        if link is not None:
            up, down = device.rates_bps
            device.rates_bps = (_rate(link.up, up), _rate(link.down, down))
        self._whole.add(session)
        self._told[session] = self._told.get(session, ())[-1:]  # it has surely heard of the last one

    def missed(self, session: Session) -> None:
        """A round has ended without a device that is alive; what it has done shows how long it needs."""
        device, progress = self._of(session.device), self._progress(session)
        device.misses += 1
        if progress > _TELLING and device.forecast is not None:
            device.own_s.append(min(self.elapsed_s(session) / progress, device.forecast.slowest_s))
            self._whole.add(session)

    def left_out(self, session: Session) -> None:
        """A device has not finished its round, for whatever reason; the others may have waited for it."""
        if session in self._began:
            now = self._loop.time()
            self._wasted_s += now - max(self._finished_at, self._missed_at)
            self._missed_at = now

    def lengthen(self) -> None:
        """A round has ended without any device, because all of them took too long: they get twice the time."""
        self._slack = min(_MOST_SLACK, 2 * self._slack)
        for device in self._devices.values():
            device.misses = 0

    def round_is_over(self, seconds: float) -> None:
        """A round is complete; it took this long. Time that was wasted on lost devices does not count."""
        self._rounds_s.append(max(0.0, seconds - self._wasted_s))
        self._slack = 1.0

    def fell_silent(self, session: Session) -> None:
        """The session of a device ends because nothing was heard from it."""
        self._of(session.device).was_silent = True

    def tried_to_resume(self, name: str) -> None:
        """A device wants to resume a session that is over: if that ended in silence, the device was alive."""
        device = self._devices.get(name)
        if device is not None and device.was_silent:
            device.was_silent, device.wait_factor = False, min(_MOST_WAIT_FACTOR, 2 * device.wait_factor)

    def woke_late(self, seconds: float) -> None:
        """A timer of the server has fired this much too late."""
        if seconds > max(_LEAST_LATE_S, self._busy_s / _BUSY):
            self._late_s, self._late_at = seconds, self._loop.time()

    @property
    def _busy_s(self) -> float:
        """How much longer devices are waited for because the machine is busy."""
        now_s: float = self._late_s * 0.5 ** ((self._loop.time() - self._late_at) / _BUSY_FOR_S)
        return min(_MOST_BUSY_S, _BUSY * now_s)

    # --- how long to wait

    def silent_after_s(self, session: Session) -> float:
        """Return after how long without a sign of life a device is lost; never if it has not shown one yet."""
        if not self.watches_silence or not session.channel.silence.peer_shows_life:
            return math.inf
        return silent_after(self._known(session)).seconds + self._busy_s

    def resume_window_s(self, session: Session) -> float:
        """Return how long a device whose connection broke keeps its place."""
        return resume_window(self._known(session)).seconds + self._busy_s

    def round_limit_s(self, session: Session) -> float:
        """Return how long a device may take for its round by its progress so far."""
        known, progress = self._known(session), self._progress(session)
        return self._slack * round_limit(known, self.elapsed_s(session), progress).seconds

    @staticmethod
    def _progress(session: Session) -> float:
        return session.round.trained / max(1, session.round_samples)

    def elapsed_s(self, session: Session) -> float:
        """Return for how long a device has been in its round."""
        return self._loop.time() - self._began[session]

    def restart(self, sessions: Collection[Session]) -> None:
        """Count the round's time from now on for these devices: another one has held them up."""
        self._began |= dict.fromkeys(sessions, self._loop.time())
        self._usual = None

    def _of(self, name: str) -> _Device:
        return self._devices.setdefault(name, _Device())

    def _known(self, session: Session) -> Knowledge:
        device, allowance = self._of(session.device), session.allowance
        up_bps, down_bps = device.rates_bps
        return Knowledge(
            forecast=device.forecast,
            rounds_s=tuple(self._rounds_s),
            # A device that has joined again first gets the whole model, which takes longer than its changes.
            own_s=tuple(device.own_s) if session in self._whole else (),
            shortest_s=device.shortest_s,
            usual_s=self._usual_s(),
            silences_s=tuple(device.silences_s),
            frame_bytes=min(CHUNK_BYTES, max(allowance.activation_bytes, allowance.model_bytes)),
            model_bytes=allowance.model_bytes,
            up_bps=up_bps,
            down_bps=down_bps,
            sign_every_s=max(self._told.get(session, ()), default=0.0),
            wait_factor=device.wait_factor,
            misses=device.misses,
        )

    def _usual_s(self) -> float | None:
        """Return what devices take for this round, or took for their last one, at the median; None for a single device.

        While most of them have not finished, this grows.
        """
        now = self._loop.time()
        if self._usual is None or now - self._usual[0] > _FRESH_S:
            take_s = [self._takes_s(session) for session in self._began if not session.is_over]
            self._usual = (now, median_low(take_s) if len(take_s) > 1 else None)
        return self._usual[1]

    def _takes_s(self, session: Session) -> float:
        if session in self._took:
            return self._took[session]
        shortest_s = self._of(session.device).shortest_s
        return min(self.elapsed_s(session), _UNFINISHED * shortest_s or math.inf)

    # --- what was chosen

    def _report(self, group: Collection[Session]) -> None:
        """Report the timeouts of the device that is waited for longest, if they have changed much."""
        known = [self._known(session) for session in group]
        if not known:
            return
        silent, window, limit = (
            max((choose(one) for one in known), key=lambda choice: choice.seconds)
            for choose in (silent_after, resume_window, round_limit)
        )
        chosen = (
            silent.seconds if self.watches_silence else None,
            window.seconds if self.chooses_window else None,
            limit.seconds if self.chooses_deadline and math.isfinite(limit.seconds) else None,
        )
        if self._reported and not any(map(_differs, chosen, self._reported)):
            return
        self._reported = chosen
        rate = min((one.up_bps for one in known if one.up_bps is not None), default=None)
        self._observe(TimeoutsChosen(*chosen, silent.reason + _slowest(rate, known)))


def _rate(traffic: Traffic, before: float | None) -> float | None:
    """Return the measured rate of a direction; one that carried too little keeps its rate."""
    return traffic.rate_bps if traffic.is_enough else before


def _differs(now: float | None, before: float | None) -> bool:
    if now is None or before is None:
        return now is not before
    return not before / _NOTABLE <= now <= before * _NOTABLE


def _slowest(rate_bps: float | None, known: list[Knowledge]) -> str:
    is_measured = any(one.rounds_s for one in known) and rate_bps not in (None, SLOWEST_BPS)
    return (
        f", the slowest uplink has {format_mbits(rate_bps, 2)} Mbit/s" if is_measured and rate_bps is not None else ""
    )
