"""run.devices_per_round: some devices are drawn for each round; the others are idle and cost the server nothing."""

from __future__ import annotations

import copy
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support import reference
from support.deployments import check_weights, counted, training
from support.programs import address_of, place
from support.reference import State
from support.training import EXACT, Case, batches, largest_error, make_job

import pipar
from pipar.errors import ConfigError
from pipar.events import Drawn, EpochResult, Event, RoundOver
from pipar.job.job import Job
from pipar.job.model_setup import make_learner
from pipar.launch.virtual import train_timing_only, train_virtually
from pipar.nn.learner import TorchLearner
from pipar.planner.simulator import simulate
from pipar.privacy.budget import PrivacyAccountant
from pipar.settings.config_file import config_from

SIZES = (23, 10, 31, 7, 18)
CASE = Case("pipar", (2,), (3,), sizes=SIZES, batch_size=10, epochs=6, devices_per_round=2)


class Watched:
    """A training in virtual time: its events, and the largest number of replicas on the server."""

    def __init__(self, case: Case) -> None:
        workload = case.workload()
        self.job: Job = make_job(workload)
        self.events: list[Event] = []
        self.epochs: list[EpochResult] = []
        self.most_replicas = 0
        self.learner: TorchLearner = make_learner(self.job, workload)
        train_virtually(self.job, workload, self._emit, self._observe, self.learner)

    def _emit(self, result: EpochResult, _: object) -> None:
        self.epochs.append(result)

    def _observe(self, event: Event) -> None:
        self.events.append(event)
        self.most_replicas = max(self.most_replicas, len(self.learner._replicas))

    @property
    def drawn(self) -> list[tuple[str, ...]]:
        return [event.devices for event in self.events if isinstance(event, Drawn)]


def by_definition(case: Case, drawn: list[tuple[str, ...]]) -> State:
    """Return the weights of federated training in which only the drawn devices of each round take part."""
    workload, rules = case.workload(), case.rules()
    model = workload.build_model().train()
    for epoch, names in enumerate(drawn):
        states, counts = [], []
        for name in names:
            own, shard = copy.deepcopy(model), workload.samples.shard(name)
            optimizer = rules.optimizer(own)
            for number in range(epoch * case.local_epochs + 1, (epoch + 1) * case.local_epochs + 1):
                for batch in batches(shard, number, case.batch_size):
                    reference.step(own, [optimizer], batch, rules, [])
            states.append(own.state_dict())
            counts.append(len(shard))
        model.load_state_dict(reference.average(states, counts))
    return model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        CASE,
        replace(CASE, method="fl", split_points=(5,), micro_batches=(1,)),
        replace(CASE, method="sfl", micro_batches=(1,)),
        replace(CASE, split_points=(1, 3, 5), micro_batches=(7, 3, 1), schedule="1f1b"),
        replace(CASE, devices_per_round=0.6, local_epochs=2),
        replace(CASE, devices_per_round=1),
    ],
    ids=str,
)
def test_the_weights_are_those_of_the_drawn_devices(case: Case) -> None:
    ran = Watched(case)
    number = case.devices_per_round if isinstance(case.devices_per_round, int) else 3
    assert [len(devices) for devices in ran.drawn] == [number] * case.epochs
    assert [tuple(sorted(e.counted)) for e in ran.events if isinstance(e, RoundOver)] == ran.drawn
    assert largest_error(ran.learner.state(), by_definition(case, ran.drawn)) < EXACT
    assert ran.most_replicas <= number
    counts = Counter(name for devices in ran.drawn for name in devices)
    assert max(counts.values()) - min(counts.get(name, 0) for name in ran.job.sizes) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sl", "sfl2"])
def test_methods_with_a_shared_model_train_the_drawn_devices_in_turn(method: str) -> None:
    ran = Watched(replace(CASE, method=method, micro_batches=(1,)))
    assert [tuple(sorted(e.counted)) for e in ran.events if isinstance(e, RoundOver)] == ran.drawn
    assert ran.most_replicas == 1


@pytest.mark.slow
def test_all_devices_as_a_share_train_the_same_bits_as_all() -> None:
    everyone, share = Watched(replace(CASE, devices_per_round="all")), Watched(replace(CASE, devices_per_round=1.0))
    assert everyone.learner.sha256() == share.learner.sha256()
    assert [e.seconds for e in everyone.epochs] == [e.seconds for e in share.epochs]
    assert not everyone.drawn
    assert not share.drawn


def timed(case: Case) -> tuple[Job, list[EpochResult], list[Event]]:
    job, epochs, events = make_job(case.workload()), [], []  # type: ignore[var-annotated]
    train_timing_only(job, lambda result, _: epochs.append(result), events.append)
    return job, epochs, events


@pytest.mark.slow
def test_a_round_is_planned_and_timed_for_the_drawn_devices() -> None:
    job, epochs, events = timed(replace(CASE, sizes=(40,) * 12, devices_per_round=3, even=True))
    assert [e.devices for e in events if isinstance(e, Drawn)] == Watched(
        replace(CASE, sizes=(40,) * 12, devices_per_round=3, even=True)
    ).drawn
    whole, drawn = job.fleet().of([m.name for m in job.fleet().members]), job.fleet().sampled()
    assert len(drawn.members) == 3
    assert drawn.cores == job.cores
    assert simulate(drawn, job.plans).epoch_s < simulate(whole, job.plans).epoch_s
    for epoch in epochs:
        assert epoch.devices == 3
        assert epoch.seconds == pytest.approx(simulate(drawn, job.plans).epoch_s, rel=0.05)
        assert epoch.predicted_s == pytest.approx(epoch.seconds, rel=0.05)
        assert epoch.bound_s <= epoch.seconds
        assert len(epoch.device_bytes) == 3
        assert epoch.bytes_down == pytest.approx(epochs[0].bytes_down, rel=0.02)


def test_drawn_devices_get_whole_models_and_others_none() -> None:
    ran = Watched(replace(CASE, sizes=(10, 10, 10), epochs=3, devices_per_round=1, method="fl", split_points=(5,)))
    model = ran.learner.model_bytes()
    for epoch in ran.epochs:
        assert model < epoch.bytes_down < 1.1 * model
        assert model < epoch.bytes_up < 1.2 * model


BAD = [
    ({"run": {"devices_per_round": 0}}, "run.devices_per_round = 0"),
    ({"run": {"devices_per_round": 0.0}}, "run.devices_per_round = 0"),
    ({"run": {"devices_per_round": 1.5}}, "run.devices_per_round = 1.5"),
    ({"run": {"devices_per_round": True}}, "run.devices_per_round"),
    ({"run": {"devices_per_round": "some"}}, "run.devices_per_round"),
    ({"run": {"devices_per_round": 5}}, r"only 4"),
    ({"run": {"devices_per_round": 2}, "server": {"min_devices": 3}}, "fewer than server.min_devices = 3"),
    ({"run": {"devices_per_round": 0.5}, "server": {"min_devices": 3}}, "draws 2 of 4 devices, fewer"),
    ({"run": {"devices_per_round": 2}, "optimizer": {"state_at_aggregation": "keep"}}, "cannot be combined"),
    ({"run": {"devices_per_round": 2}, "server": {"aggregator": "krum"}}, "needs at least"),
]


@pytest.mark.parametrize(("tree", "says"), BAD, ids=str)
def test_a_draw_that_cannot_work_is_refused_in_one_sentence(tree: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config_from(tree)


@pytest.mark.slow
def test_real_processes_draw_the_same_devices_and_train_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    case = replace(CASE, sizes=(20, 10, 15, 12), epochs=5, dtype="float64", even=True)
    tree = case.tree_with_profile(tmp_path)
    drawn: dict[str, list[tuple[str, ...]]] = {"virtual": [], "real": []}
    results = {}
    for world in ("virtual", "real"):

        def observe(event: Event, world: str = world) -> None:
            if isinstance(event, Drawn):
                drawn[world].append(event.devices)

        results[world] = pipar.run(tree, world=world, observe=observe)  # type: ignore[arg-type]
    assert drawn["real"] == drawn["virtual"]
    assert len(drawn["real"]) == 5
    states = [results[world].state_dict() for world in ("real", "virtual")]
    assert largest_error(states[0], states[1]) < EXACT


@pytest.mark.slow
def test_a_deployment_draws_among_the_present_devices_and_continues_after_a_crash(
    tmp_path: Path, profiles: Path
) -> None:
    tree = training(epochs=6, devices_per_round=1)
    with place(tmp_path, profiles, tree) as here:
        here.hold("pi-1"), here.hold("pi-2"), here.hold("pi-3")
        server = here.server("--set", "server.min_devices=1")
        address = address_of(server)
        devices = [here.device(name, address) for name in ("pi-1", "pi-2", "pi-3")]
        server.says("joined", times=3)
        for name in ("pi-1", "pi-2", "pi-3"):
            here.let_go(name)
        server.says("round 2 saved")
        server.kill()
        server = here.server("--resume", "--set", "server.min_devices=1", listen=address)
        assert server.ends() == 0
        # A device that was still reconnecting when the training ended keeps trying.
        for device in devices:
            if device.poll() is None:
                device.signal(signal.SIGTERM)
        assert [device.ends() for device in devices] == [0] * 3
        check_weights(here, tree)
        assert all(len(names) == 1 for names in counted(here))


@pytest.mark.slow
def test_a_budget_counts_the_rounds_in_which_a_device_took_part() -> None:
    case = replace(CASE, method="fl", split_points=(5,), privacy=(("noise_multiplier", 5.0),))
    workload = case.workload()
    job, drawn = make_job(workload), Counter[str]()
    accountant = PrivacyAccountant(job.update_noise)

    def observe(event: Event) -> None:
        if isinstance(event, Drawn):
            drawn.update(event.devices)

    train_virtually(job, workload, lambda *_: None, observe, accountant=accountant)
    assert {name: accountant.of(name).releases for name in job.sizes} == {name: drawn[name] for name in job.sizes}
    assert set(drawn.values()) == {2, 3}
