"""What is found before anything starts: sizes that cannot be trained, and timing-only counting as virtual time does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from training import hand_made_profile

import pipar
from pipar.config import Config, RunSection, config_from, load_config, with_settings
from pipar.data.catalog import Counts, Request, dataset_info, published_counts
from pipar.errors import ConfigError, DataError, InputError
from pipar.prepare import _own_profile_key, prepare, prepare_timing_only
from pipar.run import with_method
from pipar.workload import Own, Workload


@pytest.fixture(autouse=True)
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile of VGG-5, so that nothing is measured; runs and the cache are in a folder of their own."""
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = Workload(config_from({"data": {"name": "synthetic"}})).build_model()
    file = tmp_path / "vgg5.json"
    hand_made_profile(model, (3, 32, 32), "float32").save(file)
    return file


def configuration(profile: Path, *settings: str) -> Config:
    return load_config(None, [f'server.profile="{profile}"', f'devices.profile="{profile}"', *settings])


# --- timing-only counts as virtual time does


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["data.test=0", "data.validation=0"],
        ["data.test=0", "devices.count=3"],
        ["data.validation=7"],
        ["data.samples_per_device=10"],
        ["data.name=synthetic", "devices.count=3"],
        ["data.name=synthetic", "data.samples_per_device=[5,6,7,8]"],
    ],
    ids=str,
)
def test_a_timing_only_run_has_the_samples_of_the_virtual_one(profile: Path, settings: list[str]) -> None:
    config = configuration(profile, *settings)
    job = prepare_timing_only(config)
    assert job is not None
    assert job.sizes == prepare(Workload(config)).sizes


@pytest.mark.parametrize(
    "settings",
    [
        ["data.name=mnist", "data.shape=[3,64,64]"],
        ["data.name=digits", "data.classes=7"],
        ["data.name=cifar10", "data.classes=100"],
        ["data.name=tiny_imagenet", "data.classes=201"],
        ["data.validation=1000", "data.test=900"],
        ["data.validation=1000", "data.test=797"],
        ["devices.count=1198"],
    ],
    ids=str,
)
def test_a_timing_only_run_refuses_what_the_virtual_one_refuses(profile: Path, settings: list[str]) -> None:
    config = configuration(profile, *settings)
    with pytest.raises(InputError) as virtual:
        prepare(Workload(config))
    with pytest.raises(InputError) as timed:
        prepare_timing_only(config)
    assert str(timed.value) == str(virtual.value)


def test_published_counts_are_what_the_publisher_states() -> None:
    def counted(name: str, **asked: Any) -> Counts:
        return published_counts(dataset_info(name), Request(**asked))

    assert counted("cifar10") == Counts(50_000, 2000, 8000)
    assert counted("digits", test=0) == Counts(1597, 200, 0)
    assert counted("tiny_imagenet", classes=10) == Counts(5000, 100, 400)
    assert counted("tiny_imagenet", classes=200) == Counts(100_000, 2000, 8000)
    with pytest.raises(DataError, match="mnist has 10000 samples to hold out"):
        counted("mnist", validation=10_000, test=1)


# --- what cannot be trained


BATCH_NORM = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 2))


@pytest.mark.parametrize(("samples", "batch_size"), [(5, 1), (1, 10), (1, 1)])
def test_a_single_sample_has_no_batch_statistics_in_an_own_network_either(samples: int, batch_size: int) -> None:
    config = config_from({"run": {"batch_size": batch_size}, "devices": [{}]})
    data = TensorDataset(torch.randn(samples, 4), torch.arange(samples) % 2)
    own = Own.of(config, BATCH_NORM, [data], None, None)
    with pytest.raises(DataError, match="device-1 would train on a single sample"):
        prepare(Workload(config_from({**config.model_dump(), "data": {"classes": 2}, "devices": [{}]}), own))


@pytest.mark.parametrize("size", [3, 5, 21])
def test_a_single_sample_that_joins_others_is_no_reason_to_refuse(profile: Path, size: int) -> None:
    settings = ["model.norm=batch", "run.batch_size=2", "data.name=synthetic", f"data.samples_per_device={size}"]
    assert prepare_timing_only(configuration(profile, *settings)) is not None


def test_patience_needs_a_validation_set(profile: Path) -> None:
    config = configuration(profile, "run.patience=2", "data.name=synthetic", "data.validation=0")
    with pytest.raises(ConfigError, match=r"run\.patience needs a validation set"):
        prepare(Workload(config))
    given = TensorDataset(torch.zeros(4, 3, 32, 32), torch.arange(4))
    prepare(Workload(config, Own.of(config, None, None, given, None)))


def test_patience_needs_a_validation_set_beside_own_datasets() -> None:
    data = TensorDataset(torch.randn(10, 4), torch.arange(10) % 2)
    with pytest.raises(ConfigError, match=r"run\.patience needs a validation set"):
        pipar.run({"run": {"patience": 1}}, model=BATCH_NORM, datasets=[data], world="virtual")


def test_a_profile_of_another_network_is_refused(profile: Path) -> None:
    config = configuration(profile, "model.name=resnet18", "data.name=synthetic", "data.samples_per_device=2")
    with pytest.raises(ConfigError, match=r"vgg5\.json is of by hand with 5 layers, but the network has 10"):
        prepare(Workload(config))


# --- what a kept profile of an own network goes by


def own_network(constant: int, width: int = 4) -> nn.Sequential:
    class Scaled(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs * constant

    class Shifted(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs + constant

    Shifted.__name__ = "Scaled"
    layer = Scaled() if constant == 1 else Shifted()
    layer.register_forward_hook(lambda *_: None)
    return nn.Sequential(nn.Linear(4, width), layer, nn.Linear(width, 2))


def key(model: nn.Sequential, **run: Any) -> dict[str, object]:
    config = config_from({"run": run, "devices": [{}]})
    data = TensorDataset(torch.zeros(4, 4), torch.arange(4) % 2)
    return _own_profile_key(Workload(config, Own.of(config, None, [data], None, None)), model)


def test_equal_networks_have_one_key_whatever_their_weights() -> None:
    assert key(own_network(1)) == key(own_network(1))


@pytest.mark.parametrize("other", [own_network(2), own_network(1, width=8), own_network(1).double()])
def test_another_network_has_another_key(other: nn.Sequential) -> None:
    assert key(other) != key(own_network(1))


def test_another_batch_size_has_another_key() -> None:
    assert key(own_network(1), batch_size=7) != key(own_network(1))


# --- settings over a configuration


def test_settings_go_over_a_configuration_object(profile: Path) -> None:
    config = configuration(profile, "data.samples_per_device=20", "run.epochs=3")
    result = pipar.run(config, world="timing-only", settings=["run.epochs=1", "devices.count=2"])
    assert (len(result.epochs), result.epochs[0]["samples"]) == (1, 40)
    results = pipar.compare(config, methods=["fl", "sfl"], world="timing-only", settings=["run.epochs=2"])
    assert [len(result.epochs) for result in results.values()] == [2, 2]


def test_settings_over_an_object_are_settings_over_its_file() -> None:
    link = {"up": "1Mbit/s", "down": "2Mbit/s", "latency": "3ms"}
    tree = {"run": {"seed": 5}, "devices": [{"name": "a", "link": link}, {"name": "b", "speed": 0.5}]}
    settings = ["run.epochs=1", 'devices.profile="p.json"']
    config = with_settings(config_from(tree), settings)
    assert config == load_config(None, settings, tree)
    assert [group.speed for group in config.devices] == [1.0, 0.5]
    assert config.devices[0].link.latency_s == 0.003


def test_settings_over_changed_and_default_objects_keep_the_rest() -> None:
    changed = with_method(Config(run=RunSection(epochs=9)), "fl")
    assert with_settings(changed, ["run.seed=3"]).run == changed.run.model_copy(update={"seed": 3})
    assert with_settings(Config(), ["devices.link=wifi"]) == load_config(None, ["devices.link=wifi"])
