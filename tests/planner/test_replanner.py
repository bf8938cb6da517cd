"""New plans between two rounds change the time alone: layers change sides, weights and momentum with them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
import torch
from support.training import EXACT, Case, Trained, largest_error, make_job, reference_state
from torch import nn

from pipar.errors import PlanError
from pipar.events import EpochResult, Event, ReplanFailed, Replanned
from pipar.execution.clock import run_virtually
from pipar.execution.spans import Span
from pipar.job.prepare import prepare_timing_only
from pipar.job.user_objects import UserObjects
from pipar.job.workload import Workload
from pipar.launch.rehearsal import rehearse
from pipar.launch.virtual import train_timing_only, train_virtually
from pipar.methods import Plan
from pipar.nn.parts import Part
from pipar.planner import replanner
from pipar.planner.replanner import MeasuredLink, Replan, Replanner
from pipar.settings.config_file import config_from
from pipar.settings.links import Link
from pipar.transport.shaping import Traffic

Q = 5  # layers of VGG-5
VISIBLE = 1e-6


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round's links count as changed."""
    monkeypatch.setattr(replanner, "NOTICED", -1.0)


def scripted(names: Sequence[str], script: Sequence[Sequence[Plan]]) -> Replan:
    """Return plans that are written down beforehand: for each choice one for each device."""
    left = iter(script)

    async def replan(links: Mapping[str, Link]) -> Mapping[str, Plan]:
        assert sorted(links) == sorted(names)
        return dict(zip(sorted(names), next(left), strict=True))

    return replan


def train(
    case: Case, script: Sequence[Sequence[Plan]], model: nn.Sequential | None = None
) -> tuple[Trained, list[Replanned]]:
    """Return the outcome of a case in virtual time, with plans that a script changes between epochs."""
    workload = case.workload(model)
    job = make_job(workload)
    epochs: list[EpochResult] = []
    spans: list[Span] = []
    seen: list[Replanned] = []

    def emit(result: EpochResult, of_epoch: list[Span]) -> None:
        epochs.append(result)
        spans.extend(of_epoch)

    def observe(event: Event) -> None:
        if isinstance(event, Replanned):
            seen.append(event)

    learner = train_virtually(job, workload, emit, observe, replan=scripted(workload.names, script))
    return Trained(job, learner.state(), epochs, spans), seen


SCRIPTS: dict[str, list[list[Plan]]] = {
    "back and forth": [[Plan(4, 3)] * 3, [Plan(1, 3)] * 3],
    "to the whole network and back": [[Plan(Q, 1), Plan(Q, 1), Plan(2, 3)], [Plan(1, 7), Plan(3, 2), Plan(Q, 1)]],
    "each its own way": [[Plan(1, 7), Plan(4, 1, 2), Plan(3, 100)], [Plan(3, 2, 1), Plan(2, 12), Plan(1, 57, 3)]],
    "micro-batches alone": [[Plan(2, 1), Plan(2, 12), Plan(2, 7)], [Plan(2, 3, 2), Plan(2, 12), Plan(2, 100, 5)]],
    "one of three": [[Plan(2, 7), Plan(4, 7), Plan(2, 7)], [Plan(2, 7), Plan(1, 7), Plan(2, 7)]],
}
RULES: list[dict[str, Any]] = [
    {"momentum": "reset"},
    {"momentum": "keep"},
    {"momentum": "keep", "weight_decay": 0.1, "norm": "group"},
]


def every_case() -> Iterator[Any]:
    """Yield every script with all rules; one of them counts as fast."""
    for number, (script, rules) in enumerate(itertools.product(SCRIPTS, RULES)):
        yield pytest.param(script, rules, marks=() if number == 8 else pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.usefixtures("every_round")
@pytest.mark.parametrize(("script", "rules"), list(every_case()))
def test_weights_are_those_of_the_definition_for_any_plans(script: str, rules: dict[str, Any]) -> None:
    case = Case("pipar", (2,), (7,), epochs=3, **rules)
    trained, seen = train(case, SCRIPTS[script])
    assert [event.epoch for event in seen] == [2, 3]
    assert largest_error(trained.state, reference_state(case)) < EXACT
    assert trained.samples == [sum(case.sizes)] * case.epochs


@pytest.mark.slow
@pytest.mark.usefixtures("every_round")
@pytest.mark.parametrize("momentum", ["reset", "keep"])
def test_batch_statistics_move_with_their_layers(momentum: str) -> None:
    case = Case("pipar", (2,), (1,), epochs=3, norm="batch", momentum=momentum, sizes=(230, 101, 57))
    trained, _ = train(case, [[Plan(4, 1), Plan(1, 1), Plan(Q, 1)], [Plan(1, 1), Plan(Q, 1), Plan(3, 1)]])
    assert largest_error(trained.state, reference_state(case)) < EXACT


def without_weights_in_front() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 10))


def partly_frozen() -> nn.Sequential:
    model = without_weights_in_front()
    model[1].requires_grad_(False)
    return model


def with_one_weight_twice() -> nn.Sequential:
    """Layers 2 and 4 have one weight: they can change sides together only."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 10))
    model[3].weight = model[1].weight
    return model


@pytest.mark.slow
@pytest.mark.usefixtures("every_round")
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("aggregator", ["fedprox", "fedavgm"])
def test_layers_that_move_are_still_pulled_to_the_global_model_and_stepped(
    aggregator: str, rules: dict[str, Any]
) -> None:
    given = (("proximal", 3.0),) if aggregator == "fedprox" else (("server_momentum", 0.0),)
    case = Case("pipar", (2,), (7,), epochs=3, aggregator=aggregator, aggregation=given, **rules)
    trained, _ = train(case, SCRIPTS["to the whole network and back"])
    assert largest_error(trained.state, reference_state(case)) < EXACT


@pytest.mark.slow
@pytest.mark.usefixtures("every_round")
@pytest.mark.parametrize("aggregator", ["fedavg", "fedprox"])
@pytest.mark.parametrize("make", [without_weights_in_front, partly_frozen, with_one_weight_twice])
def test_layers_of_own_networks_move(make: Callable[[], nn.Sequential], aggregator: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        model = make().double()
    # What is between two uses of a weight is one layer.
    layers, cuts = (3, (1, 2)) if make is with_one_weight_twice else (len(model), (2, 3))
    given = (("proximal", 3.0),) if aggregator == "fedprox" else ()
    case = Case("pipar", (1,), (7,), epochs=3, momentum="keep", aggregator=aggregator, aggregation=given)
    script = [[Plan(cuts[0], 3), Plan(cuts[1], 2), Plan(layers, 1)], [Plan(cuts[1], 3), Plan(1, 2), Plan(1, 5)]]
    trained, seen = train(case, script, model)
    assert len(seen) == 2
    assert largest_error(trained.state, reference_state(case, model)) < EXACT


@pytest.mark.slow
@pytest.mark.usefixtures("every_round")
@pytest.mark.parametrize("lost", ["receive_state", "_set_state"])
def test_momentum_that_is_lost_on_the_way_would_be_detected(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("pipar", (2,), (7,), epochs=3, momentum="keep")
    monkeypatch.setattr(Part, lost, lambda *_: None)
    trained, _ = train(case, SCRIPTS["back and forth"])
    assert largest_error(trained.state, reference_state(case)) > VISIBLE


@pytest.mark.slow
@pytest.mark.usefixtures("every_round")
def test_if_momentum_is_reset_only_the_plan_is_sent_with_the_model() -> None:
    moves = SCRIPTS["back and forth"]
    still = [[Plan(2, 3)] * 3] * 2
    bytes_down = []
    for script in (moves, still):
        trained, _ = train(Case("pipar", (2,), (3,), epochs=3, encoding="raw"), script)
        states = [span for span in trained.spans if span.kind == "model" and span.lane == "uplink"]
        assert len(states) == 3 * 3  # one model a device and epoch
        bytes_down.append(trained.epochs[0].bytes_down)
    # In epoch 1 devices with P = 2 train and are sent layers 1..4, or 1..2 again.
    layers = make_job(Case("pipar").workload()).server_profile
    more = bytes_down[0] - bytes_down[1]
    assert more == pytest.approx(3 * layers.parameter_bytes(3, 4), rel=0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("every_round")
def test_each_epoch_is_trained_with_the_current_plan() -> None:
    script = [[Plan(2, 3), Plan(Q, 1), Plan(1, 7)], [Plan(Q, 1), Plan(1, 2), Plan(1, 7)]]
    trained, seen = train(Case("pipar", (2,), (7,), sizes=(100,) * 3, epochs=3, encoding="raw"), script)
    forwards = {
        (epoch, owner): max(
            s.micro_batch for s in trained.spans if (s.epoch, s.owner, s.kind, s.waiting) == (epoch, owner, "fc", False)
        )
        for epoch in (1, 2, 3)
        for owner in ("phone-a", "phone-b", "phone-c")
    }
    assert list(forwards.values()) == [7, 7, 7, 3, 1, 7, 1, 2, 7]
    assert [list(event.plans.values()) for event in seen] == [[asdict(plan) for plan in plans] for plans in script]
    served = {(span.epoch, span.device) for span in trained.spans if span.kind == "fs"}
    assert {(epoch, name) for epoch, name in forwards if (epoch, name) not in served} == {
        (2, "phone-b"),
        (3, "phone-a"),
    }


@pytest.mark.slow
@pytest.mark.usefixtures("every_round")
@pytest.mark.parametrize("momentum", ["reset", "keep"])
def test_the_same_plans_give_the_same_spans(momentum: str) -> None:
    case = Case("pipar", (2,), (7,), epochs=3, momentum=momentum)
    one, other = (train(case, SCRIPTS["to the whole network and back"])[0] for _ in range(2))
    assert one.spans == other.spans
    assert one.epochs == other.epochs


@pytest.mark.slow
@pytest.mark.usefixtures("every_round")
@pytest.mark.parametrize("method", ["fl", "sl", "sfl2"])
def test_methods_with_one_model_for_all_are_never_planned_again(method: str) -> None:
    case = Case(method, (2,), epochs=2)
    trained, seen = train(case, [])  # a choice would be one too many
    assert seen == []
    assert largest_error(trained.state, reference_state(case)) < EXACT


@pytest.mark.usefixtures("every_round")
def test_without_replanning_the_first_plans_stay() -> None:
    tree = Case("pipar", (2,), (3,)).tree()
    tree["plan"]["replan"] = False
    assert timed(tree, scripted(NAMES, [])).replanned == []


# --- without the mathematics


NAMES = ("phone-a", "phone-b", "phone-c")


@dataclass
class Timed:
    """The outcome of a timing-only run."""

    epochs: list[EpochResult] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    replanned: list[Replanned] = field(default_factory=list)
    failed: list[ReplanFailed] = field(default_factory=list)


def timed(tree: dict[str, Any], replan: Replan) -> Timed:
    config = config_from(tree)
    job = make_job(Workload(config, UserObjects.of(config, None, None, None, None)))
    timed = Timed()

    def emit(result: EpochResult, of_epoch: list[Span]) -> None:
        timed.epochs.append(result)
        timed.spans.extend(of_epoch)

    def observe(event: Event) -> None:
        timed.replanned += [event] if isinstance(event, Replanned) else []
        timed.failed += [event] if isinstance(event, ReplanFailed) else []

    train_timing_only(job, emit, observe, replan=replan)
    return timed


@pytest.mark.slow
@pytest.mark.usefixtures("every_round")
@pytest.mark.parametrize("momentum", [pytest.param("reset", marks=pytest.mark.slow), "keep"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_timing_only_run_takes_as_long_for_any_plans(script: str, momentum: str) -> None:
    # Large enough for the bytes that sizes alone do not know of, a tensor's shape and its name, not to count.
    case = Case("pipar", (2,), (7,), shape=(1, 16, 16), sizes=(60, 40, 20), epochs=3, momentum=momentum, encoding="raw")
    trained, seen = train(case, SCRIPTS[script])
    without = timed(case.tree(), scripted(NAMES, SCRIPTS[script]))
    assert without.replanned == seen
    assert [epoch.samples for epoch in without.epochs] == trained.samples
    for one, other in zip(without.epochs, trained.epochs, strict=True):
        assert one.seconds == pytest.approx(other.seconds, rel=1e-3)
        assert one.bound_s == pytest.approx(other.bound_s, rel=1e-3)
        assert one.efficiency <= 1


class Watched:
    """A choice that keeps the plans there are, and notes when it was made for which uplink of the first device."""

    def __init__(self) -> None:
        self.made: list[tuple[float, Link]] = []

    async def __call__(self, links: Mapping[str, Link]) -> Mapping[str, Plan]:
        self.made.append((asyncio.get_running_loop().time(), links["phone-a"]))
        return {}


def on_a_link(link: object, epochs: int) -> dict[str, Any]:
    """Three devices whose epochs are some seconds long: 4 MB of activations each."""
    case = Case("pipar", (1,), (5,), shape=(3, 32, 32), sizes=(120, 100, 80), epochs=epochs, dtype="float32")
    tree = case.tree()
    for device in tree["devices"]:
        device["link"] = link
    return tree


@pytest.mark.slow
def test_a_link_that_changes_every_minute_is_noticed_within_a_round() -> None:
    watched = Watched()
    cycle = [(10e6, 25e6), (20e6, 40e6), (50e6, 50e6)]  # 4g, 4g+, wifi
    run = timed(on_a_link({"cycle": ["4g", "4g+", "wifi"], "every": "60s"}, epochs=150), watched)
    total_s = sum(epoch.seconds for epoch in run.epochs)
    longest_s = max(epoch.seconds for epoch in run.epochs)
    assert longest_s < 10
    assert total_s > 4 * 60
    for minute in range(1, int(total_s // 60)):
        made = [(at, link) for at, link in watched.made if minute * 60 < at < minute * 60 + 2 * longest_s]
        rates = made[-1][1].up_bps, made[-1][1].down_bps
        # In a round in which it changes, a link is measured as partly the one and partly the other.
        assert rates == pytest.approx(cycle[minute % 3], rel=replanner.NOTICED)
    # The round in which it changes may be measured at a rate in between; otherwise there is one choice a change.
    assert len(watched.made) <= 2 * (total_s // 60)
    assert not any(0 <= at <= 60 for at, _ in watched.made)


@pytest.mark.slow
@pytest.mark.parametrize("link", ["4g", "unlimited", {"cycle": ["wifi", "wifi"], "every": "5s"}], ids=str)
def test_a_link_that_does_not_change_is_not_noticed(link: object) -> None:
    watched = Watched()
    timed(on_a_link(link, epochs=5), watched)
    assert watched.made == []


@pytest.mark.slow
def test_a_search_that_fails_does_not_end_the_training() -> None:
    async def replan(_: Mapping[str, Link]) -> Mapping[str, Plan]:
        raise PlanError("nothing fits")

    run = timed(on_a_link({"cycle": ["4g", "wifi"], "every": "5s"}, epochs=4), replan)
    assert len(run.epochs) == 4
    assert run.failed[0] == ReplanFailed("Planning again failed: nothing fits")


@pytest.mark.slow
def test_a_long_search_delays_no_round_and_its_plans_are_taken_when_it_ends() -> None:
    tree = on_a_link({"cycle": ["4g", "wifi"], "every": "8s"}, epochs=14)

    async def slow(_: Mapping[str, Link]) -> Mapping[str, Plan]:
        await asyncio.sleep(6.0)
        return {name: Plan(2, 5) for name in NAMES}

    run, kept = timed(tree, slow), timed(tree, Watched())
    (first, *_) = run.replanned
    before = [epoch.seconds for epoch in run.epochs[: first.epoch - 2]]
    assert len(before) > 2
    assert before == [epoch.seconds for epoch in kept.epochs[: first.epoch - 2]]


# --- when new plans are chosen, and for which links


def test_a_direction_with_too_little_traffic_keeps_its_known_rate() -> None:
    link = Link(up_bps=1e6, down_bps=2e6, latency_s=0.5)
    little, much = Traffic(63_999, 1.0), Traffic(1_000_000, 2.0)
    assert MeasuredLink(little, little).over(link) == link
    assert MeasuredLink(much, little).over(link) == Link(up_bps=4e6, down_bps=2e6, latency_s=0.5)
    assert MeasuredLink(little, much).over(link) == Link(up_bps=1e6, down_bps=4e6, latency_s=0.5)


def test_traffic_that_took_no_time_has_no_limit() -> None:
    assert Traffic(100_000, 0.0).rate_bps is None
    assert Traffic(100_000, 0.001).rate_bps == 8e8


def measured(up_bps: float) -> dict[str, MeasuredLink]:
    return {"a": MeasuredLink(Traffic(1_000_000, 8e6 / up_bps), Traffic())}


def run_replanner(scenario: Callable[[Replanner, list[float]], Awaitable[None]], choice_s: float = 0.0) -> list[float]:
    """Return for which uplinks a choice was made, of a device that was planned for 1 Mbit/s up."""
    made: list[float] = []

    async def replan(links: Mapping[str, Link]) -> Mapping[str, Plan]:
        made.append(links["a"].up_bps or 0.0)
        await asyncio.sleep(choice_s)
        return {"a": Plan(1, round((links["a"].up_bps or 0.0) / 1e6))}

    async def main() -> None:
        replanner = Replanner({"a": Link(up_bps=1e6)}, replan)
        await scenario(replanner, made)
        replanner.close()

    run_virtually(main())
    return made


@pytest.mark.parametrize(("up_bps", "is_noticed"), [(0.81e6, False), (1.19e6, False), (0.79e6, True), (1.21e6, True)])
def test_a_link_has_changed_if_its_rate_differs_by_a_fifth(up_bps: float, is_noticed: bool) -> None:
    async def scenario(replanner: Replanner, _: list[float]) -> None:
        replanner.observe_round(measured(up_bps))
        await asyncio.sleep(1.0)
        assert (replanner.take() is not None) is is_noticed
        assert replanner.take() is None  # once only

    assert len(run_replanner(scenario)) == is_noticed


def test_devices_that_were_unknown_before_they_joined_are_measured_too() -> None:
    made: list[dict[str, float | None]] = []

    async def replan(links: Mapping[str, Link]) -> Mapping[str, Plan]:
        made.append({name: link.up_bps for name, link in links.items()})
        return {}

    async def main() -> None:
        replanner = Replanner({}, replan)
        replanner.begin({"a": Link(), "b": Link()})
        replanner.observe_round({})
        await asyncio.sleep(1.0)
        assert made == []
        replanner.observe_round(measured(1e6))
        await asyncio.sleep(1.0)
        replanner.leave("b")
        replanner.observe_round({})
        await asyncio.sleep(1.0)
        replanner.close()

    run_virtually(main())
    assert made == [{"a": 1e6, "b": None}, {"a": 1e6}]


def test_a_slow_drift_is_noticed_when_it_adds_up() -> None:
    async def scenario(replanner: Replanner, _: list[float]) -> None:
        for up_bps in (1.1e6, 1.19e6, 1.25e6, 1.3e6):
            replanner.observe_round(measured(up_bps))
            await asyncio.sleep(1.0)

    assert run_replanner(scenario) == pytest.approx([1.25e6])


def test_one_search_runs_at_a_time_and_the_newest_measurement_wins() -> None:
    async def scenario(replanner: Replanner, made: list[float]) -> None:
        for up_bps in (2e6, 4e6, 8e6):
            replanner.observe_round(measured(up_bps))
            await asyncio.sleep(1.0)
        assert (len(made), replanner.take()) == (1, None)
        await asyncio.sleep(8.0)  # the first has ended
        assert replanner.take() == {"a": Plan(1, 2)}
        await asyncio.sleep(10.0)
        assert replanner.take() == {"a": Plan(1, 8)}

    assert run_replanner(scenario, choice_s=10.0) == [2e6, 8e6]


def test_new_plans_come_with_the_reason_for_the_change() -> None:
    async def scenario(replanner: Replanner, _: list[float]) -> None:
        replanner.observe_round(measured(4.2e6))
        await asyncio.sleep(1.0)
        assert replanner.take() is not None
        assert replanner.why == "a up from 1 to 4.2 Mbit/s"
        replanner.join("b", Link())
        await asyncio.sleep(1.0)
        replanner.take()
        assert replanner.why == "b joined"

    run_replanner(scenario)


def test_some_of_many_changes_are_named_and_the_others_counted() -> None:
    before = {name: Link(up_bps=1e6, down_bps=5e6) for name in "bcdef"}
    now = {name: Link(up_bps=2e6, down_bps=None) for name in "abcd"}
    assert replanner.what_changed(before, before) == ""
    assert replanner.what_changed(before, now) == "a joined, e left, f left, and 6 more"
    few = {"b": Link(up_bps=1.3619e9, down_bps=None)}
    said = "b up from 1 to 1360 Mbit/s, b down from 5 to unlimited Mbit/s"
    assert replanner.what_changed({"b": before["b"]}, few) == said


def test_a_link_that_has_recovered_when_a_search_ends_is_searched_for_again() -> None:
    async def scenario(replanner: Replanner, _: list[float]) -> None:
        replanner.observe_round(measured(2e6))
        await asyncio.sleep(1.0)
        replanner.observe_round(measured(1e6))
        await asyncio.sleep(30.0)
        assert replanner.take() == {"a": Plan(1, 1)}

    assert run_replanner(scenario, choice_s=10.0) == [2e6, 1e6]


@pytest.mark.slow
@pytest.mark.parametrize("momentum", ["reset", "keep"])
def test_weights_are_the_same_when_the_planner_itself_follows_a_changing_bandwidth(momentum: str) -> None:
    case = Case("pipar", momentum=momentum, epochs=5, sizes=(230, 100, 57))
    tree = case.tree()
    for device in tree["devices"]:
        device |= {"split_point": "auto", "micro_batches": "auto", "speed": 3.0}
        device["link"] = {"cycle": [{"up": "1Mbit/s", "down": "1Mbit/s"}, "unlimited"], "every": "5s"}
    config = config_from(tree)
    workload = Workload(config, UserObjects.of(config, None, None, None, None))
    seen: list[Event] = []
    learner = train_virtually(make_job(workload), workload, lambda *_: None, seen.append)
    cuts = {plan["split_point"] for event in seen if isinstance(event, Replanned) for plan in event.plans.values()}
    assert len(cuts) > 1  # layers did change sides
    assert largest_error(learner.state(), reference_state(case)) < EXACT


# --- encodings


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sl", "sfl", "sfl2", "pipar"])
def test_where_p_and_n_are_configured_changed_links_change_only_the_encodings(method: str) -> None:
    config = config_from(
        {
            "run": {"method": method, "epochs": 16, "batch_size": 20},
            "model": {"name": "vgg5"},
            "data": {"name": "cifar10", "samples_per_device": 100},
            "server": {"profile": "i7-11850h", "cores": 2},
            "devices": [
                {
                    "count": 2,
                    "profile": "raspberry-pi-5",
                    "link": {"cycle": ["unlimited", "4g"], "every": "2s"},
                    "split_point": 1,
                    "micro_batches": 4 if method == "pipar" else 1,
                }
            ],
        }
    )
    job = prepare_timing_only(config, rehearse)
    assert job is not None
    replanned: list[Replanned] = []

    def observe(event: Event) -> None:
        replanned.extend([event] if isinstance(event, Replanned) else [])

    train_timing_only(job, lambda *_: None, observe)
    assert {plan.encoding for plan in job.plans.values()} == {"raw"}
    seen = [Plan(**plan) for event in replanned for plan in event.plans.values()]
    assert "sparse-planes" in {plan.up for plan in seen}
    assert {(plan.split_point, plan.micro_batches) for plan in seen} == {(1, 4 if method == "pipar" else 1)}


def test_a_configured_encoding_stays_when_links_change() -> None:
    tree = {
        "run": {"method": "sfl", "epochs": 6, "batch_size": 20},
        "model": {"name": "vgg5"},
        "data": {"name": "cifar10", "samples_per_device": 100},
        "wire": {"encoding": "planes"},
        "server": {"profile": "i7-11850h", "cores": 2},
        "devices": [
            {"profile": "raspberry-pi-5", "link": {"cycle": ["4g", "unlimited"], "every": "5s"}, "split_point": 1}
        ],
    }
    job = prepare_timing_only(config_from(tree), rehearse)
    assert job is not None
    replanned: list[Event] = []
    train_timing_only(
        job, lambda *_: None, lambda event: replanned.extend([event] if isinstance(event, Replanned) else [])
    )
    assert {plan.encoding for plan in job.plans.values()} == {"planes"}
    assert replanned == []
