"""What a replay puts in the place of parts of the server and of devices: they do what was recorded."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from pipar.execution.lanes import Ended, Step, VirtualLanes
from pipar.execution.work import Work
from pipar.launch.sizes_only import SizesOnlyDevicePart, SizesOnlyLearner
from pipar.methods import Plan
from pipar.planner.replanner import MeasuredLink, Replanner
from pipar.recording.flight import RecordedRound
from pipar.recording.stage_times import begins_micro_batch
from pipar.server.enrolment import ClosedEnrolment
from pipar.server.sampling import Draw
from pipar.server.session import Session
from pipar.settings.links import Link
from pipar.wire.messages import Body

#: How often a replay looks for exclusions of a round that has not begun, and how far timers are rounded.
_LOOK_AGAIN_S, _ROUNDED_S = 0.05, 1e-6
#: How long a micro-batch waits for those that were before it, as a share of its round: one may never come, because its
#: device is lost a little earlier than it was.
_PATIENCE = 0.01

#: Returns the bytes of a model's changes in the current round, if they were recorded.
ChangesBytes = Callable[[str], int | None]


class ReplayedPart(SizesOnlyDevicePart):
    """A device's part whose changes have their recorded size."""

    changes_bytes: Callable[[], int | None] = staticmethod(lambda: None)

    def pack(self, *, changes: bool = False) -> Body:
        size = self.changes_bytes() if changes else None
        return super().pack(changes=changes) if size is None else Body(size, encoding="changes")


class ReplayedLearner(SizesOnlyLearner):
    """A global model whose changes have their recorded size."""

    changes_bytes: ChangesBytes = staticmethod(lambda _: None)

    def pack(self, device: str, *, changes: bool = False, frozen: bool = True) -> Body:
        size = self.changes_bytes(device) if changes else None
        return super().pack(device, changes=changes, frozen=frozen) if size is None else Body(size, encoding="changes")


class RecordedDraw(Draw):
    """Draws the devices that took part in the recorded round; by the seed where none of them is present."""

    def __init__(self, share: int | float | Literal["all"], rounds: Mapping[int, Collection[str]]) -> None:
        super().__init__(share)
        self._rounds = rounds

    def next(self, epoch: int, present: Collection[str], least: int = 1) -> list[str]:
        drawn = sorted(set(present).intersection(self._rounds.get(epoch, ())))
        return drawn if drawn and self.is_partial else super().next(epoch, present, least)


class RecordedPlans(Replanner):
    """Takes the plans of the recorded training at the rounds at which they were taken."""

    def __init__(self, plans: Mapping[int, Mapping[str, Plan]]) -> None:
        self.why = "as recorded"
        self._plans = plans
        self._epoch = 0

    def begin(self, links: Mapping[str, Link]) -> None:
        pass

    def observe_round(self, measured: Mapping[str, MeasuredLink]) -> None:
        pass

    def join(self, device: str, link: Link) -> None:
        pass

    def leave(self, device: str) -> None:
        pass

    def take(self) -> Mapping[str, Plan] | None:
        self._epoch += 1
        return self._plans.get(self._epoch + 1)

    def close(self) -> None:
        pass


class RecordedDeadline:
    """Ends rounds without a device when the recorded server did."""

    seconds = None

    def __init__(self, *, is_needed: bool) -> None:
        self._is_needed = is_needed
        self._loop = asyncio.get_running_loop()
        self._due: dict[str, float] = {}

    def exclude(self, device: str, at: float) -> None:
        """The recorded server ended a round without this device at this time of the replay."""
        self._due[device] = at

    def begin(self, group: Collection[Session]) -> None:  # noqa: ARG002
        self._due.clear()

    def timeout_s(self, waiting: Collection[Session], *, any_finished: bool) -> float | None:  # noqa: ARG002
        if not self._is_needed:
            return None
        due = [self._due[session.device] for session in waiting if session.device in self._due]
        # The times of a round are known when its first device has begun.
        return max(0.0, min(due) - self._loop.time()) if due else _LOOK_AGAIN_S

    def late(self, waiting: Collection[Session], *, any_finished: bool) -> dict[Session, str]:  # noqa: ARG002
        now = self._loop.time() + _ROUNDED_S
        late = [session for session in waiting if self._due.get(session.device, math.inf) <= now]
        for session in late:
            del self._due[session.device]
        return dict.fromkeys(late, "it was too late in the recorded round")

    def restart(self, waiting: Collection[Session], *, any_late: bool) -> None:
        pass

    def lengthen(self, *, one_at_a_time: bool) -> None:
        pass


class RecordedOrder:
    """Lets the server begin with micro-batches in the order in which the recorded server did.

    Micro-batches of two devices may arrive at almost the same time. In the other order, one of them would wait for the
    other, its device would be late, and a link that changes would send the rest of its round at another rate.
    """

    def __init__(self, rounds: Mapping[int, RecordedRound]) -> None:
        self._rounds = rounds
        self._turns: dict[int, _Turns] = {}  # by epoch

    async def wait_for_turn(self, work: Work) -> None:
        """Return when the micro-batches that were first have been begun, or have not come for too long."""
        one = self._rounds.get(work.epoch)
        if one is None:
            return
        if work.epoch not in self._turns:
            self._turns = {work.epoch: _Turns(one.times.order, _PATIENCE * one.seconds)}
        await self._turns[work.epoch].wait_for(work.device)


class _Turns:
    """The order of the micro-batches of one round."""

    def __init__(self, order: Sequence[str], patience_s: float) -> None:
        self._patience_s = patience_s
        self._places: dict[str, deque[int]] = {}
        for place, device in enumerate(order):
            self._places.setdefault(device, deque()).append(place)
        self._next = 0
        self._begun: set[int] = set()
        self._waiting: dict[int, asyncio.Event] = {}

    async def wait_for(self, device: str) -> None:
        places = self._places.get(device)
        if not places:
            return
        place = places.popleft()
        if place > self._next:
            turn = self._waiting[place] = asyncio.Event()
            with suppress(TimeoutError):
                await asyncio.wait_for(turn.wait(), self._patience_s)
            del self._waiting[place]
            self._next = max(self._next, place)  # those before it are late, and begin when they come
        self._begun.add(place)
        while self._next in self._begun:
            self._begun.remove(self._next)
            self._next += 1
        if self._next in self._waiting:
            self._waiting[self._next].set()


class OrderedLanes(VirtualLanes):
    """Lanes of a server that begins with micro-batches in the recorded order."""

    order: RecordedOrder

    async def run(self, *steps: Step, ended: Ended | None = None) -> Any:
        first = steps[0][0]
        if begins_micro_batch(first.kind, first.iteration):
            await self.order.wait_for_turn(first)
        return await super().run(*steps, ended=ended)


class ReplayEnrolment(ClosedEnrolment):
    """Admits the recorded devices; their links are emulated by the replay."""

    def link(self, name: str) -> Link:
        return self.job.links[name].model_copy(update={"latency_s": 0.0})
