"""Trainings in virtual time whose links are lost and restored."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from pipar.device.intake import Terms
from pipar.device.interfaces import Equipment, MakeLanes
from pipar.errors import PiparError
from pipar.events import EpochResult, Event, RoundOver, ignore
from pipar.execution.clock import run_virtually
from pipar.execution.lanes import VirtualLanes
from pipar.job.job import shared_costs
from pipar.job.model_setup import deterministic, make_learner, part_builder, part_sizes
from pipar.job.user_objects import UserObjects
from pipar.job.workload import Workload
from pipar.launch.assemble import ServerSetup, assemble_server, run_device
from pipar.methods import Plan
from pipar.nn.learner import TorchLearner
from pipar.planner.costs import Costs
from pipar.server.enrolment import ClosedEnrolment
from pipar.settings.config_file import config_from
from pipar.transport.backoff import Backoff
from pipar.transport.in_memory import memory_pair
from pipar.transport.interface import Transport
from pipar.transport.reconnect import Reconnector
from pipar.wire.messages import Body
from support.cutting import CutLink, Loss
from support.hostile import Tamper, TamperedLink
from support.reference import State
from support.training import Case, make_job

A, B, C = "phone-a", "phone-b", "phone-c"
#: What answers a device instead of its server.
Stranger = Callable[[Transport], Awaitable[None]]


@dataclass
class Roamed:
    """The outcome of a training whose links were lost."""

    state: State = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    results: list[EpochResult] = field(default_factory=list)
    carried: dict[str, int] = field(default_factory=dict)  # frames over each device's first link
    left_running: int = 0
    snapshots: dict[int, Body] = field(default_factory=dict)  # by round, if they were asked for
    endings: dict[str, PiparError] = field(default_factory=dict)  # of the devices that were tampered with, if any

    def of(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def counted(self) -> list[dict[str, int]]:
        return [event.counted for event in self.events if isinstance(event, RoundOver)]


def roam(
    case: Case,
    cuts: Mapping[str, Sequence[int]],
    *,
    loss: Loss = Loss.FRAMES,
    pause_s: float = 0.05,
    replan: Sequence[Plan] = (),
    saves: bool = False,
    goes_on: tuple[int, Body] | None = None,
    model: nn.Sequential | None = None,
    tampers: Mapping[str, Tamper] | None = None,
    absent: Collection[str] = (),
    begins_with: int | None = None,
    strangers: Mapping[str, Sequence[Stranger]] | None = None,
    **server: object,
) -> Roamed:
    """Train a case with the real mathematics over links that are lost after the given numbers of frames.

    It resumes after a round from a snapshot of it, if one is given. `tampers` change what devices say, and `absent`
    devices never connect. The first connections of a device go to its `strangers` instead of the server.
    """
    tree = case.tree()
    tree["server"] |= {"min_devices": 1, **server}
    config = config_from(tree)
    workload = Workload(config, UserObjects.of(config, model, None, None, None))
    job, out, tampers = make_job(workload), Roamed(), tampers or {}
    plans, wanted = iter(replan), begins_with or len(job.specs) - len(absent)

    async def choose(links: Mapping[str, object]) -> Mapping[str, Plan]:
        return dict.fromkeys(links, next(plans))

    def lanes(costs: Costs) -> MakeLanes:
        return lambda names, recorder: VirtualLanes(names, recorder, costs.seconds, costs.contention)

    async def main(learner: TorchLearner) -> None:
        loop, enough = asyncio.get_running_loop(), asyncio.Event()

        def observe(event: Event) -> None:
            out.events.append(event)
            if saves and isinstance(event, RoundOver):
                out.snapshots[event.epoch] = Body.of(bytes(learner.snapshot().contiguous()), encoding="safetensors")
            if type(event).__name__ == "Joined" and event.devices == wanted:  # type: ignore[union-attr]
                enough.set()

        of_server = lanes(job.server_costs())
        server = assemble_server(
            job,
            ServerSetup(
                learner=learner,
                validation=workload.samples.held_out_batches("validation"),
                enrolment=ClosedEnrolment(job),
                pool=of_server,
                background=of_server,
                emit=lambda result, _: out.results.append(result),
                observe=observe,
                replan=choose if replan else None,
                done=[1.0] * (0 if goes_on is None else goes_on[0]),
            ),
        )
        costs, admissions, lives, first = shared_costs(), [], [], {}

        async def live(name: str, number: int) -> None:
            spec, left = job.specs[number], iter(cuts.get(name, ()))
            before = iter((strangers or {}).get(name, ()))

            async def dial() -> Transport:
                near, far = memory_pair()
                if (stranger := next(before, None)) is not None:
                    admissions.append(asyncio.create_task(stranger(far)))
                    return near
                admissions.append(asyncio.create_task(server.admit(far)))
                link = CutLink(near, next(left, None), loss)
                first.setdefault(name, link)
                return TamperedLink(link, tampers[name]) if name in tampers else link

            async def take_part(transport: Transport) -> None:
                of_device = lanes(costs(job.device_profiles[name], spec.speed))
                terms = Terms(part_sizes(workload.build_model()))
                equipment = Equipment(
                    workload.samples.shard(name), part_builder(workload, name), of_device, terms=terms
                )
                await run_device(name, spec.link, equipment, transport, reconnector=reconnector, observe=ignore)

            backoff = Backoff(lambda: 1.0, loop.time, None, pause_s, pause_s)
            reconnector = Reconnector(name, "the server", dial, backoff, ignore)
            try:
                await reconnector.run(take_part)
            except PiparError as error:
                if name not in tampers:
                    raise
                out.endings[name] = error

        present = [(spec.name, number) for number, spec in enumerate(job.specs) if spec.name not in absent]
        lives = [asyncio.create_task(live(*one)) for one in present]
        await enough.wait()
        await server.train(0 if goes_on is None else goes_on[0])
        await server.wait_until_left()
        await asyncio.gather(*lives)
        await asyncio.gather(*admissions)
        out.carried = {name: link.carried for name, link in first.items()}
        out.left_running = len(asyncio.all_tasks()) - 1

    learner = make_learner(job, workload, trusts_devices=False)
    if goes_on is not None:
        learner.restore(goes_on[1])
    run_virtually(main(learner), within=deterministic(config.run.seed))
    out.state = learner.state()
    assert out.left_running == 0
    return out


def same(one: State, other: State) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)
