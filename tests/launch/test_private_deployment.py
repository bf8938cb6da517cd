"""A deployment with a privacy budget: counts survive a crash of the server, and no device exceeds its budget."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.deployments import training
from support.programs import address_of, place

from pipar.errors import TrainingError
from pipar.events import ignore
from pipar.execution.clock import run_virtually
from pipar.execution.lanes import VirtualLanes
from pipar.execution.spans import Recorder
from pipar.job.workload import Workload
from pipar.launch.deployed_device import allowed_cuts, device_guard, without_sample_statistics
from pipar.leakage.table import CutLeakage, LeakageTable, RebuildQuality
from pipar.privacy.accounting import cost, epsilon_after, smallest_multiplier
from pipar.privacy.budget import AllowedCuts, BudgetUse, PrivacyAccountant, choose_noise
from pipar.privacy.budget_file import BudgetFile
from pipar.profiling.profile import LayerProfile, Profile
from pipar.settings.config_file import config_from
from pipar.storage.checkpoint import Checkpoints, identity_of, latest
from pipar.storage.checkpoint_writer import CheckpointWriter
from pipar.storage.epoch_log import EpochLog
from pipar.storage.packed_rows import PackedRows
from pipar.wire.messages import EMPTY


@pytest.mark.slow
def test_a_device_follows_its_own_configuration_under_any_orders() -> None:
    target = epsilon_after(4.0, 2, 1e-5) * 1.001
    guard = device_guard(config_from({"privacy": {"noise_multiplier": 4.0, "target_epsilon": target}}), 7)
    assert guard.noise_seed == 7
    with pytest.raises(TrainingError, match="start both with the same"):
        guard.accept(3.0, BudgetUse())
    guard.accept(5.0, BudgetUse(1, cost(4.0)))
    guard.note(5.0)
    assert guard.used.releases == 2
    with pytest.raises(TrainingError, match="privacy budget"):
        guard.check(4.0)
    free = device_guard(config_from({}))
    free.accept(0.0, BudgetUse())
    assert free.noise_seed > 2**64  # but for one in 2^64


def cuts_of(method: str, **privacy: object) -> AllowedCuts | None:
    workload = Workload(config_from({"run": {"method": method}, "privacy": privacy}))
    return allowed_cuts(workload, workload.build_model())


@pytest.mark.slow
def test_a_device_configured_for_federated_learning_allows_no_cut(tmp_path: Path) -> None:
    cuts = cuts_of("fl")
    assert cuts is not None
    assert (cuts.layers, cuts.allowed) == (5, {5})
    assert cuts_of("pipar") is None
    layers = tuple(Workload(config_from({})).build_model()._modules)
    table = LeakageTable(
        "vgg5", "group", "digits", (1, 32, 32), layers, 0, "first ones", 0.0, 1, 4, 1, 0.0, {"decoder": "some"},
        tuple(CutLeakage(p, 0.5, {"decoder": RebuildQuality(0.9 - 0.2 * p, 10.0)}) for p in (1, 2, 3, 4)),
    )  # fmt: skip
    (tmp_path / "leakage.json").write_text(table.to_json())
    cuts = cuts_of("pipar", max_leakage=0.4, leakage=str(tmp_path / "leakage.json"))
    assert cuts is not None
    assert cuts.allowed == {3, 4, 5}


PROFILE = Profile(
    "own",
    "float32",
    (10,),
    (LayerProfile("one", (1.0,), (2.0,), 8, 16, shares={"sparse": (0.4, 0.3)}),),
    changes_share=0.7,
)


@pytest.mark.parametrize(
    ("tree", "tells"),
    [
        ({"run": {"method": "fl"}, "privacy": {"noise_multiplier": 1.0}}, False),
        ({"privacy": {"pixel_epsilon": 1.0}}, False),
        ({"privacy": {"noise_multiplier": 1.0}}, True),  # the server has the activations themselves
        ({"run": {"method": "fl"}}, True),
    ],
)
def test_a_profile_has_no_statistics_of_samples_that_are_hidden(tree: dict[str, Any], tells: bool) -> None:
    told = without_sample_statistics(config_from(tree), PROFILE)
    assert (told.layers[0].shares, told.changes_share) == (({"sparse": (0.4, 0.3)}, 0.7) if tells else ({}, 1.0))
    assert told.layers[0].forward_s == PROFILE.layers[0].forward_s


@pytest.mark.slow
def test_privacy_spent_in_an_unfinished_round_is_saved_with_the_round_before(tmp_path: Path) -> None:
    config = config_from({"privacy": {"noise_multiplier": 4.0}})
    accountant, saved = PrivacyAccountant(choose_noise(config)), Checkpoints(tmp_path)
    rows: dict[str, Any] = {"epochs": EpochLog(), "round_log": PackedRows(), "partly": {}}
    folder: Any = SimpleNamespace(accountant=accountant, plans={}, drawn={}, equivalence_reasons=(), **rows)

    async def keep() -> list[dict[str, Any]]:
        lane = VirtualLanes(["save"], Recorder("server"), lambda _: 0.0)
        job: Any = SimpleNamespace(config=config, sizes={})
        learner: Any = SimpleNamespace(snapshot=lambda: EMPTY)
        checkpointer = CheckpointWriter(saved, learner, folder, job=lambda: job, lane=lane, observe=ignore, done=0)
        found = []
        for epoch, last in ((0, True), (1, False), (1, True), (1, True)):
            await checkpointer.save_if_due(epoch, last=last)
            await checkpointer.finish()
            now = latest(tmp_path, identity_of(config), print)
            found.append({} if now is None else dict(now.notes["spent"]))
            if (epoch, last) != (1, True):
                accountant.note("pi")
        return found

    counts = [notes.get("pi", {}).get("releases") for notes in run_virtually(keep())]
    assert counts == [None, 1, 2, 2]


@pytest.mark.slow
def test_a_crashed_server_resumes_with_the_counts_and_stops_at_the_budget(tmp_path: Path, profiles: Path) -> None:
    tree = training(epochs=5)
    tree["server"]["min_devices"] = 2
    tree["privacy"] = {"target_epsilon": 6.0}
    with place(tmp_path, profiles, tree) as here:
        server = here.server()
        address = address_of(server)
        kept = tmp_path / "pi-1.json"
        devices = [here.device("pi-1", address, "--privacy-file", str(kept)), here.device("pi-2", address)]
        server.says("round 2 saved")
        server.kill()
        server = here.server("--resume", listen=address)
        done = int(server.says(r"resuming after round (\d+)")[1])
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
        assert BudgetFile.open(kept, "pi-1").used.releases == spent["pi-1"]["releases"]
        # A round that was sent to the crashed server counts: then no release is left for the last one.
        assert len(rounds) == 5 or (len(rounds) == 4 and "privacy.target_epsilon is 6" in result["stopped"])
        assert (result["stopped"] is None) == (len(rounds) == 5)
