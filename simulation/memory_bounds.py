"""How many bytes a simulated world holds for each device, and how many its plan needs at most."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from pipar.events import Away, Back, Event, Joined, Left, Lost, Replanned, RoundOver, RoundRestarted
from pipar.execution.spans import SERVER
from pipar.methods import METHODS, Plan
from pipar.profiling.profile import Profile
from pipar.server.session import Session
from pipar.transport.channel import Channel
from pipar.transport.limits import MESSAGE_BYTES
from pipar.wire.encodings import OVERHEAD_BYTES
from pipar.wire.messages import LABEL_BYTES
from simulation.invariants import MemoryUse
from simulation.scenario import BATCH, LAYERS, Scenario

#: Interval at which the programs are inspected.
LOOK_EVERY_S = 0.25
#: WELCOME, PLAN, STATE, MODEL, ROUND, ABANDON and REPORT or their answers, with the names and counts in them.
_ROUND_BYTES = 7 * MESSAGE_BYTES + 1000
#: The trace of one micro-batch: a dozen spans.
_SPANS_BYTES = 12 * 25


class MemoryBounds:
    """Compares what is held for each device with what may be held: nothing for a device that is gone."""

    def __init__(self, scenario: Scenario, profile: Profile) -> None:
        self._scenario = scenario
        self._profile = profile
        self._plans = {name: {plan} for name, plan in scenario.plans.items()}  # that were ever in use
        self._looks_away: dict[str, int] = {}
        self._deadline_s = scenario.round_deadline_s or 0.0  # of the current round
        self._allowed_s: dict[str, float] = {}  # for a device that is away, from when its link was lost
        self._rounds_absent: dict[str, int] = {}

    def restart(self) -> None:
        """Start over with a new server process, which holds nothing yet."""
        self._looks_away.clear()
        self._deadline_s = self._scenario.round_deadline_s or 0.0
        self._rounds_absent.clear()

    def observe(self, event: Event) -> None:
        """Follow the server's events about its devices."""
        match event:
            case Away():
                self._looks_away[event.device] = 0
                self._allowed_s[event.device] = max(self._scenario.resume_window_s, self._deadline_s)
            case Back() | Lost() | Left():
                self._looks_away.pop(event.device, None)
            case Joined():
                self._looks_away.pop(event.device, None)
                self._rounds_absent.pop(event.device, None)
            case RoundRestarted():  # with a later deadline, until which a device of the round may be away
                self._deadline_s = event.deadline_s or 0.0
            case RoundOver():
                self._deadline_s = self._scenario.round_deadline_s or 0.0
            case Replanned():
                for name, plan in event.plans.items():
                    self._plans.setdefault(name, set()).add(Plan(**plan))
            case _:
                pass

    def end_round(self, present: Collection[str], replicas: Mapping[str, int]) -> None:
        """Count the rounds for which there has been a replica without its device."""
        absent = replicas.keys() - {*present, SERVER}
        self._rounds_absent = {name: self._rounds_absent.get(name, 0) + 1 for name in absent}

    def of_devices(self, channels: Mapping[str, Channel]) -> Iterator[tuple[MemoryUse, MemoryUse]]:
        """Yield what each device holds, and the most that it may hold."""
        for name, channel in channels.items():
            yield MemoryUse(name, link_bytes=channel.held_bytes), self._needs(name)

    def of_server(
        self, sessions: Sequence[Session], replicas: Mapping[str, int]
    ) -> Iterator[tuple[MemoryUse, MemoryUse]]:
        """Yield what the server holds for each device, and the most that it may hold; call it once per inspection."""
        for name in self._looks_away:
            self._looks_away[name] += 1
        by_name = {session.device: session for session in sessions}
        for name in sorted(by_name.keys() | replicas.keys()):
            session, replica_bytes = by_name.get(name), replicas.get(name, 0)
            used = MemoryUse(name, replica_bytes=replica_bytes)
            if session is not None:
                used = MemoryUse(name, session.channel.held_bytes, session.inbox.size_bytes, replica_bytes, places=1)
            yield used, MemoryUse(name) if self._is_gone(name) else self._needs(name)

    def _is_gone(self, name: str) -> bool:
        """Whether a device is away for longer than its place is kept, or left before this round."""
        away_s = (self._looks_away.get(name, 0) - 1) * LOOK_EVERY_S
        return away_s > self._allowed_s.get(name, 0.0) or self._rounds_absent.get(name, 0) > 1

    def _needs(self, name: str) -> MemoryUse:
        """Return the most that any plan needs which this device ever had."""
        if name == SERVER:  # the model that all devices share
            return MemoryUse(SERVER, replica_bytes=self._profile.parameter_bytes(1, LAYERS))
        samples = self._scenario.samples
        if name not in samples:  # it may have any plan, and send nonsense of the size that its plan allows
            every = [Plan(split_point, BATCH) for split_point in range(1, LAYERS + 1)]
            return largest(name, [self._needs_by(plan, max(samples.values())) for plan in every])
        return largest(name, [self._needs_by(plan, samples[name]) for plan in self._plans[name]])

    def _needs_by(self, plan: Plan, samples: int) -> MemoryUse:
        """Return the size of N micro-batches, their gradients, and all other messages of the rounds it may miss."""
        scenario, profile = self._scenario, self._profile
        splits, shares = plan.split_point < LAYERS, METHODS[scenario.method].shares_server_model
        piece = -(-(BATCH + 1) // plan.micro_batches)
        activations = plan.micro_batches * piece * (profile.output_bytes(plan.split_point) + LABEL_BYTES) * splits
        whole = profile.parameter_bytes(1, LAYERS)
        # A new plan moves layers: messages that still arrive with the previous one may be about all of them.
        model = whole if scenario.replans else profile.parameter_bytes(1, plan.split_point)
        # Layers are moved before the plan is sent.
        replica = whole if scenario.replans else profile.parameter_bytes(plan.split_point + 1, LAYERS)
        momentum = whole if scenario.keep_state and scenario.replans else 0
        trace = _SPANS_BYTES * scenario.local_epochs * (samples // BATCH + 1) * (plan.micro_batches + 1)
        rounds = 3 + math.floor(scenario.resume_window_s / (scenario.round_deadline_s or math.inf))
        # Where an encoding saves nothing, it adds a little for each chunk.
        coded = activations * OVERHEAD_BYTES // scenario.coded_chunk_bytes
        said = plan.micro_batches * (MESSAGE_BYTES + OVERHEAD_BYTES) * splits + coded
        per_round = model + momentum + _ROUND_BYTES
        return MemoryUse(
            "",
            link_bytes=activations + said + rounds * per_round + trace,
            inbox_bytes=activations + per_round,
            replica_bytes=0 if shares else replica,
            places=1,
        )


def largest(holder: str, several: Sequence[MemoryUse]) -> MemoryUse:
    """Return the maximum of each number."""
    return MemoryUse(
        holder,
        max(used.link_bytes for used in several),
        max(used.inbox_bytes for used in several),
        max(used.replica_bytes for used in several),
        max(used.places for used in several),
        max(used.tasks for used in several),
    )
