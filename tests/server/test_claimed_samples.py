"""A device's weight in the global model: what the server saw it train, or what the configuration allows."""

from __future__ import annotations

import pytest
from support.hostile import Tamper, says
from support.roaming import C, roam, same
from support.training import Case

from pipar.events import Dropped
from pipar.launch.deployed_job import most_samples
from pipar.settings.config_file import config_from
from pipar.wire.messages import Kind, Message

MANY = 100_000_000


def many_samples(message: Message) -> Message:
    claims: list[Tamper] = [says(Kind.HELLO, samples=MANY), *(says(Kind.END_EPOCH, n, samples=MANY) for n in (1, 2))]
    for claim in claims:
        message = claim(message)
    return message


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fl", "pipar"])
def test_a_device_that_claims_many_samples_does_not_own_the_next_model(method: str) -> None:
    small = Case(method, sizes=(100, 60, 57), encoding="raw")
    expected = roam(small, {}, absent={C})
    trained = roam(small, {}, tampers={C: many_samples}, begins_with=2)
    assert "reports 100000000 samples" in str(trained.endings[C])
    assert trained.counted == expected.counted
    assert same(trained.state, expected.state)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pipar", "sfl2"])
def test_samples_that_the_server_has_not_seen_do_not_count(method: str) -> None:
    small = Case(method, sizes=(100, 60, 57), encoding="raw")
    trained = roam(small, {}, tampers={C: says(Kind.END_EPOCH, 1, samples=MANY)})
    assert [(event.device, event.epoch) for event in trained.of(Dropped)] == [(C, 1)]
    assert "reports 100000000 samples, but 57 arrived" in str(trained.endings[C])


def test_a_device_has_at_most_the_samples_of_the_dataset_unless_the_configuration_says_more() -> None:
    assert most_samples(config_from({"data": {"name": "cifar10"}})) == 50_000
    assert most_samples(config_from({"data": {"name": "cifar10"}, "server": {"max_samples": 70_000}})) == 70_000
    assert most_samples(config_from({"data": {"name": "synthetic"}})) is None
    own = {"factory": "my:data", "shape": [1, 4, 4], "classes": 2}
    assert most_samples(config_from({"data": own})) is None
