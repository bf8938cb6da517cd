"""Every method trains the weights of its definition.

The split point, the number of micro-batches, the order of stages on a device and the order in which devices arrive
change the time, not the result.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support import plain_aggregators as plain
from support import reference
from support.reference import State
from support.training import EXACT, SIZES, Case, largest_error, reference_data, reference_state, train_in_virtual_time
from torch import Tensor, nn
from torch.nn import functional as F

from pipar.nn.device_part import TorchDevicePart
from pipar.nn.server_part import TorchServerPart

ONE = SIZES[:1]
METHODS = ("fl", "sl", "sfl", "sfl2", "pipar")
VISIBLE = 1e-6  # a mistake in the mathematics is at least this large; rounding is a million times smaller


pytestmark = pytest.mark.usefixtures("one_thread")


def of_methods_that_do_not_pipeline() -> Iterator[Case]:
    for norm, momentum in (("none", "reset"), ("none", "keep"), ("group", "reset"), ("group", "keep")):
        settings: dict[str, Any] = {"norm": norm, "momentum": momentum}
        yield Case("fl", **settings)
        for method in ("sl", "sfl", "sfl2"):
            for split_point in (1, 3, 5) if norm == "none" else (2,):
                yield Case(method, (split_point,), **settings)
            yield Case(method, (4,), sizes=ONE, **settings)
    yield Case("fl", sizes=ONE, momentum="keep")
    yield Case("sfl", (1, 4, 2), momentum="keep")
    yield Case("sfl", (5, 1, 3), norm="group")


def of_pipar() -> Iterator[Case]:
    for n in (1, 3, 7, 12):
        for schedule in ("all-forward", "1f1b"):
            yield Case("pipar", (2,), (n,), sizes=ONE, schedule=schedule)
            yield Case("pipar", (1,), (n,), schedule=schedule)
            yield Case("pipar", (4,), (n,), norm="group", momentum="keep", schedule=schedule)
    yield Case("pipar", (5,), (1,), momentum="keep")
    yield Case("pipar", (1, 3, 5), (12, 7, 1), norm="group")
    yield Case("pipar", (4, 2, 1), (3, 100, 7), momentum="keep", schedule="1f1b")
    yield Case("pipar", (2, 1, 1), (100, 1, 57))


def of_other_settings() -> Iterator[Case]:
    for method in METHODS:
        yield Case(method, (2,), (7,), weight_decay=0.1, momentum="keep", augment=True, seed=3)


def of_larger_networks() -> Iterator[Case]:
    few: dict[str, Any] = {"shape": (1, 20, 20), "sizes": (12, 5), "epochs": 1}
    yield Case("pipar", (1, 7), (5, 3), model="resnet18", norm="group", **few)
    yield Case("pipar", (2, 9), (3, 4), model="mobilenetv3_small", norm="none", **few)
    yield Case("sl", (6,), model="mobilenetv3_small", norm="group", **few)


def every_case() -> Iterator[Any]:
    """Yield all cases; one in eighteen is not marked as slow, so that quick test runs have some of each kind."""
    cases = [*of_methods_that_do_not_pipeline(), *of_pipar(), *of_other_settings(), *of_larger_networks()]
    for number, case in enumerate(cases):
        fast = number % 18 == 0 and case.model == "vgg5"
        yield pytest.param(case, id=str(case), marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize("case", list(every_case()))
def test_weights_are_those_of_the_definition(case: Case) -> None:
    trained = train_in_virtual_time(case)
    assert largest_error(trained.state, reference_state(case)) < EXACT
    assert trained.job.equivalence == "exact"
    assert trained.samples == [sum(case.sizes)] * case.epochs


# --- other aggregators: the reference has FedProx's term in its loss, and computes the others in numpy


def fedprox(method: str, *plan: tuple[int, ...], **settings: Any) -> Case:
    return Case(method, *plan, aggregator="fedprox", aggregation=(("proximal", 3.0),), **settings)


FEDPROX = [
    fedprox("pipar", (1, 3), (7, 3), sizes=(157, 31)),
    fedprox("pipar", (1, 3, 4), (12, 7, 1)),
    fedprox("fl"),
    fedprox("fl", sizes=ONE, momentum="keep"),
    fedprox("sfl", (2,), momentum="keep"),
    fedprox("sfl2", (2,)),
    fedprox("sfl2", (3,), norm="group", momentum="keep", epochs=3),
    fedprox("pipar", (2,), (7,), sizes=ONE, epochs=3),
    fedprox("pipar", (1, 5), (3, 1), sizes=SIZES[:2], norm="group", weight_decay=0.1),
    fedprox("pipar", (4, 2, 1), (3, 100, 7), momentum="keep", schedule="1f1b", augment=True, seed=3),
    fedprox("pipar", (2,), (5,), sizes=(230, 100, 57, 31, 8)),
    fedprox("pipar", (2,), (1,), norm="batch"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", FEDPROX, ids=str)
def test_fedprox_trains_the_weights_of_its_definition(case: Case) -> None:
    expected = reference_state(case)
    assert largest_error(train_in_virtual_time(case).state, expected) < EXACT
    assert largest_error(reference_state(case, proximal=0.0), expected) > VISIBLE


@pytest.mark.parametrize("method", ["pipar", "sfl2"])
@pytest.mark.slow
def test_a_proximal_term_on_one_side_of_the_cut_only_would_be_detected(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = fedprox(method, (2,), (3,))
    for part in (TorchServerPart, TorchDevicePart):
        with monkeypatch.context() as patched:
            patched.setattr(part, "set_proximal_target", lambda *_: None)
            assert largest_error(train_in_virtual_time(case).state, reference_state(case)) > VISIBLE


def in_numpy(aggregator: str, case: Case, parameters: set[str]) -> Callable[[State, list[State], list[int]], State]:
    """Return an aggregation for the reference: of weights by numpy, of the rest the mean."""
    makes: dict[str, Any] = {}

    def aggregate(before: State, states: list[State], counts: list[int]) -> State:
        new = reference.average(states, counts)
        robust = aggregator in plain.ROBUST
        for name in new if robust else parameters & set(new):
            if new[name].is_floating_point():
                rows = np.stack([state[name].numpy() for state in states])
                make = makes.setdefault(name, plain.make(aggregator, **dict(case.aggregation)))
                new[name] = torch.from_numpy(make(before[name].numpy(), rows, np.array(counts)))
        return new

    return aggregate


OTHERS = [
    Case("pipar", (3, 1), (2, 5), sizes=(57, 31), aggregator="fedadam"),
    Case("pipar", (1, 3, 4), (12, 7, 1), aggregator="fedadam", epochs=3),
    Case("fl", aggregator="fedyogi", aggregation=(("server_learning_rate", 0.1), ("tau", 0.01)), epochs=3),
    Case("pipar", (2,), (5,), aggregator="fedavgm", momentum="keep", epochs=3),
    Case("pipar", (2,), (1,), norm="batch", aggregator="fedadam"),
    Case("sfl2", (2,), aggregator="fedadam", epochs=3),
    Case("sfl", (1, 4, 2), aggregator="median"),
    Case("sfl2", (2,), aggregator="median"),
    Case("pipar", (2,), (5,), sizes=(230, 100, 57, 31), aggregator="median"),
    Case("pipar", (1,), (3,), sizes=(120, 30, 57, 31, 8), aggregator="trimmed_mean", aggregation=(("trim", 0.3),)),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_other_aggregators_train_the_weights_of_their_definition(case: Case) -> None:
    parameters = {name for name, _ in case.workload().build_model().named_parameters()}
    expected = reference_state(case, aggregate=in_numpy(case.aggregator, case, parameters))
    assert largest_error(train_in_virtual_time(case).state, expected) < EXACT
    assert largest_error(reference_state(case, aggregate=None), expected) > VISIBLE


@pytest.mark.slow
def test_federated_learning_splitfed_and_pipar_train_the_same_weights() -> None:
    cases = [Case("fl"), Case("sfl", (2, 3, 1)), Case("pipar", (1, 2, 4), (7, 12, 3)), Case("pipar", (3,), (100,))]
    states = [train_in_virtual_time(case).state for case in cases]
    assert max(largest_error(state, states[0]) for state in states[1:]) < EXACT


@pytest.mark.slow
def test_split_learning_and_splitfed_v2_train_other_weights() -> None:
    federated, *others = (train_in_virtual_time(Case(method)).state for method in ("fl", "sl", "sfl2"))
    assert min(largest_error(other, federated) for other in others) > VISIBLE


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_training_loss_is_the_mean_over_all_samples(method: str) -> None:
    """With a learning rate too small to change the weights, every batch sees the initial ones."""
    case = Case(method, (2,), (7,), epochs=1)
    still = copy.deepcopy(case.tree())
    still["optimizer"]["learning_rate"] = 1e-300
    trained = train_in_virtual_time(TreeCase(method, still, case))
    workload = case.workload()
    model = workload.build_model().train()
    losses = []
    for name in workload.names:
        shard = workload.samples.shard(name)
        inputs, labels = shard.batch(1, shard.order(1))
        losses.append(F.cross_entropy(model(inputs), labels, reduction="none"))
    assert trained.epochs[0].train_loss == pytest.approx(torch.cat(losses).mean().item(), rel=1e-12)


class TreeCase(Case):
    """A case with additional configuration."""

    def __init__(self, method: str, tree: dict[str, Any], like: Case) -> None:
        super().__init__(**{**like.__dict__, "method": method})
        object.__setattr__(self, "_tree", tree)

    def tree(self) -> dict[str, Any]:
        return self._tree  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_in_float32_only_rounding_is_left_after_five_iterations(method: str) -> None:
    case = Case(method, (2,), (7,), sizes=(500, 230, 57), dtype="float32", norm="group", epochs=1)
    error = largest_error(train_in_virtual_time(case).state, reference_state(case))
    assert error < 1e-5


# --- batch normalisation


@pytest.mark.parametrize("sizes", [SIZES, (201, 101, 57)], ids=["tails", "single samples left over"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_batch_normalisation_without_micro_batches_is_exact(method: str, sizes: tuple[int, ...]) -> None:
    case = Case(method, (2,), (1,), norm="batch", sizes=sizes, momentum="keep")
    trained = train_in_virtual_time(case)
    assert largest_error(trained.state, reference_state(case)) < EXACT
    assert trained.job.equivalence == "exact"


@pytest.mark.slow
def test_batch_normalisation_with_micro_batches_is_reported_as_statistical_and_differs() -> None:
    case = Case("pipar", (2,), (7,), norm="batch")
    trained = train_in_virtual_time(case)
    assert trained.job.equivalence == "statistical"
    counters = [name for name in trained.state if name.endswith("num_batches_tracked")]
    floating = {name: tensor for name, tensor in trained.state.items() if name not in counters}
    expected = {name: tensor for name, tensor in reference_state(case).items() if name not in counters}
    assert counters
    assert largest_error(floating, expected) > VISIBLE


@pytest.mark.parametrize(
    ("n", "sizes", "iterations"),
    [
        (1, (201,), [(100,), (101,)]),
        (7, (101,), [(15, 15, 15, 14, 14, 14, 14)]),
        (12, (103,), [(9, 9, 9, 9) + (8,) * 8, (3,)]),
    ],
)
@pytest.mark.slow
def test_batch_normalisation_trains_every_sample(n: int, sizes: tuple[int, ...], iterations: list[Any]) -> None:
    trained = train_in_virtual_time(Case("pipar", (2,), (n,), norm="batch", sizes=sizes))
    assert trained.samples == [sum(sizes)] * 2
    assert sum(map(sum, iterations)) == sum(sizes)
    forwards = {(s.iteration, s.micro_batch) for s in trained.spans if s.kind == "fc" and s.epoch == 1}
    assert forwards == {(i, m) for i, cut in enumerate(iterations, 1) for m, _ in enumerate(cut, 1)}


@pytest.mark.parametrize("method", ["fl", "sl", "sfl2"])
@pytest.mark.slow
def test_methods_that_do_not_pipeline_stay_exact_with_batch_normalisation_for_every_configured_n(method: str) -> None:
    case = Case(method, (2,), (7,), norm="batch", epochs=1)
    trained = train_in_virtual_time(case)
    assert trained.job.equivalence == "exact"
    assert largest_error(trained.state, reference_state(case)) < EXACT


# --- networks of the user's own


def overwriting() -> nn.Sequential:
    """Return a network in which a layer that writes into its input follows the cut P = 1."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 10)
    )


def overwriting_through_a_view() -> nn.Sequential:
    """Return a network in which a layer that only reads its input follows the cut P = 1, then one that writes to it."""
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(64, 10))


def without_weights_in_front() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 10))


def without_weights_behind() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 10), nn.Tanh())


def partly_frozen() -> nn.Sequential:
    model = without_weights_in_front()
    model[1].requires_grad_(False)
    return model


@pytest.mark.parametrize("method", ["pipar", "sl", "sfl2", "sfl"])
@pytest.mark.parametrize(
    ("make", "split_point"),
    [
        (overwriting, 1),
        (overwriting, 2),
        (overwriting_through_a_view, 1),
        (without_weights_in_front, 1),
        (without_weights_behind, 2),
        (partly_frozen, 2),
    ],
)
@pytest.mark.slow
def test_own_network_trains_the_weights_of_the_definition(
    method: str, make: Callable[[], nn.Sequential], split_point: int
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        model = make().double()
    case = Case(method, (split_point,), (7,), momentum="keep")
    trained = train_in_virtual_time(case, model)
    assert largest_error(trained.state, reference_state(case, model)) < EXACT
    assert largest_error(trained.state, model.state_dict()) > VISIBLE


# --- these tests can fail: they detect mistakes in the mathematics


def equally_weighted_pieces(output: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of the micro-batches' mean losses, as if nine samples counted no more than eight."""
    pieces = zip(output.tensor_split(12), labels.tensor_split(12), strict=True)
    return torch.stack([F.cross_entropy(x, y) for x, y in pieces if len(y)]).mean()


def floored_batch(output: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of 12 * floor(B / 12) samples: the rest is dropped."""
    kept = max(1, len(labels) // 12 * 12)
    return F.cross_entropy(output[:kept], labels[:kept])


def without_last_sample(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output[:-1], labels[:-1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", [equally_weighted_pieces, floored_batch, without_last_sample])
@pytest.mark.slow
def test_wrong_weighting_of_samples_would_be_detected(method: str, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    case = Case(method, (2,))
    assert largest_error(reference_state(case, loss=loss), reference_state(case)) > VISIBLE


@pytest.mark.parametrize("method", ["fl", "sfl2"])
@pytest.mark.slow
def test_a_wrong_rule_for_momentum_would_be_detected(method: str) -> None:
    case = Case(method, (2,))
    assert largest_error(reference_state(case, keep_state=True), reference_state(case)) > VISIBLE


@pytest.mark.parametrize("method", ["fl", "sfl2"])
@pytest.mark.slow
def test_equal_weights_for_devices_would_be_detected(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, weighted = Case(method, (2,)), reference.average
    right = reference_state(case)
    monkeypatch.setattr(reference, "average", lambda states, counts: weighted(states, [1] * len(counts)))
    assert largest_error(reference_state(case, momentum=0.9), right) > VISIBLE


@pytest.mark.parametrize("method", ["sl", "sfl2"])
@pytest.mark.slow
def test_another_order_of_devices_would_be_detected(method: str) -> None:
    workload = (case := Case(method, (2,))).workload()
    first = workload.build_model()
    data = list(reversed(reference_data(workload)))
    assert largest_error(reference.train(method, first, data, 2, case.rules()), reference_state(case)) > VISIBLE
