"""The server's cores in a simulated epoch: first come, first served, and slower while others work."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace

from pipar.planner.fleet import Fleet
from pipar.planner.simulated_device import SimulatedDevice


class SimulatedCores:
    """Until when each core is taken, and how much work they have done."""

    __slots__ = ("_alone_s", "_fleet", "_free_at", "_unserved", "_unserved_s", "busy_s")

    def __init__(self, fleet: Fleet, devices: Sequence[SimulatedDevice]) -> None:
        self.busy_s = self._alone_s = 0.0
        self._fleet = fleet
        self._free_at = [0.0] * fleet.cores  # a heap
        split = [device for device in devices if device.splits]
        # Micro-batches that no core has taken.
        self._unserved = sum(len(batch.served) for device in split for batch in device.times)
        self._unserved_s = sum(device.core_share * batch.served_s for device in split for batch in device.times)

    @property
    def next_free_at(self) -> float:
        return self._free_at[0]

    @property
    def contention(self) -> float:
        """How much longer the work took than if each core had worked alone."""
        return self.busy_s / self._alone_s if self._alone_s else 1.0

    def serve(self, device: SimulatedDevice, now: float) -> tuple[float, float]:
        """Return when a device's next micro-batch is begun and done."""
        seconds = device.batch.served[device.begun]
        self._unserved -= 1
        self._unserved_s -= seconds * device.core_share
        return self._work(device, now, seconds, device.batch.contention[device.begun])

    def step(self, device: SimulatedDevice, now: float) -> tuple[float, float]:
        """Return when the step of a device's replica is begun and done."""
        return self._work(device, now, device.batch.server_step, device.batch.contention[-1])

    def _work(self, device: SimulatedDevice, now: float, seconds: float, contention: float) -> tuple[float, float]:
        free_at = self._free_at[0]
        begin = now if now > free_at else free_at
        self._alone_s += seconds * device.core_share
        device.slower = 1.0
        if contention:
            device.slower = 1.0 + contention * self._others_at_work(begin, waited=begin > now)
            seconds *= device.slower
        return begin, self._take(device, begin, seconds)

    def _take(self, device: SimulatedDevice, begin: float, seconds: float) -> float:
        """Take the next core for a job; return when it is done.

        In a sample a job stands for those of several devices, and a core for several: a core is taken for their share.
        The device waits no less than the job itself takes, and no less than those that it stands for.
        """
        taken = seconds * device.core_share
        heapreplace(self._free_at, begin + taken)
        self.busy_s += taken
        return begin + max(seconds, taken)

    def decode(self, device: SimulatedDevice, now: float, seconds: float) -> tuple[float, float]:
        """Return when decoding a trained part is begun and done; it is not part of the iterations' work."""
        begin = max(now, self._free_at[0])
        slower = 1.0 + self._fleet.server.contention(0) * self._others_at_work(begin, waited=begin > now)
        busy_s = self.busy_s
        end = self._take(device, begin, seconds * slower)
        self.busy_s = busy_s
        return begin, end

    def _others_at_work(self, begin: float, *, waited: bool) -> float:
        """Return how many other cores work when a job begins.

        In a sample of a fleet each core stands for several. Those that the job's own core stands for all work if the
        job had to wait for it; otherwise as much of the time as the cores have worked so far. It stands for less than
        one where every kind of device is in the sample, but a round has fewer devices.
        """
        free, each = self._free_at, self._fleet.cores_each
        if len(free) > 2 and free[1] > begin and free[2] > begin:  # in a heap, all others are free later than these
            others = len(free) - 1
        else:
            others = sum(free_at > begin for free_at in free[1:])
        if each == 1.0:
            return others
        at_work = 1.0 if waited or not begin else min(1.0, self.busy_s / (begin * len(self._free_at)))
        return max(0.0, others * each + (each - 1.0) * at_work)

    def all_served_at(self, now: float) -> float | None:
        """Return the earliest time at which all micro-batches of the epoch can be served; None if they are."""
        return _filled_at(self._free_at, self._unserved_s, now) if self._unserved else None


def _filled_at(cores: list[float], work_s: float, now: float) -> float:
    """Return when cores that are busy until these times can have done this much more work, shared evenly."""
    free_at = sorted(max(now, each) for each in cores)
    for count in range(1, len(free_at)):
        end = (sum(free_at[:count]) + work_s) / count
        if end <= free_at[count]:
            return end
    return (sum(free_at) + work_s) / len(free_at)
