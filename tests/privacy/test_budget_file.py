"""A restarted device keeps its budget and its randomised labels, and only that device can use its file."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipar.data.images import Images
from pipar.data.shard import SamplePrivacy, Shard
from pipar.errors import BudgetSpentError, ConfigError, InputError, PrivacyError
from pipar.launch.deployed_device import DeviceOptions, device_guard, device_workload, take_part
from pipar.privacy.accounting import cost, epsilon_after
from pipar.privacy.budget import BudgetUse
from pipar.privacy.budget_file import BudgetFile, locked
from pipar.settings.config_file import config_from


def test_a_restart_keeps_the_count_and_draws_new_noise(tmp_path: Path) -> None:
    path = tmp_path / "pi.json"
    target = epsilon_after(4.0, 3, 1e-5) * 1.001
    config = config_from({"privacy": {"noise_multiplier": 4.0, "target_epsilon": target}})
    first = device_guard(config, budget_file=BudgetFile.open(path, "pi"))
    for _ in range(2):
        first.note(4.0)
    again = device_guard(config, budget_file=BudgetFile.open(path, "pi"))
    assert again.used == BudgetUse(2, 2 * cost(4.0))
    assert again.noise_seed != first.noise_seed
    again.note(4.0)
    with pytest.raises(BudgetSpentError, match="has sent 3 updates"):
        device_guard(config, budget_file=BudgetFile.open(path, "pi")).check(4.0)


def test_the_servers_count_is_saved_too(tmp_path: Path) -> None:
    guard = device_guard(config_from({}), budget_file=BudgetFile.open(tmp_path / "pi.json", "pi"))
    guard.accept(4.0, BudgetUse(5, 5 * cost(4.0)))
    assert BudgetFile.open(tmp_path / "pi.json", "pi").used.releases == 5


def test_only_its_owner_can_read_the_file(tmp_path: Path) -> None:
    BudgetFile.open(tmp_path / "pi.json", "pi")
    assert stat.S_IMODE((tmp_path / "pi.json").stat().st_mode) == 0o600


def test_an_update_that_cannot_be_counted_is_not_sent(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    guard = device_guard(config_from({}), budget_file=BudgetFile.open(folder / "pi.json", "pi"))
    (folder / "pi.json").unlink()
    folder.rmdir()
    folder.write_text("no folder any more")
    with pytest.raises(PrivacyError, match="an update that cannot be counted is not sent"):
        guard.note(4.0)
    assert guard.used == BudgetUse()


def test_two_programs_cannot_use_one_file_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "pi.json"
    config, options = config_from({}), DeviceOptions("pi", "127.0.0.1:1", privacy_file=path)
    with locked(path):
        BudgetFile.open(path, "pi").save(BudgetUse(1, 0.25))  # replaces the file
        with pytest.raises(InputError, match="is in use by another `pipar device`"):
            take_part(config, options, pytest.fail)
    with locked(path):
        assert BudgetFile.open(path, "pi").used.releases == 1


GOOD = {"format": 1, "device": "pi", "label_key": "ff", "releases": 1, "mu_squared": 0.25}


@pytest.mark.parametrize(
    "wrong",
    ["", "[]", "nothing", *({**GOOD, **change} for change in (
        {"format": 2}, {"releases": -1}, {"releases": 1.5}, {"mu_squared": float("nan")}, {"label_key": "no number"},
    ))],
)  # fmt: skip
def test_a_damaged_file_is_refused_and_stays_unchanged(tmp_path: Path, wrong: Any) -> None:
    path = tmp_path / "pi.json"
    text = wrong if isinstance(wrong, str) else json.dumps(wrong)
    path.write_text(text)
    with pytest.raises(InputError, match="is damaged, or was not written by `pipar device`"):
        BudgetFile.open(path, "pi")
    assert path.read_text() == text


def test_the_file_of_another_device_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pi.json").write_text(json.dumps(GOOD))
    assert BudgetFile.open(tmp_path / "pi.json", "pi").label_seed == 255
    with pytest.raises(InputError, match="belongs to 'pi': give 'other' its own file"):
        BudgetFile.open(tmp_path / "pi.json", "other")


# --- labels


def told(labels: torch.Tensor, privacy: SamplePrivacy) -> torch.Tensor:
    images = Images(torch.zeros((len(labels), 1, 2, 2)), labels)
    shard = Shard(images, torch.arange(len(labels)).numpy(), "pi", privacy=privacy)
    assert shard._sent_labels is not None
    return shard._sent_labels


def test_labels_are_randomised_the_same_after_a_restart_and_other_labels_independently() -> None:
    labels = torch.arange(400) % 10
    first = SamplePrivacy(1, 0.0, 1.0, lambda: 10, label_seed=5)
    once = told(labels, first)
    assert torch.equal(told(labels, replace(first, noise_seed=2)), once)  # the noise seed of another start
    assert not torch.equal(told(labels, replace(first, label_seed=None)), once)
    # With the same random numbers, every difference of two answers would be the difference of their labels.
    other = told((labels + 1) % 10, first)
    assert ((other - once) % 10 == 1).float().mean() < 0.5
    assert not torch.equal(told(labels, replace(first, label_epsilon=1.001)), once)


def test_the_number_of_classes_is_not_taken_from_labels_that_are_to_be_hidden() -> None:
    tree = {"privacy": {"label_epsilon": 1.0}, "data": {"factory": "somewhere:make"}}
    with pytest.raises(ConfigError, match=r"needs data\.classes"):
        device_workload(config_from(tree), DeviceOptions("pi", "127.0.0.1:1"))
    tree["data"] |= {"classes": 10}
    assert device_workload(config_from(tree), DeviceOptions("pi", "127.0.0.1:1")).samples.classes == 10
