"""Each aggregator follows its paper for any order of arrival; robust ones tolerate arbitrary models."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import plain_aggregators as plain
from torch import nn

from pipar.aggregation import robust_aggregators
from pipar.aggregation.aggregators import Aggregator, DeviceModel, DeviceModels
from pipar.aggregation.averaging import federated_average
from pipar.aggregation.named_aggregators import make_aggregator
from pipar.aggregation.robust_aggregators import krum_scores
from pipar.cutting.split import split_model
from pipar.errors import ConfigError, PiparError, ProtocolError, TrainingError
from pipar.nn.learner import LearnerSettings, TorchLearner
from pipar.nn.optimizers import sgd
from pipar.settings.aggregators import AGGREGATORS, all_parameters, check_devices, trimmed_at_each_end
from pipar.tasks.task import classification
from pipar.tensors.bodies import state_body, weights_sha256
from pipar.wire.orders import TrainedPart

State = dict[str, torch.Tensor]
WEIGHTS = frozenset({"w", "b"})
BUFFERS = ("running", "count")
OPTIMIZERS = ("fedavgm", "fedadam", "fedyogi")
ROBUST = ("median", "trimmed_mean", "krum")
CLOSE = 1e-14


def state(seed: int, dtype: torch.dtype = torch.float64) -> State:
    """Two weights, running statistics and a counter."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {"w": numbers(3, 4), "b": numbers(), "running": numbers(4).abs(), "count": torch.tensor(10 + seed)}


def fleet(count: int, round_: int = 0, dtype: torch.dtype = torch.float64) -> list[DeviceModel]:
    """This many devices in name order, with different numbers of samples."""
    return [DeviceModel(f"pi-{n}", state(1 + n + 100 * round_, dtype), 7 + 5 * n) for n in range(count)]


def rows(models: list[DeviceModel], name: str) -> Any:
    return np.stack([model.state[name].numpy() for model in models])


def samples(models: list[DeviceModel]) -> Any:
    return np.array([model.samples for model in models])


def error(one: torch.Tensor, other: Any) -> float:
    return float(np.abs(one.numpy() - other).max() / max(1.0, float(np.abs(other).max())))


def made(name: str, **given: float) -> Aggregator:
    return make_aggregator(name, given)


# --- means


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_by_samples_is_bit_for_bit_the_federated_average(name: str, dtype: torch.dtype) -> None:
    models = fleet(5, dtype=dtype)
    sums = {key: torch.zeros(tensor.shape, dtype=torch.float64) for key, tensor in models[0].state.items()}
    for model in models:
        for key, tensor in model.state.items():
            sums[key].add_(tensor.to(torch.float64), alpha=model.samples)
    wanted = {key: tensor.div_(int(samples(models).sum())).to(dtype) for key, tensor in sums.items()}
    wanted["count"] = torch.tensor(15)
    new = made(name).aggregate(state(0, dtype), models, WEIGHTS)
    assert weights_sha256(new) == weights_sha256(wanted)
    assert weights_sha256(new) == weights_sha256(federated_average([(m.state, m.samples) for m in models]))


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "median"])
def test_one_model_is_its_own_aggregate_to_the_bit(name: str) -> None:
    for count in (1, 3, 7, 49):
        only = DeviceModel("pi", state(4, torch.float32), count)
        new = made(name).aggregate(state(0, torch.float32), [only], WEIGHTS)
        assert weights_sha256(new) == weights_sha256(only.state)


def test_means_hold_one_model_at_a_time() -> None:
    held = most = 0

    class Lazy:
        def __len__(self) -> int:
            return 6

        def __iter__(self) -> Any:
            nonlocal held, most
            for model in fleet(6):
                held += 1
                most = max(most, held)
                yield model
                held -= 1

    for name in ("fedavg", "fedprox", *OPTIMIZERS):
        made(name).aggregate(state(0), Lazy(), WEIGHTS)
    assert most == 1


# --- server optimisers


GIVEN: list[tuple[str, dict[str, float]]] = [
    ("fedavgm", {}),
    ("fedavgm", {"server_learning_rate": 0.3, "server_momentum": 0.0}),
    ("fedadam", {}),
    ("fedadam", {"server_learning_rate": 0.5, "beta1": 0.0, "beta2": 0.5, "tau": 0.1}),
    ("fedyogi", {}),
    ("fedyogi", {"server_learning_rate": 0.5, "beta1": 0.3, "beta2": 0.0, "tau": 0.1}),
]


@pytest.mark.parametrize(("name", "given"), GIVEN)
def test_a_server_optimiser_steps_round_after_round_as_its_paper_says(name: str, given: dict[str, float]) -> None:
    aggregator, x = made(name, **given), state(0)
    by_hand = {key: plain.make(name, **given) for key in WEIGHTS}
    wanted = {key: x[key].numpy() for key in WEIGHTS}
    for number in range(5):
        models = fleet(4, number)
        x = aggregator.aggregate(x, models, WEIGHTS)
        for key in WEIGHTS:
            wanted[key] = by_hand[key](wanted[key], rows(models, key), samples(models))
            assert error(x[key], wanted[key]) < CLOSE
        assert error(x["running"], plain.mean(rows(models, "running"), samples(models))) < CLOSE
        assert x["count"].item() == 10 + 4 + 100 * number


def test_the_first_steps_are_those_computed_by_hand() -> None:
    before, after = {"w": torch.tensor([1.0, 0.0]).double()}, {"w": torch.tensor([3.0, 0.0]).double()}
    models = [DeviceModel("a", after, 5)]
    new = made("fedavgm", server_learning_rate=0.5).aggregate(before, models, {"w"})
    assert new["w"].tolist() == [2.0, 0.0]
    # delta = 2: m = 0.5 * 2, v = 0.75 * 0.01 + 0.25 * 4.
    given = {"server_learning_rate": 0.1, "beta1": 0.5, "beta2": 0.75, "tau": 0.1}
    new = made("fedadam", **given).aggregate(before, models, {"w"})
    assert new["w"].tolist() == pytest.approx([1 + 0.1 * 1 / (1.0075**0.5 + 0.1), 0.0], rel=1e-15)
    # v = 0.01 - 0.25 * 4 * sign(0.01 - 4)
    new = made("fedyogi", **given).aggregate(before, models, {"w"})
    assert new["w"].tolist() == pytest.approx([1 + 0.1 * 1 / (1.01**0.5 + 0.1), 0.0], rel=1e-15)


def test_momentum_without_memory_and_a_rate_of_one_is_the_mean() -> None:
    models = fleet(4)
    new = made("fedavgm", server_momentum=0.0).aggregate(state(0), models, WEIGHTS)
    mean = federated_average([(model.state, model.samples) for model in models])
    assert max(error(new[key], mean[key].numpy()) for key in mean) < CLOSE


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_float32_step_is_taken_in_float64_and_rounded_once(name: str) -> None:
    x, models = state(0, torch.float32), fleet(4, dtype=torch.float32)
    new = made(name).aggregate(x, models, WEIGHTS)
    for key in WEIGHTS:
        wide = plain.make(name)(x[key].double().numpy(), rows(models, key).astype("float64"), samples(models))
        assert new[key].dtype == torch.float32
        assert torch.equal(new[key], torch.from_numpy(np.asarray(wide)).float())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimiser_resumes_from_its_saved_state_bit_for_bit(name: str) -> None:
    one, other, x = made(name), made(name), state(0)
    for number in range(3):
        x = one.aggregate(x, fleet(3, number), WEIGHTS)
    kept = one.state()
    hash_ = weights_sha256(kept)
    assert kept
    assert all(tensor.dtype == torch.float64 for tensor in kept.values())
    other.load_state(kept)
    went_on = one.aggregate(x, fleet(3, 3), WEIGHTS)
    assert weights_sha256(went_on) == weights_sha256(other.aggregate(x, fleet(3, 3), WEIGHTS))
    assert weights_sha256(went_on) != weights_sha256(made(name).aggregate(x, fleet(3, 3), WEIGHTS))
    assert weights_sha256(kept) == hash_  # later rounds do not change returned tensors


def test_only_server_optimisers_keep_state_and_none_loads_that_of_another() -> None:
    kept = {}
    for name in AGGREGATORS:
        given = {"byzantine": 0} if name == "krum" else {}
        aggregator = made(name, **given)
        aggregator.aggregate(state(0), fleet(4), WEIGHTS)
        kept[name] = aggregator.state()
        aggregator.load_state({})
    assert [name for name in kept if kept[name]] == list(OPTIMIZERS)
    for name in ("fedavg", "median", "fedavgm"):
        with pytest.raises(ConfigError, match=r"^The aggregator's saved state has '\w+/\w+', which \w+ does not"):
            made(name).load_state(kept["fedadam"])
    adam = made("fedadam")
    adam.load_state({key: torch.zeros(9, dtype=torch.float64) for key in kept["fedadam"]})
    with pytest.raises(ConfigError, match="saved for another network"):
        adam.aggregate(state(0), fleet(4), WEIGHTS)


# --- robust aggregators


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_median_is_taken_for_each_coordinate(count: int, dtype: torch.dtype) -> None:
    models = fleet(count, dtype=dtype)
    new = made("median").aggregate(state(0, dtype), models, WEIGHTS)
    for key in ("w", "b", "running"):
        wanted = np.median(rows(models, key).astype("float64"), axis=0)
        assert torch.equal(new[key], torch.from_numpy(np.asarray(wanted)).to(dtype))
    assert new["count"].item() == 10 + (count + 1) // 2  # the smaller of the middle two: a counter is not averaged


@pytest.mark.parametrize(
    ("count", "trim", "left_out"), [(3, 0.0, 0), (3, 0.1, 1), (5, 0.2, 1), (5, 0.21, 2), (9, 0.4, 4)]
)
def test_the_trimmed_mean_leaves_out_a_share_at_each_end(count: int, trim: float, left_out: int) -> None:
    models = fleet(count)
    assert trimmed_at_each_end(trim, count) == left_out
    new = made("trimmed_mean", trim=trim).aggregate(state(0), models, WEIGHTS)
    for key in ("w", "b", "running"):
        kept = np.sort(rows(models, key), axis=0)[left_out : count - left_out]
        assert error(new[key], kept.sum(axis=0) / (count - 2 * left_out)) < CLOSE


def test_a_share_is_its_decimal_value_and_not_its_nearest_binary_fraction() -> None:
    assert [trimmed_at_each_end(0.07, 100), trimmed_at_each_end(0.1, 30), trimmed_at_each_end(1e-3, 10)] == [7, 3, 1]


@pytest.mark.parametrize(("byzantine", "selected"), [(0, 1), (1, 1), (2, 1), (1, 3), (2, 5), (0, 7)])
def test_krum_takes_the_models_nearest_to_their_neighbours(byzantine: int, selected: int) -> None:
    models = fleet(7)
    vectors = np.stack(
        [np.concatenate([m.state[key].numpy().ravel() for key in ("w", "b", "running")]) for m in models]
    )
    places = plain.krum_places(vectors, byzantine, selected)
    new = made("krum", byzantine=byzantine, selected=selected).aggregate(state(0), models, WEIGHTS)
    if selected == 1:
        assert weights_sha256(new) == weights_sha256(models[places[0]].state)
    for key in ("w", "b", "running"):
        assert error(new[key], rows(models, key)[places].mean(axis=0)) < CLOSE
    assert new["count"].item() == max(models[place].state["count"].item() for place in places)


def honest(n: int) -> State:
    """A model close to all other honest models."""
    return {key: tensor + (1e-3 * state(n)[key] if key != "count" else 0) for key, tensor in state(0).items()}


ATTACKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "far": lambda tensor: tensor + 1e6,
    "flipped": lambda tensor: -20 * tensor,
    "infinite": lambda tensor: torch.full_like(tensor, torch.inf),
    "minus infinite": lambda tensor: torch.full_like(tensor, -torch.inf),
    "nan": lambda tensor: torch.full_like(tensor, torch.nan),
}


def attacked(attack: str, liars: tuple[int, ...], count: int = 7) -> list[DeviceModel]:
    def lie(model: State) -> State:
        return {key: ATTACKS[attack](tensor) if key != "count" else tensor + 2**40 for key, tensor in model.items()}

    models = [honest(n + 1) for n in range(count)]
    return [
        DeviceModel(f"pi-{n}", lie(model) if n in liars else model, 10**9 if n in liars else 10)
        for n, model in enumerate(models)
    ]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("liars", [(0, 1), (3, 6), (5,)])
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("median", {}),
        ("trimmed_mean", {"trim": 0.25}),
        ("krum", {"byzantine": 2}),
        ("krum", {"byzantine": 2, "selected": 5}),
    ],
)
def test_robust_results_stay_within_the_range_of_honest_models(
    name: str, given: dict[str, float], liars: tuple[int, ...], attack: str
) -> None:
    models = attacked(attack, liars)
    true = [model.state for n, model in enumerate(models) if n not in liars]
    new = made(name, **given).aggregate(state(0), models, WEIGHTS)
    for key in new:
        values = torch.stack([one[key] for one in true]).double()
        slack = 1e-12 if key != "count" else 0.0  # rounding may move a mean out of its bounds by a bit
        assert (new[key].double() >= values.amin(0) - slack).all()
        assert (new[key].double() <= values.amax(0) + slack).all()
    mean = made("fedavg").aggregate(state(0), models, WEIGHTS)
    assert not torch.allclose(mean["w"], new["w"], atol=1e-2)  # the attack works against the mean


def test_krum_scores_of_liars_are_high_even_if_they_agree() -> None:
    models = [model.state for model in attacked("far", (2, 5))]
    best = krum_scores(models, 2).argsort().tolist()
    assert set(best[-2:]) == {2, 5}


def test_of_equal_scores_the_first_device_by_name_wins() -> None:
    same = [DeviceModel(f"pi-{n}", {"w": torch.ones(2), "count": torch.tensor(n)}, 1) for n in range(5)]
    assert made("krum").aggregate(same[0].state, same, {"w"})["count"].item() == 0


@pytest.mark.parametrize("name", ROBUST)
def test_blocks_of_coordinates_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = made(name).aggregate(state(0), fleet(6), WEIGHTS)
    monkeypatch.setattr(robust_aggregators, "_BLOCK", 18)  # three coordinates of six devices
    assert weights_sha256(made(name).aggregate(state(0), fleet(6), WEIGHTS)) == weights_sha256(whole)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_an_aggregator_does_not_change_its_arguments(name: str) -> None:
    x, models, aggregator = state(0), fleet(5), made(name)
    hashes = [weights_sha256(given) for given in (x, *(model.state for model in models))]
    for _ in range(2):
        aggregator.aggregate(x, models, WEIGHTS)
        aggregator.aggregate(x, models[:1] if name in ("fedavg", *OPTIMIZERS) else models, WEIGHTS)
    assert [weights_sha256(given) for given in (x, *(model.state for model in models))] == hashes


@pytest.mark.parametrize("name", AGGREGATORS)
def test_tensors_of_any_shape_and_layout_are_aggregated(name: str) -> None:
    def odd(n: int) -> State:
        generator = torch.Generator().manual_seed(n)
        image = torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)
        return {"w": image, "b": torch.zeros(0, 3), "running": torch.randn(4, 3, generator=generator).t()}

    models = [DeviceModel(f"pi-{n}", odd(n), 1) for n in range(5)]
    laid_out = [m._replace(state={key: t.contiguous() for key, t in m.state.items()}) for m in models]
    new = made(name).aggregate(odd(9), models, WEIGHTS)
    assert {key: tensor.shape for key, tensor in new.items()} == {key: tensor.shape for key, tensor in odd(9).items()}
    assert weights_sha256(new) == weights_sha256(made(name).aggregate(odd(9), laid_out, WEIGHTS))


# --- inside the learner


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()


def trained(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
        if tensor.is_floating_point()
        else tensor + seed
        for name, tensor in network().state_dict().items()
    }


def learner(aggregator: Aggregator, split_points: dict[str, int], *, shared: bool = False) -> TorchLearner:
    settings = LearnerSettings(sgd(), task=classification(3), shares_server_model=shared)
    return TorchLearner(network(), split_points, settings, aggregator)


def bring_back(one: TorchLearner, name: str, split_point: int, seed: int) -> TrainedPart:
    near, far = split_model(network(), split_point)
    whole = trained(seed)
    one.replica(name).module.load_state_dict({key: whole[key] for key in far.state_dict()})
    return TrainedPart(name, state_body({key: whole[key] for key in near.state_dict()}), 10 * seed)


SPLIT_POINTS = {"a": 1, "b": 2, "c": 3, "d": 1, "e": 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", AGGREGATORS)
def test_whole_models_are_aggregated_for_any_cuts_and_any_order_of_arrival(name: str) -> None:
    models = [DeviceModel(device, trained(seed), 10 * seed) for seed, device in enumerate(SPLIT_POINTS, start=1)]
    weights = {key for key, _ in network().named_parameters()}
    wanted = made(name).aggregate(network().state_dict(), models, weights)
    for order in itertools.islice(itertools.permutations(SPLIT_POINTS), 0, 120, 17):
        one = learner(made(name), SPLIT_POINTS)
        backs = {
            device: bring_back(one, device, p, seed) for seed, (device, p) in enumerate(SPLIT_POINTS.items(), start=1)
        }
        one.aggregate([backs[device] for device in order])
        assert one.sha256() == weights_sha256(wanted)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_where_the_server_part_is_shared_it_stays_and_the_device_parts_are_aggregated(name: str) -> None:
    devices = dict.fromkeys("abcde", 2)
    one = learner(made(name), devices, shared=True)
    backs = [bring_back(one, device, 2, seed) for seed, device in enumerate(devices, start=1)]
    one.aggregate(backs)
    near, far = split_model(network(), 2)
    models = [
        DeviceModel(device, {key: trained(seed)[key] for key in near.state_dict()}, 10 * seed)
        for seed, device in enumerate(devices, start=1)
    ]
    weights = {key for key, _ in near.named_parameters()}
    wanted = made(name).aggregate(near.state_dict(), models, weights)
    last = {key: trained(5)[key] for key in far.state_dict()}
    assert weights_sha256(one.state()) == weights_sha256({**wanted, **last})


def test_batch_statistics_are_averaged_where_weights_are_stepped() -> None:
    one = learner(made("fedadam"), {"a": 1, "b": 2})
    one.aggregate([bring_back(one, "a", 1, 1), bring_back(one, "b", 2, 2)])
    mean = federated_average([(trained(1), 10), (trained(2), 20)])
    assert torch.equal(one.state()["1.running_var"], mean["1.running_var"])
    assert not torch.allclose(one.state()["1.weight"], mean["1.weight"])


@pytest.mark.parametrize("name", AGGREGATORS)
def test_an_unreadable_model_changes_neither_the_global_model_nor_the_kept_state(name: str) -> None:
    one = learner(made(name), SPLIT_POINTS)

    def backs() -> list[TrainedPart]:
        return [bring_back(one, device, p, 1 + n) for n, (device, p) in enumerate(SPLIT_POINTS.items())]

    one.aggregate(backs())
    before, kept = one.sha256(), weights_sha256(one.aggregator.state())
    with pytest.raises(ProtocolError, match=r"^e returned a model that does not match"):
        one.aggregate([*backs()[:-1], TrainedPart("e", state_body({}), 1)])
    assert (one.sha256(), weights_sha256(one.aggregator.state())) == (before, kept)


# --- parameters and numbers of devices


RANGES = [
    ("fedprox", "proximal", [0, 0.5, 3], [-0.1, float("inf"), float("nan"), True, "1"], "a number from 0"),
    ("fedavgm", "server_learning_rate", [1e-9, 5], [0, -1], "a number above 0"),
    ("fedavgm", "server_momentum", [0, 0.99], [1, -0.1], "a number from 0, below 1"),
    ("fedadam", "beta1", [0, 0.99], [1, -0.1], "a number from 0, below 1"),
    ("fedyogi", "beta2", [0, 0.99], [1, float("nan")], "a number from 0, below 1"),
    ("fedyogi", "tau", [1e-9], [0], "a number above 0"),
    ("trimmed_mean", "trim", [0, 0.49], [0.5, -0.1], "a number from 0, below 0.5"),
    ("krum", "byzantine", [0, 7], [-1, 1.0, 0.5, True], "a whole number from 0"),
    ("krum", "selected", [1, 7], [0, 1.5], "a whole number from 1"),
]


@pytest.mark.parametrize(("name", "key", "good", "bad", "allowed"), RANGES, ids=lambda value: str(value)[:30])
def test_every_parameter_has_a_range(name: str, key: str, good: list[Any], bad: list[Any], allowed: str) -> None:
    for value in good:
        assert all_parameters(name, {key: value})[key] == value
    for value in bad:
        with pytest.raises(ConfigError) as raised:
            make_aggregator(name, {key: value})
        assert str(raised.value) == f"server.aggregation.{key} = {value!r} is not allowed: it should be {allowed}."


def test_a_parameter_of_another_aggregator_is_refused() -> None:
    keys = {key for known in AGGREGATORS.values() for key in known}
    for name, key in itertools.product(AGGREGATORS, keys):
        if key not in AGGREGATORS[name]:
            with pytest.raises(ConfigError, match=f"^server.aggregation.{key} = 0.3 does not belong to {name}, wh"):
                make_aggregator(name, {key: 0.3})


@pytest.mark.parametrize(
    ("name", "parameters", "least"),
    [
        ("krum", {"byzantine": 0, "selected": 1}, 3),
        ("krum", {"byzantine": 2, "selected": 1}, 7),
        ("krum", {"byzantine": 1, "selected": 6}, 7),
        ("trimmed_mean", {"trim": 0.1}, 3),
        ("trimmed_mean", {"trim": 0.0}, 1),
        ("trimmed_mean", {"trim": 0.4}, 5),
        ("median", {}, 1),
    ],
)
def test_too_few_devices_are_refused_before_and_at_the_aggregation(
    name: str, parameters: dict[str, float], least: int
) -> None:
    check_devices(name, parameters, least)
    made(name, **parameters).aggregate(state(0), fleet(least), WEIGHTS)
    if least > 1:
        with pytest.raises(ValueError, match=rf"^{name} .*give .*[^.]$"):
            check_devices(name, parameters, least - 1)
        with pytest.raises(TrainingError, match=rf"^{name} .*give .*\.$"):
            made(name, **parameters).aggregate(state(0), fleet(least - 1), WEIGHTS)


# --- a user's own


OWN = '''
import torch

class Strongest:
    """The model of the device with the most samples, and a little of the previous global model."""

    def __init__(self, inertia=0.5):
        self.inertia = inertia
        self.rounds = torch.zeros((), dtype=torch.float64)

    def aggregate(self, before, models, parameters):
        self.rounds = self.rounds + 1
        best = max(models, key=lambda model: model.samples)
        assert len(models) and parameters <= before.keys()
        return {
            name: self.inertia * before[name].double() + (1 - self.inertia) * tensor
            if tensor.is_floating_point() else tensor
            for name, tensor in best.state.items()
        }

    def state(self):
        return {"rounds": self.rounds}

    def load_state(self, state):
        self.rounds = state["rounds"]

class Simple:
    def aggregate(self, before, models, parameters):
        for tensor in before.values():
            tensor.zero_()
        return before

class Raising(Simple):
    def aggregate(self, before, models, parameters):
        before["w"].zero_()
        raise RuntimeError("no mood")

class Half(Simple):
    def state(self):
        return {}

class Lacking(Simple):
    def aggregate(self, before, models, parameters):
        before.pop("w")
        return before

class Misshapen(Simple):
    def aggregate(self, before, models, parameters):
        return {**before, "w": torch.zeros(1)}

class Rounding(Simple):
    def aggregate(self, before, models, parameters):
        return {**before, "count": torch.tensor(0.5)}

class Nothing(Simple):
    def aggregate(self, before, models, parameters):
        pass

def number():
    return 5
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_aggregators.py").write_text(OWN, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "own_aggregators", raising=False)
    return "own_aggregators"


def test_an_own_aggregator_gets_its_parameters_and_is_rounded_to_the_model(own: str) -> None:
    aggregator, models = make_aggregator(f"{own}:Strongest", {"inertia": 0.25}), fleet(3, dtype=torch.float32)
    x = state(0, torch.float32)
    new = aggregator.aggregate(x, models, WEIGHTS)
    wanted = 0.25 * x["w"].double() + 0.75 * models[2].state["w"]
    assert torch.equal(new["w"], wanted.float())
    assert new["count"].item() == 13
    other = make_aggregator(f"{own}:Strongest", {})
    other.load_state(aggregator.state())
    assert other.state()["rounds"].item() == 1


def test_an_own_aggregator_may_keep_nothing_and_cannot_change_the_global_model_in_place(own: str) -> None:
    aggregator, x = make_aggregator(f"{own}:Simple", {}), state(0)
    hash_ = weights_sha256(x)
    assert aggregator.aggregate(x, fleet(2), WEIGHTS)["w"].abs().sum() == 0
    assert weights_sha256(x) == hash_
    assert aggregator.state() == {}
    aggregator.load_state({})
    with pytest.raises(ConfigError, match="which own_aggregators:Simple does not keep"):
        aggregator.load_state({"rounds": torch.zeros(1)})


@pytest.mark.parametrize(
    ("function", "given", "sentence"),
    [
        ("number", {}, "returned a int without the method aggregate(before, models, parameters): add it."),
        ("Half", {}, "has only one of state() and load_state(state): define both, or neither"),
        ("Strongest", {"inertai": 1}, "raised TypeError: Strongest.__init__() got an unexpected keyword argument"),
        ("nobody", {}, "own_aggregators has no 'nobody'"),
        ("Raising", {}, "raised RuntimeError: no mood in aggregate."),
        ("Lacking", {}, "must return a dictionary with exactly the names of the state"),
        ("Nothing", {}, "must return a dictionary"),
        ("Misshapen", {}, "must return for 'w' a tensor of shape (3, 4) and a dtype like"),
        ("Rounding", {}, "must return for 'count' a tensor of shape () and a dtype like torch.int64."),
    ],
)
def test_an_error_of_an_own_aggregator_is_one_sentence(
    own: str, function: str, given: dict[str, Any], sentence: str
) -> None:
    x = state(0)
    hash_ = weights_sha256(x)
    with pytest.raises(PiparError) as raised:
        make_aggregator(f"{own}:{function}", given).aggregate(x, fleet(2), WEIGHTS)
    assert sentence in str(raised.value)
    assert str(raised.value).endswith(".")
    assert weights_sha256(x) == hash_


def test_the_example_in_the_documents_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "aggregators.md").read_text("utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "documented_aggregator.py").write_text(block, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    x, models = state(0), fleet(4)
    new = make_aggregator("documented_aggregator:Inertia", {"inertia": 0.25}).aggregate(x, models, WEIGHTS)
    mean = plain.mean(rows(models, "w"), samples(models))
    assert error(new["w"], 0.25 * x["w"].numpy() + 0.75 * mean) < CLOSE


def test_a_protocol_error_is_not_blamed_on_the_aggregator(own: str) -> None:
    class Broken:
        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Any:
            yield fleet(1)[0]
            raise ProtocolError("pi-1 returned no valid model.")

    models: DeviceModels = Broken()
    with pytest.raises(ProtocolError, match="pi-1 returned no valid model"):
        make_aggregator(f"{own}:Strongest", {}).aggregate(state(0), models, WEIGHTS)
