"""The devices of a simulated epoch: their state, and the distribution of models to them."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import cache, partial

from pipar.execution.work import Work
from pipar.methods import Plan
from pipar.planner.fleet import Fleet, Member
from pipar.planner.stage_times import BatchTimes, batch_times, model_s, transfer_s, work_key

#: Changes the times of one device's iteration: (device, iteration, times) -> times.
Disturb = Callable[[str, int, BatchTimes], BatchTimes]


class SimulatedDevice:
    """How far one device is in its epoch, and the server with it. Micro-batches are counted from 0 here."""

    __slots__ = (
        "answered", "arrivals", "arrived", "batch", "began_at", "begun", "chunks", "compute_s", "computed",
        "computed_at", "core_share", "decode_free", "decoded_at", "decoding", "down_free", "down_s", "encode_free",
        "encoded", "encoding", "ends", "forwarded", "inbox", "io_free", "latency", "loaded", "loads", "member",
        "norm_at", "order", "packed_at", "place", "plan", "replied_at", "returned", "returned_at", "served", "serving",
        "slower", "splits", "stepped", "times", "trains", "up_began", "up_free", "up_s", "waits_for", "watched",
        "working",
    )  # fmt: skip

    def __init__(
        self, fleet: Fleet, member: Member, plan: Plan, times: list[BatchTimes], *, splits: bool, watched: bool
    ) -> None:
        self.member, self.plan, self.times, self.splits, self.watched = member, plan, times, splits, watched
        self.trains = fleet.trains(plan.split_point)  # it has something to train, and gets gradients
        self.core_share = fleet.core_share(member)
        self.latency = member.link.latency_s
        # The device's compute lane: its batch, the order of its stages, and the place in that order.
        self.working: BatchTimes | None = None
        self.order: tuple[tuple[bool, int], ...] = ()
        self.place = 0
        self.waits_for = -1  # the micro-batch whose gradient it needs next, until its arrival is known
        self.ends: list[float] = []  # of its iterations
        # Its other lanes: how many micro-batches of this iteration they have finished, and when they are free.
        self.loads = self.loaded = self.forwarded = self.encoded = self.answered = 0
        self.decoded_at: list[float] = []  # when each gradient is decoded, as far as known
        self.chunks = 0  # of the micro-batch that is being encoded
        self.encode_free = self.decode_free = 0.0  # one micro-batch is encoded, and one decoded, at a time
        self.encoding = self.decoding = False  # an event will start the next one
        self.up_began = 0.0
        self.io_free = self.up_free = self.down_free = 0.0
        self.compute_s = self.up_s = self.down_s = 0.0
        # The server's side: the batch that it works on, how many of its micro-batches are answered, begun and being
        # computed, and how many wait; the end and the slowdown of those that are begun and not answered.
        self.batch, self.stepped = times[0], 0
        self.served = self.begun = self.serving = self.inbox = 0
        self.computed: dict[int, tuple[float, float]] = {}
        self.replied_at = 0.0  # when the last answer was complete
        self.packed_at = 0.0  # when its trained part was packed
        self.norm_at = 0.0  # when the norm of the server's gradient arrives
        # Of an iteration whose forward phase is computed in one step: when it began, and what is known from then on.
        self.began_at = self.computed_at = 0.0
        self.arrivals: tuple[float, ...] = ()
        self.arrived = 0
        self.slower = 1.0  # the factor by which other cores lengthen the current job
        self.returned = False  # its trained part has arrived at the server
        self.returned_at = 0.0  # when its part can be aggregated


def simulated_devices(
    fleet: Fleet,
    plans: Mapping[str, Plan],
    iterations: int | None,
    disturb: Disturb | None = None,
    watch: Container[str] = (),
) -> list[SimulatedDevice]:
    """Return the devices of a fleet before an epoch of some iterations, or of all; spans of `watch` are recorded."""
    known: dict[tuple[object, ...], list[BatchTimes]] = {}  # most devices are like others
    devices = []
    for member in fleet.members:
        plan = plans[member.name]
        key = work_key(member, plan)
        if key not in known:
            batches = fleet.batches(member.samples, iterations)
            each = {batch: batch_times(fleet, member, plan, batch) for batch in set(batches)}
            known[key] = [each[batch] for batch in batches]
        times = known[key]
        if disturb:
            times = [disturb(member.name, number, batch) for number, batch in enumerate(times, start=1)]
        splits = plan.split_point < fleet.layers
        watched = member.name in watch
        devices.append(SimulatedDevice(fleet, member, plan, times, splits=splits, watched=watched))
    return devices


class Distribution:
    """Sends every device its part of the model, before the first iteration and after the last."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        profile = fleet.server.profile
        self.part_bytes = cache(partial(profile.changing_bytes, 1))
        self._whole_bytes = cache(partial(profile.parameter_bytes, 1))

    def send(self, devices: Sequence[SimulatedDevice], now: float, *, changes: bool) -> tuple[float, dict[str, float]]:
        """Return when the last part was packed, and when each device has installed its own.

        The part of one split point is packed once whole, and once as changes for devices on slow links. The first one,
        without `changes`, has the frozen parameters.
        """
        size_of = self.part_bytes if changes else self._whole_bytes
        packed: set[tuple[int, bool]] = set()
        installed = {}
        for device in devices:
            member, size = device.member, size_of(device.plan.split_point)
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
