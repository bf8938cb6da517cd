"""One simulated world: a server, its devices and all that goes wrong, from the first hello to the end of the training.

The programs are those of a deployment. What is simulated is around them: time, the network, the disk, and the compute.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import random
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipar.config import Config, DeviceSpec
from pipar.config_file import config_from
from pipar.data.datasets import Images
from pipar.device.interfaces import Equipment
from pipar.errors import PiparError, ProtocolError
from pipar.events import Dropped, Event, Lost, Progress, Resumed, RoundOver, Saved, SaveFailed
from pipar.execution.clock import VirtualTimeLoop, run_virtually
from pipar.execution.lanes import VirtualLanes
from pipar.execution.spans import SERVER, Recorder
from pipar.job.job import Job
from pipar.job.model_setup import deterministic
from pipar.job.plans import make_plans
from pipar.job.workload import UserObjects, Workload
from pipar.launch.assemble import ServerSetup, assemble_server, run_device
from pipar.launch.rehearsal import rehearse
from pipar.links import Link
from pipar.methods import METHODS, Plan
from pipar.nn.learner import LearnerSettings
from pipar.planner.costs import Costs
from pipar.profiling.profile import CodingTimes, LayerProfile, Profile
from pipar.server.enrolment import OpenEnrolment
from pipar.server.program import Server
from pipar.storage.checkpoint import Checkpoints, identity_of, latest
from pipar.storage.checkpoint_writer import CheckpointWriter
from pipar.storage.run_folder import RunFolder
from pipar.transport.backoff import Backoff
from pipar.transport.channel import Channel
from pipar.transport.interface import Transport
from pipar.transport.reconnect import Reconnector
from pipar.wire import encodings, frames
from pipar.wire.orders import TrainedPart
from simulation.disk import PowerLossError, UnreliableDisk
from simulation.held import LOOK_EVERY_S, Holdings, largest
from simulation.invariants import (
    Held,
    OnDisk,
    State,
    Taught,
    Violation,
    aggregate_is_the_mean,
    breaches_have_a_cause,
    checkpoint_is_whole,
    counted_once_each,
    log_is_true,
    memory_is_bounded,
    plain_relay,
    plain_round,
    plain_turns,
    programs_do_not_fail,
    samples_count_once,
    training_ends,
    weights_are_finite,
)
from simulation.network import DOWN, UP, Network
from simulation.plan import BATCH, LAYERS, RECTIFIED, Fault, Scenario, draw_encodings, draw_plans
from simulation.watched import CountedLearner, breakable_builder

#: Everything that broke is whole again and has had time to find each other, many times over.
_LIMIT_S = 900.0
#: More frames than any training of this size needs: two programs talk to each other without end.
_MOST_FRAMES = 60_000
_SAVING_S = 0.3
_INPUTS, _HIDDEN, _CLASSES = 4, 80, 3

_OWNER: contextvars.ContextVar[str] = contextvars.ContextVar("owner", default="world")


@dataclass(frozen=True)
class Outcome:
    """What became of one world."""

    scenario: Scenario
    violation: Violation | None
    events: list[str]
    digest: str  # of all events and all frames: equal digests are equal worlds
    seconds: float  # of virtual time
    rounds: int
    restarts: int  # of the server
    most: Held = field(default=Held("all"))  # that was ever held

    @property
    def seed(self) -> int:
        return self.scenario.seed


def simulate(scenario: Scenario) -> Outcome:
    """Run a world to its end, or to the first violation."""
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(prefix="pipar-faults-", dir=memory if memory.is_dir() else None) as folder,
        _chunks_of(scenario.chunk_bytes, scenario.coded_chunk_bytes),
    ):
        world: list[World] = []
        run_virtually(_run(scenario, Path(folder), world), within=deterministic(scenario.seed))
        return world[0].outcome()


async def _run(scenario: Scenario, folder: Path, made: list[World]) -> None:
    world = World(scenario, folder)
    made.append(world)
    await world.run()


@contextmanager
def _chunks_of(size_bytes: int, coded_bytes: int) -> Iterator[None]:
    """Cut messages and tensors into smaller pieces than usual, so that tiny ones are of several, too."""
    usual = frames.CHUNK_BYTES, encodings._CHUNK_BYTES
    frames.CHUNK_BYTES, encodings._CHUNK_BYTES = size_bytes, coded_bytes
    try:
        yield
    finally:
        frames.CHUNK_BYTES, encodings._CHUNK_BYTES = usual


@dataclass
class _Life:
    """A server or a device between two crashes."""

    owner: str
    task: asyncio.Task[None] | None = None
    is_dead: bool = False
    back_after_s: float = 1.0


class World:
    """All parts of a simulated deployment, and what is known of it."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.folder = folder
        self.violation: Violation | None = None
        self.models: dict[int, State] = {}
        self.counted: dict[int, dict[str, int]] = {}
        self._loop = asyncio.get_running_loop()
        assert isinstance(self._loop, VirtualTimeLoop)
        self._events: list[str] = []
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._tasks: dict[str, dict[asyncio.Task[Any], None]] = {}
        self._loop.set_task_factory(self._make_task)
        self._loop.set_exception_handler(self._unseen)
        self._network = Network(scenario.names, self._note, is_proved=scenario.is_proved)
        self._config = make_config(scenario)
        self._workload = Workload(self._config, make_own(scenario))
        self._profile = make_profile(self._workload.build_model())
        self._identity = identity_of(self._config)
        self._server_life: _Life | None = None
        self._server: Server | None = None
        self._learner: CountedLearner | None = None
        self._disk: UnreliableDisk | None = None
        self._lives: dict[str, _Life] = {}
        self._channels: dict[str, Channel] = {}
        self._poisoned: set[str] = set()  # the next model that they send is no model
        self._poisoned_once: set[str] = set()
        self._saved = self._save_failures = 0
        self._starts = 0
        self._called_back = asyncio.Event()
        self._numbers = random.Random(f"sessions {scenario.seed}")
        self._most = Held("all")
        self._holdings = Holdings(scenario, self._profile)
        self.models[0] = _copied(self._workload.build_model().state_dict())
        self._velocities = {0: _still(self.models[0], scenario)}  # behind the cut, where it is shared, by round

    # --- the whole

    async def run(self) -> None:
        """Live until the training is over or something is seen that must not be."""
        programs = [self._serve_for_ever(), *(self._live_for_ever(name) for name in self.scenario.names)]
        tasks = [self._loop.create_task(program) for program in (*programs, self._break_things(), self._look())]
        await self._over
        self._disk_is_whole()
        for task in tasks:
            task.cancel()
        await self._end_tasks(*self._tasks)

    def outcome(self) -> Outcome:
        text = "\n".join([*self._events, self._network.digest])
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        now, rounds = self._loop.time(), len(self.counted)
        return Outcome(self.scenario, self.violation, self._events, digest, now, rounds, self._starts - 1, self._most)

    def check(self, invariant: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Look whether an invariant holds; the first violation ends the world."""
        try:
            invariant(*arguments, **options)
        except Violation as violation:
            if self.violation is None:
                self.violation = violation
                self._note("world", f"VIOLATION {violation}")
            self._finish()

    def _finish(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _note(self, who: str, what: str) -> None:
        self._events.append(f"{self._loop.time():9.4f}  {who}: {what}")

    # --- tasks and whose they are

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        context = options.get("context")
        owner = _OWNER.get() if context is None else context.get(_OWNER, "world")
        task = asyncio.Task(coroutine, loop=loop, **options)
        owned = self._tasks.setdefault(owner, {})
        owned[task] = None
        task.add_done_callback(lambda done: owned.pop(done, None))
        return task

    def _start(self, life: _Life, program: Any) -> asyncio.Task[None]:
        context = contextvars.copy_context()
        context.run(_OWNER.set, life.owner)
        life.task = self._loop.create_task(program, context=context)
        return life.task

    async def _end_tasks(self, *owners: str) -> None:
        """Cancel all tasks of these owners, those too that they start while they are cancelled."""
        for _ in range(20):
            left = [
                task for owner in owners for task in self._tasks.get(owner, {}) if task is not asyncio.current_task()
            ]
            if not left:
                break
            for task in left:
                task.cancel()
            await asyncio.sleep(0)

    def _unseen(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and not isinstance(error, PiparError | PowerLossError):
            self.check(programs_do_not_fail, "a task that nobody waits for", error)

    # --- the server

    async def _serve_for_ever(self) -> None:
        """Start the server again whenever it has gone, as systemd does, until the training is over."""
        while True:
            life = self._server_life = _Life(f"server {self._starts}")
            self._starts += 1
            task = self._start(life, self._serve(life))
            await asyncio.wait([task])
            if life.is_dead:
                await self._end_tasks(life.owner)
                self._disk_is_whole()
                if self._save_failures:  # the end was told and then lost: somebody has to start the devices again
                    self._called_back.set()
            elif not task.cancelled():
                error = task.exception()
                if error is not None:
                    self._note(SERVER, "".join(traceback.format_exception(error)))
                    self.check(programs_do_not_fail, "the server", error)
                self._finish()
                return
            await asyncio.sleep(life.back_after_s)

    async def _serve(self, life: _Life) -> None:
        """As `pipar server --resume` does, over this network, this disk and these lanes."""
        job = Job(
            config=self._config,
            specs=(),
            sizes={},
            server_profile=self._profile,
            device_profiles={},
            batch_statistics=False,
            dropout=False,
            plans={},
            dataset="own",
            model="own",
        )
        checkpoints = self.folder / "checkpoint"
        found = latest(checkpoints, self._identity, lambda sentence: self._note(SERVER, sentence))
        if found is not None:
            job = replace(job, plans=found.plans, sizes=found.samples)
        learner = self._learner = self._make_learner(job, life)
        self._holdings.begin_anew()
        done = 0 if found is None else found.round
        if found is not None:
            learner.restore(found.tensors)
        self._forget_rounds_behind(done)
        folder = RunFolder(self.folder, job, world="real", command="python -m simulation", has_checkpoints=True)
        if found is not None:
            folder.resume(found)
        else:
            folder.start_over()
        observe = _while_alive(life, folder.event_recorder(lambda event: self._observe(event, learner)))
        job = replace(job, plans={}, sizes={})
        enrolment = OpenEnrolment(job, {}, self._spec, partial(make_plans, rehearse=rehearse))
        enrolment.keep_plans({**self.scenario.plans, **(found.plans if found is not None else {})})
        enrolment.add_listener(folder.update_job)
        self._disk = UnreliableDisk(lambda: self._crash_server(1.0, silently=True))
        lane = VirtualLanes(["checkpoint"], Recorder(SERVER, frozenset()), lambda _: _SAVING_S)
        checkpointer = CheckpointWriter(
            Checkpoints(checkpoints, 3, self._disk),
            learner,
            folder,
            job=lambda: enrolment.job,
            lane=lane,
            observe=observe,
        )
        lanes = _lanes(Costs(self._profile))
        server = self._server = assemble_server(
            job,
            ServerSetup(
                learner=learner,
                enrolment=enrolment,
                pool=lanes,
                background=lanes,
                emit=_while_alive(life, folder.add_epoch),
                observe=observe,
                replan=self._choose if self.scenario.replans else None,
                session_numbers=iter(lambda: 1 + self._numbers.getrandbits(31), 0),
                checkpointer=checkpointer,
                accountant=folder.accountant,
                done=[result.val_loss for result in folder.epochs][:done],
            ),
        )
        self._network.listen(server.admit, contextvars.copy_context(), self._admitted)
        if found is not None:
            observe(Resumed(done))
        try:
            await server.train(done)
            await server.wait_until_left()
        except asyncio.CancelledError:
            if not life.is_dead:
                await server.suspend("The server stops for now.")
            raise
        finally:
            if not life.is_dead:
                await checkpointer.finish()
                self._network.hang_up(silently=False)
            server.close()

    def _make_learner(self, job: Job, life: _Life) -> CountedLearner:
        settings = LearnerSettings(
            self._workload.optimizer(),
            _CLASSES,
            shares_server_model=job.method.shares_server_model,
            keep_momentum=job.keep_momentum,
        )
        learner = CountedLearner(self._workload.build_model(), job.split_points, settings)
        learner.aggregated = _while_alive(life, self._aggregated)
        return learner

    def _spec(self, name: str) -> DeviceSpec:
        return DeviceSpec(name, self._link, 1.0, None, "auto", "auto")

    @property
    def _link(self) -> Link:
        rate = self.scenario.rate_bps
        return Link(up_bps=rate, down_bps=rate, latency_s=self.scenario.latency_s)

    async def _choose(self, links: Mapping[str, Link]) -> Mapping[str, Plan]:  # noqa: ARG002
        """Choose any plans, after a while: what is trained may not depend on them."""
        await asyncio.sleep(self._numbers.uniform(0.0, 1.0))
        if METHODS[self.scenario.method].pipelines:
            return draw_plans(self._numbers, self.scenario.names)
        # Where the batch is not cut, or a shared model is cut in one place, there are encodings to choose.
        return {name: draw_encodings(self._numbers, plan) for name, plan in self.scenario.plans.items()}

    def _admitted(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.check(programs_do_not_fail, "the server", error)

    def _crash_server(self, back_after_s: float, *, silently: bool) -> None:
        """Nothing is saved or said: the server's process is gone."""
        life = self._server_life
        if life is None or life.is_dead or life.task is None or life.task.done():
            return
        self._note(SERVER, "is gone")
        life.is_dead, life.back_after_s = True, back_after_s
        self._server = None
        if self._disk is not None:
            self._disk.lose_unsynced()
        self._network.hang_up(silently=silently)
        for task in list(self._tasks.get(life.owner, {})):
            task.cancel()

    def _stop_server(self, back_after_s: float) -> None:
        """SIGTERM: the server says goodbye and saves what it has begun to save."""
        life = self._server_life
        if life is not None and not life.is_dead and life.task is not None and not life.task.done():
            life.back_after_s = back_after_s
            life.task.cancel()

    # --- the devices

    async def _live_for_ever(self, name: str) -> None:
        """Start the device again whenever it has gone, until it has trained to the end."""
        draws = random.Random(f"{self.scenario.seed} {name}")
        await asyncio.sleep(draws.uniform(0.0, 1.0))
        for number in range(10_000):
            life = self._lives[name] = _Life(f"{name} {number}", back_after_s=draws.uniform(0.5, 3.0))
            task = self._start(life, self._live(name, number))
            await asyncio.wait([task])
            self._channels.pop(name, None)
            if life.is_dead:
                await self._end_tasks(life.owner)
            elif task.exception() is None:
                self._note(name, "has trained to the end")
                await self._called_back.wait()
            else:
                error = task.exception()
                assert error is not None
                self._note(name, f"{type(error).__name__}: {error}")
                self.check(programs_do_not_fail, name, error, expected=PiparError)
                self.check(breaches_have_a_cause, name, error, excused=self._is_excused(name))
            await asyncio.sleep(life.back_after_s)

    async def _live(self, name: str, number: int) -> None:
        """As `pipar device` does."""
        backoff = Backoff.of_device(self.scenario.seed + 1000 * number, name, self._loop.time)
        reconnector = _Watched(
            name, lambda: self._network.dial(name), backoff, self._observe_device(name), self._channels
        )
        build = breakable_builder(self._workload, lambda: self._is_poisoned(name))
        lanes = _lanes(Costs(self._profile, self.scenario.speeds[name]))
        equipment = Equipment(self._workload.shard(name), build, lanes, self._profile)
        observe = self._observe_device(name)

        async def take_part(transport: Transport) -> None:
            try:
                await run_device(name, self._link, equipment, transport, reconnector=reconnector, observe=observe)
            except ProtocolError as error:  # it comes back, but should not have had to
                self.check(breaches_have_a_cause, name, error, excused=self._is_excused(name))
                raise

        await reconnector.run(take_part)

    def _is_poisoned(self, name: str) -> bool:
        if name not in self._poisoned:
            return False
        self._poisoned.discard(name)
        self._poisoned_once.add(name)
        return True

    def _is_excused(self, name: str) -> bool:
        return name in self._poisoned_once or name in self._network.excused

    def _crash_device(self, name: str, back_after_s: float, *, silently: bool) -> None:
        life = self._lives.get(name)
        if life is None or life.is_dead or life.task is None or life.task.done():
            return
        life.is_dead, life.back_after_s = True, back_after_s
        self._network.lose_device(name, silently=silently)
        for task in list(self._tasks.get(life.owner, {})):
            task.cancel()

    def _observe_device(self, name: str) -> Callable[[Event], None]:
        def observe(event: Event) -> None:
            if not isinstance(event, Progress):
                self._note(name, str(event))

        return observe

    # --- what goes wrong

    async def _break_things(self) -> None:
        for fault in self.scenario.faults:
            await asyncio.sleep(max(0.0, fault.at_s - self._loop.time()))
            self._note("fault", f"{fault.kind} {fault.device} {fault.seconds:g} s, choice {fault.choice}")
            self._break(fault)

    def _break(self, fault: Fault) -> None:
        network, now, silently = self._network, self._loop.time(), bool(fault.choice & 2)
        weather = network.weather.get(fault.device)
        match fault.kind:
            case "cut":
                network.cut(fault.device, fault.seconds, (None, None, UP, DOWN)[fault.choice % 4])
            case "one-way":
                network.lose_one_way(fault.device, fault.seconds, UP if fault.choice & 1 else DOWN)
            case "slow" if weather is not None:
                weather.slow_until, weather.slow_s = now + fault.seconds, 0.01 + (fault.choice % 100) / 200
            case "delay" if weather is not None:
                weather.late_s.extend([fault.seconds] * (1 + fault.choice % 3))
            case "duplicate" if weather is not None:
                weather.doubled += 1 + fault.choice % 5
            case "corrupt" if weather is not None:
                weather.damaged.append(fault.choice)
            case "crash-device":
                self._crash_device(fault.device, fault.seconds, silently=silently)
            case "poison":
                self._poisoned.add(fault.device)
            case "crash-server":
                self._crash_server(fault.seconds, silently=silently)
            case "stop-server":
                self._stop_server(fault.seconds)
            case "power-loss" if self._disk is not None:
                self._disk.power_fails_in = fault.choice % 9
            case "full-disk" if self._disk is not None:
                self._disk.full_for += 1 + fault.choice % 2
            case "clock-jump":
                assert isinstance(self._loop, VirtualTimeLoop)
                self._loop.leap(fault.seconds)

    # --- what is seen

    def _observe(self, event: Event, learner: CountedLearner) -> None:
        if isinstance(event, Progress):
            return
        if isinstance(event, Saved):
            self._note(SERVER, f"Saved(epoch={event.epoch})")
            self._saved, self._save_failures = event.epoch, 0
            self._disk_is_whole()
            return
        if isinstance(event, SaveFailed):
            self._note(SERVER, f"SaveFailed(epoch={event.epoch})")
            self._save_failures += 1
            self._disk_is_whole()
            return
        self._note(SERVER, str(event))
        self._holdings.observe(event)
        if isinstance(event, Lost) and "Sending failed" in event.reason:
            self.check(programs_do_not_fail, "the server", RuntimeError(event.reason))
        if isinstance(event, Dropped) and "broke the protocol" in event.reason:
            error = ProtocolError(event.reason)
            self.check(breaches_have_a_cause, event.device, error, excused=self._is_excused(event.device))
        if isinstance(event, RoundOver):
            self._round_is_over(event, _copied(learner.state()))

    def _aggregated(self, returned: Sequence[TrainedPart], trained: Mapping[str, tuple[int, int]]) -> None:
        """Count what an aggregation was made of."""
        self.check(counted_once_each, [back.device for back in returned])
        for back in returned:
            stepped, begun = trained.get(back.device, (None, 0))
            if self._server is None or self._server.plan_of(back.device).split_point == LAYERS:
                stepped = None  # its replica has no layers
            own = self.scenario.samples[back.device]
            self.check(samples_count_once, back.device, own=own, said=back.samples, stepped=stepped, begun=begun)

    def _round_is_over(self, event: RoundOver, state: State) -> None:
        epoch, counted = event.epoch, dict(event.counted)
        self.models[epoch], self.counted[epoch] = state, counted
        if self._server is not None and self._learner is not None:
            present = [session.device for session in self._server.sessions]
            self._holdings.end_round(present, self._learner.replica_bytes())
        self.check(weights_are_finite, epoch, state)
        if self.scenario.is_exact and self.violation is None:
            self.check(aggregate_is_the_mean, epoch, state, self._expected(epoch, counted, event.partly))

    def _expected(self, epoch: int, counted: Mapping[str, int], partly: Mapping[str, int]) -> State:
        """Return the model of a round by the definition of the method, from that of the round before."""
        method, rules = METHODS[self.scenario.method], self._workload.optimizer()
        model, before = self._workload.build_model(), self.models[epoch - 1]
        shards = {name: self._workload.shard(name) for name in (*counted, *partly)}
        if not method.shares_server_model:
            return plain_round(model, before, shards, epoch, rules)
        velocity = self._velocities[epoch - 1]
        if method.one_device_at_a_time:
            expected, self._velocities[epoch] = plain_relay(model, before, velocity, shards, epoch, rules)
        else:
            samples = {**counted, **partly}
            taught = {name: Taught(shards[name], samples[name], name in counted) for name in shards}
            expected, self._velocities[epoch] = plain_turns(model, before, velocity, taught, epoch, rules)
        return expected

    def _forget_rounds_behind(self, done: int) -> None:
        """A server goes on behind this round: later ones are trained again."""
        for known in (self.models, self.counted, self._velocities):
            for epoch in [epoch for epoch in known if epoch > done]:
                del known[epoch]
        self._saved, self._save_failures = done, 0

    def _disk_is_whole(self) -> None:
        most = max(self.models)
        may_be = OnDisk(self._identity, self.models, self.counted, self._saved, most, self._save_failures)
        self.check(checkpoint_is_whole, self.folder / "checkpoint", may_be)
        self.check(log_is_true, self.folder, self.counted, self._saved)

    async def _look(self) -> None:
        """Look now and then at what the programs hold on to, and at the clock."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            doing = f"{len(self.counted)} of {self.scenario.rounds} rounds are trained"
            self.check(training_ends, self._loop.time(), _LIMIT_S, doing)
            if self._network.frames > _MOST_FRAMES:
                self.check(training_ends, 1.0, 0.0, f"{self._network.frames} frames were sent")
            for held, most in self._held():
                self._most = largest("all", [self._most, held])
                self.check(memory_is_bounded, held, most)

    def _held(self) -> Iterator[tuple[Held, Held]]:
        yield from self._holdings.of_devices(self._channels)
        if self._server is not None and self._learner is not None:
            yield from self._holdings.of_server(self._server.sessions, self._learner.replica_bytes())
        tasks = 30 + 16 * len(self.scenario.names)
        yield Held("all", tasks=sum(map(len, self._tasks.values()))), Held("all", tasks=tasks)


class _Watched(Reconnector):
    """A reconnector whose channel can be looked at."""

    def __init__(self, name: str, dial: Any, backoff: Backoff, observe: Any, channels: dict[str, Channel]) -> None:
        super().__init__(name, "the server", dial, backoff, observe)
        self._channels = channels

    async def keep_attached(self, channel: Channel) -> None:
        self._channels[self._name] = channel
        await super().keep_attached(channel)


def _while_alive(life: _Life, take: Callable[..., None]) -> Callable[..., None]:
    """Return the same function, which does nothing more once the process is gone."""

    def gated(*arguments: Any) -> None:
        if not life.is_dead:
            take(*arguments)

    return gated


def _still(state: State, scenario: Scenario) -> State:
    """Return no momentum for the weights behind the cut."""
    shared = {str(number) for number in scenario.layers_behind_the_cut}
    return {name: torch.zeros_like(tensor) for name, tensor in state.items() if name.partition(".")[0] in shared}


def _copied(state: Mapping[str, torch.Tensor]) -> State:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def _lanes(costs: Costs) -> Any:
    return lambda lanes, recorder: VirtualLanes(lanes, recorder, costs.seconds)


# --- what is trained


def make_config(scenario: Scenario) -> Config:
    """Return the configuration of a scenario's training."""
    return config_from(
        {
            "run": {
                "method": scenario.method,
                "epochs": scenario.rounds,
                "batch_size": BATCH,
                "seed": scenario.seed,
                "trace": "off",
            },
            "model": {"dtype": "float64", "norm": "none"},
            "wire": {"encoding": scenario.encoding},
            "optimizer": {
                "learning_rate": 0.1,
                "momentum_at_aggregation": "keep" if scenario.keep_momentum else "reset",
            },
            "server": {
                "cores": 2,
                "min_devices": scenario.min_devices,
                "round_deadline": scenario.round_deadline_s,
                "resume_window": scenario.resume_window_s,
            },
            "devices": [{"name": name} for name in scenario.names],
        }
    )


def make_own(scenario: Scenario) -> UserObjects:
    """Return a tiny network and tiny data, drawn from the seed."""
    generator = torch.Generator().manual_seed(scenario.seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(scenario.seed)
        model = nn.Sequential(nn.Linear(_INPUTS, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _CLASSES)).double()
    assert len(model) == LAYERS
    data = {}
    for name, count in scenario.samples.items():
        inputs = torch.randn((count, _INPUTS), generator=generator, dtype=torch.float64)
        data[name] = Images(inputs, torch.randint(_CLASSES, (count,), generator=generator))
    own = UserObjects.of(config_from({}), model, None, None, None)
    return replace(own, training=data, input_shape=(_INPUTS,), classes=_CLASSES)


#: So little that encodings which are to be chosen are worth their time on a slow link.
_SHARES = {"sparse": (0.3, 0.3), "planes": (0.2, 0.2), "sparse-planes": (0.1, 0.1)}


def make_profile(model: nn.Sequential) -> Profile:
    """Return what the network takes on a machine of this world: tens of milliseconds a layer."""
    layers, x = [], torch.zeros((1, _INPUTS), dtype=torch.float64)
    for place, (name, layer) in enumerate(model.named_children(), start=1):
        with torch.no_grad():
            x = layer(x)
        weights = sum(tensor.nbytes for tensor in layer.state_dict().values())
        forward, rectified = (0.01, 0.03), place in RECTIFIED
        layer_profile = LayerProfile(name, forward, (0.02, 0.06), x[0].nbytes, weights, rectified=rectified)
        layers.append(replace(layer_profile, shares=_SHARES))
    # Each chunk takes so long that messages are often half encoded when something happens to them.
    coding = {name: CodingTimes(encode_s=0.03, decode_s=0.002) for name in encodings.EXACT[1:]}
    coding["changes"] = CodingTimes()
    network = ("simulated", "float64", (1, BATCH), tuple(layers))
    return Profile(*network, load_s=0.005, pack_s=0.02, install_s=0.02, coding=coding, changes_share=0.5)
