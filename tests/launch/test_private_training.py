"""Training with noise equals its definition in plain torch, and does not depend on micro-batches."""

from __future__ import annotations

import asyncio
import copy
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import reference
from support.over_grpc import train_over_grpc
from support.reference import State
from support.training import (
    EXACT,
    Case,
    largest_error,
    make_job,
    reference_data,
    reference_state,
    train_in_virtual_time,
)
from torch import nn

from pipar import random_streams
from pipar.job.model_setup import make_learner, scores_on_test_set
from pipar.networks.models import uses_batch_statistics
from pipar.nn.device_part import DeviceSettings, TorchDevicePart
from pipar.nn.optimizers import sgd
from pipar.tensors.bodies import read_state, state_body

CLASSIC = (("clip", 0.02), ("noise_multiplier", 0.8))
#: The norms of the devices' updates in the cases below lie on both sides of 0.02, so some are clipped and some are not.
ALL = (*CLASSIC, ("pixel_epsilon", 1.0), ("label_epsilon", 2.0))
SMALL: dict[str, Any] = {"sizes": (130, 57), "epochs": 2}

pytestmark = pytest.mark.usefixtures("one_thread")


# --- one round by definition


def private_round(case: Case) -> State:
    """Return the global model after one round: clip, noise and average, with torch and numpy only."""
    workload = case.workload()
    model = workload.build_model()
    data = reference_data(workload, joins_single=uses_batch_statistics(model))
    cuts = [len(model)] * len(data) if case.method == "fl" else itertools.cycle(case.split_points)
    states = []
    for name, batches, cut in zip(sorted(workload.names), data, cuts, strict=False):
        trained = reference.federated(copy.deepcopy(model).train(), [batches[:1]], case.rules())
        states.append(protected(case, name, model, trained, cut))
    return reference.average(states, [reference.samples(batches[0]) for batches in data])


def protected(case: Case, device: str, model: nn.Sequential, trained: State, cut: int) -> State:
    """Return a device's trained model with clip and noise on the layers before the cut."""
    before, settings = model.state_dict(), dict(case.privacy)
    names = [name for name, tensor in model[:cut].state_dict().items() if tensor.is_floating_point()]
    update = torch.cat([(trained[name] - before[name]).ravel() for name in names])
    update *= min(1.0, settings["clip"] / float(update.norm()))
    after, scale = dict(trained), settings["clip"] * settings["noise_multiplier"]
    for name, change in zip(names, update.split([before[name].numel() for name in names]), strict=True):
        noise = random_streams.generator(case.seed, "update", device, 1, 0, name).standard_normal(before[name].shape)
        after[name] = before[name] + change.reshape(before[name].shape) + scale * torch.from_numpy(noise)
        if name.endswith("running_var"):
            after[name] = after[name].clamp(min=0)
    return after


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("pipar", (2,), (3,), epochs=1, privacy=CLASSIC, sizes=(57, 23)), id="pipar"),
        *(
            pytest.param(replace(case, epochs=1, privacy=CLASSIC), id=str(case), marks=pytest.mark.slow)
            for case in (
                Case("fl"),
                Case("fl", norm="batch"),
                Case("sfl", (3,), norm="group"),
                Case("sfl", (2,), norm="batch"),
                Case("pipar", (1, 4, 5), (7, 3, 1), seed=3),
            )
        ),
    ],
)
def test_a_round_with_noise_equals_its_definition(case: Case) -> None:
    expected = private_round(case)
    assert largest_error(train_in_virtual_time(case).state, expected) < EXACT
    assert largest_error(reference_state(replace(case, privacy=())), expected) > 1e-3  # there is noise on it


# --- independence of N


def cases(method: str, norm: str, privacy: tuple[tuple[str, float], ...]) -> list[Case]:
    one = Case(method, (2,), norm=norm, privacy=privacy, **SMALL)
    if method in ("fl", "sfl"):  # batches are not cut; only links and speeds can differ
        return [one, replace(one, even=True)]
    return [one, *(replace(one, micro_batches=(n,), schedule=how) for n, how in ((3, "all-forward"), (7, "1f1b")))]


@pytest.mark.slow
def test_a_small_noisy_model_does_not_depend_on_micro_batches() -> None:
    one = Case("pipar", (2,), norm="group", privacy=ALL, sizes=(31, 8), epochs=1)
    first, other = (train_in_virtual_time(replace(one, micro_batches=(n,))) for n in (1, 3))
    assert largest_error(other.state, first.state) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [CLASSIC, ALL], ids=["classic", "all"])
@pytest.mark.parametrize("norm", ["none", "group"])
@pytest.mark.parametrize("method", ["fl", "sfl", "pipar"])
def test_the_noisy_model_depends_neither_on_micro_batches_nor_on_the_order_of_devices(
    method: str, norm: str, privacy: tuple[tuple[str, float], ...]
) -> None:
    first, *others = (train_in_virtual_time(case) for case in cases(method, norm, privacy))
    for other in others:
        assert largest_error(other.state, first.state) < EXACT
        assert [epoch.epsilon for epoch in other.epochs] == [epoch.epsilon for epoch in first.epochs]
    another_seed = replace(cases(method, norm, privacy)[0], seed=1)
    assert largest_error(train_in_virtual_time(another_seed).state, first.state) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "norm", "micro_batches"),
    [("fl", "group", 1), ("sfl", "group", 1), ("pipar", "group", 3), ("pipar", "none", 7)],
)
def test_the_real_world_trains_the_same_noisy_model(method: str, norm: str, micro_batches: int) -> None:
    case = Case(method, (2,), (micro_batches,), norm=norm, privacy=ALL, **SMALL)
    virtual = train_in_virtual_time(replace(case, micro_batches=(1,)))
    real = asyncio.run(train_over_grpc(replace(case, even=True)))
    assert largest_error(real.state, virtual.state) < EXACT
    assert [epoch.epsilon for epoch in real.epochs] == [epoch.epsilon for epoch in virtual.epochs]


# --- inputs and labels


def pieces(case: Case, sizes: list[int], epoch: int = 1) -> list[Any]:
    shard = case.workload().samples.shard("phone-a")
    positions = shard.order(epoch)[: sum(sizes)]
    return shard.with_noise(epoch, positions, shard.micro_batches(epoch, positions, sizes))


def test_noise_on_inputs_is_the_same_for_every_cut_and_differs_between_epochs() -> None:
    case = Case("pipar", privacy=(("pixel_epsilon", 0.5), ("pixel_bound", 0.2)))
    whole = pieces(case, [60])[0].inputs
    for sizes in ([20, 20, 20], [7] * 8 + [4]):
        assert torch.equal(torch.cat([piece.inputs for piece in pieces(case, sizes)]), whole)
    plain = pieces(replace(case, privacy=()), [60])[0].inputs
    scale = case.workload().config.privacy.pixel_scale
    assert scale == pytest.approx(np.sqrt(2 * np.log(1.25 / 0.05)) * 0.2 / 0.5)
    noise = (whole - plain).numpy().ravel()
    assert noise.std() == pytest.approx(scale, rel=0.1)
    assert not torch.equal(pieces(case, [60], epoch=2)[0].inputs, whole)


def test_evaluation_has_the_same_noise_each_time_and_measurements_have_none() -> None:
    case = Case("pipar", privacy=(("pixel_epsilon", 1.0),))
    workload, plain = case.workload(), replace(case, privacy=()).workload()
    for which in ("validation", "test"):
        (_, load), (_, load_plain) = (
            workload.samples.held_out_batches(which)[0],
            plain.samples.held_out_batches(which)[0],
        )
        assert torch.equal(load()[0], load()[0])
        assert (load()[0] - load_plain()[0]).std() == pytest.approx(workload.config.privacy.pixel_scale, rel=0.2)
        assert torch.equal(load()[1], load_plain()[1])
    shards = workload.samples.shard("phone-a"), plain.samples.shard("phone-a")
    batches = [shard.batch(1, shard.order(1)[:9])[0] for shard in shards]
    assert torch.equal(*batches)
    learner = make_learner(make_job(workload), workload)
    assert scores_on_test_set(learner, workload) == scores_on_test_set(learner, workload)


@pytest.mark.slow
def test_labels_are_drawn_once_for_all_epochs_and_replaced_only_where_they_are_sent() -> None:
    case = Case("pipar", privacy=(("label_epsilon", 1.0),))
    shard = case.workload().samples.shard("phone-a")

    def labels(epoch: int) -> dict[int, tuple[int, int]]:
        order = shard.order(epoch)
        piece = shard.micro_batches(epoch, order, [len(order)])[0]
        return {int(at): (int(y), int(t)) for at, y, t in zip(order, piece.targets, piece.sent_targets, strict=True)}

    first = labels(1)
    assert labels(2) == first
    kept = np.mean([true == told for true, told in first.values()])
    assert 0.1 < kept < 0.4  # e / (e + 9) = 0.23 of 230
    own = shard.materialised()
    assert torch.equal(own._sent_labels, shard._sent_labels)
    # With all layers on the device no labels are sent, and the weights are those of the true labels.
    fl = Case("fl", privacy=(("label_epsilon", 1.0),), sizes=(57,), epochs=1)
    assert largest_error(train_in_virtual_time(fl).state, reference_state(replace(fl, privacy=()))) < EXACT
    split = replace(fl, method="sfl")
    assert largest_error(train_in_virtual_time(split).state, reference_state(replace(fl, privacy=()))) > 1e-6


# --- the part


def part(module: nn.Sequential) -> TorchDevicePart:
    made = TorchDevicePart(module, sgd(), has_loss=False, settings=DeviceSettings(keeps_base=True))
    made.unpack_and_install(state_body({k: v.clone() for k, v in module.state_dict().items()}), keep_state=False)
    return made


def noise(name: str) -> np.random.Generator:
    return random_streams.generator(1, "update", "pi", 1, 0, name)


def test_a_weight_that_two_layers_share_has_the_same_noise_in_both() -> None:
    layer = nn.Linear(4, 4)
    made = part(nn.Sequential(layer, nn.ReLU(), layer))
    made.protect(noise, clip=1.0, multiplier=1.0)
    state = read_state(made.pack())
    assert torch.equal(state["0.weight"], state["2.weight"])


def test_statistics_have_noise_counters_and_frozen_weights_have_none_and_variances_stay_positive() -> None:
    network = nn.Sequential(nn.Linear(4, 50), nn.BatchNorm1d(50))
    network[0].bias.requires_grad_(False)
    made = part(network)
    before = {name: tensor.clone() for name, tensor in made.state().items()}
    made.protect(noise, clip=1.0, multiplier=3.0)
    after = made.state()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var"}
    assert after["1.running_var"].min() == 0.0


class Keeps(nn.Module):
    """A layer that keeps statistics of its data in a buffer without noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.average = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(4, dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average += inputs.mean(dim=0)
            self.seen += (inputs > 0).sum(dim=0)
        return self.layer(inputs)


def test_buffers_without_noise_are_not_sent() -> None:
    kept = Keeps()
    made = part(nn.Sequential(kept, nn.BatchNorm1d(4), kept))
    before = {name: tensor.clone() for name, tensor in made.state().items()}
    made.module(torch.rand(8, 4))
    made.protect(noise, clip=1.0, multiplier=1.0)
    sent = read_state(made.pack())
    assert not {"0.average", "2.average"} & set(sent)
    for name in ("0.seen", "2.seen"):
        assert torch.equal(sent[name], before[name])
    assert sent["1.num_batches_tracked"] == 1
    assert torch.equal(sent["0.layer.weight"], sent["2.layer.weight"])
    assert not torch.equal(sent["0.layer.weight"], before["0.layer.weight"])


def test_a_protected_update_can_be_sent_as_changes() -> None:
    made = part(nn.Sequential(nn.Linear(40, 40)))
    base = {name: tensor.clone() for name, tensor in made.state().items()}
    made.protect(noise, clip=1.0, multiplier=1e-3)
    sent = read_state(made.pack(changes=True), base)
    assert all(torch.equal(sent[name], tensor) for name, tensor in made.state().items())
