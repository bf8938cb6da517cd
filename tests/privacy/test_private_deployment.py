"""A deployment with a budget: counts outlive a crash of the server, and nobody sends more than it may."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import address_of, place
from test_deployment import training

from pipar.config import config_from
from pipar.deployment import own_guard
from pipar.errors import TrainingError
from pipar.privacy.accounting import cost, epsilon_after, smallest_multiplier
from pipar.privacy.spending import Spent


def test_a_device_goes_by_its_own_configuration_whatever_the_server_orders() -> None:
    target = epsilon_after(4.0, 2, 1e-5) * 1.001
    guard = own_guard(config_from({"privacy": {"noise_multiplier": 4.0, "target_epsilon": target}}), 7)
    assert guard.noise_seed == 7
    with pytest.raises(TrainingError, match="start both with the same"):
        guard.accept(3.0, Spent())
    guard.accept(5.0, Spent(1, cost(4.0)))
    guard.note(5.0)
    assert guard.spent.releases == 2
    with pytest.raises(TrainingError, match="privacy budget"):
        guard.check(4.0)
    free = own_guard(config_from({}))
    free.accept(0.0, Spent())
    assert free.noise_seed > 2**64  # but for one in 2^64


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_that_crashes_goes_on_with_the_counts_and_stops_at_the_budget(tmp_path: Path, profiles: Path) -> None:
    tree = training(epochs=5)
    tree["server"]["min_devices"] = 2
    tree["privacy"] = {"target_epsilon": 6.0}
    with place(tmp_path, profiles, tree) as here:
        server = here.server()
        address = address_of(server)
        devices = [here.device(name, address) for name in ("pi-1", "pi-2")]
        server.says("round 2 is saved")
        server.kill()
        server = here.server("--resume", listen=address)
        done = int(server.says(r"going on after round (\d+)")[1])
        assert done >= 2
        assert [program.ends() for program in (server, *devices)] == [0, 0, 0]
        result, rounds = here.result(), here.rounds()
        spent = {entry["device"]: entry for entry in result["privacy"]["devices"]}
        multiplier = smallest_multiplier(5, 6.0, 1e-5)
        assert result["privacy"]["noise_multiplier"] == multiplier
        for entry in spent.values():
            assert len(rounds) <= entry["releases"] <= 5
            assert entry["epsilon"] == pytest.approx(epsilon_after(multiplier, entry["releases"], 1e-5))
        assert max(entry["epsilon"] for entry in spent.values()) == result["epsilon"] <= 6.0
        # A round that was sent to the server that crashed was sent: then there is none left for the last one.
        assert len(rounds) == 5 or (len(rounds) == 4 and "privacy.target_epsilon is 6" in result["stopped"])
        assert (result["stopped"] is None) == (len(rounds) == 5)
