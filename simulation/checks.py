"""What is known about a simulated world from outside, and the checks of its invariants."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipar.events import RoundOver
from pipar.methods import METHODS
from pipar.storage.checkpoint import identity_of
from pipar.wire.orders import TrainedPart
from simulation import invariants
from simulation.clocks import running_loop
from simulation.disk import DiskTroubles, round_of
from simulation.invariants import OnDisk, Violation
from simulation.reference_training import (
    Contribution,
    Rules,
    State,
    copied,
    federated_round,
    split_learning_round,
    splitfed_v2_round,
)
from simulation.scenario import Scenario
from simulation.tiny_training import Training

#: A long world keeps only its last events.
_MOST_EVENTS = 20_000
#: Trainings whose first weights differ by rounding errors, to see what these grow to.
_DISTURBED = 10


class Checks:
    """Records events, models and saves as they are seen; the first violation of an invariant ends the world."""

    def __init__(self, scenario: Scenario, training: Training, folder: Path, troubles: DiskTroubles) -> None:
        self.events: list[str] = []
        self.violation: Violation | None = None
        self.save_failures = 0  # since the last checkpoint that was saved
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._scenario = scenario
        self._workload = training.workload
        self._identity = identity_of(training.config)
        self._folder = folder
        self._troubles = troubles
        self._loop = running_loop()
        self._digest = hashlib.blake2b(digest_size=16)  # of all events
        self._excused: set[str] = set()
        self._reached: dict[int, asyncio.Future[None]] = {}  # by round: those that wait for its end
        self.is_saving_slow = False
        self.last_new_round_at = 0.0
        self._saved = 0  # the last round that was reported as saved
        self._counted: dict[int, dict[str, int]] = {}
        first = copied(self._workload.build_model().state_dict())
        self._models = {0: first}
        self._velocities = {0: _zero_momentum(first, scenario)}  # of the server's layers, where they are shared

    @property
    def rounds(self) -> int:
        return len(self._counted)

    @property
    def counted(self) -> Mapping[int, Mapping[str, int]]:
        """The samples by device of each round that is over."""
        return self._counted

    def digest(self, frames: str) -> str:
        """Return a digest of all events, and of a text about all frames."""
        whole = self._digest.copy()
        whole.update(frames.encode())
        return whole.hexdigest()

    def note(self, source: str, text: str) -> None:
        """Add a line to the events of the world."""
        event = f"{self._loop.true_time():9.4f}  {source}: {text}"
        self._digest.update(f"{event}\n".encode())
        self.events.append(event)
        if len(self.events) > _MOST_EVENTS:
            del self.events[: _MOST_EVENTS // 2]

    def check(self, invariant: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Check whether an invariant holds; the first violation ends the world."""
        try:
            invariant(*arguments, **options)
        except Violation as violation:
            if self.violation is None:
                self.violation = violation
                self.note("world", f"VIOLATION {violation}")
            self.end()

    def end(self) -> None:
        """End the world."""
        if not self.over.done():
            self.over.set_result(None)

    # --- breaches of the protocol

    def excuse(self, device: str) -> None:
        """Allow breaches of the protocol from now on: something of this device was damaged, duplicated or hostile."""
        self._excused.add(device)

    def is_excused(self, device: str) -> bool:
        """Return whether a device may break the protocol; all that are no members only attack."""
        return device in self._excused or device not in self._scenario.samples

    def server_failed(self, device: str, reason: str) -> None:
        """Check that the server's work for a device failed because the device attacks."""
        if not self.is_excused(device):
            self.check(invariants.programs_do_not_fail, "the server", RuntimeError(reason))

    def breach(self, device: str, error: BaseException) -> None:
        """Check that a device which ended with this error has an excuse, if the error is a breach of the protocol."""
        self.check(invariants.breaches_have_a_cause, device, error, excused=self.is_excused(device))

    # --- rounds

    def aggregated(self, returned: Sequence[TrainedPart], trained: Mapping[str, tuple[int | None, int]]) -> None:
        """Check the samples of an aggregation.

        `trained` are those that each replica was trained on: in batches that were followed by a step (None if the
        replica has no layers), and in one that was not.
        """
        devices = [part.device for part in returned]
        self.check(invariants.counted_once_each, devices)
        self.check(invariants.only_members_count, self.rounds + 1, devices, self._scenario.names)
        for part in returned if self.violation is None else ():
            own, (stepped, begun) = self._scenario.samples[part.device], trained.get(part.device, (None, 0))
            counts = {"own": own, "said": part.samples, "stepped": stepped, "begun": begun}
            self.check(invariants.samples_count_once, part.device, passes=self._scenario.local_epochs, **counts)

    def round_is_over(self, event: RoundOver, state: State) -> None:
        """Check the model that a round ended with."""
        epoch, counted = event.epoch, dict(event.counted)
        if epoch > max(self._counted, default=0):
            self.last_new_round_at = self._loop.true_time()
        self._models[epoch], self._counted[epoch] = copied(state), counted
        for number in [number for number in self._reached if number <= epoch]:
            self._reached.pop(number).set_result(None)
        self.check(invariants.only_members_count, epoch, [*counted, *event.partly], self._scenario.names)
        self.check(invariants.weights_are_finite, epoch, self._models[epoch])
        if self._scenario.is_exact and self.violation is None:
            self._check_weights(epoch, partial(self._expected, epoch, counted, event.partly))

    def _check_weights(self, epoch: int, expected: Callable[[State], State]) -> None:
        """Check the model of a round against what plain training makes of the model of the round before.

        Some rounds magnify each rounding error, as batch normalisation does in a small batch of similar samples. If the
        difference is too large for others, it is compared with what small errors in the first weights grow to.
        """
        before, after = self._models[epoch - 1], self._models[epoch]
        plain, allowed = expected(before), invariants.EXACT
        if invariants.largest_error(after, plain) > allowed:
            velocities, draw = dict(self._velocities), torch.Generator().manual_seed(epoch)
            disturbed = [expected(_rounded(before, draw)) for _ in range(_DISTURBED)]
            self._velocities = velocities
            allowed = invariants.allowed_error([invariants.largest_error(one, plain) for one in disturbed])
        self.check(invariants.aggregate_is_the_mean, epoch, after, plain, allowed)

    async def until_over(self, epoch: int) -> None:
        """Return when this round is over for the first time."""
        if epoch > max(self._counted, default=0):
            await self._reached.setdefault(epoch, self._loop.create_future())

    def _expected(self, epoch: int, counted: Mapping[str, int], partly: Mapping[str, int], before: State) -> State:
        """Return the model of a round by the definition of the method, from `before`."""
        method, rules = METHODS[self._scenario.method], Rules(self._workload.optimizer(), self._scenario.local_epochs)
        model = self._workload.build_model()
        shards = {name: self._workload.samples.shard(name) for name in (*counted, *partly)}
        if not method.shares_server_model:
            return federated_round(model, before, shards, epoch, rules)
        velocity = self._velocities[epoch - 1]
        if method.one_device_at_a_time:
            expected, self._velocities[epoch] = split_learning_round(model, before, velocity, shards, epoch, rules)
        else:
            samples = {**{name: rules.passes * own for name, own in counted.items()}, **partly}
            parts = {name: Contribution(shards[name], samples[name], name in counted) for name in shards}
            expected, self._velocities[epoch] = splitfed_v2_round(model, before, velocity, parts, epoch, rules)
        return expected

    # --- saves

    def resume_after(self, done: int) -> None:
        """A server resumes after this round: later ones are trained again, but none that was saved and is whole."""
        overwritten = self._troubles.overwritten & set(self._resumable())
        whole = max((number for number in self._resumable() if number <= self._saved - 1), default=0)
        self.check(invariants.saved_rounds_stay, done, whole if self._saved in overwritten else self._saved)
        known: tuple[dict[int, Any], ...] = (self._models, self._counted, self._velocities)
        for by_epoch in known:
            for epoch in [epoch for epoch in by_epoch if epoch > done]:
                del by_epoch[epoch]
        self._saved, self.save_failures = done, 0

    def saved(self, epoch: int) -> None:
        self._saved, self.save_failures = epoch, 0
        self.disk()
        for known in (self._models, self._velocities):  # no server resumes from an earlier one
            for number in [number for number in known if number < min([epoch, *self._resumable()])]:
                del known[number]

    def _resumable(self) -> list[int]:
        """Return the rounds of the checkpoints that are kept."""
        return [round_of(path) for path in (self._folder / "checkpoint").glob("round-*.pipar")]

    def save_failed(self) -> None:
        self.save_failures += 1
        self.disk()

    def told_the_end(self, epoch: int) -> None:
        """A device is told that this round was the last one."""
        self.check(invariants.end_is_saved, epoch, self._saved)

    def disk(self) -> None:
        """Check the files of the server."""
        may_be = OnDisk(
            self._identity,
            self._models,
            self._counted,
            least=self._saved,
            most=max(self._models),
            failed=self.save_failures + self.is_saving_slow,
            overwritten=frozenset(self._troubles.overwritten),
        )
        self.check(invariants.checkpoint_is_whole, self._folder / "checkpoint", may_be)
        self.check(invariants.log_is_true, self._folder, self._counted, self._saved)

    def result(self) -> None:
        """Check the files of a training that has ended."""
        self.check(invariants.result_is_complete, self._folder, self._counted, self._models[max(self._models)])


def _zero_momentum(state: State, scenario: Scenario) -> State:
    """Return zeros for the weights of the layers that devices share on the server."""
    shared = {str(number) for number in scenario.server_layers}
    return {name: torch.zeros_like(tensor) for name, tensor in state.items() if name.partition(".")[0] in shared}


def _rounded(state: State, draw: torch.Generator) -> State:
    """Return a copy whose weights differ by rounding errors."""

    def noisy(tensor: torch.Tensor) -> torch.Tensor:
        relative = torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype) * torch.finfo(tensor.dtype).eps
        return tensor * (1 + relative)

    return {name: noisy(tensor) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
