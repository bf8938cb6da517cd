"""Links that are lost change nothing that is learned; a round that is lost is as if its device had no data in it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from support import reference
from support.cutting import CutLink, Loss
from support.reference import State
from support.training import EXACT, Case, largest_error, make_job, reference_data
from torch import nn

from pipar.config_file import config_from
from pipar.events import Back, BegunAnew, Dropped, EpochResult, Event, Lost, RoundOver, ignore
from pipar.execution.clock import run_virtually
from pipar.execution.lanes import VirtualLanes
from pipar.job.job import shared_costs
from pipar.job.torch_setup import make_learner, part_builder, repeatable
from pipar.job.workload import UserObjects, Workload
from pipar.launch.assemble import Equipment, MakeCompute, assemble_server, run_device
from pipar.methods import Plan
from pipar.nn.learner import TorchLearner
from pipar.planner.costs import Costs
from pipar.server.enrolment import ClosedEnrolment
from pipar.transport.backoff import Backoff
from pipar.transport.channel import Transport
from pipar.transport.in_memory import memory_pair
from pipar.transport.reconnect import Reconnector
from pipar.wire.messages import Body

pytestmark = pytest.mark.usefixtures("one_thread")

A, B, C = "phone-a", "phone-b", "phone-c"


@dataclass
class Roamed:
    """What came of a training whose links were lost."""

    state: State = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    results: list[EpochResult] = field(default_factory=list)
    carried: dict[str, int] = field(default_factory=dict)  # frames over each device's first link
    left_running: int = 0
    snapshots: dict[int, Body] = field(default_factory=dict)  # by round, if they were asked for

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
    **server: object,
) -> Roamed:
    """Train a case with the real mathematics over links that are lost behind so many frames each.

    It goes on behind a round from a snapshot of it, if there is one.
    """
    tree = case.tree()
    tree["server"] |= {"min_devices": 1, **server}
    config = config_from(tree)
    workload = Workload(config, UserObjects.of(config, model, None, None, None))
    job, out = make_job(workload), Roamed()
    plans = iter(replan)

    async def choose(links: Mapping[str, object]) -> Mapping[str, Plan]:
        return dict.fromkeys(links, next(plans))

    def lanes(costs: Costs) -> MakeCompute:
        return lambda names, recorder: VirtualLanes(names, recorder, costs.seconds, costs.contention)

    async def main(learner: TorchLearner) -> None:
        loop, enough = asyncio.get_running_loop(), asyncio.Event()

        def observe(event: Event) -> None:
            out.events.append(event)
            if saves and isinstance(event, RoundOver):
                out.snapshots[event.epoch] = Body.of(bytes(learner.snapshot().contiguous()), encoding="safetensors")
            if type(event).__name__ == "Joined" and event.devices == len(job.specs):  # type: ignore[union-attr]
                enough.set()

        of_server = lanes(job.server_costs())
        server = assemble_server(
            job,
            learner,
            workload.held_out_batches("validation"),
            enrolment=ClosedEnrolment(job),
            pool=of_server,
            background=of_server,
            emit=lambda result, _: out.results.append(result),
            observe=observe,
            replan=choose if replan else None,
            done=[1.0] * (0 if goes_on is None else goes_on[0]),
        )
        costs, admissions, lives, first = shared_costs(), [], [], {}

        async def live(name: str, number: int) -> None:
            spec, left = job.specs[number], iter(cuts.get(name, ()))

            async def dial() -> Transport:
                near, far = memory_pair()
                admissions.append(asyncio.create_task(server.admit(far)))
                link = CutLink(near, next(left, None), loss)
                first.setdefault(name, link)
                return link

            async def take_part(transport: Transport) -> None:
                of_device = lanes(costs(job.device_profiles[name], spec.speed))
                equipment = Equipment(workload.shard(name), part_builder(workload, name), of_device)
                await run_device(name, spec.link, equipment, transport, reconnector=reconnector, observe=ignore)

            backoff = Backoff(lambda: 1.0, loop.time, None, pause_s, pause_s)
            reconnector = Reconnector(name, "the server", dial, backoff, ignore)
            await reconnector.run(take_part)

        lives = [asyncio.create_task(live(spec.name, number)) for number, spec in enumerate(job.specs)]
        await enough.wait()
        await server.train(0 if goes_on is None else goes_on[0])
        await server.wait_until_left()
        await asyncio.gather(*lives)
        await asyncio.gather(*admissions)
        out.carried = {name: link.carried for name, link in first.items()}
        out.left_running = len(asyncio.all_tasks()) - 1

    learner = make_learner(job, workload)
    if goes_on is not None:
        learner.restore(goes_on[1])
    run_virtually(main(learner), within=repeatable(config.run.seed))
    out.state = learner.state()
    assert out.left_running == 0
    return out


def same(one: State, other: State) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def without(case: Case, absent: Mapping[str, Sequence[int]]) -> State:
    """What the definition comes to if these devices have no data in these epochs."""
    workload = case.workload()
    data = reference_data(workload)
    for number, name in enumerate(sorted(workload.names)):
        for epoch in absent.get(name, ()):
            data[number][epoch - 1] = []  # type: ignore[index]
    return reference.train(case.method, workload.build_model(), data, case.split_points[0], case.rules())


UNHURT = {
    "pipar": Case("pipar", (1, 3, 4), (7, 3, 2), momentum="keep", schedule="1f1b"),
    "sfl2": Case("sfl2", (2,), momentum="keep"),
    "sl": Case("sl", (2,)),
    "fl": Case("fl"),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", UNHURT)
def test_links_that_are_lost_for_a_while_change_no_bit_of_the_weights(method: str) -> None:
    case = UNHURT[method]
    undisturbed = roam(case, {})
    frames = undisturbed.carried[A]
    for cut in range(4, frames - 4, max(1, frames // 6)):
        cuts = {A: [cut, 5, 7], B: [frames - cut], C: [5, 6, 7]}
        roamed = roam(case, cuts)
        assert same(roamed.state, undisturbed.state), cut
        assert roamed.counted == undisturbed.counted
        assert len(roamed.of(Back)) >= 3
        assert not roamed.of(Dropped)
        assert not roamed.of(Lost)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "absent_in"),
    [
        (Case("pipar", (1,), (7,), epochs=3), 1),
        (Case("pipar", (2,), (3,), epochs=3, momentum="keep"), 1),
        (Case("pipar", (2, 1, 4), (3,), epochs=3), 2),
        (Case("sfl", (3,), epochs=3), 1),
        (Case("fl", epochs=3), 1),
        (Case("sl", (2,), epochs=3), 1),
    ],
    ids=str,
)
def test_a_round_that_is_lost_is_as_if_its_device_had_had_no_data(case: Case, absent_in: int) -> None:
    undisturbed = roam(case, {})
    each = undisturbed.carried[B] // case.epochs
    cut = each // 2 + (absent_in - 1) * each + 2
    roamed = roam(case, {B: [cut]}, pause_s=0.5, resume_window=0.2)
    assert [(event.device, event.epoch) for event in roamed.of(Dropped)] == [(B, absent_in)]  # type: ignore[attr-defined]
    absent = [epoch for epoch, counts in enumerate(roamed.counted, start=1) if B not in counts]
    assert absent[0] == absent_in
    assert absent[-1] < case.epochs  # it has come anew
    assert largest_error(roamed.state, without(case, {B: absent})) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sfl2", "sl"])
def test_a_round_in_which_nobody_counts_leaves_nothing_in_a_model_that_all_share(method: str) -> None:
    case = Case(method, (2,), epochs=2)
    undisturbed = roam(case, {})
    cuts = {name: [frames // case.epochs // 2 + 2] for name, frames in undisturbed.carried.items()}
    roamed = roam(case, cuts, pause_s=0.5, resume_window=0.2, min_devices=3)
    assert sorted((event.device, event.epoch) for event in roamed.of(Dropped)) == [(A, 1), (B, 1), (C, 1)]  # type: ignore[attr-defined]
    assert len(roamed.of(BegunAnew)) == 1
    assert same(roamed.state, undisturbed.state)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", ["reset", "keep"])
def test_a_straggler_counts_in_the_rounds_that_it_was_ready_for(momentum: str) -> None:
    case = Case("pipar", (2,), (3,), epochs=4, momentum=momentum)
    slowest_s = max(result.seconds for result in roam(case, {}).results)
    roamed = roam(case, {A: [12]}, pause_s=0.6 * slowest_s, round_deadline=1.1 * slowest_s, resume_window=100.0)
    absent = [epoch for epoch, counts in enumerate(roamed.counted, start=1) if A not in counts]
    assert absent == [1]
    assert not roamed.of(Lost)
    assert largest_error(roamed.state, without(case, {A: absent})) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("momentum", ["reset", "keep"])
def test_plans_may_change_while_devices_are_lost_and_late(momentum: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipar.planner.replanner.NOTICED", -1.0)
    case = Case("pipar", (2,), (3,), epochs=5, momentum=momentum)
    slowest_s = max(result.seconds for result in roam(replace(case, split_points=(4,)), {}).results)
    roamed = roam(
        case,
        {A: [12], B: [9]},
        replan=[Plan(1, 2), Plan(4, 3)] * 5,
        pause_s=1.2 * slowest_s,
        round_deadline=1.1 * slowest_s,
        resume_window=100.0,
    )
    assert len(roamed.of(Dropped)) >= 1
    assert not roamed.of(Lost)
    absent = {name: [n for n, counts in enumerate(roamed.counted, 1) if name not in counts] for name in (A, B, C)}
    assert absent == {A: [1], B: [1], C: []}
    assert largest_error(roamed.state, without(case, absent)) < EXACT
