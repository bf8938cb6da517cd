"""What a simulated world holds on to for each device, in bytes, and how much of that the device's plan needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from pipar.events import Away, Back, Event, Joined, Left, Lost, Replanned
from pipar.execution.spans import SERVER
from pipar.methods import METHODS, Plan
from pipar.profiling.profile import Profile
from pipar.server.session import Session
from pipar.transport.channel import Channel
from pipar.transport.limits import MESSAGE_BYTES
from pipar.wire.encodings import OVERHEAD_BYTES
from pipar.wire.messages import LABEL_BYTES
from simulation.invariants import Held
from simulation.plan import BATCH, LAYERS, Scenario

#: The programs are looked at so often.
LOOK_EVERY_S = 0.25
#: WELCOME, PLAN, STATE, MODEL, ROUND, ABANDON and REPORT, or their answers, and the names and counts in them.
_ROUND_BYTES = 7 * MESSAGE_BYTES + 1000
#: Of the trace of one micro-batch: a dozen spans.
_SPANS_BYTES = 12 * 25


class Holdings:
    """Knows what is held for whom, and what may be: nothing at all of a device that is gone."""

    def __init__(self, scenario: Scenario, profile: Profile) -> None:
        self._scenario = scenario
        self._profile = profile
        self._plans = {name: {plan} for name, plan in scenario.plans.items()}  # that were ever in force
        self._looks_away: dict[str, int] = {}
        self._rounds_absent: dict[str, int] = {}

    def begin_anew(self) -> None:
        """Another server: it holds nothing yet."""
        self._looks_away.clear()
        self._rounds_absent.clear()

    def observe(self, event: Event) -> None:
        """Take in what the server says of its devices."""
        match event:
            case Away():
                self._looks_away[event.device] = 0
            case Back() | Lost() | Left():
                self._looks_away.pop(event.device, None)
            case Joined():
                self._looks_away.pop(event.device, None)
                self._rounds_absent.pop(event.device, None)
            case Replanned():
                for name, plan in event.plans.items():
                    self._plans.setdefault(name, set()).add(Plan(**plan))
            case _:
                pass

    def end_round(self, present: Sequence[str], replicas: Mapping[str, int]) -> None:
        """Count for how many rounds there has been a replica without its device."""
        absent = replicas.keys() - {*present, SERVER}
        self._rounds_absent = {name: self._rounds_absent.get(name, 0) + 1 for name in absent}

    def of_devices(self, channels: Mapping[str, Channel]) -> Iterator[tuple[Held, Held]]:
        """Yield what each device holds, and what it may."""
        for name, channel in channels.items():
            yield Held(name, link_bytes=channel.held_bytes), self._needs(name)

    def of_server(self, sessions: Sequence[Session], replicas: Mapping[str, int]) -> Iterator[tuple[Held, Held]]:
        """Yield what the server holds for each device, and what it may; to be asked at every look, once."""
        for name in self._looks_away:
            self._looks_away[name] += 1
        by_name = {session.device: session for session in sessions}
        for name in sorted(by_name.keys() | replicas.keys()):
            session, replica_bytes = by_name.get(name), replicas.get(name, 0)
            held = Held(name, replica_bytes=replica_bytes)
            if session is not None:
                held = Held(name, session.channel.held_bytes, session.inbox.size_bytes, replica_bytes, places=1)
            yield held, Held(name) if self._is_gone(name) else self._needs(name)

    def _is_gone(self, name: str) -> bool:
        """Whether a device is away for longer than its place is kept, or its session was over before this round."""
        longest_s = max(self._scenario.resume_window_s, self._scenario.round_deadline_s or 0.0)
        away_s = (self._looks_away.get(name, 0) - 1) * LOOK_EVERY_S
        return away_s > longest_s or self._rounds_absent.get(name, 0) > 1

    def _needs(self, name: str) -> Held:
        """Return the most that any plan needs by which this device was ever to train."""
        if name == SERVER:  # the model that all devices share
            return Held(SERVER, replica_bytes=self._profile.parameter_bytes(1, LAYERS))
        return largest(name, [self._needs_by(plan, self._scenario.samples[name]) for plan in self._plans[name]])

    def _needs_by(self, plan: Plan, samples: int) -> Held:
        """Return N micro-batches and their gradients, and what the rounds begin and end with that a device may miss."""
        scenario, profile = self._scenario, self._profile
        splits, shares = plan.split_point < LAYERS, METHODS[scenario.method].shares_server_model
        piece = -(-(BATCH + 1) // plan.micro_batches)
        activations = plan.micro_batches * piece * (profile.output_bytes(plan.split_point) + LABEL_BYTES) * splits
        whole = profile.parameter_bytes(1, LAYERS)
        # A plan moves layers: what still comes of the one before may be of all of them.
        model = whole if scenario.replans else profile.parameter_bytes(1, plan.split_point)
        # Layers are moved before the plan is told.
        replica = whole if scenario.replans else profile.parameter_bytes(plan.split_point + 1, LAYERS)
        momentum = whole if scenario.keep_momentum and scenario.replans else 0
        trace = _SPANS_BYTES * (samples // BATCH + 1) * (plan.micro_batches + 1)
        rounds = 3 + math.floor(scenario.resume_window_s / (scenario.round_deadline_s or math.inf))
        # What does not get shorter by an encoding gets longer, by a little for each chunk.
        coded = activations * OVERHEAD_BYTES // scenario.coded_chunk_bytes
        said = plan.micro_batches * (MESSAGE_BYTES + OVERHEAD_BYTES) * splits + coded
        of_a_round = model + momentum + _ROUND_BYTES
        return Held(
            "",
            link_bytes=activations + said + rounds * of_a_round + trace,
            inbox_bytes=activations + model + momentum,
            replica_bytes=0 if shares else replica,
            places=1,
        )


def largest(who: str, several: Sequence[Held]) -> Held:
    """Return the most of each."""
    return Held(
        who,
        max(held.link_bytes for held in several),
        max(held.inbox_bytes for held in several),
        max(held.replica_bytes for held in several),
        max(held.places for held in several),
        max(held.tasks for held in several),
    )
