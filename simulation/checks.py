"""What is known about a simulated world from outside, and the checks of its invariants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pipar.events import RoundOver
from pipar.methods import METHODS
from pipar.storage.checkpoint import identity_of
from pipar.wire.orders import TrainedPart
from simulation import invariants
from simulation.invariants import OnDisk, Violation
from simulation.reference_training import (
    Contribution,
    State,
    copied,
    federated_round,
    split_learning_round,
    splitfed_v2_round,
)
from simulation.scenario import Scenario
from simulation.tiny_training import Training


class Checks:
    """Records events, models and saves as they are seen; the first violation of an invariant ends the world."""

    def __init__(self, scenario: Scenario, training: Training, folder: Path) -> None:
        self.events: list[str] = []
        self.violation: Violation | None = None
        self.save_failures = 0  # since the last checkpoint that was saved
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._scenario = scenario
        self._workload = training.workload
        self._identity = identity_of(training.config)
        self._folder = folder
        self._loop = asyncio.get_running_loop()
        self._excused: set[str] = set()
        self._saved = 0  # the last round that was reported as saved
        self._counted: dict[int, dict[str, int]] = {}
        first = copied(self._workload.build_model().state_dict())
        self._models = {0: first}
        self._velocities = {0: _zero_momentum(first, scenario)}  # of the server's layers, where they are shared

    @property
    def rounds(self) -> int:
        return len(self._counted)

    def note(self, source: str, text: str) -> None:
        """Add a line to the events of the world."""
        self.events.append(f"{self._loop.time():9.4f}  {source}: {text}")

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
        """Allow breaches of the protocol from now on: something of this device was damaged or duplicated."""
        self._excused.add(device)

    def breach(self, device: str, error: BaseException) -> None:
        """Check that a device which ended with this error has an excuse, if the error is a breach of the protocol."""
        self.check(invariants.breaches_have_a_cause, device, error, excused=device in self._excused)

    # --- rounds

    def aggregated(self, returned: Sequence[TrainedPart], trained: Mapping[str, tuple[int | None, int]]) -> None:
        """Check the samples of an aggregation.

        `trained` are those that each replica was trained on: in batches that were followed by a step (None if the
        replica has no layers), and in one that was not.
        """
        self.check(invariants.counted_once_each, [part.device for part in returned])
        for part in returned:
            own = self._scenario.samples[part.device]
            stepped, begun = trained.get(part.device, (None, 0))
            self.check(
                invariants.samples_count_once, part.device, own=own, said=part.samples, stepped=stepped, begun=begun
            )

    def round_is_over(self, event: RoundOver, state: State) -> None:
        """Check the model that a round ended with."""
        epoch, counted = event.epoch, dict(event.counted)
        self._models[epoch], self._counted[epoch] = copied(state), counted
        self.check(invariants.weights_are_finite, epoch, self._models[epoch])
        if self._scenario.is_exact and self.violation is None:
            expected = self._expected(epoch, counted, event.partly)
            self.check(invariants.aggregate_is_the_mean, epoch, self._models[epoch], expected)

    def _expected(self, epoch: int, counted: Mapping[str, int], partly: Mapping[str, int]) -> State:
        """Return the model of a round by the definition of the method, from that of the round before."""
        method, rules = METHODS[self._scenario.method], self._workload.optimizer()
        model, before = self._workload.build_model(), self._models[epoch - 1]
        shards = {name: self._workload.shard(name) for name in (*counted, *partly)}
        if not method.shares_server_model:
            return federated_round(model, before, shards, epoch, rules)
        velocity = self._velocities[epoch - 1]
        if method.one_device_at_a_time:
            expected, self._velocities[epoch] = split_learning_round(model, before, velocity, shards, epoch, rules)
        else:
            samples = {**counted, **partly}
            parts = {name: Contribution(shards[name], samples[name], name in counted) for name in shards}
            expected, self._velocities[epoch] = splitfed_v2_round(model, before, velocity, parts, epoch, rules)
        return expected

    # --- saves

    def resume_after(self, done: int) -> None:
        """A server resumes after this round: later ones are trained again."""
        known: tuple[dict[int, Any], ...] = (self._models, self._counted, self._velocities)
        for by_epoch in known:
            for epoch in [epoch for epoch in by_epoch if epoch > done]:
                del by_epoch[epoch]
        self._saved, self.save_failures = done, 0

    def saved(self, epoch: int) -> None:
        self._saved, self.save_failures = epoch, 0
        self.disk()

    def save_failed(self) -> None:
        self.save_failures += 1
        self.disk()

    def disk(self) -> None:
        """Check the files of the server."""
        may_be = OnDisk(self._identity, self._models, self._counted, self._saved, max(self._models), self.save_failures)
        self.check(invariants.checkpoint_is_whole, self._folder / "checkpoint", may_be)
        self.check(invariants.log_is_true, self._folder, self._counted, self._saved)


def _zero_momentum(state: State, scenario: Scenario) -> State:
    """Return zeros for the weights of the layers that devices share on the server."""
    shared = {str(number) for number in scenario.server_layers}
    return {name: torch.zeros_like(tensor) for name, tensor in state.items() if name.partition(".")[0] in shared}
