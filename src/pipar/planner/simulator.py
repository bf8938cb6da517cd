"""How long an epoch of these plans lasts: the two programs' rules over sizes and costs, without the programs.

    device compute   f_c 1 .. f_c N          b_c 1 .. b_c N  step
    device io        load, encode 1 .. encode N, decode 1 .. decode N
    device noise     on the inputs of the batch that was loaded, if they are to have any
    uplink           u 1 .. u N                              at last the trained part; coded ones leave chunk by chunk
    server core      decode, f_s, b_s, encode of one micro-batch at a time; first come first served over all devices;
                     at last each trained part that comes as changes
    downlink         d 1 .. d N                              at last the new part

A timing-only run of the same plans gives the same times, to the last digits; it runs the programs themselves and takes
30 times as long. The planner compares hundreds of plans, so it asks here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache, lru_cache, partial
from heapq import heappop, heappush, heapreplace

from pipar.execution.schedule import device_order
from pipar.execution.spans import COMPUTE, CORE, DOWNLINK, IO, NOISE, SERVER, UPLINK, Span
from pipar.execution.stages import Work
from pipar.methods import Plan
from pipar.planner.bounds import Cutoff
from pipar.planner.fleet import Fleet, Member
from pipar.planner.stage_times import (
    BatchTimes,
    batch_times,
    decoding,
    model_s,
    protect_s,
    transfer_s,
    work_key,
)
from pipar.planner.timing import FEWEST_ITERATIONS, STEADY_ITERATIONS, Timing, steady_epoch_s

#: Devices of a prediction in the middle of a training, which the server's messages wait for.
_FEW = 32
#: So many micro-batches take less than a tenth of a second.
_QUICK = 4000
#: What the JSON of 'stop epoch' has, give or take a few bytes.
_END_EPOCH_BYTES = 80

#: Changes the times of one device's iteration: (device, iteration, times) -> times.
Disturb = Callable[[str, int, BatchTimes], BatchTimes]


def simulate(
    fleet: Fleet, plans: Mapping[str, Plan], iterations: int | None = None, *, disturb: Disturb | None = None
) -> Timing:
    """Return the times of one epoch, or of its first `iterations` and the exchange of models after them."""
    return _Epoch(fleet, plans, iterations, disturb).run()


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
        return _Epoch(fleet, plans, iterations, disturb, within_s=within_s).run()
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

    `exchange` adds what comes behind the iterations: the trained part up, the averaging, the new part down.
    """
    epoch = _Epoch(fleet, plans, iterations, watch=device)
    epoch.run()
    shown = [span for span in epoch.spans if exchange or (span.kind != "model" and span.iteration)]
    return sorted(shown, key=lambda span: span.start)


def predict_s(fleet: Fleet, plans: Mapping[str, Plan]) -> float:
    """Return the seconds of an epoch of these plans: all of it simulated, or of a large fleet the part that repeats."""
    everyone = fleet.sampled()
    pieces = sum(plans[m.name].micro_batches * fleet.iterations(m.samples) for m in everyone.members)
    if pieces <= _QUICK:
        return simulate(everyone, plans).epoch_s
    few = fleet.sampled(_FEW)
    iterations = _QUICK // sum(plans[member.name].micro_batches for member in few.members)
    return steady_epoch_s(simulate, few, plans, max(FEWEST_ITERATIONS, min(STEADY_ITERATIONS, iterations)))


class _Device:
    """Where one device is in its epoch, and where the server is with it. Micro-batches are counted from 0 here."""

    __slots__ = (
        "answered", "batch", "chunks", "compute_s", "decode_free", "decoded_at", "decoding", "down_free",
        "down_s", "encode_free", "encoded", "encoding", "ends", "forwarded", "inbox", "io_free", "latency", "loaded",
        "loads", "member", "order", "place", "plan", "returned", "returned_at", "served", "serving", "slower", "splits",
        "stepped", "times", "up_began", "up_free", "up_s", "waits_for", "watched", "working",
    )  # fmt: skip

    def __init__(self, member: Member, plan: Plan, times: list[BatchTimes], *, splits: bool, watched: bool) -> None:
        self.member, self.plan, self.times, self.splits, self.watched = member, plan, times, splits, watched
        self.latency = member.link.latency_s
        # The device's compute lane: its batch, the order of its stages, and how far it is.
        self.working: BatchTimes | None = None
        self.order: tuple[tuple[bool, int], ...] = ()
        self.place = 0
        self.waits_for = -1  # the micro-batch whose gradient it needs next, as long as nobody knows when that comes
        self.ends: list[float] = []  # of its iterations
        # Its other lanes: how many micro-batches of this iteration are through, and until when they are taken.
        self.loads = self.loaded = self.forwarded = self.encoded = self.answered = 0
        self.decoded_at: list[float] = []  # when, as far as that is known
        self.chunks = 0  # of the micro-batch that is being encoded
        self.encode_free = self.decode_free = 0.0  # one is encoded, and one decoded, at a time
        self.encoding = self.decoding = False  # the next one is to be begun when this one ends
        self.up_began = 0.0
        self.io_free = self.up_free = self.down_free = 0.0
        self.compute_s = self.up_s = self.down_s = 0.0
        # The server's side: the batch that it works on, how many pieces of it are served, and how many wait.
        self.batch, self.stepped = times[0], 0
        self.served = self.inbox = 0
        self.serving = False
        self.slower = 1.0  # what other cores make of the job that is being served
        self.returned = False  # its trained part is at the server
        self.returned_at = 0.0  # and can be aggregated


_LOADED, _READY, _COMPUTED, _ENCODED, _ARRIVED, _SERVED, _STEPPED, _ANSWERED, _DECODED, _RETURNED = range(10)


class _TooLong(Exception):  # noqa: N818 - nothing is wrong with it
    """An epoch cannot be as short as it was to be."""


class _Epoch:
    """One epoch, event by event; of two at the same time, the one that was caused first comes first."""

    def __init__(
        self,
        fleet: Fleet,
        plans: Mapping[str, Plan],
        iterations: int | None,
        disturb: Disturb | None = None,
        watch: str | None = None,
        within_s: float | None = None,
    ) -> None:
        self.spans: list[Span] = []
        self._fleet = fleet
        self._plans = plans
        self._devices = self._make_devices(iterations, disturb, watch)
        self._events: list[tuple[float, int, int, _Device]] = []
        self._count = 0
        self._cores = [0.0] * fleet.cores  # until when each is taken
        self._server_s = self._alone_s = self._start = 0.0
        self._part_bytes = cache(partial(fleet.server.profile.parameter_bytes, 1))
        batches = [batch for device in self._devices if device.splits for batch in device.times]
        self._unserved = sum(len(batch.served) for batch in batches)  # micro-batches that no core has taken
        self._unserved_s = sum(batch.served_s for batch in batches)
        times = {device.member.name: device.times for device in self._devices}
        self._cutoff = None if within_s is None else Cutoff(fleet, plans, times, within_s)

    def _make_devices(self, iterations: int | None, disturb: Disturb | None, watch: str | None) -> list[_Device]:
        known: dict[tuple[object, ...], list[BatchTimes]] = {}  # most devices are like another one
        devices = []
        for member in self._fleet.members:
            plan = self._plans[member.name]
            key = work_key(member, plan)
            if key not in known:
                batches = self._fleet.batches(member.samples, iterations)
                each = {batch: batch_times(self._fleet, member, plan, batch) for batch in set(batches)}
                known[key] = [each[batch] for batch in batches]
            times = known[key]
            if disturb:
                times = [disturb(member.name, number, batch) for number, batch in enumerate(times, start=1)]
            splits = plan.split_point < self._fleet.layers
            devices.append(_Device(member, plan, times, splits=splits, watched=member.name == watch))
        return devices

    def run(self) -> Timing:
        if self._cutoff is not None and self._cutoff.rules_out():
            raise _TooLong
        # Nobody waits for the others' new parts: who has a short way begins early.
        distributed, installed = self._distribute(0.0, changes=False)
        for device in self._devices:
            told = max(distributed, device.down_free) + transfer_s(0, device.member.link.down_bps)
            device.down_free, device.down_s = told, 0.0
            self._load(device, max(told + device.latency, installed[device.member.name]))
        self._start = min(device.io_free - device.times[0].load for device in self._devices)
        handlers = (
            self._loaded, self._ready, self._computed, self._encoded, self._arrived,
            self._served, self._stepped, self._answered, self._decoded, self._returned,
        )  # fmt: skip
        events = self._events
        while events:
            now, _, kind, device = heappop(events)
            handlers[kind](device, now)
        return self._timing(self._start, self._exchange())

    def _at(self, when: float, kind: int, device: _Device) -> None:
        self._count += 1
        heappush(self._events, (when, self._count, kind, device))

    # --- on a device

    def _load(self, device: _Device, now: float) -> None:
        device.loads += 1
        self._on_io(device, now, "load", 0, device.times[device.loads - 1].load, _LOADED)

    def _on_io(self, device: _Device, now: float, kind: str, n: int, seconds: float, then: int) -> None:
        begin = max(now, device.io_free)
        device.io_free = begin + seconds
        if device.watched:
            self._span(device, IO, kind, n, begin, device.io_free)
        self._at(device.io_free, then, device)

    def _loaded(self, device: _Device, now: float) -> None:
        """Add the batch's noise; its lane is free, as a batch is loaded behind the last forward of the one before."""
        seconds = device.times[device.loads - 1].noise
        if not seconds:
            self._ready(device, now)
            return
        if device.watched:
            self._span(device, NOISE, "noise", 0, now, now + seconds)
        self._at(now + seconds, _READY, device)

    def _ready(self, device: _Device, now: float) -> None:
        device.loaded += 1
        if device.working is None:
            self._begin(device, now)

    def _begin(self, device: _Device, now: float) -> None:
        """Begin the next iteration, if its batch is there."""
        number = len(device.ends)
        if device.loaded <= number:
            device.working = None
            return
        device.working = device.times[number]
        device.order = _order(len(device.working.fc), device.plan.window)
        device.place = device.forwarded = device.encoded = device.answered = 0
        device.decoded_at = []
        self._go_on(device, now)

    def _go_on(self, device: _Device, now: float) -> None:
        """Start the compute lane's next stage, unless it has to wait for a gradient."""
        times = device.working
        assert times is not None
        if device.place == len(device.order):
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
            self._span(device, COMPUTE, kind, n + 1, now, end)
        self._at(end, _COMPUTED, device)

    def _computed(self, device: _Device, now: float) -> None:
        if device.place == len(device.order):
            device.ends.append(now)
            if self._cutoff is not None:
                self._go_on_only_within(self._cutoff, device, now)
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
        self._go_on(device, now)

    def _encode_next(self, device: _Device, now: float) -> None:
        """Encode the next micro-batch, or wait for the one before."""
        if now < device.encode_free:
            device.encoding = True
            self._at(device.encode_free, _ENCODED, device)
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
        # Nothing but what was encoded before stands in its way: when it is through can be said at once.
        up_free, seconds = device.up_free, device.working.u[n]
        up_begin = ready if ready > up_free else up_free
        device.up_free = up_begin + seconds
        device.up_s += seconds
        if device.watched:
            self._span(device, IO, "encode", n + 1, begin, ready)
            self._span(device, UPLINK, "u", n + 1, up_begin, device.up_free)
        self._at(device.up_free + device.latency, _ARRIVED, device)

    def _encoded(self, device: _Device, now: float) -> None:
        """Go on when a micro-batch is encoded that the next one has waited for, or a chunk of it."""
        if device.encode_free == math.inf:
            self._send_chunk(device, now)
            return
        device.encoding = False
        self._encode_waiting(device, now)

    def _encode_waiting(self, device: _Device, now: float) -> None:
        """Encode what has waited: a micro-batch of one chunk is through at once, and others may wait behind it."""
        while device.encoded < device.forwarded and not device.encoding:
            self._encode_next(device, now)

    def _encode_chunk(self, device: _Device, now: float) -> None:
        assert device.working is not None
        n, device.encoding, device.encode_free = device.encoded, True, math.inf
        seconds = device.working.encode[n] * device.working.up_chunks[n][device.chunks]
        self._on_io(device, now, "encode", n + 1, seconds, _ENCODED)

    def _send_chunk(self, device: _Device, now: float) -> None:
        """Send a chunk of a micro-batch's activations while the next one is encoded."""
        assert device.working is not None
        n, chunks = device.encoded, device.working.up_chunks[device.encoded]
        begin, seconds = max(now, device.up_free), device.working.u[n] * chunks[device.chunks]
        device.up_free = begin + seconds
        device.up_s += seconds
        device.chunks += 1
        if device.chunks == 1:
            device.up_began = begin
        if device.chunks < len(chunks):
            self._encode_chunk(device, now)
            return
        device.chunks = 0
        if device.watched:
            self._span(device, UPLINK, "u", n + 1, device.up_began, device.up_free)
        self._at(device.up_free + device.latency, _ARRIVED, device)
        device.encoded, device.encoding, device.encode_free = n + 1, False, now
        self._encode_waiting(device, now)

    def _answered(self, device: _Device, now: float) -> None:
        device.answered += 1
        if not device.decoding:
            self._decode_next(device, now)

    def _decode_next(self, device: _Device, now: float) -> None:
        """Decode the next micro-batch, or wait for the one before."""
        if now < device.decode_free:
            device.decoding = True
            self._at(device.decode_free, _DECODED, device)
        else:
            self._decode(device, now)

    def _decoded(self, device: _Device, now: float) -> None:
        """Go on when a micro-batch is decoded that the next one has waited for."""
        device.decoding = False
        while len(device.decoded_at) < device.answered and not device.decoding:
            self._decode_next(device, now)

    def _decode(self, device: _Device, now: float) -> None:
        assert device.working is not None
        n, io_free = len(device.decoded_at), device.io_free
        begin = now if now > io_free else io_free
        device.io_free = device.decode_free = ready = begin + device.working.decode[n]
        device.decoded_at.append(ready)
        if device.watched:
            self._span(device, IO, "decode", n + 1, begin, ready)
        if device.waits_for == n:
            device.waits_for = -1
            self._go_on(device, ready)

    def _go_on_only_within(self, cutoff: Cutoff, device: _Device, now: float) -> None:
        served_s = _filled_at(self._cores, self._unserved_s, now) - self._start if self._unserved else 0.0
        if cutoff.gives_up(device.member.name, len(device.ends), now - self._start, served_s):
            raise _TooLong

    # --- on the server

    def _arrived(self, device: _Device, now: float) -> None:
        if device.serving:
            device.inbox += 1
        else:
            device.serving = True
            self._on_core(device, now, device.batch.served[device.served], _SERVED)

    def _on_core(self, device: _Device, now: float, seconds: float, then: int) -> None:
        begin = max(now, self._cores[0])
        if then == _SERVED:
            self._unserved -= 1
            self._unserved_s -= seconds
        self._alone_s += seconds
        contention = device.batch.contention[device.served if then == _SERVED else -1]
        device.slower = 1.0
        if contention:
            device.slower = 1.0 + contention * sum(free_at > begin for free_at in self._cores[1:])
            seconds *= device.slower
        heapreplace(self._cores, begin + seconds)
        self._server_s += seconds
        if device.watched:
            kind, n = ("fs", device.served + 1) if then == _SERVED else ("step", device.served)
            place = (1, device.stepped + 1, n, begin, begin + seconds)
            self.spans.append(Span(SERVER, CORE, kind, *place, device=device.member.name))
        self._at(begin + seconds, then, device)

    def _served(self, device: _Device, now: float) -> None:
        n = device.served
        chunks, seconds = device.batch.down_chunks[n], device.batch.d[n]
        # Chunks are sent as they are encoded: all behind the first, but the last not before it is there.
        first = now - device.slower * device.batch.answer[n] * (1.0 - chunks[0])
        begin = max(first, device.down_free)
        device.down_free = max(begin + seconds, now + seconds * chunks[-1])
        device.down_s += seconds
        if device.watched:
            self._span(device, DOWNLINK, "d", n + 1, begin, device.down_free)
        self._answer(device, device.down_free + device.latency)
        device.served = n + 1
        if device.served == len(device.batch.served):
            self._on_core(device, now, device.batch.server_step, _STEPPED)
        else:
            self._serve_next(device, now)

    def _answer(self, device: _Device, when: float) -> None:
        """Let gradients come to a device then."""
        if device.decoding or device.answered < device.served or 2 * device.encoded < len(device.order):
            self._at(when, _ANSWERED, device)
            return
        # All others have come, and the io lane has nothing else to do: when this one is decoded can be said at once.
        device.answered += 1
        self._decode(device, when if when > device.decode_free else device.decode_free)

    def _stepped(self, device: _Device, now: float) -> None:
        device.stepped, device.served = device.stepped + 1, 0
        if device.stepped < len(device.times):
            device.batch = device.times[device.stepped]
        elif device.returned:
            self._take_part(device, now)
        self._serve_next(device, now)

    def _serve_next(self, device: _Device, now: float) -> None:
        if device.inbox:
            device.inbox -= 1
            self._on_core(device, now, device.batch.served[device.served], _SERVED)
        else:
            device.serving = False

    # --- the end of the round

    def _exchange(self) -> float:
        """Return when the last device has its new part: trained parts up, aggregation, new parts down."""
        server = self._fleet.server
        returned = max(max(device.returned_at for device in self._devices), self._cores[0])
        averaged = returned + server.seconds(Work("aggregate", size_bytes=self._fleet.averaged_bytes))
        _, installed = self._distribute(averaged, changes=True)
        for device in self._devices:
            if device.watched:
                self.spans.append(Span(SERVER, CORE, "aggregate", 1, 0, 0, returned, averaged))
                seconds = model_s(self._fleet, device.member, device.plan, device.member.link.down_bps)
                self._span(device, DOWNLINK, "model", 0, device.down_free - seconds, device.down_free)
        return max(installed.values())

    def _distribute(self, now: float, *, changes: bool) -> tuple[float, dict[str, float]]:
        """Return when the last part was packed, and when each device has installed its own.

        One split point is packed once: as it is, and once more as what has changed, for devices on slow links.
        """
        packed: set[tuple[int, bool]] = set()
        installed = {}
        for device in self._devices:
            member, size = device.member, self._part_bytes(device.plan.split_point)
            changed = changes and self._fleet.sends_changes(member, member.link.down_bps)
            form = "changes" if changed else "raw"
            key = (device.plan.split_point, changed)
            if key not in packed:
                now += self._fleet.server.seconds(Work("pack", size_bytes=size, encoding=form))
                packed.add(key)
            rate_bps = member.link.down_bps
            first_s = transfer_s(size, rate_bps)
            seconds = model_s(self._fleet, member, device.plan, rate_bps) if changes else first_s
            device.down_s += seconds
            device.down_free = max(now, device.down_free) + seconds
            install = member.costs.seconds(Work("install", size_bytes=size, encoding=form))
            installed[member.name] = device.down_free + device.latency + install
        return now, installed

    def _return_part(self, device: _Device) -> None:
        member, size = device.member, self._part_bytes(device.plan.split_point)
        said = max(device.ends[-1], device.up_free) + transfer_s(_END_EPOCH_BYTES, member.link.up_bps)
        changed = self._fleet.sends_changes(member, member.link.up_bps)
        pack = Work("pack", size_bytes=size, encoding="changes" if changed else "raw")
        protected = device.ends[-1] + protect_s(self._fleet, member, size)
        packed = protected + member.costs.seconds(pack)
        seconds = model_s(self._fleet, member, device.plan, member.link.up_bps)
        device.up_s += seconds
        sent = max(packed, said)
        if device.watched:
            if self._fleet.protects:
                self.spans.append(Span(member.name, COMPUTE, "protect", 1, 0, 0, device.ends[-1], protected))
            self._span(device, UPLINK, "model", 0, sent, sent + seconds)
        self._at(sent + seconds + device.latency, _RETURNED, device)

    def _returned(self, device: _Device, now: float) -> None:
        device.returned = True
        if not device.splits or device.stepped == len(device.times):
            self._take_part(device, now)

    def _take_part(self, device: _Device, now: float) -> None:
        """Decode what a device has brought back if it is changes, first come first served like all other work."""
        device.returned_at = now
        if self._fleet.sends_changes(device.member, device.member.link.up_bps):
            begin, server = max(now, self._cores[0]), self._fleet.server
            slower = 1.0 + server.contention(0) * sum(free_at > begin for free_at in self._cores[1:])
            device.returned_at = begin + server.seconds(decoding(self._part_bytes(device.plan.split_point))) * slower
            heapreplace(self._cores, device.returned_at)
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
                "server": self._server_s / self._fleet.cores,
                "downlink": max(device.down_s for device in devices),
            },
            contention=self._server_s / self._alone_s if self._alone_s else 1.0,
            own_s={device.member.name: (device.compute_s, device.up_s, device.down_s) for device in devices},
        )

    def _span(self, device: _Device, lane: str, kind: str, n: int, begin: float, end: float) -> None:
        is_ahead = kind in ("load", "noise") and device.loads > len(device.ends) + 1
        iteration = len(device.ends) + 1 + is_ahead
        self.spans.append(Span(device.member.name, lane, kind, 1, iteration, n, begin, end))


def _filled_at(cores: list[float], work_s: float, now: float) -> float:
    """Return when cores that are taken until then can have done so much more work, shared out evenly."""
    free_at = sorted(max(now, each) for each in cores)
    for count in range(1, len(free_at)):
        end = (sum(free_at[:count]) + work_s) / count
        if end <= free_at[count]:
            return end
    return (sum(free_at) + work_s) / len(free_at)


@lru_cache(maxsize=1024)
def _order(micro_batches: int, window: int) -> tuple[tuple[bool, int], ...]:
    return tuple((stage.kind == "fc", stage.micro_batch - 1) for stage in device_order(micro_batches, window))
