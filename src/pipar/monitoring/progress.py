"""How far a running training is: its epoch and iteration, its speed, how busy its lanes are, and when it will end.

`TrainingProgress` sums up the events of both sides by their own clocks, virtual or real. `TimeEstimate` predicts the
end by the wall clock. The terminal and the live page show both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pipar.events import Drawn, EpochResult, Event, Joined, Progress, RoundOver, Started
from pipar.execution.spans import COMPUTE, CORE, DOWNLINK, SERVER, UPLINK

#: Reports of one owner over which the utilisation of its lanes is averaged.
_WINDOW = 4
#: Recent epochs from which the next ones are predicted: before them, links and plans may have been different.
_RECENT_EPOCHS = 3
#: A smaller share of an epoch is too little to predict a whole one from.
_LEAST_SHARE = 0.02


class TrainingProgress:
    """The state of the running training, from the reports of the server and the devices.

    Devices on other machines send no reports to this process; then the server's reports alone say how far it is.
    """

    def __init__(self) -> None:
        self.started: Started | None = None
        self.last: EpochResult | None = None
        self.loss: float | None = None  # of the latest batch that any device reported
        self.joined = 0
        self.drawn = (0, 0)  # for the current round, and of how many; 0 if devices are not drawn
        self._reports: dict[str, deque[Progress]] = {}
        self._first: dict[str, Progress] = {}
        self._epoch_samples = 0  # samples of a whole epoch
        self._samples_before = 0  # samples that the server had served before the current epoch

    def take(self, event: Event) -> None:
        """Update the state by one event."""
        if isinstance(event, Progress):
            if event.owner == SERVER:
                self._note_epoch(event)
            self._first.setdefault(event.owner, event)
            self._reports.setdefault(event.owner, deque(maxlen=_WINDOW)).append(event)
            self.loss = self.loss if event.loss is None else event.loss
        elif isinstance(event, Started):
            self.started, self.last, self.loss, self.joined = event, None, None, 0
            self._reports, self._first = {}, {}
            self._epoch_samples, self._samples_before = event.local_epochs * sum(event.samples.values()), 0
        elif isinstance(event, Drawn) and self.started is not None:
            self.drawn = (len(event.devices), event.present)
            known = [self.started.samples.get(name, 0) for name in event.devices]
            self._epoch_samples = self.started.local_epochs * sum(known)
        elif isinstance(event, Joined):
            self.joined = event.devices
        elif isinstance(event, EpochResult):
            self.last = event
        elif isinstance(event, RoundOver):
            passes = self.started.local_epochs if self.started else 1
            self._epoch_samples = passes * sum(event.counted.values()) or self._epoch_samples

    def _note_epoch(self, report: Progress) -> None:
        before = self._reports.get(SERVER)
        if before and before[-1].epoch < report.epoch:
            self._samples_before = before[-1].samples

    @property
    def running(self) -> bool:
        """True once the first report has arrived."""
        return bool(self._reports)

    def place(self) -> tuple[int, int, int, float]:
        """Return epoch, iteration and iterations of the furthest device, and the share of that epoch done by all."""
        latest = self._latest()
        if self.started is None or not latest:
            return self._place_of_server()
        epoch = max(report.epoch for report in latest)
        furthest = max((report for report in latest if report.epoch == epoch), key=lambda report: report.iteration)
        shares = [report.iteration / self._iterations(report) for report in latest if report.epoch == epoch]
        share = sum(shares) / (self.drawn[0] or len(self.started.samples))
        return (epoch, furthest.iteration, self._iterations(furthest), share)

    def _place_of_server(self) -> tuple[int, int, int, float]:
        report = self.report(SERVER)
        if self.started is None or report is None:
            return (1, 0, 0, 0.0)
        served = report.samples - self._samples_before
        share = min(1.0, served / self._epoch_samples) if self._epoch_samples else 0.0
        return (report.epoch, report.iteration, max(self.started.iterations.values(), default=0), share)

    def report(self, owner: str) -> Progress | None:
        """Return the latest report of a device, or of the server."""
        reports = self._reports.get(owner)
        return reports[-1] if reports else None

    def device_place(self, name: str) -> tuple[int, int] | None:
        """Return epoch and iteration of a device, by its own report or the server's; None if neither has it."""
        own, server = self.report(name), self.report(SERVER)
        if own is not None:
            return own.epoch, own.iteration
        return server.served.get(name) if server is not None else None

    def samples_per_s(self) -> float | None:
        """Return the samples that all devices train per second of their clock, since their first reports."""
        # The screen is drawn by another thread: a new run may have begun since the latest reports were looked up.
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
        """Return the busy share of each lane of a device, or of the server; {} without enough reports."""
        return _busy_shares(self._reports.get(owner, ()))

    def utilisation(self) -> dict[str, float | None]:
        """Return the busy share of the four lanes, averaged over devices and cores; None without reports."""
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
    """Return the share of the time between the first and last report that each lane was busy; {} if that is 0."""
    if not reports or (elapsed := reports[-1].at_s - reports[0].at_s) <= 0:
        return {}
    first, last = reports[0], reports[-1]
    return {lane: min(1.0, (busy - first.busy_s.get(lane, 0.0)) / elapsed) for lane, busy in last.busy_s.items()}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


class TimeEstimate:
    """Predicts when a run will end, from notes of how many epochs, with fractions, were done at which time."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[float, float]] = {}  # by epoch: its first note, as (epochs done, time)
        self._last: tuple[float, float] | None = None

    def begin(self, done: float, at: float) -> None:
        """Set the start of the first epoch, unless progress has been noted already.

        Without it, the first reports, which arrive from all devices at the same time, would look like a high speed.
        """
        if self._last is None:
            self._begun = {int(done): (done, at)}

    def note(self, done: float, at: float) -> None:
        """Record that `done` epochs were finished at time `at`."""
        if self._last is None or done > self._last[0]:
            self._begun.setdefault(int(done), (done, at))
            self._last = (done, at)

    def ends_at(self, epochs: int) -> float | None:
        """Return when this number of epochs will be done, at the speed of recent epochs; None if unknown."""
        if self._last is None:
            return None
        done, at = self._last
        first = min(epoch for epoch in self._begun if epoch >= int(done) - _RECENT_EPOCHS)
        done_before, at_before = self._begun[first]
        if done - done_before < _LEAST_SHARE or at <= at_before:
            return None
        return at + (epochs - done) * (at - at_before) / (done - done_before)
