"""What is checked before training starts; timing-only runs count the same samples as virtual ones."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import hand_made_profile
from support.waiting import PATIENCE_S
from torch import nn
from torch.utils.data import TensorDataset

import pipar
from pipar.data.catalog import dataset_info
from pipar.data.request import Counts, Request, published_counts
from pipar.errors import ConfigError, DataError, InputError
from pipar.events import Event, Preparing
from pipar.job.prepare import prepare, prepare_timing_only
from pipar.job.profiles import _own_profile_key, measured_profile
from pipar.job.user_objects import UserObjects
from pipar.job.workload import Workload
from pipar.launch.rehearsal import rehearse
from pipar.launch.run import with_method
from pipar.profiling.machines import MACHINES
from pipar.profiling.measurement_task import Measurement
from pipar.profiling.profile import Profile
from pipar.settings.config import Config, RunSection
from pipar.settings.config_file import config_from, load_config, with_settings


@pytest.fixture(autouse=True)
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with profiles, so that nothing is measured; runs and the cache have their own folders."""
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_profile(tmp_path, (3, 32, 32))


def write_profile(folder: Path, shape: tuple[int, int, int], classes: int = 10, norm: str = "group") -> Path:
    file = folder / "vgg5.json"
    file.write_text(profile_json(shape, classes, norm), "utf-8")
    return file


@cache
def profile_json(shape: tuple[int, int, int], classes: int, norm: str) -> str:
    data = {"name": "synthetic", "shape": list(shape), "classes": classes}
    model = Workload(config_from({"data": data, "model": {"norm": norm}})).build_model()
    return hand_made_profile(model, shape, "float32").to_json()


def configuration(profile: Path, *settings: str) -> Config:
    """Return the configuration with a profile of VGG-5 for the images of its dataset."""
    config = load_config(None, [f'server.profile="{profile}"', f'devices.profile="{profile}"', *settings])
    write_profile(profile.parent, dataset_info(config.data.name).shape, norm=config.model.norm)
    return config


# --- timing-only counts as virtual time does


@pytest.mark.slow
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
    config = configuration(profile, *settings, "plan.split_point=2", "plan.micro_batches=2")
    job = prepare_timing_only(config, rehearse)
    assert job is not None
    assert job.sizes == prepare(Workload(config), rehearse).sizes


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [[], ["privacy.pixel_epsilon=0.5"]], ids=["plain", "noise"])
def test_a_timing_only_run_counts_noise_on_the_bytes_that_get_it(profile: Path, privacy: list[str]) -> None:
    workload = Workload(configuration(profile, *privacy))
    jobs = [prepare_timing_only(workload.config, rehearse), prepare(workload, rehearse)]
    noised = workload.samples.shard(workload.names[0]).noised_bytes
    assert noised == (4 * 32 * 32 if privacy else 0)  # of digits
    assert [job.noised_bytes for job in jobs if job is not None] == [noised, noised]


@pytest.mark.slow
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
        prepare(Workload(config), rehearse)
    with pytest.raises(InputError) as timed:
        prepare_timing_only(config, rehearse)
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


# --- workloads that cannot be trained


BATCH_NORM = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 2))


@pytest.mark.parametrize(("samples", "batch_size"), [(5, 1), (1, 10), (1, 1)])
def test_a_single_sample_has_no_batch_statistics_in_an_own_network_either(samples: int, batch_size: int) -> None:
    config = config_from({"run": {"batch_size": batch_size}, "devices": [{}]})
    data = TensorDataset(torch.randn(samples, 4), torch.arange(samples) % 2)
    own = UserObjects.of(config, BATCH_NORM, [data], None, None)
    with pytest.raises(DataError, match="device-1 would train on a single sample"):
        prepare(Workload(config_from({**config.model_dump(), "data": {"classes": 2}, "devices": [{}]}), own), rehearse)


@pytest.mark.parametrize("size", [3, 5, 21])
def test_a_single_sample_that_joins_the_batch_before_is_accepted(profile: Path, size: int) -> None:
    settings = ["model.norm=batch", "run.batch_size=2", "data.name=synthetic", f"data.samples_per_device={size}"]
    assert prepare_timing_only(configuration(profile, *settings), rehearse) is not None


@pytest.mark.slow
def test_patience_needs_a_validation_set(profile: Path) -> None:
    config = configuration(profile, "run.patience=2", "data.name=synthetic", "data.validation=0")
    with pytest.raises(ConfigError, match=r"run\.patience = 2 needs a validation set"):
        prepare(Workload(config), rehearse)
    given = TensorDataset(torch.zeros(4, 3, 32, 32), torch.arange(4))
    prepare(Workload(config, UserObjects.of(config, None, None, given, None)), rehearse)


def test_patience_needs_a_validation_set_with_own_datasets_too() -> None:
    data = TensorDataset(torch.randn(10, 4), torch.arange(10) % 2)
    with pytest.raises(ConfigError, match=r"run\.patience = 1 needs a validation set"):
        pipar.run({"run": {"patience": 1}}, model=BATCH_NORM, datasets=[data], world="virtual")


@pytest.mark.slow
def test_a_profile_of_another_network_is_refused(profile: Path) -> None:
    config = configuration(profile, "model.name=resnet18", "data.name=synthetic", "data.samples_per_device=2")
    with pytest.raises(ConfigError, match=r"vgg5\.json is of by hand with 5 layers, but resnet18 has 10"):
        prepare(Workload(config), rehearse)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "float64"}, "in float64, but vgg5 is trained in float32"),
        ({"layers": 4}, "with 4 layers, but vgg5 has 5"),
        ({"name": "conv9"}, "whose layer 1 is 'conv9', but that of vgg5 is 'conv1'"),
        ({"output_bytes": 12}, "with 12 output_bytes in layer 1 'conv1', but vgg5 has 32768 there"),
        ({"parameter_bytes": 12}, "with 12 parameter_bytes in layer 1 'conv1', but vgg5 has 1536 there"),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["server", "devices"])
def test_a_file_of_another_network_is_refused_in_one_sentence(
    profile: Path, change: dict[str, Any], says: str, where: str
) -> None:
    config = configuration(profile)
    right = Profile.load(profile)
    layers = list(right.layers[: change.get("layers", 5)])
    if "dtype" in change:
        right = replace(right, **change)
    elif "layers" not in change:
        layers[0] = replace(layers[0], **change)
    other = profile.with_name("other.json")
    replace(right, layers=tuple(layers)).save(other)
    config = with_settings(config, [f'{where}.profile="{other}"'])
    with pytest.raises(ConfigError) as raised:
        prepare_timing_only(config, rehearse)
    assert str(raised.value) == f"The profile {other} is of by hand {says}" + str(raised.value).partition(says)[2]
    assert str(raised.value).endswith("write another with 'pipar profile'.")


@pytest.mark.parametrize("path", ["timing-only", "virtual"])
def test_a_wrong_file_is_refused_before_this_machine_is_measured(
    path: str, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object, **__: object) -> Profile:
        raise AssertionError("measured")

    monkeypatch.setattr("pipar.job.prepare.measured_profile", measure)
    monkeypatch.setattr("pipar.job.prepare.cached_profile", lambda *_: None)
    settings = ["model.name=resnet18", "data.name=synthetic", "data.samples_per_device=2"]
    config = load_config(None, [*settings, f'devices.profile="{profile}"'])  # the server is this machine
    with pytest.raises(ConfigError, match=r"vgg5\.json is of by hand with 5 layers, but resnet18 has 10"):
        prepare(Workload(config), rehearse) if path == "virtual" else prepare_timing_only(config, rehearse)


def test_a_profile_of_the_first_layers_is_enough_for_a_device_but_not_for_the_server(profile: Path) -> None:
    config = configuration(profile, "plan.split_point=1", "plan.micro_batches=2")
    right = Profile.load(profile)
    first = profile.with_name("first.json")
    replace(right, layers=right.layers[:2], total_layers=5).save(first)
    job = prepare_timing_only(with_settings(config, [f'devices.profile="{first}"']), rehearse)
    assert job is not None
    assert not job.device_profiles["device-1"].whole
    with pytest.raises(ConfigError, match=r"has only the first 2 of 5 layers of vgg5, but a server needs all"):
        prepare_timing_only(with_settings(config, [f'server.profile="{first}"']), rehearse)


# --- named machines


def named(*settings: str) -> Config:
    fixed = ["plan.split_point=1", "plan.micro_batches=2"]
    return load_config(None, ["server.profile=i7-11850h", "devices.profile=raspberry-pi-3b", *fixed, *settings])


def test_named_machines_bring_profile_memory_and_cores() -> None:
    job = prepare_timing_only(named(), rehearse)
    assert job is not None
    assert job.cores == 8
    assert job.server_profile.machine.startswith("Intel Core i7-11850H")
    assert job.device_profiles["device-1"].machine.startswith("Raspberry Pi 3B")
    assert {spec.memory_bytes for spec in job.specs} == {800 * 2**20}
    assert len({id(profile) for profile in job.device_profiles.values()}) == 1


def test_configured_values_override_those_of_a_named_machine() -> None:
    job = prepare_timing_only(named("server.cores=2", "devices.memory=600MiB"), rehearse)
    assert job is not None
    assert job.cores == 2
    assert {spec.memory_bytes for spec in job.specs} == {600 * 2**20}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            ["server.cores=9"],
            "server.cores = 9 is more than i7-11850h has: it runs 8 stages at a time. ",
        ),
        (
            ["server.profile=raspberry-pi-3b", "server.cores=4"],
            "server.cores = 4 is more than raspberry-pi-3b has: it runs one stage, with all of its cores, at a time. ",
        ),
    ],
)
def test_a_named_server_cannot_have_more_cores_than_its_machine(settings: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as said:
        prepare_timing_only(named(*settings), rehearse)
    assert str(said.value).startswith(says)


def test_a_virtual_run_takes_named_machines_as_the_timing_only_one_does() -> None:
    timed = prepare_timing_only(named("model.norm=batch"), rehearse)
    virtual = prepare(Workload(named("model.norm=batch")), rehearse)
    assert timed is not None
    assert (virtual.server_profile, virtual.device_profiles) == (timed.server_profile, timed.device_profiles)
    assert virtual.specs == timed.specs


def test_an_own_network_is_counted_for_named_machines() -> None:
    config = named("run.batch_size=4", "data.classes=2")
    data = TensorDataset(torch.zeros(8, 4), torch.arange(8) % 2)
    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 2)))
    job = prepare(Workload(config, UserObjects.of(config, model, [data] * 4, None, None)), rehearse)
    assert [layer.parameter_bytes for layer in job.server_profile.layers] == [120, 56]
    assert job.device_profiles["device-1"].machine.startswith("Raspberry Pi 3B")


@pytest.mark.slow
def test_images_of_a_shape_without_stored_counts_are_counted() -> None:
    settings = [
        "data.name=synthetic",
        "data.shape=[2,20,24]",
        "server.aggregator=krum",
        "server.aggregation.byzantine=0",
    ]
    job = prepare_timing_only(named(*settings), rehearse)
    assert job is not None
    assert job.config.server.aggregator == "krum"
    assert job.server_profile.output_bytes(1) == 32 * 10 * 12 * 4


def test_an_unknown_machine_is_refused_with_a_list_of_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"'raspbery-pi' is neither a machine that pipar knows nor a file: .*"
    ) as said:
        prepare_timing_only(named("devices.profile=raspbery-pi"), rehearse)
    for name in MACHINES:
        assert name in str(said.value)


WITHOUT_TORCH = """
import sys
from collections.abc import Callable

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise AssertionError("torch is imported")

sys.meta_path.insert(0, Refuse())
from pipar.settings.config_file import load_config
from pipar.job.prepare import prepare_timing_only
from pipar.launch.rehearsal import rehearse

job = prepare_timing_only(load_config(None, sys.argv[1:]), rehearse)
print(job.cores, len(job.specs), len(job.server_profile.layers))
"""


@pytest.mark.slow
def test_timing_only_with_named_machines_needs_no_torch() -> None:
    settings = ["model.name=resnet101", "data.name=tiny_imagenet", "data.samples_per_device=100", "devices.count=100"]
    settings += ["server.profile=i7-11850h", "devices.profile=raspberry-pi-3b"]
    settings += ["plan.split_point=2", "plan.micro_batches=20", "plan.schedule=1f1b", "plan.window=1"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *settings],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("8 100 35\n", "")


# --- cached profiles and limits of memory


@pytest.mark.slow
def test_a_limit_is_part_of_the_key_only_if_it_cut_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, ["run.batch_size=8", "data.name=synthetic", "data.samples_per_device=8"])
    workload = Workload(config)
    model = workload.build_model()
    limits: list[int | None] = []

    def measure(wanted: Measurement) -> Profile:
        limits.append(wanted.memory_bytes)
        made = hand_made_profile(model, (3, 32, 32), "float32")
        if wanted.memory_bytes is None or wanted.memory_bytes > 2**30:
            return made
        return replace(made, layers=made.layers[:2], total_layers=5)

    monkeypatch.setattr("pipar.profiling.measure.measure_profile", measure)
    assert measured_profile(workload, model, memory_bytes=2**31).whole
    assert measured_profile(workload, model, memory_bytes=2**32).whole
    assert measured_profile(workload, model).whole
    assert limits == [2**31]
    assert [len(measured_profile(workload, model, memory_bytes=2**28).layers) for _ in range(2)] == [2, 2]
    assert len(measured_profile(workload, model, memory_bytes=2**27).layers) == 2
    assert limits == [2**31, 2**28, 2**27]
    assert measured_profile(workload, model).whole


def test_a_measurement_reports_whether_it_is_at_the_layers_or_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(load_config(None, ["run.batch_size=8", "data.name=synthetic", "data.samples_per_device=8"]))
    model, seen = workload.build_model(), list[Event]()

    def measure(wanted: Measurement) -> Profile:
        for share in (0.5, 0.9, 1.0):
            wanted.progress(share)
        return hand_made_profile(model, (3, 32, 32), "float32")

    monkeypatch.setattr("pipar.profiling.measure.measure_profile", measure)
    measured_profile(workload, model, seen.append, fresh=True)
    layers, rest = "Measuring the layers", "Measuring loading, messages and crowded cores"
    assert seen == [Preparing(what, share) for what, share in ((layers, 0), (layers, 0.5), (rest, 0.9), (rest, 1.0))]


# --- the cache key of a user's own network


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
    return _own_profile_key(Workload(config, UserObjects.of(config, None, [data], None, None)), model)


def test_equal_networks_have_one_key_for_any_weights() -> None:
    assert key(own_network(1)) == key(own_network(1))


@pytest.mark.parametrize("other", [own_network(2), own_network(1, width=8), own_network(1).double()])
def test_another_network_has_another_key(other: nn.Sequential) -> None:
    assert key(other) != key(own_network(1))


def test_another_batch_size_has_another_key() -> None:
    assert key(own_network(1), batch_size=7) != key(own_network(1))


# --- settings that override a configuration


@pytest.mark.slow
def test_settings_override_a_configuration_object(profile: Path) -> None:
    config = configuration(profile, "data.samples_per_device=20", "run.epochs=3")
    result = pipar.run(config, world="timing-only", settings=["run.epochs=1", "devices.count=2"])
    assert (len(result.epochs), result.epochs[0]["samples"]) == (1, 40)
    results = pipar.compare(config, methods=["fl", "sfl"], world="timing-only", settings=["run.epochs=2"])
    assert [len(result.epochs) for result in results.values()] == [2, 2]


def test_settings_override_an_object_as_they_override_its_file() -> None:
    link = {"up": "1Mbit/s", "down": "2Mbit/s", "latency": "3ms"}
    tree = {"run": {"seed": 5}, "devices": [{"name": "a", "link": link}, {"name": "b", "speed": 0.5}]}
    settings = ["run.epochs=1", 'devices.profile="p.json"']
    config = with_settings(config_from(tree), settings)
    assert config == load_config(None, settings, tree)
    assert [group.speed for group in config.devices] == [1.0, 0.5]
    assert config.devices[0].link.latency_s == 0.003


def test_settings_do_not_change_the_other_keys_of_an_object() -> None:
    changed = with_method(Config(run=RunSection(epochs=9)), "fl")
    assert with_settings(changed, ["run.seed=3"]).run == changed.run.model_copy(update={"seed": 3})
    assert with_settings(Config(), ["devices.link=wifi"]) == load_config(None, ["devices.link=wifi"])


@pytest.mark.parametrize(("name", "copies", "step"), [("adamw", 2.0, 3.0), ("rmsprop", 1.0, 1.5), ("sgd", 1.0, 1.0)])
def test_steps_and_memory_are_those_of_the_optimiser(profile: Path, name: str, copies: float, step: float) -> None:
    """Those of a file or a named machine, whose steps are of SGD, are scaled."""
    for given in (str(profile), next(iter(MACHINES))):
        jobs = []
        for optimizer in ("sgd", name):
            settings = [f"optimizer.name={optimizer}", f'devices.profile="{given}"', "run.method=fl"]
            job = prepare_timing_only(with_settings(configuration(profile), settings), rehearse)
            assert job is not None
            jobs.append(next(iter(job.device_profiles.values())))
        sgd, other = jobs
        assert (sgd.state_copies, other.state_copies) == (1.0, copies)
        assert other.step_s_per_byte == pytest.approx(step * sgd.step_s_per_byte)


def test_a_profile_is_measured_with_the_optimiser_and_kept_for_it(profile: Path, tmp_path: Path) -> None:  # noqa: ARG001
    data = {"name": "synthetic", "shape": [1, 4, 4], "samples_per_device": 20, "validation": 0, "test": 0}
    found = []
    for section in ({"name": "sgd"}, {"name": "adam"}, {"name": "sgd", "momentum": 0.0}, {"name": "sgd"}):
        tree = {"data": data, "run": {"batch_size": 10}, "optimizer": section}
        workload = Workload(config_from(tree))
        found.append(measured_profile(workload, workload.checked_model(), budget_s=0.01))
    assert [(one.optimizer, one.state_copies) for one in found] == [
        ("sgd", 1.0), ("adam", 2.0), ("sgd", 0.0), ("sgd", 1.0)
    ]  # fmt: skip
