"""Networks of known families train the weights of the uncut network: at every cut, for several N, and with tails."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support import reference
from support.families import FAMILIES, ResNet, images
from support.training import EXACT, Case, hand_made_profile, largest_error, reference_data, train_workload
from torch import nn

import pipar
from pipar.job.workload import Workload
from pipar.settings.config_file import config_from

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

#: Batches of 6: a whole one and one of 5 samples; a whole one and a single sample; one of 5.
SIZES = (11, 7, 5)
#: Each device has its own N: one micro-batch, three, and as many as samples.
PIECES = (1, 3, 5)
#: Families of which several tensors cross the cut that processes train with.
WITH_SEVERAL = ("resnet-18", "bert", "u-net", "gpt-2")


@cache
def made(name: str) -> tuple[nn.Module, list[Any]]:
    """Return the network, and the samples of each device."""
    make, samples = FAMILIES[name]
    torch.manual_seed(0)
    return make(), [samples(size, number) for number, size in enumerate(SIZES)]


def case(split_points: tuple[int, ...], pieces: tuple[int, ...] = PIECES, **changes: Any) -> Case:
    return Case("pipar", split_points, pieces, sizes=SIZES, batch_size=6, **changes)


def workload(name: str) -> Workload:
    return case((1,)).workload(*made(name))


def expected(of: Workload, model: nn.Module) -> reference.State:
    joins_single = any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    return reference.train("fl", model.double(), reference_data(of, joins_single=joins_single), 0, case((1,)).rules())


def trained(changed: Case, of: Workload) -> reference.State:
    """Return the weights after a training with the network and data of a workload, which is cut only once."""
    other = Workload(config_from(changed.tree()), of.user_objects)
    other._line = of._line
    return train_workload(other).state


def rotated(cuts: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the P and N of three devices in each training: every cut occurs with every N."""
    groups = [[min(start + number, cuts) for number in range(3)] for start in range(1, cuts + 1, 3)]
    return [
        (tuple(group), tuple(PIECES[(number + turn) % 3] for number in range(3)))
        for turn in range(3)
        for group in groups
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_after_two_epochs_are_those_of_the_uncut_network_at_every_cut(name: str) -> None:
    of, (model, _) = workload(name), made(name)
    cuts, reached = len(of.build_model()) - 1, expected(of, model)
    assert (cuts == 0) == (name == "gpt-2 with tied weights")
    plans = rotated(cuts) or [((1,), (1,))]  # P = Q
    if cuts:
        at_cuts = {pair for split_points, pieces in plans for pair in zip(split_points, pieces, strict=True)}
        assert at_cuts == set(product(range(1, cuts + 1), PIECES))
    for split_points, pieces in plans:
        assert largest_error(trained(case(split_points, pieces), of), reached) < EXACT, (split_points, pieces)


def test_batch_normalisation_trains_as_in_the_uncut_network_with_one_micro_batch() -> None:
    torch.manual_seed(0)
    model = ResNet(nn.BatchNorm2d, layers=(1, 1, 1, 1))
    datasets = [images(size, number, side=32) for number, size in enumerate(SIZES)]
    of = case((1,)).workload(model, datasets)
    cuts, reached = len(of.build_model()) - 1, expected(of, model)
    for split_points in {split_points for split_points, _ in rotated(cuts)}:
        assert largest_error(trained(case(split_points, (1,)), of), reached) < EXACT, split_points


@pytest.mark.parametrize(
    ("name", "split_point"),
    [
        *(("resnet-18", 4), ("vit", 3), ("bert", 3), ("u-net", 3), ("gpt-2", 3), ("lstm", 1)),
        ("gpt-2 with tied weights", 1),  # P = Q: it has no cut
    ],
)
def test_processes_train_the_weights_of_the_uncut_network(
    name: str, split_point: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    model, datasets = made(name)
    of, file = workload(name), tmp_path / "profile.json"
    profile = hand_made_profile(of.build_model(), of.samples.form, "float64")
    assert (len(profile.layers[split_point - 1].tensor_bytes) > 1) == (name in WITH_SEVERAL)
    profile.save(file)
    tree = case((split_point,), even=True).tree()
    settings = [f'server.profile="{file}"', f'devices.profile="{file}"']
    real = pipar.run(tree, model=model, datasets=datasets, world="real", settings=settings)
    reached = expected(of, model)
    state = real.state_dict()
    assert largest_error({weight: state[weight] for weight in reached}, reached) < EXACT
    assert (real.content["world"], real.content["equivalence"]) == ("real", "exact")
