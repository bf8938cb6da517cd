"""A simulated device: the program of `pipar device`, restarted whenever it ends, over the world's network and lanes."""

from __future__ import annotations

import asyncio
import random

from pipar.device.intake import Terms
from pipar.device.interfaces import Equipment
from pipar.errors import BudgetSpentError, PiparError, ProtocolError
from pipar.events import Event, Progress
from pipar.job.model_setup import part_sizes
from pipar.launch.assemble import run_device
from pipar.launch.deployed_device import device_guard
from pipar.privacy.budget import PrivacyGuard
from pipar.privacy.budget_file import BudgetFile
from pipar.transport.backoff import Backoff
from pipar.transport.channel import Channel
from pipar.transport.interface import Transport
from pipar.transport.reconnect import Reconnector
from pipar.wire.messages import Message
from simulation.clocks import running_loop
from simulation.environment import Environment
from simulation.instrumented import poisonable_builder
from simulation.invariants import admitted_devices_keep_trying, programs_do_not_fail
from simulation.processes import Process
from simulation.tampering import Tamper, TamperedLink, computes_huge_activations

_MOST_STARTS = 10_000


class SimulatedDevice:
    """One device from the beginning of the world to its end."""

    def __init__(self, name: str, environment: Environment, finish_again: asyncio.Event) -> None:
        self.name = name
        self.channel: Channel | None = None  # of the process that is running
        self.is_poisoned = False  # the next model that it sends has weights that are not finite
        self._was_admitted = False  # the process that is running
        self._tamper: Tamper | None = None
        self._hostile_until = 0.0
        self._env = environment
        self._finish_again = finish_again  # a server has lost the end of the training: devices are needed again
        self._process: Process | None = None

    async def run(self) -> None:
        """Restart the device whenever it ends, until the world does."""
        draws = random.Random(f"{self._env.scenario.seed} {self.name}")
        await asyncio.sleep(draws.uniform(0.0, 1.0))
        for number in range(_MOST_STARTS):
            process = self._process = self._env.process(f"{self.name} {number}", self.name, draws.uniform(0.5, 3.0))
            self._was_admitted = False
            task = self._env.processes.start(process, self._take_part(number))
            await asyncio.wait([task])
            self.channel = None
            if process.is_dead:
                await self._env.processes.bury(process)
            elif (error := task.exception()) is None:
                self._env.checks.note(self.name, "has trained to the end")
                await self._finish_again.wait()
            else:
                self._check_end(error)
            await asyncio.sleep(process.restart_after_s)

    def _check_end(self, error: BaseException) -> None:
        checks = self._env.checks
        checks.note(self.name, f"{type(error).__name__}: {error}")
        checks.check(programs_do_not_fail, self.name, error, expected=PiparError)
        checks.check(admitted_devices_keep_trying, self.name, error, admitted=self._was_admitted)
        checks.breach(self.name, error)
        if isinstance(error, BudgetSpentError):
            self._env.ledgers.stopped(self.name)

    async def _take_part(self, number: int) -> None:
        """Take part in the training as `pipar device` does."""
        env, training = self._env, self._env.training
        backoff = Backoff.of_device(env.scenario.seed + 1000 * number, self.name, asyncio.get_running_loop().time)
        reconnector = _VisibleReconnector(self, backoff)
        equipment = Equipment(
            training.workload.samples.shard(self.name),
            poisonable_builder(training.workload, self._takes_poison, self._exaggerates),
            env.lanes(env.scenario.speeds[self.name]),
            training.profile,
            self._guard(number),
            terms=Terms(part_sizes(training.workload.build_model()), training.profile, samples=10**6),
            evaluation=training.workload.evaluation_samples(self.name) if env.scenario.evaluates else None,
        )

        async def take_part(transport: Transport) -> None:
            try:
                await run_device(
                    self.name, env.link, equipment, transport, reconnector=reconnector, observe=self.observe
                )
            except ProtocolError as error:  # it would reconnect, but should not need to
                env.checks.breach(self.name, error)
                raise

        await reconnector.run(take_part)

    def _guard(self, number: int) -> PrivacyGuard:
        """Return the limits of the device's configuration; with a budget, its file outlives this process."""
        seed = random.Random(f"noise {self._env.scenario.seed} {self.name} {number}").getrandbits(128)
        ledgers = self._env.ledgers
        file = BudgetFile.open(ledgers.path(self.name), self.name) if ledgers.is_kept else None
        return device_guard(self._env.training.config, seed, budget_file=file)

    async def dial(self) -> Transport:
        link = await self._env.network.dial(self.name)
        return TamperedLink(
            link, self._tamper_now, self._note_tampering, lambda frame: self._env.ledgers.sent(self.name, frame)
        )

    def attach(self, channel: Channel) -> None:
        """A process of this device uses this channel from now on."""
        self.channel = channel

    def turn_hostile(self, tamper: Tamper, seconds: float) -> None:
        """Let the device change what it sends for this time."""
        self._tamper, self._hostile_until = tamper, running_loop().true_time() + seconds

    def _tamper_now(self) -> Tamper | None:
        self._was_admitted |= self.channel is not None and self.channel.session != 0
        return self._tamper if running_loop().true_time() < self._hostile_until else None

    def _note_tampering(self, message: Message) -> None:
        assert self._tamper is not None
        self._env.checks.excuse(self.name)
        self._env.checks.note(self.name, f"{self._tamper.__name__} instead of {message}")

    def observe(self, event: Event) -> None:
        if not isinstance(event, Progress):
            self._env.checks.note(self.name, str(event))

    def _exaggerates(self) -> bool:
        if self._tamper_now() is not computes_huge_activations:
            return False
        self._env.checks.excuse(self.name)
        self._env.checks.note(self.name, "computes_huge_activations")
        return True

    def _takes_poison(self) -> bool:
        if not self.is_poisoned:
            return False
        self.is_poisoned = False
        self._env.checks.excuse(self.name)
        return True

    def crash(self, restart_after_s: float, *, silently: bool) -> None:
        """End the process without a message."""
        if self._process is not None and self._process.is_running:
            self._env.network.lose_device(self.name, silently=silently)
            self._env.processes.kill(self._process, restart_after_s=restart_after_s)


class _VisibleReconnector(Reconnector):
    """A reconnector that tells its device which channel it keeps attached."""

    def __init__(self, device: SimulatedDevice, backoff: Backoff) -> None:
        super().__init__(device.name, "the server", device.dial, backoff, device.observe)
        self._device = device

    async def keep_attached(self, channel: Channel) -> None:
        self._device.attach(channel)
        await super().keep_attached(channel)
