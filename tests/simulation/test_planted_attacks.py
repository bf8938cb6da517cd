"""Each invariant about attacks, disks and budgets finds the error that it is there for, planted in production code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipar.aggregation.update_check import UpdateCheck
from pipar.device.intake import Intake
from pipar.errors import CredentialError, InputError
from pipar.execution.spans import Clock
from pipar.methods import Plan
from pipar.nn import learner, server_part, shared_part
from pipar.privacy.budget import PrivacyAccountant, PrivacyGuard, UpdateNoise
from pipar.privacy.budget_file import BudgetFile
from pipar.server.rounds import Round
from pipar.server.serving import Serving
from pipar.server.session import Session
from pipar.storage import checkpoint, run_folder, run_lock, trace_file, whole_files
from pipar.storage.checkpoint_writer import CheckpointWriter
from pipar.transport.reconnect import Reconnector
from simulation.imposter import HOSTILE, Imposter
from simulation.scenario import Fault, Privacy, Scenario, draw_scenario
from simulation.tampering import TAMPERS, Tamper, choose_tamper, computes_huge_activations, sends_large_models
from simulation.world import Outcome, simulate
from tests.support.quiet_worlds import found, holds, quiet


def nothing(*_: Any, **__: Any) -> None:
    pass


def text_of(outcomes: Sequence[Outcome]) -> str:
    return "\n".join(event for outcome in outcomes for event in outcome.events)


# --- peers


def with_imposter(seed: int) -> Scenario:
    crash = Fault(3.0, "crash-server", "", 4.0, 0)
    return quiet(seed, crash, *(Fault(3.0, "imposter", "", 3.5, 2 * choice) for choice in range(seed, seed + 1)))


@pytest.mark.slow
def test_devices_that_give_up_because_of_an_imposter_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "meets an imposter" in text_of(holds(with_imposter))

    def is_final(self: Reconnector, error: Exception) -> bool:  # noqa: ARG001
        return isinstance(error, CredentialError)

    monkeypatch.setattr(Reconnector, "_is_final", is_final)
    monkeypatch.setattr(Reconnector, "_resume", _resume_only_once)
    assert found(with_imposter) == "admitted devices keep trying"


async def _resume_only_once(self: Reconnector, channel: Any, reason: Exception) -> None:  # noqa: ARG001
    await self._dial()
    raise CredentialError("It gives up.")


def with_a_hostile_server(answer: str, seed: int) -> Scenario:
    choice = next(one for one in range(10_000) if Imposter(one, is_verified=False).answer == answer)
    hostile = [Fault(at_s, "imposter", "", 2.5, choice) for at_s in (0.0, 4.0)]
    return quiet(seed, Fault(4.0, "crash-server", "", 2.0, 0), *hostile, has_credentials=False)


@pytest.mark.slow
@pytest.mark.parametrize("answer", HOSTILE)
def test_devices_outlast_a_server_that_orders_or_sends_too_much(answer: str) -> None:
    outcomes = holds(partial(with_a_hostile_server, answer))
    assert f"meets an imposter: {answer}" in text_of(outcomes)
    assert [outcome.rounds for outcome in outcomes] == [4, 4]


@pytest.mark.slow
def test_devices_that_take_too_much_from_a_server_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Intake, "_most_bytes", lambda _, __: 10**9)
    assert found(partial(with_a_hostile_server, "too large a model")) == "memory is bounded"


def with_a_stranger(seed: int) -> Scenario:
    attacks = [Fault(0.5 + 2.0 * n, "intruder", "device-1", 8.0, 31 * n + seed) for n in range(4)]
    return quiet(seed, *attacks, method="fl", plans=dict.fromkeys(("device-1", "device-2", "device-3"), Plan(3, 1)))


@pytest.mark.slow
def test_a_stranger_that_counts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Joined(device='stranger'" in text_of(holds(with_a_stranger))
    begin, begun = Serving.begin, dict[str, int]()

    def remembered(self: Serving, group: Sequence[Session], *round_of: Any) -> None:
        begun.update({session.device: 7 for session in group if session.device == "stranger"})
        begin(self, group, *round_of)

    own = Round.samples.fget
    assert own is not None
    monkeypatch.setattr(Serving, "begin", remembered)
    monkeypatch.setattr(Round, "samples", property(lambda self: {**own(self), **begun}))
    assert found(with_a_stranger) == "only members count"


def with_a_hostile_device(
    seed: int, method: str = "pipar", network: str = "plain", tamper: Tamper | None = None
) -> Scenario:
    wanted = tamper or computes_huge_activations
    choice = next(choice for choice in range(1000) if choose_tamper(choice) is wanted)
    hostile = [Fault(1.0 + 2.0 * n, "hostile-device", "device-2", 1.5, choice) for n in range(3)]
    return quiet(seed, *hostile, method=method, network=network)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pipar", "sfl2"])
def test_finite_numbers_that_ruin_a_model_are_found(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = holds(lambda seed: with_a_hostile_device(seed, method))
    assert "computes_huge_activations" in text_of(outcomes)
    for module in (learner, server_part, shared_part):
        monkeypatch.setattr(module, "check_range", nothing)
    monkeypatch.setattr(shared_part.SharedServerPart, "_check_weights", lambda _: 1.0)
    monkeypatch.setattr(learner, "check_finite", nothing)
    monkeypatch.setattr(UpdateCheck, "check", nothing)
    assert found(lambda seed: with_a_hostile_device(seed, method)) in ("aggregate is the mean", "weights are finite")


@pytest.mark.slow
def test_a_model_that_is_far_from_all_others_and_counts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UpdateCheck, "check", nothing)
    assert found(lambda seed: with_a_hostile_device(seed, tamper=sends_large_models)) == "aggregate is the mean"


@pytest.mark.slow
@pytest.mark.parametrize("tamper", TAMPERS[1:], ids=lambda tamper: tamper.__name__)
@pytest.mark.parametrize("method", ["pipar", "sfl2"])
def test_honest_devices_train_exactly_beside_each_kind_of_hostile_device(tamper: Any, method: str) -> None:
    choice = next(choice for choice in range(1000) if choose_tamper(choice) is tamper)
    hostile = [Fault(1.0 + 2.0 * n, "hostile-device", "device-2", 1.5, choice) for n in range(4)]
    clips = {"clip_norm": 1.0} if method == "pipar" else {}
    scenario = quiet(1, *hostile, method=method, network="batch-norm", **clips)
    assert scenario.is_exact
    outcome = simulate(scenario)
    assert outcome.violation is None, "\n".join([str(outcome.violation), *outcome.events[-20:]])
    assert outcome.rounds == 4


# --- disks


def unreadable(seed: int) -> Scenario:
    return quiet(seed, Fault(7.0, "unreadable", "", 4.0, seed))


@pytest.mark.slow
def test_checkpoints_that_cannot_be_read_and_are_changed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    said = text_of(holds(unreadable))
    assert "InputError: The checkpoint" in said
    latest = checkpoint.latest

    def forgiving(folder: Path, *arguments: Any) -> Any:
        """Resume from the checkpoint before one that cannot be read."""
        try:
            return latest(folder, *arguments)
        except InputError:
            before = sorted(folder.glob("round-*.pipar"))[:-1]
            return checkpoint.read(before[-1]) if before else None

    def removes_and_fails(folder: Path, *arguments: Any) -> Any:
        try:
            return latest(folder, *arguments)
        except Exception:
            max(folder.glob("round-*.pipar")).unlink()
            raise

    with monkeypatch.context() as patched:
        patched.setattr("simulation.server.latest", removes_and_fails)
        assert found(unreadable) == "unread files are kept"
    monkeypatch.setattr("simulation.server.latest", forgiving)
    assert found(unreadable) == "saved rounds stay"


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped_and_set_aside() -> None:
    def misdirected(seed: int) -> Scenario:
        return quiet(seed, Fault(8.5, "misdirected", "", 1.0, 4))

    assert "its checksum does not match its content. It is skipped" in text_of(holds(misdirected))


@pytest.mark.slow
def test_two_servers_in_one_folder_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def second(seed: int) -> Scenario:
        return quiet(seed, Fault(4.0, "second-server", "", 3.0, 0))

    assert "second server: is refused" in text_of(holds(second))
    monkeypatch.setattr(run_lock, "_lock", nothing)
    assert found(second) == "one server at a time"


def full_at_the_end(seed: int) -> Scenario:
    """Return a world whose disk is full from the last rounds on, for checkpoints and for results."""
    full = [Fault(9.0 + n, kind, "", 1.0, 3) for n in range(3) for kind in ("full-disk", "full-results")]
    return quiet(seed, *full, is_traced=True)


@pytest.mark.slow
def test_devices_that_leave_before_the_end_is_saved_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "SaveFailed" in text_of(holds(full_at_the_end))

    async def at_once(self: CheckpointWriter, epoch: int) -> None:
        pass

    monkeypatch.setattr(CheckpointWriter, "save_end", at_once)
    assert found(full_at_the_end) == "end is saved"


@pytest.mark.slow
def test_results_that_a_full_disk_leaves_incomplete_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(write: Callable[[], Any], *_: Any, **__: Any) -> None:
        with contextlib.suppress(OSError):
            write()

    def full_once(seed: int) -> Scenario:
        return quiet(seed, Fault(1.0, "full-results", "", 1.0, 3), rounds=1)

    with monkeypatch.context() as patched:
        patched.setattr("simulation.server.keep_trying", once)
        late = [Fault(2.0 + 0.5 * n, "full-results", "", 1.0, 3) for n in range(24)]
        assert found(lambda seed: quiet(seed, *late)) == "result is complete"
    holds(full_once)

    def torn(path: Path, content: bytes) -> None:
        with path.open("ab") as file:
            file.write(content[: len(content) // 2])
        append_whole(path, content)

    append_whole = whole_files.append_whole
    monkeypatch.setattr(run_folder, "append_whole", torn)
    monkeypatch.setattr(trace_file, "append_whole", torn)
    assert found(full_at_the_end) in ("log is true", "result is complete")


@pytest.mark.slow
def test_slow_disks_delay_no_round() -> None:
    slow = [Fault(1.0 + 3 * n, "slow-disk", "", 6.0, 1) for n in range(3)]
    holds(lambda seed: quiet(seed, *slow, Fault(6.0, "crash-server", "", 1.0, 0)))


# --- privacy budgets


def private(seed: int, releases: int = 6) -> Scenario:
    """Return a world in which devices and the server crash between updates."""
    crashes = [Fault(1.7 + 1.1 * n, "crash-device", f"device-{1 + n % 3}", 0.5, n) for n in range(6)]
    stops = [Fault(4.0 + 4.0 * n, "crash-server", "", 1.0, n) for n in range(2)]
    return quiet(seed, *crashes, *stops, privacy=Privacy(5.0, releases), round_deadline_s=4.0)


@pytest.mark.slow
def test_updates_that_no_file_has_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    save = BudgetFile.save
    monkeypatch.setattr(BudgetFile, "save", lambda self, used: save(self, replace(used, releases=0)))
    assert found(private) == "budgets are kept"


@pytest.mark.slow
def test_updates_beyond_the_budget_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "BudgetSpent" in text_of(holds(lambda seed: private(seed, releases=2)))
    monkeypatch.setattr(PrivacyGuard, "check", nothing)
    monkeypatch.setattr(UpdateNoise, "allow", lambda *_: True)
    assert found(lambda seed: private(seed, releases=2)) == "budgets are kept"


@pytest.mark.slow
def test_a_server_that_forgets_updates_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrivacyAccountant, "note", nothing)
    monkeypatch.setattr(PrivacyAccountant, "learn", nothing)
    assert found(private) == "budgets are kept"


# --- clocks and traces


@pytest.mark.slow
def test_spans_on_another_clock_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def skewed(seed: int) -> Scenario:
        ahead = {"server": 5.0, "device-1": 1e6, "device-2": 300.0}
        return quiet(seed, is_traced=True, skews_s=ahead)

    holds(skewed)
    monkeypatch.setattr(Clock, "offset_s", lambda *_: 0.0)
    assert found(skewed) == "trace is true"


def test_rates_of_faults_follow_the_length_of_a_training() -> None:
    per_round: Mapping[int, float] = {
        rounds: sum(len(draw_scenario(seed, rounds=rounds).faults) for seed in range(20)) / rounds
        for rounds in (5, 100)
    }
    assert per_round[100] == pytest.approx(per_round[5], rel=0.5)
    assert max(fault.after_round for fault in draw_scenario(1, rounds=100).faults) >= 80
