"""One round of a simulated training: it begins where the previous round has left each device, its link and the server.

The spans of watched devices are those that the programs would record: every job of a core by its parts, on the core
with the lowest number of those that were free first.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace

from pipar.execution.spans import COMPUTE, CORE, DOWNLINK, SERVER, UPLINK, Span
from pipar.execution.work import Work
from pipar.methods import Plan
from pipar.planner.fleet import Fleet
from pipar.planner.forward_phase import ForwardPhase, forward_phase
from pipar.planner.simulated_device import SimulatedDevice
from pipar.planner.simulator import ARRIVED, COMPUTED, LOADED, NORM_BYTES, SimulatedEpoch, order_of
from pipar.planner.stage_times import BatchTimes, decoding, model_s, protect_s, transfer_s


@dataclass(frozen=True, slots=True)
class RoundStart:
    """When a device can load its first batch, and until when its link is busy in each direction."""

    ready_at: float
    up_free: float
    down_free: float


class NumberedCores:
    """Which core of the server takes each job: of those that are free first, the one with the lowest number."""

    def __init__(self, cores: int) -> None:
        self._free_at = [(0.0, number) for number in range(cores)]  # a heap

    def take(self, end: float) -> tuple[int, float]:
        """Return the number of the core of the next job, which ends then, and since when it was free."""
        free_at, number = self._free_at[0]
        heapreplace(self._free_at, (end, number))
        return number, free_at


class SimulatedRound(SimulatedEpoch):
    """One round, from the first loads to the end of the averaging of all parts."""

    def __init__(
        self,
        fleet: Fleet,
        plans: Mapping[str, Plan],
        number: int,
        starts: Mapping[str, RoundStart],
        end_bytes: Callable[[str], int],
        *,
        watch: Container[str] = (),
        lanes: NumberedCores | None = None,
    ) -> None:
        super().__init__(fleet, plans, watch=watch)
        self._number = number
        self._starts = starts
        self._end_bytes = end_bytes
        self._lanes = lanes
        self._decoded_s = 0.0
        self._end_s = 0.0  # of 'stop epoch' on the last link
        self._phases: dict[tuple[int, float | None], ForwardPhase] = {}  # by batch and load of the next one
        self.averaged_at = 0.0

    @property
    def devices(self) -> Sequence[SimulatedDevice]:
        """The devices after the round."""
        return self._devices

    @property
    def server_s(self) -> float:
        """How long the server's cores worked in all."""
        return self._cores.busy_s + self._decoded_s

    def train(self) -> None:
        """Simulate the round up to the arrival of the last trained part."""
        for device in self._devices:
            start = self._starts[device.member.name]
            device.up_free, device.down_free = start.up_free, start.down_free
            self._load(device, start.ready_at)
        self._run_events()

    def average(self) -> float:
        """Average all trained parts; return how long a core works on it."""
        begin = max(max(device.returned_at for device in self._devices), self._cores.next_free_at)
        seconds = self._fleet.server.seconds(Work("aggregate", size_bytes=self._fleet.averaged_bytes))
        self.averaged_at = begin + seconds
        self.add_server_span("aggregate", begin, self.averaged_at)
        return seconds

    def add_server_span(self, kind: str, begin: float, end: float) -> None:
        """Record work of a core that is for no device alone."""
        if self._lanes is not None:
            self._core_spans("", 0, 0, begin, [(kind, end)])

    # --- iterations in few events

    def _begin(self, device: SimulatedDevice, now: float) -> None:
        """Begin the next iteration; its forward phase is one step if nothing can disturb it."""
        number = len(device.ends)
        device.arrivals, device.arrived = (), 0
        is_sequential = not device.watched and device.times[min(number, len(device.times) - 1)].at_once == 1
        if not is_sequential or device.loaded <= number or 0 < device.plan.window < device.plan.micro_batches:
            super()._begin(device, now)
            return
        times = device.times[number]
        phase = self._phase(device, times, now)
        free_s = self._cores.next_free_at - now
        if not phase.is_undisturbed(free_s) or device.io_free > now + times.fc[0]:
            super()._begin(device, now)
            return
        count = len(times.fc)
        device.working, device.order, device.waits_for, device.decoded_at = times, order_of(count, 0), -1, []
        device.place, device.forwarded, device.encoded, device.answered = count, count, count, 0
        device.began_at, device.arrivals, device.computed_at = now, phase.arrivals_s, now + phase.computed_s
        device.compute_s += phase.computed_s
        if device.loads < len(device.times):
            device.loads += 1
            self._schedule(now + phase.loaded_s, LOADED, device)
        device.io_free = now + phase.io_free_s
        if device.splits:
            device.up_free = now + phase.up_free_s
            self._schedule(now + phase.arrivals_s[0], ARRIVED, device)
        else:
            device.computed_at += sum(times.bc)
            self._end_backwards(device, times)

    def _phase(self, device: SimulatedDevice, times: BatchTimes, now: float) -> ForwardPhase:
        following = device.times[device.loads] if device.loads < len(device.times) else None
        loads_s = None if following is None else following.load
        key = (id(times), loads_s)
        kind = {"splits": device.splits, "trains": device.trains}
        if key not in self._phases:
            self._phases[key] = forward_phase(times, device.latency, loads_s=loads_s, **kind)
        phase, busy_s = self._phases[key], device.up_free - now
        if device.splits and busy_s > phase.first_encoded_s:  # a trace, for example
            return forward_phase(times, device.latency, loads_s=loads_s, up_free_s=busy_s, **kind)
        return phase

    def _arrived(self, device: SimulatedDevice, now: float) -> None:
        device.arrived += 1
        super()._arrived(device, now)

    def _serve_next(self, device: SimulatedDevice, now: float) -> None:
        if device.inbox or not 0 < device.arrived < len(device.arrivals):
            super()._serve_next(device, now)
            return
        arrival = device.began_at + device.arrivals[device.arrived]
        if arrival <= now:
            device.arrived += 1
            device.serving = 1
            self._serve(device, now)
        else:
            self._schedule(arrival, ARRIVED, device)

    def _decode(self, device: SimulatedDevice, now: float) -> None:
        if not device.arrivals:
            super()._decode(device, now)
            return
        times = device.working
        assert times is not None
        n, ready = len(device.decoded_at), now
        if device.trains:
            begin = now if now > device.io_free else device.io_free
            device.io_free = device.decode_free = ready = begin + times.decode[n]
        device.decoded_at.append(ready)
        device.computed_at = (ready if ready > device.computed_at else device.computed_at) + times.bc[n]
        if len(device.decoded_at) == len(times.bc):
            self._end_backwards(device, times)

    def _end_backwards(self, device: SimulatedDevice, times: BatchTimes) -> None:
        """The last backward ends at a time that is known: then the device steps."""
        device.compute_s += sum(times.bc)
        device.place = len(device.order) - 1
        self._schedule(device.computed_at, COMPUTED, device)

    # --- spans, and what differs from an epoch that stands alone

    def _end_epoch_bytes(self, device: SimulatedDevice) -> int:
        size = self._end_bytes(device.member.name)
        self._end_s = transfer_s(size, device.member.link.up_bps)
        return size

    def _send_norm(self, device: SimulatedDevice, now: float) -> float:
        if device.watched:
            begin = max(now, device.up_free)
            end = begin + transfer_s(NORM_BYTES, device.member.link.up_bps)
            self._span(device, UPLINK, "control", 0, begin, end)
        return super()._send_norm(device, now)

    def _span(self, device: SimulatedDevice, lane: str, kind: str, n: int, begin: float, end: float) -> None:
        if lane == DOWNLINK:  # without the time that it waits for chunks
            begin = max(begin, end - device.batch.d[n - 1])
        is_ahead = kind in ("load", "noise") and device.loads > len(device.ends) + 1
        iteration = 0 if kind in ("model", "pack", "protect") else len(device.ends) + 1 + is_ahead
        self.spans.append(Span(device.member.name, lane, kind, self._number, iteration, max(n, 0), begin, end))

    def _compute_span(self, device: SimulatedDevice, kind: str, n: int, begin: float, end: float) -> None:
        # Also of a device that has nothing to train: it waits for each of its empty answers.
        self._span(device, COMPUTE, kind, n, begin, end)

    def _return_part(self, device: SimulatedDevice) -> None:
        count, announced = len(self.spans), max(device.ends[-1], device.up_free)
        super()._return_part(device)
        if not device.watched:
            return
        del self.spans[count:]  # of an epoch that stands alone
        place = (self._number, 0, 0, announced, announced + self._end_s)
        self.spans.append(Span(device.member.name, UPLINK, "control", *place))
        protected = device.ends[-1]
        if self._fleet.protects:
            size = self._part_bytes(device.plan.split_point)
            protected += protect_s(self._fleet, device.member, size)
            self._span(device, COMPUTE, "protect", 0, device.ends[-1], protected)
        self._span(device, COMPUTE, "pack", 0, protected, device.packed_at)
        seconds = model_s(self._fleet, device.member, device.plan, device.member.link.up_bps)
        self._span(device, UPLINK, "model", 0, device.up_free - seconds, device.up_free)

    def _serve(self, device: SimulatedDevice, now: float) -> None:
        begin, end = self._cores.serve(device, now)
        if self._lanes is not None:
            if device.watched:
                parts = self._parts(device, begin, end)
                self._core_spans(device.member.name, device.stepped + 1, device.begun + 1, begin, parts)
            else:
                self._lanes.take(end)
        self._schedule_served(device, end)

    def _parts(self, device: SimulatedDevice, begin: float, end: float) -> list[tuple[str, float]]:
        """Return the ends of decode, f_s, b_s and encode of a micro-batch."""
        fleet, first, n = self._fleet, device.plan.split_point + 1, device.begun
        batch = fleet.batches(device.member.samples, device.stepped + 1)[-1]
        samples = fleet.pieces(batch, device.plan.micro_batches)[n]
        forward_s, backward_s = (
            device.slower * fleet.server.seconds(Work(kind, 0, 0, 0, first, fleet.layers, samples))
            for kind in ("fs", "bs")
        )
        encoding_at = end - device.slower * device.batch.answer[n]
        decoded_at = max(begin, encoding_at - forward_s - backward_s)
        parts = [("decode", decoded_at), ("fs", decoded_at + forward_s), ("bs", encoding_at)]
        return [*parts, ("encode", end)] if device.trains else parts

    def _core_spans(
        self, device: str, iteration: int, n: int, begin: float, parts: Sequence[tuple[str, float]]
    ) -> None:
        assert self._lanes is not None
        number, free_at = self._lanes.take(parts[-1][1])
        lane = f"{CORE} {number}"
        place = (self._number, iteration, n)
        if begin > free_at:
            self.spans.append(Span(SERVER, lane, "u", *place, free_at, begin, waiting=True, device=device))
        for kind, end in parts:
            self.spans.append(Span(SERVER, lane, kind, *place, begin, end, device=device))
            begin = end

    def _step(self, device: SimulatedDevice, now: float) -> None:
        begin, end = self._cores.step(device, now)
        if self._lanes is not None:
            if device.watched:
                place = (device.stepped + 1, len(device.batch.served), begin)
                self._core_spans(device.member.name, *place, [("step", end)])
            else:
                self._lanes.take(end)
        self._schedule_stepped(device, end)

    def _take_part(self, device: SimulatedDevice, now: float) -> None:
        device.returned_at = now
        if not self._fleet.sends_changes(device.member, device.member.link.up_bps):
            return
        seconds = self._fleet.server.seconds(decoding(self._part_bytes(device.plan.split_point)))
        begin, device.returned_at = self._cores.decode(device, now, seconds)
        self._decoded_s += device.returned_at - begin
        if self._lanes is None:
            return
        if device.watched:
            self._core_spans(device.member.name, 0, 0, begin, [("decode", device.returned_at)])
        else:
            self._lanes.take(device.returned_at)
