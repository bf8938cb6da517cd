"""Perturbed times differ from the planner's by as much as stated, and the planner's choices stay good in them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support.fleets import PROFILE, fleet, plans

from pipar.job.prepare import unplanned_timing_only_job
from pipar.planner.exhaustive import search_all
from pipar.planner.search import search_kinds
from pipar.planner.simulator import simulate
from pipar.planner.timing import steady_epoch_s
from pipar.settings.config_file import config_from
from reproduction.perturbed_times import JITTER, PERTURBATION, jittered_simulation, perturbed


def test_every_layer_is_perturbed_by_its_own_bounded_factor() -> None:
    truth = perturbed(fleet(), 1)
    factors = []
    for profile in (truth.members[0].costs.profile, truth.server.profile):
        for layer, before in zip(profile.layers, PROFILE.layers, strict=True):
            factors.append(layer.forward_s[0] / before.forward_s[0])
            assert layer.forward_s[1] / before.forward_s[1] == pytest.approx(factors[-1])
    assert all(abs(factor - 1) <= PERTURBATION for factor in factors)
    assert all(one != other for one, other in pairwise(factors))


def test_the_same_seed_gives_the_same_world_and_another_seed_another_one() -> None:
    here = fleet()
    first, again, other = (jittered_simulation(seed)(here, plans(here), 2).epoch_s for seed in (1, 1, 2))
    assert first == again != other


def test_stages_are_jittered_by_a_little() -> None:
    here = fleet(1)
    quiet, jittered = simulate(here, plans(here)).epoch_s, jittered_simulation(5)(here, plans(here), None).epoch_s
    assert quiet != jittered
    assert abs(jittered / quiet - 1) < JITTER


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "data", "link", "speed"),
    [
        ("vgg5", "cifar10", "4g+", 1.0),
        ("vgg5", "mnist", "wifi", 5.0),
        ("resnet18", "mnist", "4g", 20.0),
        ("mobilenetv3_small", "cifar10", "wifi", 1.0),
        ("mobilenetv3_large", "tiny_imagenet", "4g", 5.0),
    ],
)
def test_a_choice_is_within_two_per_cent_of_the_best_in_a_world_it_does_not_know(
    model: str, data: str, link: str, speed: float
) -> None:
    """100 boards on 8 cores; the benchmark `selection` has all rows."""
    config = config_from(
        {
            "model": {"name": model, "norm": "batch"},
            "data": {"name": data, "samples_per_device": 500, "validation": 0, "test": 0},
            "server": {"profile": "i7-11850h"},
            "devices": [{"count": 100, "profile": "raspberry-pi-3b", "link": link, "speed": speed}],
        }
    )
    job = unplanned_timing_only_job(config)
    assert job is not None
    truth, world = perturbed(job.fleet(), 11), jittered_simulation(11)
    chosen = search_kinds(job.fleet(), simulate).plans
    best = search_all(truth, world, slack=JITTER)
    assert best.epoch_s / steady_epoch_s(world, truth, chosen) >= 0.98
