"""A device refuses orders of a server whose configuration would train something else."""

from __future__ import annotations

from typing import Any

import pytest

from pipar.config import TaskSection
from pipar.config_file import config_from
from pipar.errors import OrdersError
from pipar.job.model_setup import part_builder
from pipar.job.prepare import prepare
from pipar.job.workload import Workload
from pipar.launch.rehearsal import rehearse

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
    with pytest.raises(OrdersError, match=r"The server has another \[task\] than this device"):
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
