"""What the reports of a running training add up to: how far it is, how quick, and how busy its lanes are.

How quickly a run gets on by the clock on the wall, and when it will be done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pipar.events import EpochResult, Event, Joined, Progress, RoundOver, Started
from pipar.execution.spans import COMPUTE, CORE, DOWNLINK, SERVER, UPLINK

#: How many reports of one owner a lane's utilisation is taken over.
_WINDOW = 4


class TrainingProgress:
    """What the reports of both sides say about the running training: how far it is, and how busy the lanes are.

    Devices on other machines report nothing here; then the server's reports alone say how far it is.
    """

    def __init__(self) -> None:
        self.started: Started | None = None
        self.last: EpochResult | None = None
        self.loss: float | None = None  # of the last batch that anybody reported
        self.joined = 0
        self._reports: dict[str, deque[Progress]] = {}
        self._first: dict[str, Progress] = {}
        self._epoch_samples = 0  # that an epoch has
        self._samples_before = 0  # that the server had served when the epoch began which it reports of

    def take(self, event: Event) -> None:
        if isinstance(event, Progress):
            if event.owner == SERVER:
                self._note_epoch(event)
            self._first.setdefault(event.owner, event)
            self._reports.setdefault(event.owner, deque(maxlen=_WINDOW)).append(event)
            self.loss = self.loss if event.loss is None else event.loss
        elif isinstance(event, Started):
            self.started, self.last, self.loss, self.joined = event, None, None, 0
            self._reports, self._first = {}, {}
            self._epoch_samples, self._samples_before = sum(event.samples.values()), 0
        elif isinstance(event, Joined):
            self.joined = event.devices
        elif isinstance(event, EpochResult):
            self.last = event
        elif isinstance(event, RoundOver):
            self._epoch_samples = sum(event.counted.values()) or self._epoch_samples

    def _note_epoch(self, report: Progress) -> None:
        before = self._reports.get(SERVER)
        if before and before[-1].epoch < report.epoch:
            self._samples_before = before[-1].samples

    @property
    def running(self) -> bool:
        """True when a first report has come."""
        return bool(self._reports)

    def place(self) -> tuple[int, int, int, float]:
        """Return epoch, iteration and iterations of who is furthest, and the share of that epoch that all have done."""
        latest = self._latest()
        if self.started is None or not latest:
            return self._place_of_server()
        epoch = max(report.epoch for report in latest)
        furthest = max((report for report in latest if report.epoch == epoch), key=lambda report: report.iteration)
        shares = [report.iteration / self._iterations(report) for report in latest if report.epoch == epoch]
        share = sum(shares) / len(self.started.samples)
        return (epoch, furthest.iteration, self._iterations(furthest), share)

    def _place_of_server(self) -> tuple[int, int, int, float]:
        report = self.report(SERVER)
        if self.started is None or report is None:
            return (1, 0, 0, 0.0)
        served = report.samples - self._samples_before
        share = min(1.0, served / self._epoch_samples) if self._epoch_samples else 0.0
        return (report.epoch, report.iteration, max(self.started.iterations.values(), default=0), share)

    def report(self, owner: str) -> Progress | None:
        """Return the last report of a device, or of the server."""
        reports = self._reports.get(owner)
        return reports[-1] if reports else None

    def device_place(self, name: str) -> tuple[int, int] | None:
        """Return epoch and iteration that a device has come to, by itself or as the server saw it; None if unknown."""
        own, server = self.report(name), self.report(SERVER)
        if own is not None:
            return own.epoch, own.iteration
        return server.served.get(name) if server is not None else None

    def samples_per_s(self) -> float | None:
        """Return the samples that all devices train in a second of their clock, from their first report on."""
        # A screen is drawn by another thread: a new run may have begun since its reports were looked up.
        pairs = [(self._first.get(report.owner), report) for report in self._latest()]
        rates = [self._rate(first, last) for first, last in pairs if first is not None]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known else self._samples_served_per_s()

    def _samples_served_per_s(self) -> float | None:
        first, last = self._first.get(SERVER), self.report(SERVER)
        if first is None or last is None or last.at_s <= first.at_s:
            return None
        return (last.samples - first.samples) / (last.at_s - first.at_s)

    def busy(self, owner: str) -> dict[str, float]:
        """Return the busy share of each lane of a device, or of the server, as far as its reports say it."""
        return _busy_shares(self._reports.get(owner, ()))

    def utilisation(self) -> dict[str, float | None]:
        """Return the busy share of the four lanes, the mean over devices and cores; None where no reports say it."""
        owners = dict(self._reports)
        server = _busy_shares(owners.pop(SERVER, ()))
        devices = [shares for reports in owners.values() if (shares := _busy_shares(reports))]
        cores = [share for lane, share in server.items() if lane.startswith(CORE)]
        return {
            "device": _mean([shares.get(COMPUTE, 0.0) for shares in devices]),
            "uplink": _mean([shares.get(UPLINK, 0.0) for shares in devices]),
            "server": sum(cores) / self.started.cores if self.started and cores else None,
            "downlink": server.get(DOWNLINK),
        }

    def _latest(self) -> list[Progress]:
        return [reports[-1] for owner, reports in list(self._reports.items()) if owner != SERVER and reports]

    def _iterations(self, report: Progress) -> int:
        return self.started.iterations.get(report.owner, 1) if self.started else 1

    def _rate(self, first: Progress, last: Progress) -> float | None:
        iterations = self._iterations(first)
        done = (last.epoch - first.epoch) * iterations + last.iteration - first.iteration
        elapsed = last.at_s - first.at_s
        return done / iterations * last.samples / elapsed if elapsed > 0 else None


def _busy_shares(reports: Sequence[Progress]) -> dict[str, float]:
    """Return each lane's busy time from the first to the last report over the time between; {} if that is none."""
    if not reports or (elapsed := reports[-1].at_s - reports[0].at_s) <= 0:
        return {}
    first, last = reports[0], reports[-1]
    return {lane: min(1.0, (busy - first.busy_s.get(lane, 0.0)) / elapsed) for lane, busy in last.busy_s.items()}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


#: How many of the last epochs say how quick the next ones will be: links and plans may have changed before them.
_EPOCHS = 3
#: Less of an epoch than this says nothing about how long all of them take.
_TELLING_SHARE = 0.02


class TimeEstimate:
    """Notes how many epochs, and which share of the next one, are done at which time."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[float, float]] = {}  # by epoch: its first sign, as (epochs done, time)
        self._last: tuple[float, float] | None = None

    def begin(self, done: float, at: float) -> None:
        """The first epoch begins no earlier than at this time, unless there was a sign of it.

        Without it the first signs, which come of all devices at once, would look like a great pace.
        """
        if self._last is None:
            self._begun = {int(done): (done, at)}

    def note(self, done: float, at: float) -> None:
        """At this time so many epochs were done."""
        if self._last is None or done > self._last[0]:
            self._begun.setdefault(int(done), (done, at))
            self._last = (done, at)

    def ends_at(self, epochs: int) -> float | None:
        """Return when so many epochs will be done, as far as the last few tell; None if they do not."""
        if self._last is None:
            return None
        done, at = self._last
        first = min(epoch for epoch in self._begun if epoch >= int(done) - _EPOCHS)
        done_before, at_before = self._begun[first]
        if done - done_before < _TELLING_SHARE or at <= at_before:
            return None
        return at + (epochs - done) * (at - at_before) / (done - done_before)
