"""What a deployment makes of its configuration before anything connects."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pipar.cli import main
from pipar.errors import (
    AddressInUseError,
    ConfigError,
    CredentialError,
    DeviceRefusedError,
    NetworkRefusedError,
    PiparError,
    PlanError,
)
from pipar.events import ignore
from pipar.job.job import Job
from pipar.job.plans import make_plans
from pipar.job.workload import Workload
from pipar.launch import deployed_device, deployed_job, deployed_server
from pipar.launch.assemble import most_devices
from pipar.launch.deployed_device import DeviceOptions, device_workload
from pipar.launch.deployed_job import job_without_devices, server_workload
from pipar.launch.deployed_process import as_deployed, listed_specs, prepare_process, unlisted_spec
from pipar.profiling.profile import LayerProfile, Profile
from pipar.server.device_messages import Introduction
from pipar.server.enrolment import OpenEnrolment
from pipar.settings.config_file import config_from, dump_config
from pipar.settings.wording import setting_text
from pipar.tensors.inputs import InputForm, TensorForm

PROFILE = Profile("any", "float32", (10,), tuple(LayerProfile(name, (0.01,), (0.02,), 40_000, 4_000) for name in "abc"))


def test_a_folder_with_data_beside_a_factory_is_refused() -> None:
    config = config_from({"data": {"factory": "mine:samples", "classes": 10, "shape": [1, 4, 4]}})
    with pytest.raises(ConfigError, match=r"--data /photos is given, but data\.factory = 'mine:samples' returns"):
        device_workload(config, DeviceOptions("pi", "127.0.0.1:1", data="/photos"))


def test_a_folder_of_data_that_is_missing_is_named_without_other_advice(tmp_path: Path) -> None:
    config, wanted = config_from({"data": {"name": "mnist"}}), str(tmp_path / "photos")
    with pytest.raises(ConfigError, match=rf"^--data {wanted} is not a folder on this machine: give the folder that"):
        device_workload(config, DeviceOptions("pi", "127.0.0.1:1", data=wanted))


def test_a_deployment_has_no_emulated_speeds_and_links_that_were_not_given() -> None:
    config = as_deployed(config_from({"devices": [{"name": "pi", "count": 2}, {"name": "slow", "speed": 0.5}]}))
    assert "speed = 0.05" not in dump_config(config)
    assert "speed 0.05" not in setting_text(config)
    again = config_from(tomllib.loads(dump_config(config)))
    assert [(one.name, one.speed, one.link) for one in listed_specs(again)] == [
        (one.name, one.speed, one.link) for one in listed_specs(config)
    ]
    assert [one.speed for one in listed_specs(again)] == [1.0, 1.0, 0.5]
    assert as_deployed(again) == as_deployed(as_deployed(again))


GIVEN = {"plan": {"split_point": 2, "micro_batches": 3}, "devices": [{"name": "pi", "split_point": 1}]}


def test_a_device_that_is_not_listed_follows_the_plan_of_the_configuration() -> None:
    config = config_from(GIVEN)
    specs = {spec.name: spec for spec in listed_specs(config)}
    job = Job(
        config=config, specs=(), sizes={}, server_profile=PROFILE, device_profiles={}, batch_statistics=False,
        dropout=False, plans={}, dataset="own", model="any",
    )  # fmt: skip
    enrolment = OpenEnrolment(job, specs, partial(unlisted_spec, config), partial(make_plans, rehearse=pytest.fail))
    first = asyncio.run(enrolment.begin([Introduction(name, 100, PROFILE) for name in ("pi", "guest-1")]))
    late = enrolment.join(Introduction("guest-2", 100, PROFILE))
    found = {name: orders.plan for name, orders in {**first, "guest-2": late}.items()}
    assert {name: (plan.split_point, plan.micro_batches) for name, plan in found.items()} == {
        "pi": (1, 3), "guest-1": (2, 3), "guest-2": (2, 3),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "plan", "error"),
    [
        ("pipar", {"split_point": 99}, "Split point 99 is outside"),
        ("sfl2", {"split_point": 2}, "Split points 1, 2 are given"),
    ],
)
def test_a_plan_that_no_device_beside_the_listed_ones_can_have_is_refused_before_any_joins(
    method: str, plan: dict[str, int], error: str
) -> None:
    config = config_from({**GIVEN, "run": {"method": method}, "plan": plan})
    with pytest.raises(PlanError, match=error):
        job_without_devices(server_workload(config), pytest.fail)


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        ({"name": "muon"}, "optimizer.name = 'muon' cannot be made: ValueError: Muon only supports 2D parameters"),
        ({"groups": [{"match": ["head.*"]}]}, "optimizer.groups has 'head.*', which matches no parameter"),
        ({"schedule": "no_such_module:rate"}, "no module 'no_such_module' is installed"),
    ],
)
def test_an_optimiser_that_cannot_train_the_network_is_refused_on_server_and_device(
    optimizer: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_from({"optimizer": optimizer, "devices": [{"name": "pi"}]})
    monkeypatch.setattr(deployed_job, "measured_profile", pytest.fail)
    monkeypatch.setattr(deployed_device, "measured_profile", pytest.fail)
    monkeypatch.setattr(deployed_device, "prepare_process", lambda _: None)
    with pytest.raises(ConfigError, match=re.escape(says)):
        job_without_devices(server_workload(config), ignore)
    with pytest.raises(ConfigError, match=re.escape(says)):
        deployed_device.take_part(config, DeviceOptions("pi", "127.0.0.1:1"), ignore)


def test_a_warm_up_that_is_longer_than_a_devices_training_is_refused_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_from({"run": {"epochs": 1}, "optimizer": {"warmup": 1000}, "devices": [{"name": "pi"}]})
    monkeypatch.setattr(deployed_device, "measured_profile", pytest.fail)
    monkeypatch.setattr(deployed_device, "prepare_process", lambda _: None)
    with pytest.raises(ConfigError, match=r"^optimizer.warmup = 1000, but pi takes only \d+ steps"):
        deployed_device.take_part(config, DeviceOptions("pi", "127.0.0.1:1"), ignore)


def test_a_port_in_use_is_found_before_the_network_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path))
    monkeypatch.setattr(deployed_server, "prepare_process", lambda _: None)  # takes long, and is not needed
    monkeypatch.setattr(deployed_server, "job_without_devices", pytest.fail)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(AddressInUseError, match=rf"^Cannot listen on {address}: address already in use\.$"):
            deployed_server.serve(config_from({}), deployed_server.ServerOptions(address), ignore)


def test_a_server_does_not_wait_for_devices_that_may_not_take_part(tmp_path: Path) -> None:
    names = tmp_path / "ward.txt"
    names.write_text("pi-1\npi-3\n")
    devices = [{"name": "pi", "count": 3}]
    allow = {None: 3, str(names): 2, ("pi-2",): 1, ("pi-1", "pi-2", "pi-3", "guest"): 3}
    for allowed, wanted in allow.items():
        config = config_from({"server": {"allow": allowed} if allowed else {}, "devices": devices})
        assert most_devices(config) == wanted


FACTORIES = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def network():
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))

def one_number():
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))

def probabilities(name):
    assert name == "validation", "a server has no data of devices"
    return TensorDataset(torch.randn(5, 4), torch.rand(5, 3).softmax(1))

def numbers(name):
    assert name == "validation", "a server has no data of devices"
    return TensorDataset(torch.randn(5, 4), torch.randn(5))

def nothing(name):
    assert name in ("validation", "test"), "a server has no data of devices"
"""


def server_of(folder: Path, monkeypatch: pytest.MonkeyPatch, tree: dict[str, dict[str, object]]) -> Workload:
    (folder / "remote_sets.py").write_text(FACTORIES)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.delitem(sys.modules, "remote_sets", raising=False)
    return server_workload(config_from({"model": {"factory": "remote_sets:network"}, **tree}))


def test_a_server_expects_the_probabilities_that_its_validation_set_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"factory": "remote_sets:probabilities", "shape": [4], "classes": 3}
    workload = server_of(tmp_path, monkeypatch, {"data": data})
    assert workload.task.form == InputForm((TensorForm((3,)),))
    workload.checked_model()
    assert sum(size for size, _ in workload.samples.held_out_batches("validation")) == 5


def test_a_server_needs_no_number_of_classes_where_the_loss_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, task = {"factory": "remote_sets:nothing", "shape": [4]}, {"loss": "mse"}
    workload = server_of(tmp_path, monkeypatch, {"data": data, "task": task})
    assert workload.task.form == InputForm((TensorForm((3,)),))
    workload.checked_model()
    own_number = server_of(tmp_path, monkeypatch, {"data": data})  # of classes: the outputs of the network
    assert own_number.task.classes == 3
    own_number.checked_model()
    with pytest.raises(ConfigError, match=r"cannot count the labels: also give data\.classes\."):
        server_workload(config_from({"data": data}))
    with pytest.raises(ConfigError, match=r"return a validation set, or give data\.shape .* or"):
        server_of(tmp_path, monkeypatch, {"data": {"factory": "remote_sets:nothing"}, "task": task})


def test_a_server_validates_one_number_for_each_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree: dict[str, dict[str, object]] = {
        "data": {"factory": "remote_sets:numbers", "shape": [4]},
        "model": {"factory": "remote_sets:one_number"},
        "task": {"loss": "mse"},
    }
    workload = server_of(tmp_path, monkeypatch, tree)
    workload.checked_model()
    assert sum(size for size, _ in workload.samples.held_out_batches("validation")) == 5


@pytest.mark.parametrize(
    ("options", "error", "code"),
    [
        ((), CredentialError("The server at 127.0.0.1:1 uses TLS: give --certs."), 2),
        ((), NetworkRefusedError("The network of the device is another."), 2),
        (("--certs", "certs"), NetworkRefusedError("The network of the device is another."), 2),
        (("--certs", "certs"), DeviceRefusedError("This certificate was revoked."), 2),
        (("--certs", "certs"), CredentialError("The server's certificate is another's."), 1),
        (("--insecure",), NetworkRefusedError("Anyone may say so."), 1),
        (("--insecure",), CredentialError("Anyone may say so."), 1),
    ],
)
def test_a_device_ends_with_2_where_its_own_options_or_configuration_are_wrong(
    options: tuple[str, ...], error: PiparError, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def take_part(*_: object) -> int:
        raise error

    monkeypatch.chdir(tmp_path)
    (tmp_path / "certs").mkdir()
    monkeypatch.setattr(deployed_device, "take_part", take_part)
    monkeypatch.setattr("pipar.transport.tls.check_device", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        main(["device", "--server", "127.0.0.1:1", "--name", "pi-1", *options])
    assert ended.value.code == code


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [{}, {"factory": "mine:optimizer"}])
def test_a_process_of_a_deployment_is_prepared_for_every_optimiser(
    optimizer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    prepare_process(config_from({"optimizer": optimizer}))
    assert threads == [1]
