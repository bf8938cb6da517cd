"""A simulation of one epoch of all devices: the rules of the two programs over sizes and costs alone.

    device compute   f_c 1 .. f_c N          b_c 1 .. b_c N  step
    device io        load, encode 1 .. encode N, decode 1 .. decode N
    device noise     for the inputs of the loaded batch, with privacy.pixel_epsilon
    uplink           u 1 .. u N                              finally the trained part; encoded tensors leave by chunks
    server core      decode, f_s, b_s, encode of one micro-batch at a time, first come, first served, of all devices;
                     finally each trained part that is sent as changes
    downlink         d 1 .. d N                              finally the new part

If gradients are clipped by one norm, the server sends that of its gradient after d N, and the device that of its own
after b_c N; then both step.

The programs give the same times with sizes only, to the last digits, but take 30 times as long. The planner compares
hundreds of plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from functools import lru_cache
from heapq import heappop, heappush

from pipar.execution.schedule import device_order
from pipar.execution.spans import COMPUTE, CORE, DOWNLINK, IO, NOISE, SERVER, UPLINK, Span
from pipar.execution.work import Work
from pipar.methods import Plan
from pipar.planner.bounds import Cutoff
from pipar.planner.fleet import Fleet
from pipar.planner.shared_host import settled
from pipar.planner.simulated_cores import SimulatedCores
from pipar.planner.simulated_device import Distribution, Disturb, SimulatedDevice, simulated_devices
from pipar.planner.stage_times import decoding, model_s, protect_s, transfer_s
from pipar.planner.timing import Timing

#: The size of the 'stop epoch' message's JSON, give or take a few bytes.
_END_EPOCH_BYTES = 80
#: The body of a norm.
NORM_BYTES = 8


def simulate(
    fleet: Fleet, plans: Mapping[str, Plan], iterations: int | None = None, *, disturb: Disturb | None = None
) -> Timing:
    """Return the times of one epoch, or of its first `iterations` and the exchange of models after them."""
    return _simulated(fleet, plans, lambda here: SimulatedEpoch(here, plans, iterations, disturb).run())


def _simulated(fleet: Fleet, plans: Mapping[str, Plan], run: Callable[[Fleet], Timing]) -> Timing:
    return run(fleet) if fleet.host is None else settled(fleet, plans, run)


def simulate_within(
    fleet: Fleet,
    plans: Mapping[str, Plan],
    iterations: int | None,
    within_s: float,
    *,
    disturb: Disturb | None = None,
) -> Timing | None:
    """Return the same, or None as soon as it is certain that its `steady_epoch_s` is at least `within_s`."""
    try:
        return _simulated(
            fleet, plans, lambda here: SimulatedEpoch(here, plans, iterations, disturb, within_s=within_s).run()
        )
    except _TooLong:
        return None


def timeline(
    fleet: Fleet,
    plans: Mapping[str, Plan],
    device: str,
    *,
    iterations: int | None = None,
    exchange: bool = False,
) -> list[Span]:
    """Return the spans of one device, and of the server's cores when they work for it, in order of their starts.

    `exchange` adds the exchange of models after the iterations: trained part up, averaging, new part down.
    """
    epoch = SimulatedEpoch(fleet, plans, iterations, watch={device})
    epoch.run()
    shown = [span for span in epoch.spans if exchange or (span.kind != "model" and span.iteration)]
    return sorted(shown, key=lambda span: span.start)


LOADED, _READY, COMPUTED, _ENCODED, ARRIVED, _SERVED, _STEPPED, _ANSWERED, _DECODED, _RETURNED, _MEASURED = range(11)


class _TooLong(Exception):  # noqa: N818 - nothing is wrong with it
    """The epoch cannot be shorter than `within_s`."""


class SimulatedEpoch:
    """One epoch, event by event; of two events at the same time, the one that was scheduled first comes first."""

    def __init__(
        self,
        fleet: Fleet,
        plans: Mapping[str, Plan],
        iterations: int | None = None,
        disturb: Disturb | None = None,
        watch: Container[str] = (),
        within_s: float | None = None,
    ) -> None:
        self.spans: list[Span] = []
        self._fleet = fleet
        self._devices = simulated_devices(fleet, plans, iterations, disturb, watch)
        self._events: list[tuple[float, int, int, SimulatedDevice]] = []
        self._count = 0
        self._cores = SimulatedCores(fleet, self._devices)
        self._start = 0.0
        self._distribution = Distribution(fleet)
        self._part_bytes = self._distribution.part_bytes
        times = {device.member.name: device.times for device in self._devices}
        self._cutoff = None if within_s is None else Cutoff(fleet, plans, times, within_s)

    def run(self) -> Timing:
        if self._cutoff is not None and self._cutoff.rules_out():
            raise _TooLong
        # A device does not wait for the parts of others: one with a fast link starts early.
        distributed, installed = self._distribution.send(self._devices, 0.0, changes=False)
        for device in self._devices:
            told = max(distributed, device.down_free) + transfer_s(0, device.member.link.down_bps)
            device.down_free, device.down_s = told, 0.0
            self._load(device, max(told + device.latency, installed[device.member.name]))
        self._start = min(device.io_free - device.times[0].load for device in self._devices)
        self._run_events()
        return self._timing(self._start, self._exchange())

    def _run_events(self) -> None:
        handlers = (
            self._loaded, self._ready, self._computed, self._encoded, self._arrived,
            self._served, self._stepped, self._answered, self._decoded, self._returned,
            self._measured,
        )  # fmt: skip
        events = self._events
        while events:
            now, _, kind, device = heappop(events)
            handlers[kind](device, now)

    def _schedule(self, when: float, kind: int, device: SimulatedDevice) -> None:
        self._count += 1
        heappush(self._events, (when, self._count, kind, device))

    # --- on a device

    def _load(self, device: SimulatedDevice, now: float) -> None:
        device.loads += 1
        self._on_io(device, now, "load", 0, device.times[device.loads - 1].load, LOADED)

    def _on_io(self, device: SimulatedDevice, now: float, kind: str, n: int, seconds: float, then: int) -> None:
        begin = max(now, device.io_free)
        device.io_free = begin + seconds
        if device.watched:
            self._span(device, IO, kind, n, begin, device.io_free)
        self._schedule(device.io_free, then, device)

    def _loaded(self, device: SimulatedDevice, now: float) -> None:
        """Add the batch's noise; its lane is free, because a batch is loaded after the previous one's last forward."""
        seconds = device.times[device.loads - 1].noise
        if not seconds:
            self._ready(device, now)
            return
        if device.watched:
            self._span(device, NOISE, "noise", 0, now, now + seconds)
        self._schedule(now + seconds, _READY, device)

    def _ready(self, device: SimulatedDevice, now: float) -> None:
        device.loaded += 1
        if device.working is None:
            self._begin(device, now)

    def _begin(self, device: SimulatedDevice, now: float) -> None:
        """Begin the next iteration, if its batch is loaded."""
        number = len(device.ends)
        if device.loaded <= number:
            device.working = None
            return
        device.working = device.times[number]
        # References to activations that the server has kept are all sent at the same time.
        device.order = order_of(len(device.working.fc), device.plan.window if any(device.working.fc) else 0)
        device.place = device.forwarded = device.encoded = device.answered = 0
        device.decoded_at = []
        self._compute_next(device, now)

    def _compute_next(self, device: SimulatedDevice, now: float) -> None:
        """Start the compute lane's next stage, unless it has to wait for a gradient."""
        times = device.working
        assert times is not None
        if device.place == len(device.order):
            if self._fleet.exchanges_norms and device.splits and device.trains:
                now = self._send_norm(device, now)
            end, kind, n = now + times.step, "step", -1
        else:
            forward, n = device.order[device.place]
            if forward:
                end, kind = now + times.fc[n], "fc"
            elif not device.splits:
                end, kind = now + times.bc[n], "bc"
            elif n < len(device.decoded_at):
                now = max(now, device.decoded_at[n])
                end, kind = now + times.bc[n], "bc"
            else:
                device.waits_for = n
                return
        device.compute_s += end - now
        if device.watched:
            self._compute_span(device, kind, n + 1, now, end)
        self._schedule(end, COMPUTED, device)

    def _send_norm(self, device: SimulatedDevice, now: float) -> float:
        """Send the norm of a device's gradient; return when it also has the server's, and can step."""
        device.up_free = max(now, device.up_free) + transfer_s(NORM_BYTES, device.member.link.up_bps)
        self._schedule(device.up_free + device.latency, _MEASURED, device)
        return max(now, device.norm_at)

    def _computed(self, device: SimulatedDevice, now: float) -> None:
        if device.place == len(device.order):
            device.ends.append(now)
            if self._cutoff is not None:
                self._stop_if_too_long(self._cutoff, device, now)
            if len(device.ends) < len(device.times):
                self._begin(device, now)
            else:
                self._return_part(device)
            return
        forward, _ = device.order[device.place]
        device.place += 1
        if forward:
            device.forwarded += 1
            if device.splits and not device.encoding:
                self._encode_next(device, now)
            if 2 * device.forwarded == len(device.order) and device.loads < len(device.times):
                self._load(device, now)
        self._compute_next(device, now)

    def _encode_next(self, device: SimulatedDevice, now: float) -> None:
        """Encode the next micro-batch, or wait for the previous one."""
        if now < device.encode_free:
            device.encoding = True
            self._schedule(device.encode_free, _ENCODED, device)
            return
        assert device.working is not None
        n = device.encoded
        if len(device.working.up_chunks[n]) > 1:
            self._encode_chunk(device, now)
            return
        io_free = device.io_free
        begin = now if now > io_free else io_free
        device.io_free = device.encode_free = ready = begin + device.working.encode[n]
        device.encoded = n + 1
        # Only earlier micro-batches are ahead of it on the link, so its arrival is known immediately.
        up_free, seconds = device.up_free, device.working.u[n]
        up_begin = ready if ready > up_free else up_free
        device.up_free = up_begin + seconds
        device.up_s += seconds
        if device.watched:
            self._span(device, IO, "encode", n + 1, begin, ready)
            self._span(device, UPLINK, "u", n + 1, up_begin, device.up_free)
        self._schedule(device.up_free + device.latency, ARRIVED, device)

    def _encoded(self, device: SimulatedDevice, now: float) -> None:
        """Continue after a micro-batch, or a chunk of it, that the next one has waited for is encoded."""
        if device.encode_free == math.inf:
            self._send_chunk(device, now)
            return
        device.encoding = False
        self._encode_waiting(device, now)

    def _encode_waiting(self, device: SimulatedDevice, now: float) -> None:
        """Encode the micro-batches that have waited: one of a single chunk takes no event, and the next may follow."""
        while device.encoded < device.forwarded and not device.encoding:
            self._encode_next(device, now)

    def _encode_chunk(self, device: SimulatedDevice, now: float) -> None:
        assert device.working is not None
        n, device.encoding, device.encode_free = device.encoded, True, math.inf
        seconds = device.working.encode[n] * device.working.up_chunks[n][device.chunks]
        self._on_io(device, now, "encode", n + 1, seconds, _ENCODED)

    def _send_chunk(self, device: SimulatedDevice, now: float) -> None:
        """Send a chunk of a micro-batch's activations while the next one is encoded."""
        assert device.working is not None
        n, chunks = device.encoded, device.working.up_sent[device.encoded]
        begin, seconds = max(now, device.up_free), device.working.u[n] * chunks[device.chunks]
        if device.watched and device.chunks and begin > device.up_free:  # the link has waited for this chunk
            self._span(device, UPLINK, "u", n + 1, device.up_began, device.up_free)
        if not device.chunks or begin > device.up_free:
            device.up_began = begin
        device.up_free = begin + seconds
        device.up_s += seconds
        device.chunks += 1
        if device.chunks < len(chunks):
            self._encode_chunk(device, now)
            return
        device.chunks = 0
        if device.watched:
            self._span(device, UPLINK, "u", n + 1, device.up_began, device.up_free)
        self._schedule(device.up_free + device.latency, ARRIVED, device)
        device.encoded, device.encoding, device.encode_free = n + 1, False, now
        self._encode_waiting(device, now)

    def _answered(self, device: SimulatedDevice, now: float) -> None:
        device.answered += 1
        if not device.decoding:
            self._decode_next(device, now)

    def _decode_next(self, device: SimulatedDevice, now: float) -> None:
        """Decode the next micro-batch, or wait for the previous one."""
        if now < device.decode_free:
            device.decoding = True
            self._schedule(device.decode_free, _DECODED, device)
        else:
            self._decode(device, now)

    def _decoded(self, device: SimulatedDevice, now: float) -> None:
        """Continue after a micro-batch that the next one has waited for is decoded."""
        device.decoding = False
        while len(device.decoded_at) < device.answered and not device.decoding:
            self._decode_next(device, now)

    def _decode(self, device: SimulatedDevice, now: float) -> None:
        assert device.working is not None
        n, io_free = len(device.decoded_at), device.io_free
        begin = ready = now
        if device.trains:  # otherwise the answer is empty
            begin = now if now > io_free else io_free
            device.io_free = device.decode_free = ready = begin + device.working.decode[n]
        device.decoded_at.append(ready)
        if device.watched and device.trains:
            self._span(device, IO, "decode", n + 1, begin, ready)
        if device.waits_for == n:
            device.waits_for = -1
            self._compute_next(device, ready)

    def _stop_if_too_long(self, cutoff: Cutoff, device: SimulatedDevice, now: float) -> None:
        served_at = self._cores.all_served_at(now)
        served_s = 0.0 if served_at is None else served_at - self._start
        if cutoff.gives_up(device.member.name, len(device.ends), now - self._start, served_s):
            raise _TooLong

    # --- on the server

    def _arrived(self, device: SimulatedDevice, now: float) -> None:
        device.inbox += 1
        self._serve_next(device, now)

    def _serve(self, device: SimulatedDevice, now: float) -> None:
        begin, end = self._cores.serve(device, now)
        if device.watched:
            self._core_span(device, "fs", device.begun + 1, begin, end)
        self._schedule_served(device, end)

    def _schedule_served(self, device: SimulatedDevice, end: float) -> None:
        """Note that the next micro-batch of a device is begun, and done at this time."""
        device.computed[device.begun] = end, device.slower
        device.begun += 1
        self._schedule(end, _SERVED, device)

    def _step(self, device: SimulatedDevice, now: float) -> None:
        begin, end = self._cores.step(device, now)
        if device.watched:
            self._core_span(device, "step", device.served, begin, end)
        self._schedule_stepped(device, end)

    def _schedule_stepped(self, device: SimulatedDevice, end: float) -> None:
        self._schedule(end, _STEPPED, device)

    def _core_span(self, device: SimulatedDevice, kind: str, n: int, begin: float, end: float) -> None:
        place = (1, device.stepped + 1, n, begin, end)
        self.spans.append(Span(SERVER, CORE, kind, *place, device=device.member.name))

    def _served(self, device: SimulatedDevice, now: float) -> None:
        """Answer the micro-batches that are computed, in their order, and begin the next one."""
        device.serving -= 1
        while device.served < device.begun and device.computed[device.served][0] <= now:
            self._reply(device, now, device.computed.pop(device.served)[1])
        if device.served < len(device.batch.served):
            self._serve_next(device, now)

    def _reply(self, device: SimulatedDevice, now: float, slower: float) -> None:
        n = device.served
        chunks, seconds = device.batch.down_chunks[n], device.batch.d[n]
        # Chunks are sent as they are encoded: from the first one on, but the last not before it is encoded.
        first = now - slower * device.batch.answer[n] * (1.0 - chunks[0])
        begin = max(first, device.replied_at, device.down_free)
        device.replied_at = now
        device.down_free = max(begin + seconds, now + seconds * device.batch.down_sent[n][-1])
        device.down_s += seconds
        if device.watched:
            self._span(device, DOWNLINK, "d", n + 1, begin, device.down_free)
        self._answer(device, device.down_free + device.latency)
        device.served = n + 1
        if device.served == len(device.batch.served):
            if self._fleet.exchanges_norms and device.trains:
                device.down_free = max(now, device.down_free) + transfer_s(NORM_BYTES, device.member.link.down_bps)
                device.norm_at = device.down_free + device.latency
            else:
                self._step(device, now)

    def _measured(self, device: SimulatedDevice, now: float) -> None:
        """The norm of a device's gradient has arrived, for which the replica's step has waited."""
        self._step(device, now)

    def _answer(self, device: SimulatedDevice, when: float) -> None:
        """Let the gradients of a micro-batch arrive at a device at this time."""
        if device.decoding or device.answered < device.served or 2 * device.encoded < len(device.order):
            self._schedule(when, _ANSWERED, device)
            return
        # All earlier gradients have arrived, and the io lane has no other work: the end of decoding is known
        # immediately.
        device.answered += 1
        self._decode(device, when if when > device.decode_free else device.decode_free)

    def _stepped(self, device: SimulatedDevice, now: float) -> None:
        device.stepped, device.served, device.begun = device.stepped + 1, 0, 0
        if device.stepped < len(device.times):
            device.batch = device.times[device.stepped]
        elif device.returned:
            self._take_part(device, now)
        self._serve_next(device, now)

    def _serve_next(self, device: SimulatedDevice, now: float) -> None:
        """Begin micro-batches that wait, of the batch that the server works on."""
        batch = device.batch
        while device.inbox and device.serving < batch.at_once and device.begun < len(batch.served):
            device.inbox -= 1
            device.serving += 1
            self._serve(device, now)

    # --- the end of the round

    def _exchange(self) -> float:
        """Return when the last device has installed its new part: trained parts up, aggregation, new parts down."""
        server = self._fleet.server
        returned = max(max(device.returned_at for device in self._devices), self._cores.next_free_at)
        averaged = returned + server.seconds(Work("aggregate", size_bytes=self._fleet.averaged_bytes))
        _, installed = self._distribution.send(self._devices, averaged, changes=True)
        for device in self._devices:
            if device.watched:
                self.spans.append(Span(SERVER, CORE, "aggregate", 1, 0, 0, returned, averaged))
                seconds = model_s(self._fleet, device.member, device.plan, device.member.link.down_bps)
                self._span(device, DOWNLINK, "model", 0, device.down_free - seconds, device.down_free)
        return max(installed.values())

    def _return_part(self, device: SimulatedDevice) -> None:
        member, size = device.member, self._part_bytes(device.plan.split_point)
        size_of_end = self._end_epoch_bytes(device)
        announced = max(device.ends[-1], device.up_free) + transfer_s(size_of_end, member.link.up_bps)
        changed = self._fleet.sends_changes(member, member.link.up_bps)
        pack = Work("pack", size_bytes=size, encoding="changes" if changed else "raw")
        protected = device.ends[-1] + protect_s(self._fleet, member, size)
        packed = device.packed_at = protected + member.costs.seconds(pack)
        seconds = model_s(self._fleet, member, device.plan, member.link.up_bps)
        device.up_s += seconds
        sent = max(packed, announced)
        device.up_free = sent + seconds
        if device.watched:
            if self._fleet.protects:
                self.spans.append(Span(member.name, COMPUTE, "protect", 1, 0, 0, device.ends[-1], protected))
            self._span(device, UPLINK, "model", 0, sent, sent + seconds)
        self._schedule(device.up_free + device.latency, _RETURNED, device)

    def _end_epoch_bytes(self, device: SimulatedDevice) -> int:  # noqa: ARG002
        return _END_EPOCH_BYTES

    def _returned(self, device: SimulatedDevice, now: float) -> None:
        device.returned = True
        if not device.splits or device.stepped == len(device.times):
            self._take_part(device, now)

    def _take_part(self, device: SimulatedDevice, now: float) -> None:
        """Decode a device's trained part if it was sent as changes: first come, first served, like all other work."""
        device.returned_at = now
        if self._fleet.sends_changes(device.member, device.member.link.up_bps):
            seconds = self._fleet.server.seconds(decoding(self._part_bytes(device.plan.split_point)))
            begin, device.returned_at = self._cores.decode(device, now, seconds)
            if device.watched:
                place = (1, 0, 0, begin, device.returned_at)
                self.spans.append(Span(SERVER, CORE, "decode", *place, device=device.member.name))

    def _timing(self, start: float, end: float) -> Timing:
        devices = self._devices
        return Timing(
            epoch_s=end - start,
            ends={device.member.name: tuple(at - start for at in device.ends) for device in devices},
            busy_s={
                "device": max(device.compute_s for device in devices),
                "uplink": max(device.up_s for device in devices),
                "server": self._cores.busy_s / self._fleet.cores,
                "downlink": max(device.down_s for device in devices),
            },
            contention=self._cores.contention,
            own_s={device.member.name: (device.compute_s, device.up_s, device.down_s) for device in devices},
        )

    def _compute_span(self, device: SimulatedDevice, kind: str, n: int, begin: float, end: float) -> None:
        if device.trains or kind == "fc":
            self._span(device, COMPUTE, kind, n, begin, end)

    def _span(self, device: SimulatedDevice, lane: str, kind: str, n: int, begin: float, end: float) -> None:
        is_ahead = kind in ("load", "noise") and device.loads > len(device.ends) + 1
        iteration = len(device.ends) + 1 + is_ahead
        self.spans.append(Span(device.member.name, lane, kind, 1, iteration, n, begin, end))


@lru_cache(maxsize=1024)
def order_of(micro_batches: int, window: int) -> tuple[tuple[bool, int], ...]:
    return tuple((stage.kind == "fc", stage.micro_batch - 1) for stage in device_order(micro_batches, window))
