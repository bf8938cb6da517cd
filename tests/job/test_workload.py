"""Workloads of the user's own objects and factories, and which process reads which samples."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import hand_made_profile
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import pipar
from pipar.errors import DataError
from pipar.job.user_objects import UserObjects, is_list_of_datasets
from pipar.job.workload import Workload
from pipar.profiling.profile import Profile
from pipar.settings.config_file import config_from

#: A factory that writes down which process called it for which name.
FACTORY = """
import os
import torch
from torch.utils.data import TensorDataset

def samples(name):
    with open("calls.txt", "a") as file:
        file.write(f"{os.getpid()} {name}\\n")
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return TensorDataset(torch.randn(20, 8, generator=generator), torch.arange(20) % 3)

def without_held_out(name):
    return None if name in ("validation", "test") else samples(name)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with a module of factories; runs and profiles go into it."""
    (tmp_path / "counted_factory.py").write_text(FACTORY, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "counted_factory", raising=False)
    return tmp_path


class Doubled(nn.Module):
    """A layer that torch does not have."""

    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * inputs


class Small(nn.Sequential):
    """A network of a class that is defined here."""

    def __init__(self, inputs: int = 8, classes: int = 3) -> None:
        super().__init__(nn.Linear(inputs, 16), nn.Sequential(Doubled(), nn.ReLU()), nn.Linear(16, classes))


def dataset(size: int, seed: int = 0, classes: int = 3, inputs: int = 8) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(size, inputs, generator=generator), torch.arange(size) % classes)


def configuration(**sections: Any) -> dict[str, Any]:
    quick = {"link": "unlimited", "speed": 1.0}
    tree = {"run": {"epochs": 1, "batch_size": 10}, "plan": {"split_point": 1, "micro_batches": 2}, "devices": [quick]}
    return {**tree, **sections}


@pytest.fixture
def _nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(workload: Workload, model: nn.Sequential, _: object, *, on: object, threads: object) -> Profile:
        assert (on, threads) == (("cpu", "off"), 1)
        return hand_made_profile(model, workload.samples.input_shape, workload.config.model.dtype)

    monkeypatch.setattr("pipar.job.prepare.measured_profile", made)


def calls(place: Path) -> dict[str, list[str]]:
    """Return the names for which each process called the factory."""
    found: dict[str, list[str]] = {}
    for line in (place / "calls.txt").read_text("utf-8").splitlines():
        process, name = line.split()
        found.setdefault(process, []).append(name)
    return found


def own_workload(datasets: Any, **sections: Any) -> Workload:
    config = config_from(sections)
    return Workload(config, UserObjects.of(config, None, datasets, None, None))


# --- which process reads which samples


@pytest.mark.slow
@pytest.mark.usefixtures("measured_at_once")
def test_real_devices_train_an_own_model_on_own_datasets_as_virtual_ones_do() -> None:
    # Only the last device has the highest label: the others cannot know the number of classes by themselves.
    datasets = [dataset(20, 1, classes=2), dataset(15, 2, classes=2), dataset(31, 3)]
    tree = configuration(devices=[{"count": 3, "link": "unlimited", "speed": 1.0}])
    model = Small()
    held_out = {"validation": dataset(9, 4), "test": dataset(12, 5)}
    real = pipar.run(tree, model=model, datasets=datasets, **held_out)
    assert [epoch["samples"] for epoch in real.epochs] == [66]
    assert real.epochs[0]["val_loss"] is not None
    virtual = pipar.run(tree, model=model, datasets=datasets, world="virtual", **held_out)
    assert real.content["weights_sha256"] == virtual.content["weights_sha256"]
    assert real.test_accuracy == virtual.test_accuracy


@pytest.mark.slow
@pytest.mark.usefixtures("measured_at_once")
def test_a_process_calls_the_data_factory_for_itself_only(place: Path) -> None:
    tree = configuration(data={"factory": "counted_factory:samples"})
    tree["devices"] = [{"count": 3, "link": "unlimited", "speed": 1.0}]
    pipar.run(tree, model=Small())
    names = ["device-1", "device-2", "device-3"]
    expected = [names, ["device-1"], ["device-2"], ["device-3"], ["test", "validation"]]
    assert sorted(sorted(asked) for asked in calls(place).values()) == sorted(expected)


@pytest.mark.slow
@pytest.mark.usefixtures("_nothing_measured")
def test_the_factory_is_called_once_for_each_name_in_virtual_time(place: Path) -> None:
    tree = configuration(data={"factory": "counted_factory:samples"}, devices=[{"count": 3}])
    pipar.run(tree, model=Small(), world="virtual")
    counted = Counter(name for asked in calls(place).values() for name in asked)
    assert counted == dict.fromkeys(["device-1", "device-2", "device-3", "validation", "test"], 1)


def test_a_device_is_sent_its_samples_and_the_common_shape_and_classes() -> None:
    sets = [dataset(10, classes=2), dataset(12, classes=5)]
    workload = own_workload(sets, devices=[{"count": 2}])
    own = workload.for_processes().only("device-1")
    assert list(own.training or {}) == ["device-1"]
    child = Workload(workload.config, own)
    assert len(child.samples.keep_only_shard("device-1")) == 10
    assert (child.samples.input_shape, child.samples.classes) == ((8,), 5)


def test_a_device_builds_a_named_network_for_a_factory_without_calling_it_for_others(place: Path) -> None:
    config = config_from({"data": {"factory": "counted_factory:samples"}, "devices": [{"count": 3}]})
    sent = Workload(config).for_processes()
    (place / "calls.txt").unlink()
    child = Workload(config, sent.only("device-2"))
    shard = child.samples.keep_only_shard("device-2")
    assert (len(shard), child.samples.input_shape, child.samples.classes) == (20, (8,), 3)
    assert list(calls(place).values()) == [["device-2"]]


# --- one dataset, or one for each device


PAIRS = [(torch.zeros(8), 0), (torch.ones(8), 1), (torch.ones(8), 1)]


@pytest.mark.parametrize(
    ("datasets", "one_for_each"),
    [
        ([dataset(4), dataset(4)], True),
        ((dataset(4), dataset(4)), True),
        ([Subset(dataset(4), [0, 1]), ConcatDataset([dataset(2)])], True),
        ([PAIRS[:2], PAIRS], True),
        ([], True),
        (dataset(4), False),
        (Subset(dataset(4), [0, 1]), False),
        (ConcatDataset([dataset(2), dataset(2)]), False),
        (PAIRS, False),
        (tuple(PAIRS), False),
    ],
    ids=["list", "tuple", "subset and concat", "lists of pairs", "none", "tensors", "subset", "concat", "pairs", "t"],
)
def test_a_list_or_tuple_of_datasets_is_one_for_each_and_anything_else_is_one(
    datasets: Any, one_for_each: bool
) -> None:
    assert is_list_of_datasets(datasets) is one_for_each


@pytest.mark.slow
@pytest.mark.usefixtures("_nothing_measured")
@pytest.mark.parametrize("sequence", [list, tuple])
def test_a_sequence_of_datasets_gives_as_many_devices(sequence: Callable[[Any], Any]) -> None:
    datasets = sequence([dataset(20), dataset(10), dataset(12)])
    tree = {"run": {"epochs": 1, "batch_size": 10}}
    result = pipar.run(tree, model=Small(), datasets=datasets, world="timing-only")
    assert [plan["device"] for plan in result.content["plans"]] == ["device-1", "device-2", "device-3"]
    assert result.epochs[0]["samples"] == 42


@pytest.mark.parametrize(
    "one",
    [dataset(20), Subset(dataset(30), range(20)), ConcatDataset([dataset(13), dataset(7)]), list(dataset(20))],
    ids=["tensors", "subset", "concat", "pairs"],
)
def test_one_dataset_is_partitioned(one: Any) -> None:
    workload = own_workload(one, devices=[{"count": 3}])
    assert workload.samples.sizes() == {"device-1": 7, "device-2": 7, "device-3": 6}


def test_an_object_that_is_not_a_dataset_is_named_in_the_error() -> None:
    with pytest.raises(DataError, match="a int is not a dataset"):
        own_workload(5)


GROUPS = [{"name": "phone"}, {"name": "board", "count": 2}, {"name": "a"}]


def test_a_list_of_sizes_is_in_the_order_of_the_configuration() -> None:
    data = {"name": "synthetic", "shape": [1, 4, 4], "samples_per_device": [10, 20, 30, 40]}
    workload = Workload(config_from({"data": data, "devices": GROUPS}))
    assert workload.samples.sizes() == {"a": 40, "board-1": 20, "board-2": 30, "phone": 10}
    assert {name: len(workload.samples.shard(name)) for name in workload.names} == workload.samples.sizes()


def test_a_list_of_datasets_is_in_the_order_of_the_configuration() -> None:
    workload = own_workload([dataset(10), dataset(20), dataset(30), dataset(40)], devices=GROUPS)
    assert workload.samples.sizes() == {"a": 40, "board-1": 20, "board-2": 30, "phone": 10}


def test_samples_of_another_shape_or_with_too_high_a_label_are_refused() -> None:
    with pytest.raises(DataError, match=r"the data of device-2 has samples of shape 9, but those of device-1"):
        own_workload([dataset(5), dataset(5, inputs=9)], devices=[{"count": 2}]).samples.check_samples()
    with pytest.raises(DataError, match="the data of device-1 has label 2, but the highest label is 1"):
        own_workload([dataset(5)], devices=[{}], data={"classes": 2}).samples.check_samples()


# --- held-out sets


def test_given_held_out_sets_replace_those_of_a_named_dataset() -> None:
    config = config_from({"data": {"name": "synthetic", "shape": [1, 4, 4], "validation": 30, "test": 0}})
    images = TensorDataset(torch.zeros(7, 1, 4, 4), torch.arange(7))
    workload = Workload(config, UserObjects.of(config, None, None, images, images))
    assert [sum(n for n, _ in workload.samples.held_out_batches(which)) for which in ("validation", "test")] == [7, 7]
    assert workload.samples.name == "synthetic"
    only_test = Workload(config, UserObjects.of(config, None, None, None, images))
    assert [sum(n for n, _ in only_test.samples.held_out_batches(which)) for which in ("validation", "test")] == [30, 7]


def test_held_out_sets_that_do_not_fit_are_refused() -> None:
    config = config_from({"data": {"name": "synthetic", "shape": [1, 4, 4]}})
    flat = Workload(config, UserObjects.of(config, None, None, dataset(7), None))
    with pytest.raises(DataError, match=r"the validation set has samples of shape 8, but"):
        flat.samples.held_out("validation")
    images = TensorDataset(torch.zeros(12, 1, 4, 4), torch.arange(12))
    with pytest.raises(DataError, match="the test set has label 11, but the highest label is 9"):
        Workload(config, UserObjects.of(config, None, None, None, images)).samples.held_out("test")
