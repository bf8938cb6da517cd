"""Times and rates of a recorded training, for a replay: by device, round and place, or scaled to another plan."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipar.execution.work import Work
from pipar.job.job import Job
from pipar.methods import Plan
from pipar.planner.costs import Costs
from pipar.recording.flight import Flight, RecordedRound
from pipar.recording.micro_batch_sizes import Places
from pipar.recording.stage_times import Times, is_pass, may_be_chunk, time_key
from pipar.transport.shaping import Rates
from pipar.wire.frames import CHUNK_BYTES, HEADER_BYTES

#: Models of at least this share of their bytes were sent whole.
_WHOLE = 0.97
#: Dimensions of a tensor in the header of its frame.
_SHAPE_BYTES = 8


class ReplayClock:
    """Compares the clock of a replay with that of the recorded server, again at the start of every round.

    With `follows_devices`, it also does so for each device whose link changes, at each of its passes. A device
    that is a little ahead of its recorded time, or late, would otherwise send more or less before its link changes,
    and the rest may take ten times as long.
    """

    def __init__(self, flight: Flight, begins: Callable[[int], None], *, follows_devices: bool) -> None:
        self._begun_at = {flight.epoch_of(one): one.times.begun for one in flight.rounds} if follows_devices else {}
        self._passes: dict[str, int] = {}  # by device: passes in this round so far
        self._device_ahead_s: dict[str, float] = {}  # by device, in this round
        self._starts = {flight.epoch_of(one): one.start for one in flight.rounds}
        self._ahead_s = flight.rounds[0].start
        self.epoch = 0  # the last one that has begun
        self._begun: set[int] = set()
        self._begins = begins

    def note_work(self, device: str, work: Work, now: float) -> None:
        """Note that a device starts some work; the first load of a round is the start of the round."""
        if work.kind == "load" and work.epoch not in self._begun and work.epoch in self._starts:
            self._begun.add(work.epoch)
            self.epoch = work.epoch
            self._ahead_s = self._starts[work.epoch] - now
            self._passes.clear()
            self._device_ahead_s.clear()
            self._begins(work.epoch)
        elif is_pass(work.kind):
            self._note_pass(device, work.epoch, now)

    def _note_pass(self, device: str, epoch: int, now: float) -> None:
        begun_at = self._begun_at.get(epoch, {}).get(device, ())
        number = self._passes.get(device, 0)
        self._passes[device] = number + 1
        if epoch == self.epoch and number < len(begun_at):
            self._device_ahead_s[device] = begun_at[number] - now

    def recorded(self, now: float, device: str = "") -> float:
        """Return the time on the recorded server's clock, by the progress of a device if one is given."""
        return now + self._device_ahead_s.get(device, self._ahead_s)


@dataclass(frozen=True)
class RoundRates:
    """The measured rates of one direction of a link, from the start of each round on; None means no limit."""

    steps: Sequence[tuple[float, float | None]]

    def at(self, time: float) -> float | None:
        place = bisect_right(self.steps, time, key=lambda step: step[0])
        return self.steps[max(0, place - 1)][1]

    def end(self, start: float, bits: float) -> float:
        rate = self.at(start)
        return start + (bits / rate if rate else 0.0)

    def bits(self, start: float, end: float) -> float:
        return (self.at(start) or 0.0) * (end - start)


@dataclass(frozen=True)
class ReplayedRates:
    """The rates of one direction of a link as recorded, times a factor; nothing is sent while the link is away."""

    rates: Rates | RoundRates
    clock: ReplayClock
    device: str
    away: Sequence[tuple[float, float]] = ()
    factor: float = 1.0

    def end(self, start: float, bits: float) -> float:
        bits /= self.factor
        if isinstance(self.rates, Rates) and len(self.rates.cycle) == 1 and not self.away:
            return self.rates.end(start, bits)
        began = now = self.clock.recorded(start, self.device)
        for lost_at, back_at in self.away:
            if back_at <= now:
                continue
            ends = self.rates.end(now, bits)
            if ends <= lost_at:
                break
            bits -= self.rates.bits(now, lost_at) if lost_at > now else 0.0
            now = back_at
        return start + (self.rates.end(now, max(0.0, bits)) - began)

    def at(self, time: float) -> float | None:
        rate = self.rates.at(self.clock.recorded(time, self.device))
        return None if rate is None else rate * self.factor


class RecordedTimes:
    """Seconds of work in a replay of a job, which may have other plans than the recorded training.

    Recorded work takes as long as it did. Other work takes the time that the cost model predicts, multiplied by the
    ratio of recorded to predicted time for work of that kind on that machine.
    """

    def __init__(self, flight: Flight, job: Job, plan_of: Callable[[str, int], Plan]) -> None:
        self._flight = flight
        self._rounds = {flight.epoch_of(one): one for one in flight.rounds}
        self._job = job
        self._plan_of = plan_of
        self._costs = {spec.name: Costs(job.device_profiles[spec.name], spec.speed) for spec in job.specs}
        self._server_costs = job.server_costs()
        self._chunks: dict[tuple[str, int], dict[tuple[str, int, int], int]] = {}
        self._nearest: dict[tuple[str, str, int], RecordedRound | None] = {}

    def device_s(self, device: str, work: Work) -> float:
        """Return the seconds of a device's own work."""
        found = self._round_of("devices", device, work.epoch)
        costs = self._costs[device]
        if found is None:
            return costs.seconds(work)
        return self._seconds(device, work, found, found.times.devices[device], costs, is_server=False)

    def server_s(self, work: Work) -> float:
        """Return the seconds of the server's work, for one device or for all."""
        device = work.device
        if not device:
            one = self._rounds.get(max(1, work.epoch))  # the first model is packed before the first round
            series = one.times.server.get(time_key(work.kind, 0, self._chunk("", work))) if one is not None else None
            return self._server_costs.seconds(work) if series is None else series.mean_s
        found = self._round_of("serving", device, work.epoch)
        if found is None:
            return self._server_costs.seconds(work)
        return self._seconds(device, work, found, found.times.serving[device], self._server_costs, is_server=True)

    def _seconds(
        self, device: str, work: Work, found: RecordedRound, times: Times, costs: Costs, *, is_server: bool
    ) -> float:
        recorded, now = found.plans[device], self._plan_of(device, work.epoch)
        chunk = self._chunk(f"{device} at the server" if is_server else device, work)
        samples, position = self._places(device, now).find(work.kind, work.iteration, work.micro_batch)
        is_same = (recorded.split_point, recorded.up, recorded.down) == (now.split_point, now.up, now.down)
        series = times.get(time_key(work.kind, samples, chunk)) if is_same else None
        if series is not None:
            return series.at(position)
        return costs.seconds(work) * self._factor(device, work, recorded, times, costs, is_server=is_server)

    def _factor(self, device: str, work: Work, recorded: Plan, times: Times, costs: Costs, *, is_server: bool) -> float:
        """Return how many times as long as by the cost model work of this kind took, or else any forward work."""
        for kind in (work.kind, "fs" if is_server else "fc", "bs" if is_server else "bc"):
            seconds = modelled = 0.0
            for key, series in times.items():
                name, _, rest = key.partition("/")
                samples = int(rest.partition("/")[0] or 0)
                if name == kind and "/" not in rest:
                    seconds += series.mean_s * series.count
                    example = self._example(device, kind, recorded, samples, is_server=is_server)
                    modelled += costs.seconds(example) * series.count
            if modelled > 0:
                return seconds / modelled
        return 1.0

    def _example(self, device: str, kind: str, plan: Plan, samples: int, *, is_server: bool) -> Work:
        """Return the recorded work of a kind, with what its cost depends on."""
        job, p = self._job, plan.split_point
        profile = job.device_profiles[device]
        first, last = (p + 1, job.layers) if is_server else (1, p)
        size_bytes, encoding = profile.changing_bytes(1, p), "raw"
        if kind in ("encode", "decode") and samples:
            is_down = (kind == "encode") == is_server
            size_bytes = samples * (profile.gradient_bytes(p) if is_down else profile.output_bytes(p))
            encoding = plan.down if is_down else plan.up
        if kind == "noise":
            size_bytes = samples * job.noised_bytes
        return Work(kind, 1, 1, 1, first, last, samples, size_bytes, device, encoding)

    def _places(self, device: str, plan: Plan) -> Places:
        job = self._job
        size, pieces, run = job.sizes[device], plan.micro_batches, job.config.run
        cut = {"batch_statistics": job.batch_statistics, "passes": run.local_epochs}
        return Places.of(size, pieces, run.batch_size, **cut)

    def _chunk(self, owner: str, work: Work) -> int:
        """Return how many pieces of work of this kind were at this place before."""
        if not may_be_chunk(work.kind):
            return 0
        key, place = (owner, work.epoch), (work.kind, work.iteration, work.micro_batch)
        if key not in self._chunks:
            self._chunks = {old: seen for old, seen in self._chunks.items() if old[1] >= work.epoch - 1}
            self._chunks[key] = {}
        seen = self._chunks[key]
        seen[place] = seen.get(place, 0) + 1
        return seen[place] - 1

    def _round_of(self, which: str, device: str, epoch: int) -> RecordedRound | None:
        """Return the round whose times a device has in an epoch: the same one, or the nearest that was recorded."""
        key = (which, device, epoch)
        if key not in self._nearest:
            known = [n for n, one in self._rounds.items() if device in getattr(one.times, which)]
            nearest = min(known, key=lambda n: (abs(n - epoch), n), default=None)
            self._nearest[key] = None if nearest is None else self._rounds[nearest]
        return self._nearest[key]

    # --- sizes

    def share(self, device: str, epoch: int, way: str) -> float | None:
        """Return the share of the bytes of tensors that the encoding of a round left; None if it is not known."""
        one = self._rounds.get(epoch)
        sent = None if one is None else getattr(one.times, way).get(device)
        if one is None or not sent or not sent.tensor_bytes:
            return None
        recorded, now = one.plans[device], self._plan_of(device, epoch)
        if recorded.split_point != now.split_point or getattr(recorded, way) != getattr(now, way):
            return None
        samples = self._job.sizes[device] * self._job.config.run.local_epochs
        messages = sum(1 for _, number in self._places(device, recorded).at if number)
        targets = self._job.target_size
        labels = samples * targets.sample_bytes + messages * targets.message_bytes if way == "up" else 0
        extra = messages * (HEADER_BYTES + _SHAPE_BYTES) + labels
        profile = self._job.server_profile
        raw = samples * (profile.output_bytes if way == "up" else profile.gradient_bytes)(now.split_point)
        return min(1.0, max(1e-6, (sent.tensor_bytes - extra) / raw)) if raw else None

    def changes_bytes(self, device: str, epoch: int, way: str) -> int | None:
        """Return the bytes of a model's changes in a round; None if they were not sent, or another part is now."""
        one = self._rounds.get(epoch)
        sent = None if one is None else getattr(one.times, way).get(device)
        if one is None or sent is None or one.plans[device].split_point != self._plan_of(device, epoch).split_point:
            return None
        whole = self._job.server_profile.changing_bytes(1, one.plans[device].split_point)
        size = sent.model_bytes - HEADER_BYTES * math.ceil(sent.model_bytes / CHUNK_BYTES)
        return size if 0 < size < _WHOLE * whole else None

    def changes_share(self) -> float:
        """Return the mean share of a model's bytes that its changes had; as profiled if none were sent."""
        profile, shares = self._job.server_profile, []
        for epoch, one in self._rounds.items():
            for way in ("up", "down"):
                for name in getattr(one.times, way):
                    size = self.changes_bytes(name, epoch, way) if name in self._job.sizes else None
                    if size is not None:
                        shares.append(size / profile.changing_bytes(1, one.plans[name].split_point))
        return math.fsum(shares) / len(shares) if shares else profile.changes_share
