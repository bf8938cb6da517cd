"""A device that dies without a word does not stall a deployment, without a configured timeout."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.deployments import check_weights, counted, training
from support.programs import Place, address_of, place

pytestmark = pytest.mark.slow

#: Micro-batches that pi-2 computes before it is held: a round has two for each of its four batches.
IN_ROUND_3 = 2 * 8 + 3


@pytest.fixture
def here(tmp_path: Path, profiles: Path) -> Iterator[Place]:
    tree = training(epochs=20)
    tree["server"] |= {"min_devices": 2, "round_deadline": "auto", "resume_window": "auto", "keepalive": "auto"}
    tree["devices"] = [{"name": "pi", "count": 2}]
    tree["data"]["samples_per_device"] = [40, 35]
    with place(tmp_path, profiles, tree) as made:
        yield made


def test_a_device_that_is_stopped_in_mid_epoch_is_lost_and_the_others_train_on(here: Place) -> None:
    server = here.server()
    address = address_of(server)
    here.hold("pi-2", after=IN_ROUND_3)
    pi_1, pi_2 = (here.device(name, address) for name in ("pi-1", "pi-2"))
    server.says("timeouts .* forecast")
    server.says("round 2 finished")
    here.wait_until_held("pi-2")
    pi_2.signal(signal.SIGSTOP)
    server.says("pi-2 is lost: nothing was heard from it for [0-9.]+ s")
    server.says("waiting for devices: 1 of 2 joined")
    pi_2.signal(signal.SIGCONT)  # it finds its session over, and joins again
    here.let_go("pi-2")
    assert (server.ends(), pi_1.ends(), pi_2.ends()) == (0, 0, 0)
    without = counted(here).index({"pi-1"})
    assert {"pi-1", "pi-2"} in counted(here)[without:], "it takes part again"
    tree = training(epochs=20)
    tree["data"]["samples_per_device"], tree["devices"] = [40, 35], [{"name": "pi", "count": 2}]
    check_weights(here, tree)
