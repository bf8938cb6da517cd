"""A device takes the learning rate from its server, and refuses orders that would train something else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.training import Case, make_job

from pipar.errors import OrdersError
from pipar.job.model_setup import part_builder
from pipar.job.prepare import prepare
from pipar.job.workload import Workload
from pipar.launch.rehearsal import rehearse
from pipar.nn.device_part import TorchDevicePart
from pipar.settings.config_file import config_from
from pipar.settings.training_sections import TaskSection

CASE = Case("pipar", (1,), (1,), sizes=(10,))
SIX = [1.0, 2.0, 1.0, 1.0, 1.0, 3.0]


def workload(task: dict[str, Any]) -> Workload:
    tree = {
        "data": {"name": "synthetic", "shape": [1, 8, 8], "classes": 6},
        "plan": {"split_point": 1, "micro_batches": 1},
        "server": {"profile": "i7-11850h", "cores": 1},
        "devices": [{"profile": "raspberry-pi-3b"}],
    }
    return Workload(config_from({**tree, "task": task}))


@pytest.mark.parametrize(
    ("server", "device"),
    [
        ({"label_smoothing": 0.1}, {}),
        ({}, {"label_smoothing": 0.1}),
        ({"class_weights": SIX}, {"class_weights": SIX[::-1]}),
        ({"ignore_index": 5}, {"ignore_index": 4}),
    ],
)
def test_a_device_with_another_task_refuses_the_servers_orders(server: dict[str, Any], device: dict[str, Any]) -> None:
    orders = next(iter(prepare(workload(server), rehearse).orders().values()))
    part_builder(workload(server), "device-1")(orders)
    with pytest.raises(OrdersError, match=r"different settings in \[task\]"):
        part_builder(workload(device), "device-1")(orders)


def test_tasks_that_train_differently_have_different_fingerprints() -> None:
    given: list[dict[str, Any]] = [
        {}, {"loss": "nll"}, {"loss": "mse"}, {"label_smoothing": 0.1}, {"class_weights": [1, 2]},
        {"class_weights": [2, 1]}, {"ignore_index": 255}, {"loss": "a:b"}, {"loss": "a:b", "count": "a:c"},
    ]  # fmt: skip
    prints = [TaskSection(**one).fingerprint for one in given]
    assert len(set(prints)) == len(prints)
    assert prints[0] == TaskSection(loss="cross_entropy", label_smoothing=0, metrics=("accuracy",)).fingerprint == 0
    assert prints[4] == TaskSection(class_weights=(1.0, 2.0)).fingerprint


def built(on_server: dict[str, Any], on_device: dict[str, Any]) -> TorchDevicePart:
    """Return the part of a device whose [optimizer] may be another than the server's."""
    server, device = (replace(CASE, optimizer=tuple(one.items())) for one in (on_server, on_device))
    ((name, orders),) = make_job(server.workload()).orders().items()
    return part_builder(device.workload(), name)(orders)


def test_a_device_trains_with_the_learning_rate_of_its_server() -> None:
    steps = built({"learning_rate": 3.0}, {"learning_rate": 0.5})._steps
    assert steps is not None
    assert steps.largest("lr") == 3.0


@pytest.mark.parametrize("other", [{"name": "adam"}, {"momentum": 0.5}, {"warmup": 2}, {"clip_norm": 1.0}], ids=str)
def test_a_device_refuses_to_train_in_another_way_than_its_server(other: dict[str, Any]) -> None:
    with pytest.raises(OrdersError, match=r"different settings in \[optimizer\]"):
        built(other, {})
